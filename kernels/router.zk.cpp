// The router (spec 1.6): depth averaging, norm, a two-layer MLP, softmax and biased argmax, all of 64 rows in one kernel, and the
// same backwards. The products with h (down-projection and its gradients) and the gradients of the weights, which are sums over all
// rows, are ordinary products done elsewhere.
//
// Numbers: state, norm, hidden layers, logits, softmax, parameters f32; operands of products bf16 with f32 sums. What the backward
// hands to the products of weight gradients is bf16: activations, and gradients of logits, hidden layers and state.
//
// Weights come packed in the order of fragments (router_pack), padded with zeros to WIDTH channels; so a width R that is a multiple
// of 4 and at most WIDTH (64 or 256) is as good as another. At most 64 classes.
//
// Loops over accumulators are unrolled on demand, so that these stay in registers.
// In a product's accumulator a lane has row `lane % 16` of each group of 16 rows and, of each tile of 16 channels, four: one row's
// numbers are spread over the lanes 16 apart and the four waves.
#include "gelu.h"
#include "lds_tile.h"

#define BLOCK 256
#define WAVES 4
#define TILE_ROWS 64
#define ROW_TILES (TILE_ROWS / 16)
#define MAX_CLASSES 64
/// Numbers (bf16) of LDS: a tile of activations, or of logits in f32.
#define ROUTER_LDS(width) (TILE_ROWS * ((width) > 2 * MAX_CLASSES ? (width) : 2 * MAX_CLASSES))

struct RouterSizes {
    int tokens, width, classes;
};

/// Sums of a wave: its tiles of channels (every fourth), all rows.
template <int WIDTH>
struct Sums {
    static constexpr int OWN = WIDTH / 16 / WAVES;
    zk_acc acc[OWN][ROW_TILES];

    /// Place of a lane's four channels of tile j; whether they exist.
    ZK_MEMBER static int channel(int j) {
        return 16 * (zk_tid() / ZK_WAVE + WAVES * j) + 4 * (zk_tid() % ZK_WAVE >> 4);
    }
    ZK_MEMBER static int row(int i) { return 16 * i + (zk_tid() & 15); }

    /// Rows of LDS times packed weights, over `steps` times 16 inputs. All work-items must come; LDS may be written after it.
    ZK_MEMBER void multiply(LdsTile<WIDTH> rows, const bf16_t* weights, int steps) {
        const int lane = zk_tid() % ZK_WAVE, wave = zk_tid() / ZK_WAVE;
        for (int j = 0; j < OWN; j++)
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) zk_acc_zero(acc[j][i]);
#pragma unroll 1
        for (int kk = 0; kk < steps; kk++) {
            zk_frag r[ROW_TILES];
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) r[i] = rows.frag(16 * i, 16 * kk, lane);
            for (int j = 0; j < OWN; j++) {
                zk_frag w;
                w.v = *(const s16x4*)__builtin_assume_aligned(weights + (((wave + WAVES * j) * steps + kk) * 64 + lane) * 4, 8);
#pragma unroll
                for (int i = 0; i < ROW_TILES; i++) zk_mma(acc[j][i], w, r[i]);
            }
        }
        zk_barrier();
    }
};

/// One wave's part of a row's sum, over the lanes that share the row, and then over the waves, through LDS ([WAVES, TILE_ROWS]).
template <class F>
ZK_DEV void sum_of_rows(float* lds, float (&sum)[ROW_TILES], F part) {
    const int lane = zk_tid() % ZK_WAVE, wave = zk_tid() / ZK_WAVE;
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
        float v = part(i);
        v += zk_shfl_xor(v, 16);
        v += zk_shfl_xor(v, 32);
        if (lane < 16) lds[wave * TILE_ROWS + 16 * i + lane] = v;
    }
    zk_barrier();
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) {
        sum[i] = 0.0f;
        for (int w = 0; w < WAVES; w++) sum[i] += lds[w * TILE_ROWS + 16 * i + (lane & 15)];
    }
    zk_barrier();
}

/// Over the rows of a tile: lanes with row 0 of a group write the sums of their four channels.
ZK_DEV void sum_of_channels(float* to, int channel, int width, f32x4 v) {
    for (int e = 0; e < 4; e++)
        for (int mask = 1; mask < 16; mask <<= 1) v[e] += zk_shfl_xor(v[e], mask);
    if ((zk_tid() & 15) == 0 && channel < width) zk_store4(to + channel, v);
}

ZK_DEV f32x4 gelu4(f32x4 v) {
    for (int e = 0; e < 4; e++) v[e] = gelu(v[e]);
    return v;
}

/// Adds the bias, keeps the hidden layer, and puts its GELU into LDS as the next product's operand.
template <int WIDTH>
ZK_DEV void finish_layer(const Sums<WIDTH>& sums, LdsTile<WIDTH> rows, const float* bias, float* hidden, RouterSizes s, int t0) {
#pragma unroll
    for (int j = 0; j < Sums<WIDTH>::OWN; j++) {
        const int c = sums.channel(j);
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            const int t = t0 + sums.row(i);
            f32x4 v = (f32x4)(0.0f);
            if (c < s.width && t < s.tokens) {
                v = sums.acc[j][i].v + zk_load4(bias + c);
                zk_store4(hidden + (long)t * s.width + c, v);
                v = gelu4(v);
            }
            zk_store4(rows.group(sums.row(i), c / 4), v);
        }
    }
    zk_barrier();
}

struct RouterForward {
    const float *projected, *down_bias, *prev, *gamma, *norm;
    const bf16_t *fc1, *fc2, *out;
    const float *fc1_bias, *fc2_bias, *balancing;
    const unsigned* pinned;
    /// `hidden`: both layers before GELU, [2, T, R].
    float *state, *inv_rms, *hidden, *logits, *probs;
    unsigned* choice;
    float* prob;
};

/// State, its norm into LDS. A wave takes 16 rows.
template <int WIDTH>
ZK_DEV void stage_normed(const RouterForward& x, LdsTile<WIDTH> rows, RouterSizes s, float eps, int t0) {
    constexpr int OWN = WIDTH / ZK_WAVE;
    const int lane = zk_tid() % ZK_WAVE, wave = zk_tid() / ZK_WAVE;
#pragma unroll 1
    for (int row = wave * (TILE_ROWS / WAVES); row < (wave + 1) * (TILE_ROWS / WAVES); row++) {
        const int t = t0 + row;
        float v[OWN], squares = 0.0f;
        for (int i = 0; i < OWN; i++) {
            const int c = lane + i * ZK_WAVE;
            v[i] = 0.0f;
            if (c >= s.width || t >= s.tokens) continue;
            const long at = (long)t * s.width + c;
            v[i] = x.projected[at] + x.down_bias[c];
            if (x.prev) v[i] += x.prev[at] * x.gamma[c];
            x.state[at] = v[i];
            squares += v[i] * v[i];
        }
        const float inv = 1.0f / __builtin_sqrtf(zk_wave_sum(squares) / (float)s.width + eps);
        if (lane == 0 && t < s.tokens) x.inv_rms[t] = inv;
        for (int i = 0; i < OWN; i++) {
            const int c = lane + i * ZK_WAVE;
            rows.group(row, c / 4)[c % 4] = c < s.width ? zk_f2bf(v[i] * inv * x.norm[c]) : (bf16_t)0;
        }
    }
    zk_barrier();
}

/// Softmax of a row of logits, choice and its probability. Ties go to the lowest index.
ZK_DEV void decide(const RouterForward& x, const float* z, RouterSizes s, int t) {
    float top = z[0], sum = 0.0f, best_score = 0.0f;
    for (int c = 1; c < s.classes; c++) top = zk_max(top, z[c]);
    for (int c = 0; c < s.classes; c++) sum += zk_exp(z[c] - top);
    unsigned best = 0;
    for (int c = 0; c < s.classes; c++) {
        const float p = zk_exp(z[c] - top) / sum, score = p + x.balancing[c];
        x.probs[(long)t * s.classes + c] = p;
        x.logits[(long)t * s.classes + c] = z[c];
        if (c == 0 || score > best_score) {
            best = (unsigned)c;
            best_score = score;
        }
    }
    if (x.pinned) best = x.pinned[t];
    x.choice[t] = best;
    x.prob[t] = zk_exp(z[best] - top) / sum;
}

template <int WIDTH>
ZK_DEV void forward(const RouterForward& x, RouterSizes s, float eps, bf16_t* lds) {
    const int t0 = zk_bid_x() * TILE_ROWS, lane = zk_tid() % ZK_WAVE, wave = zk_tid() / ZK_WAVE;
    const LdsTile<WIDTH> rows{lds};
    stage_normed<WIDTH>(x, rows, s, eps, t0);
    Sums<WIDTH> sums;
    sums.multiply(rows, x.fc1, WIDTH / 16);
    finish_layer<WIDTH>(sums, rows, x.fc1_bias, x.hidden, s, t0);
    sums.multiply(rows, x.fc2, WIDTH / 16);
    finish_layer<WIDTH>(sums, rows, x.fc2_bias, x.hidden + (long)s.tokens * s.width, s, t0);
    // A wave to each tile of classes; there are at most as many as waves.
    zk_acc z[ROW_TILES];
#pragma unroll
    for (int i = 0; i < ROW_TILES; i++) zk_acc_zero(z[i]);
    if (16 * wave < s.classes) {
        for (int kk = 0; kk < WIDTH / 16; kk++) {
            zk_frag w;
            w.v = *(const s16x4*)__builtin_assume_aligned(x.out + ((wave * (WIDTH / 16) + kk) * 64 + lane) * 4, 8);
#pragma unroll
            for (int i = 0; i < ROW_TILES; i++) zk_mma(z[i], w, rows.frag(16 * i, 16 * kk, lane));
        }
    }
    zk_barrier();
    float* logits = (float*)lds;
    if (16 * wave < s.classes)
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) zk_store4(logits + (16 * i + (lane & 15)) * MAX_CLASSES + 16 * wave + 4 * (lane >> 4), z[i].v);
    zk_barrier();
    if (zk_tid() < TILE_ROWS && t0 + zk_tid() < s.tokens) decide(x, logits + zk_tid() * MAX_CLASSES, s, t0 + zk_tid());
}

/// The backward is two kernels, since one would need more scalar registers than there are. `work` is for the weights' gradients,
/// [6, T, R]: activation and gradient of the second layer, of the first, the norm's output, dr.
struct MlpBackward {
    const unsigned* choice;
    const float *prob, *probs, *d_prob, *hidden;
    /// Packed for this direction.
    const bf16_t *fc2, *out;
    bf16_t *d_logits, *work;
    float* partial;
};
struct StateBackward {
    const float *d_state, *state, *inv_rms, *prev, *gamma, *norm;
    const bf16_t* fc1;
    bf16_t* work;
    float *d_prev, *partial;
};

/// Gradients of the logits, into LDS and memory: softmax of the chosen class only, dl_c = p (1[c] - p_c) d_prob.
template <int WIDTH>
ZK_DEV void stage_logit_gradients(const MlpBackward& x, LdsTile<WIDTH> rows, RouterSizes s, int t0) {
    const int padded = (s.classes + 15) / 16 * 16;
    for (int i = zk_tid(); i < TILE_ROWS * padded; i += BLOCK) {
        const int row = i / padded, c = i % padded, t = t0 + row;
        bf16_t d = 0;
        if (t < s.tokens && c < s.classes) {
            const int chosen = (int)x.choice[t];
            const float* p = x.probs + (long)t * s.classes;
            float factor = -p[c];
            if (c == chosen) {
                // 1 - p of the chosen class, without the cancellation when that is nearly 1.
                factor = 0.0f;
                for (int other = 0; other < s.classes; other++)
                    if (other != chosen) factor += p[other];
            }
            d = zk_f2bf(x.prob[t] * x.d_prob[t] * factor);
            x.d_logits[(long)t * s.classes + c] = d;
        }
        rows.group(row, c / 4)[c % 4] = d;
    }
    zk_barrier();
}

/// Back through GELU: the sums times its derivative, into memory and LDS; the activation into memory; the bias' gradient.
template <int WIDTH>
ZK_DEV void finish_gelu(const Sums<WIDTH>& sums, LdsTile<WIDTH> rows, const float* hidden, bf16_t* act, bf16_t* d, float* bias_sum,
                        RouterSizes s, int t0) {
#pragma unroll
    for (int j = 0; j < Sums<WIDTH>::OWN; j++) {
        const int c = sums.channel(j);
        f32x4 total = (f32x4)(0.0f);
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            const int t = t0 + sums.row(i);
            const long at = (long)t * s.width + c;
            f32x4 v = (f32x4)(0.0f);
            if (c < s.width && t < s.tokens) {
                const f32x4 h = zk_load4(hidden + at);
                v = sums.acc[j][i].v;
                for (int e = 0; e < 4; e++) v[e] *= gelu_derivative(h[e]);
                zk_store4(d + at, v);
                zk_store4(act + at, gelu4(h));
            }
            total += v;
            zk_store4(rows.group(sums.row(i), c / 4), v);
        }
        sum_of_channels(bias_sum, c, s.width, total);
    }
    zk_barrier();
}

/// Back through the norm and depth averaging.
template <int WIDTH>
ZK_DEV void finish_state(const StateBackward& x, const Sums<WIDTH>& sums, float* lds, float* partial, RouterSizes s, int t0) {
    const long layer = (long)s.tokens * s.width;
    float dot[ROW_TILES];
    sum_of_rows(lds, dot, [&](int i) {
        float sum = 0.0f;
        const int t = t0 + sums.row(i);
#pragma unroll
        for (int j = 0; j < Sums<WIDTH>::OWN; j++) {
            const int c = sums.channel(j);
            if (c >= s.width || t >= s.tokens) continue;
            const f32x4 v = sums.acc[j][i].v * zk_load4(x.norm + c) * zk_load4(x.state + (long)t * s.width + c);
            sum += (v[0] + v[1]) + (v[2] + v[3]);
        }
        return sum;
    });
#pragma unroll
    for (int j = 0; j < Sums<WIDTH>::OWN; j++) {
        const int c = sums.channel(j);
        f32x4 of_down = (f32x4)(0.0f), of_norm = (f32x4)(0.0f), of_gamma = (f32x4)(0.0f);
#pragma unroll
        for (int i = 0; i < ROW_TILES; i++) {
            const int t = t0 + sums.row(i);
            const long at = (long)t * s.width + c;
            if (c >= s.width || t >= s.tokens) continue;
            const float n = x.inv_rms[t];
            const f32x4 state = zk_load4(x.state + at), norm = zk_load4(x.norm + c), g = sums.acc[j][i].v;
            f32x4 dr = g * norm * n - state * (dot[i] / (float)s.width * n * n * n);
            if (x.d_state) dr += zk_load4(x.d_state + at);
            of_norm += g * state * n;
            of_down += dr;
            if (x.prev) {
                of_gamma += dr * zk_load4(x.prev + at);
                zk_store4(x.d_prev + at, dr * zk_load4(x.gamma + c));
            }
            zk_store4(x.work + 5 * layer + at, dr);
            zk_store4(x.work + 4 * layer + at, state * n * norm);
        }
        sum_of_channels(partial + 2 * s.width, c, s.width, of_down);
        sum_of_channels(partial + 3 * s.width, c, s.width, of_norm);
        sum_of_channels(partial + 4 * s.width, c, s.width, of_gamma);
    }
}

template <int WIDTH>
ZK_DEV void backward_mlp(const MlpBackward& x, RouterSizes s, bf16_t* lds) {
    const int t0 = zk_bid_x() * TILE_ROWS;
    const LdsTile<WIDTH> rows{lds};
    float* partial = x.partial + (long)zk_bid_x() * 5 * s.width;
    const long layer = (long)s.tokens * s.width;
    stage_logit_gradients<WIDTH>(x, rows, s, t0);
    Sums<WIDTH> sums;
    sums.multiply(rows, x.out, (s.classes + 15) / 16);
    finish_gelu<WIDTH>(sums, rows, x.hidden + layer, x.work, x.work + layer, partial, s, t0);
    sums.multiply(rows, x.fc2, WIDTH / 16);
    finish_gelu<WIDTH>(sums, rows, x.hidden, x.work + 2 * layer, x.work + 3 * layer, partial + s.width, s, t0);
}

template <int WIDTH>
ZK_DEV void backward_state(const StateBackward& x, RouterSizes s, bf16_t* lds) {
    const int t0 = zk_bid_x() * TILE_ROWS;
    const LdsTile<WIDTH> rows{lds};
    const bf16_t* d1 = x.work + 3 * (long)s.tokens * s.width;
    for (int i = zk_tid(); i < TILE_ROWS * (WIDTH / 4); i += BLOCK) {
        const int row = i / (WIDTH / 4), group = i % (WIDTH / 4), t = t0 + row;
        const bool there = t < s.tokens && 4 * group < s.width;
        *(u32x2*)rows.group(row, group) = there ? *(const u32x2*)(d1 + (long)t * s.width + 4 * group) : (u32x2)(0u);
    }
    zk_barrier();
    Sums<WIDTH> sums;
    sums.multiply(rows, x.fc1, WIDTH / 16);
    finish_state<WIDTH>(x, sums, (float*)lds, x.partial + (long)zk_bid_x() * 5 * s.width, s, t0);
}

#define ROUTER(WIDTH) \
    ZK_KERNEL(router_fwd_##WIDTH, BLOCK, const float* projected, const float* down_bias, const float* prev, const float* gamma, \
              const float* norm, const bf16_t* fc1, const float* fc1_bias, const bf16_t* fc2, const float* fc2_bias, const bf16_t* out, \
              const float* balancing, const unsigned* pinned, float* state, float* inv_rms, float* hidden, float* logits, \
              float* probs, unsigned* choice, float* prob, int tokens, int width, int classes, float eps) { \
        ZK_SHARED(bf16_t, lds, ROUTER_LDS(WIDTH)); \
        const RouterForward x{projected, down_bias, prev, gamma, norm, fc1, fc2, out, fc1_bias, fc2_bias, balancing, pinned, state, \
                              inv_rms, hidden, logits, probs, choice, prob}; \
        forward<WIDTH>(x, RouterSizes{tokens, width, classes}, eps, lds); \
    } \
    ZK_DEFINE_CPU_ENTRY(router_fwd_##WIDTH, BLOCK) \
    ZK_KERNEL(router_bwd_mlp_##WIDTH, BLOCK, const unsigned* choice, const float* prob, const float* probs, const float* d_prob, \
              const float* hidden, const bf16_t* fc2, const bf16_t* out, bf16_t* d_logits, bf16_t* work, float* partial, int tokens, \
              int width, int classes) { \
        ZK_SHARED(bf16_t, lds, ROUTER_LDS(WIDTH)); \
        const MlpBackward x{choice, prob, probs, d_prob, hidden, fc2, out, d_logits, work, partial}; \
        backward_mlp<WIDTH>(x, RouterSizes{tokens, width, classes}, lds); \
    } \
    ZK_DEFINE_CPU_ENTRY(router_bwd_mlp_##WIDTH, BLOCK) \
    ZK_KERNEL(router_bwd_state_##WIDTH, BLOCK, const float* d_state, const float* state, const float* inv_rms, const float* prev, \
              const float* gamma, const float* norm, const bf16_t* fc1, bf16_t* work, float* d_prev, float* partial, int tokens, int width) { \
        ZK_SHARED(bf16_t, lds, ROUTER_LDS(WIDTH)); \
        const StateBackward x{d_state, state, inv_rms, prev, gamma, norm, fc1, work, d_prev, partial}; \
        backward_state<WIDTH>(x, RouterSizes{tokens, width, 0}, lds); \
    } \
    ZK_DEFINE_CPU_ENTRY(router_bwd_state_##WIDTH, BLOCK)

ROUTER(64)
ROUTER(256)

// A weight [outputs, inputs] in bf16 in the order of fragments, zeros beyond its edges: [tiles of 16 outputs, steps of 16 inputs, 64
// lanes, 4]. `turned`: of its transpose, whose outputs are the weight's inputs. One work-item a number, 256 tiles steps in all.
ZK_KERNEL(router_pack, BLOCK, const float* weight, bf16_t* packed, int outputs, int inputs, int turned, int tiles, int steps) {
    const int n = zk_bid_x() * BLOCK + zk_tid();
    if (n >= tiles * steps * 256) return;
    const int i = n % 4, lane = n / 4 % 64, step = n / 256 % steps, tile = n / 256 / steps;
    const int output = 16 * tile + lane % 16, input = 16 * step + 4 * (lane / 16) + i;
    const int row = turned ? input : output, column = turned ? output : input;
    packed[n] = row < outputs && column < inputs ? zk_f2bf(weight[(long)row * inputs + column]) : (bf16_t)0;
}
ZK_DEFINE_CPU_ENTRY(router_pack, BLOCK)

// Adds the sums of both backward kernels over their blocks to the gradients of the vectors; d_gamma may be null.
ZK_KERNEL(router_params, BLOCK, const float* partial, float* d_fc2_bias, float* d_fc1_bias, float* d_down_bias, float* d_norm,
          float* d_gamma, int blocks, int width) {
    const int n = zk_bid_x() * BLOCK + zk_tid(), which = n / width, c = n % width;
    if (which >= (d_gamma ? 5 : 4)) return;
    float sum = 0.0f;
    for (int b = 0; b < blocks; b++) sum += partial[((long)b * 5 + which) * width + c];
    float* const to[] = {d_fc2_bias, d_fc1_bias, d_down_bias, d_norm, d_gamma};
    float* out = to[0];
    for (int i = 1; i < 5; i++)
        if (which == i) out = to[i];
    out[c] += sum;
}
ZK_DEFINE_CPU_ENTRY(router_params, BLOCK)

// Rows that chose class zk_bid_x(), padding (valid 0; null = none) left out. A workgroup for each class.
ZK_KERNEL(router_counts, BLOCK, const unsigned* choice, const unsigned char* valid, int* counts, int tokens) {
    ZK_SHARED(int, lds, WAVES);
    int n = 0;
    for (int t = zk_tid(); t < tokens; t += BLOCK) n += choice[t] == (unsigned)zk_bid_x() && (!valid || valid[t]);
    for (int mask = ZK_WAVE / 2; mask; mask >>= 1) n += zk_shfl_xor_i(n, mask);
    if (zk_tid() % ZK_WAVE == 0) lds[zk_tid() / ZK_WAVE] = n;
    zk_barrier();
    if (zk_tid() > 0) return;
    n = 0;
    for (int w = 0; w < WAVES; w++) n += lds[w];
    counts[zk_bid_x()] = n;
}
ZK_DEFINE_CPU_ENTRY(router_counts, BLOCK)
