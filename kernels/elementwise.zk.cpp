// Elementwise verbs and reductions. Numbers f32 unless a kernel's name says bf16; sums over rows and over a buffer in a fixed order,
// workgroup by workgroup, sums of squares in f64.
//
// Flat kernels: one work-item a number, grid count / 256 rounded up.
#include "zk.h"

#define BLOCK 256

ZK_DEV long flat() { return (long)zk_bid_x() * BLOCK + zk_tid(); }

/// x = value
ZK_KERNEL(fill, BLOCK, float* x, float value, long count) {
    if (flat() < count) x[flat()] = value;
}
ZK_DEFINE_CPU_ENTRY(fill, BLOCK)

/// a += b
ZK_KERNEL(add_assign, BLOCK, float* a, const float* b, long count) {
    if (flat() < count) a[flat()] += b[flat()];
}
ZK_DEFINE_CPU_ENTRY(add_assign, BLOCK)

ZK_KERNEL(add_assign_bf16, BLOCK, float* a, const bf16_t* b, long count) {
    if (flat() < count) a[flat()] += zk_bf2f(b[flat()]);
}
ZK_DEFINE_CPU_ENTRY(add_assign_bf16, BLOCK)

ZK_KERNEL(cast_f32_bf16, BLOCK, const float* x, bf16_t* y, long count) {
    if (flat() < count) y[flat()] = zk_f2bf(x[flat()]);
}
ZK_DEFINE_CPU_ENTRY(cast_f32_bf16, BLOCK)

ZK_KERNEL(cast_bf16_f32, BLOCK, const bf16_t* x, float* y, long count) {
    if (flat() < count) y[flat()] = zk_bf2f(x[flat()]);
}
ZK_DEFINE_CPU_ENTRY(cast_bf16_f32, BLOCK)

/// Rows of `width` numbers of padding tokens (valid 0) become 0, in place.
ZK_KERNEL(mask_rows, BLOCK, float* x, const unsigned char* valid, long count, int width) {
    if (flat() < count && !valid[flat() / width]) x[flat()] = 0.0f;
}
ZK_DEFINE_CPU_ENTRY(mask_rows, BLOCK)

ZK_KERNEL(mask_rows_bf16, BLOCK, bf16_t* x, const unsigned char* valid, long count, int width) {
    if (flat() < count && !valid[flat() / width]) x[flat()] = 0;
}
ZK_DEFINE_CPU_ENTRY(mask_rows_bf16, BLOCK)

/// y = (x + bias) * scale, rows of d numbers.
ZK_KERNEL(affine_fwd, BLOCK, const float* x, const float* scale, const float* bias, float* y, long count, int d) {
    const long i = flat();
    if (i < count) y[i] = (x[i] + bias[i % d]) * scale[i % d];
}
ZK_DEFINE_CPU_ENTRY(affine_fwd, BLOCK)

/// dx = dy * scale, and of each workgroup's rows sum dy (x + bias) and sum dy: partial [row blocks, 2, d]. Grid: pieces of BLOCK
/// channels, blocks of rows.
ZK_KERNEL(affine_bwd, BLOCK, const float* x, const float* scale, const float* bias, const float* dy, float* dx, float* partial, int rows,
          int d, int rows_per_block) {
    const int c = zk_bid_x() * BLOCK + zk_tid(), first = zk_bid_y() * rows_per_block, end = zk_min_i(rows, first + rows_per_block);
    if (c >= d) return;
    float of_scale = 0.0f, sum = 0.0f;
    for (int r = first; r < end; r++) {
        const long at = (long)r * d + c;
        const float g = dy[at];
        of_scale += g * (x[at] + bias[c]);
        sum += g;
        dx[at] = g * scale[c];
    }
    float* to = partial + (long)zk_bid_y() * 2 * d + c;
    to[0] = of_scale;
    to[d] = sum;
}
ZK_DEFINE_CPU_ENTRY(affine_bwd, BLOCK)

/// Adds the sums of affine_bwd over its row blocks to the gradients.
ZK_KERNEL(affine_params, BLOCK, const float* partial, const float* scale, float* d_scale, float* d_bias, int blocks, int d) {
    const int c = (int)flat();
    if (c >= d) return;
    float of_scale = 0.0f, sum = 0.0f;
    for (int b = 0; b < blocks; b++) {
        of_scale += partial[(long)b * 2 * d + c];
        sum += partial[(long)b * 2 * d + d + c];
    }
    d_scale[c] += of_scale;
    d_bias[c] += sum * scale[c];
}
ZK_DEFINE_CPU_ENTRY(affine_params, BLOCK)

/// Copies runs of `width` numbers: run i from from + (i / per) * from_step + (i % per) * width to the same of `to`. Joins and cuts
/// sequences (concat_rows, last_rows).
ZK_KERNEL(copy_runs, BLOCK, const float* from, float* to, long count, int width, int per, long from_step, long to_step) {
    const long i = flat();
    if (i >= count) return;
    const long run = i / width, at = run % per * width + i % width;
    to[run / per * to_step + at] = from[run / per * from_step + at];
}
ZK_DEFINE_CPU_ENTRY(copy_runs, BLOCK)

/// Sum over a workgroup's doubles, in a fixed order, for work-item 0; 0 for the others.
ZK_DEV double sum_of_block(double v, double* lds) {
    lds[zk_tid()] = v;
    for (int step = BLOCK / 2; step; step >>= 1) {
        zk_barrier();
        if (zk_tid() < step) lds[zk_tid()] += lds[zk_tid() + step];
    }
    return zk_tid() == 0 ? lds[0] : 0.0;
}

/// Sum of squares of each workgroup's numbers, per_block of them; partial [blocks].
ZK_KERNEL(sum_of_squares, BLOCK, const float* x, double* partial, long count, int per_block) {
    ZK_SHARED(double, lds, BLOCK);
    const long first = (long)zk_bid_x() * per_block, end = first + per_block < count ? first + per_block : count;
    double sum = 0.0;
    for (long i = first + zk_tid(); i < end; i += BLOCK) sum += (double)x[i] * (double)x[i];
    sum = sum_of_block(sum, lds);
    if (zk_tid() == 0) partial[zk_bid_x()] = sum;
}
ZK_DEFINE_CPU_ENTRY(sum_of_squares, BLOCK)

/// Sum of `count` doubles into out[0]; one workgroup.
ZK_KERNEL(sum_f64, BLOCK, const double* x, double* out, int count) {
    ZK_SHARED(double, lds, BLOCK);
    double sum = 0.0;
    for (int i = zk_tid(); i < count; i += BLOCK) sum += x[i];
    sum = sum_of_block(sum, lds);
    if (zk_tid() == 0) out[0] = sum;
}
ZK_DEFINE_CPU_ENTRY(sum_f64, BLOCK)
