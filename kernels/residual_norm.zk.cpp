// Residual merge and RMSNorm (spec 1.3, 1.5), forward and backward, each in one pass over memory:
//
//   y = (branch + b1) * s1 + (stream + b2) * s2        h = w * y / sqrt(mean(y^2) + eps)
//
// Without a branch (null) y is the stream itself, nothing is merged and only the norm remains.
//
// Numbers: stream, y, statistics, parameters and their gradients f32; branch bf16 (a product's output); h bf16 (a product's
// operand) or, in the kernels ending in _f32, f32 (for the head); dh and dy f32 (sums over several products); d_branch bf16 (an
// operand again), d_stream f32. The backward computes y anew instead of reading it.
//
// A workgroup takes a row at a time and keeps it in registers, CHANNELS numbers a work-item; the number at the end of a kernel's
// name is the largest width it can hold (512 and 2048: 256 work-items, 4096: 512). Gradients of parameters are summed by each workgroup over its rows, in their order, and
// by residual_norm_params over the workgroups, in theirs.
#include "reduce.h"

#define WAVES(block) ((block) / ZK_WAVE)

struct Merge {
    const float *s1, *b1, *s2, *b2;
};

template <int BLOCK, int CHANNELS, class Out>
ZK_DEV void forward(float* lds, const bf16_t* branch, const float* stream, Merge p, const float* w, float* y, Out* h, float* inv_rms,
                    int d, float eps) {
    const int t = zk_tid();
    const long at = (long)zk_bid_x() * d;
    float v[CHANNELS], squares = 0.0f;
    for (int i = 0; i < CHANNELS; i++) {
        const int c = t + i * BLOCK;
        v[i] = 0.0f;
        if (c >= d) continue;
        v[i] = stream[at + c];
        if (branch) {
            v[i] = (zk_bf2f(branch[at + c]) + p.b1[c]) * p.s1[c] + (v[i] + p.b2[c]) * p.s2[c];
            y[at + c] = v[i];
        }
        squares += v[i] * v[i];
    }
    const float inv = 1.0f / __builtin_sqrtf(block_sum<BLOCK>(squares, lds) / (float)d + eps);
    for (int i = 0; i < CHANNELS; i++) {
        const int c = t + i * BLOCK;
        if (c < d) zk_store(h + at + c, v[i] * inv * w[c]);
    }
    if (t == 0) inv_rms[zk_bid_x()] = inv;
}

// With g = dh * w, n = 1 / rms:  d = dy + n g - y n^3 mean(g y),  dw = sum dh y n;  and of either side of the merge
// dx = d s,  ds = sum d (x + b),  db = s sum d.
template <int BLOCK, int CHANNELS>
ZK_DEV void backward(float* lds, const bf16_t* branch, const float* stream, Merge p, const float* w, const float* inv_rms,
                     const float* dh, const float* dy, bf16_t* d_branch, float* d_stream, float* partial, int rows, int d,
                     int rows_per_block) {
    const int t = zk_tid(), first = zk_bid_x() * rows_per_block, end = zk_min_i(rows, first + rows_per_block);
    float dw[CHANNELS], ds1[CHANNELS], ds2[CHANNELS], sum[CHANNELS];
    for (int i = 0; i < CHANNELS; i++) dw[i] = ds1[i] = ds2[i] = sum[i] = 0.0f;
    for (int row = first; row < end; row++) {
        const long at = (long)row * d;
        const float n = inv_rms[row];
        // branch + b1 and stream + b2, the merged stream, and the gradient of h.
        float x1[CHANNELS], x2[CHANNELS], y[CHANNELS], g[CHANNELS], dot = 0.0f;
        for (int i = 0; i < CHANNELS; i++) {
            const int c = t + i * BLOCK;
            x1[i] = x2[i] = y[i] = g[i] = 0.0f;
            if (c >= d) continue;
            y[i] = stream[at + c];
            if (branch) {
                x1[i] = zk_bf2f(branch[at + c]) + p.b1[c];
                x2[i] = y[i] + p.b2[c];
                y[i] = x1[i] * p.s1[c] + x2[i] * p.s2[c];
            }
            g[i] = dh[at + c];
            dot += g[i] * w[c] * y[i];
        }
        // Two sets in turn: one barrier a row is enough.
        const float mean = block_sum<BLOCK>(dot, lds + (row - first) % 2 * WAVES(BLOCK)) / (float)d * n * n * n;
        for (int i = 0; i < CHANNELS; i++) {
            const int c = t + i * BLOCK;
            if (c >= d) continue;
            dw[i] += g[i] * y[i] * n;
            const float dv = g[i] * w[c] * n - y[i] * mean + (dy ? dy[at + c] : 0.0f);
            if (!branch) {
                d_stream[at + c] = dv;
                continue;
            }
            ds1[i] += dv * x1[i];
            ds2[i] += dv * x2[i];
            sum[i] += dv;
            d_branch[at + c] = zk_f2bf(dv * p.s1[c]);
            d_stream[at + c] = dv * p.s2[c];
        }
    }
    float* out = partial + (long)zk_bid_x() * (branch ? 4 : 1) * d;
    for (int i = 0; i < CHANNELS; i++) {
        const int c = t + i * BLOCK;
        if (c >= d) continue;
        out[c] = dw[i];
        if (!branch) continue;
        out[d + c] = ds1[i];
        out[2 * d + c] = ds2[i];
        out[3 * d + c] = sum[i];
    }
}

#define FORWARD(name, block, channels, Out) \
    ZK_KERNEL(name, block, const bf16_t* branch, const float* stream, const float* s1, const float* b1, const float* s2, \
              const float* b2, const float* w, float* y, Out* h, float* inv_rms, int d, float eps) { \
        ZK_SHARED(float, lds, WAVES(block)); \
        forward<block, channels>(lds, branch, stream, Merge{s1, b1, s2, b2}, w, y, h, inv_rms, d, eps); \
    } \
    ZK_DEFINE_CPU_ENTRY(name, block)

#define BACKWARD(name, block, channels) \
    ZK_KERNEL(name, block, const bf16_t* branch, const float* stream, const float* s1, const float* b1, const float* s2, \
              const float* b2, const float* w, const float* inv_rms, const float* dh, const float* dy, bf16_t* d_branch, \
              float* d_stream, float* partial, int rows, int d, int rows_per_block) { \
        ZK_SHARED(float, lds, 2 * WAVES(block)); \
        backward<block, channels>(lds, branch, stream, Merge{s1, b1, s2, b2}, w, inv_rms, dh, dy, d_branch, d_stream, partial, rows, d, \
                           rows_per_block); \
    } \
    ZK_DEFINE_CPU_ENTRY(name, block)

FORWARD(residual_norm_fwd_512, 256, 2, bf16_t)
FORWARD(residual_norm_fwd_2048, 256, 8, bf16_t)
FORWARD(residual_norm_fwd_4096, 512, 8, bf16_t)
FORWARD(residual_norm_fwd_f32_512, 256, 2, float)
FORWARD(residual_norm_fwd_f32_2048, 256, 8, float)
FORWARD(residual_norm_fwd_f32_4096, 512, 8, float)
BACKWARD(residual_norm_bwd_512, 256, 2)
BACKWARD(residual_norm_bwd_2048, 256, 8)
BACKWARD(residual_norm_bwd_4096, 512, 8)

// Adds the sums over all workgroups of residual_norm_bwd to the gradients of the parameters. Without a branch (ds1 null) there is
// only that of the norm.
ZK_KERNEL(residual_norm_params, 256, const float* partial, const float* s1, const float* s2, float* dw, float* ds1, float* db1,
          float* ds2, float* db2, int blocks, int d) {
    const int c = zk_bid_x() * 256 + zk_tid(), parts = ds1 ? 4 : 1;
    if (c >= d) return;
    float sums[4] = {0.0f, 0.0f, 0.0f, 0.0f};
    for (int i = 0; i < blocks; i++)
        for (int k = 0; k < parts; k++) sums[k] += partial[((long)i * parts + k) * d + c];
    dw[c] += sums[0];
    if (!ds1) return;
    ds1[c] += sums[1];
    db1[c] += sums[3] * s1[c];
    ds2[c] += sums[2];
    db2[c] += sums[3] * s2[c];
}
ZK_DEFINE_CPU_ENTRY(residual_norm_params, 256)
