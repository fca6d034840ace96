// Gradients of CCA's mixer: of the four projections, of the halo and of the parameters. In the order of launching:
//
//   cca_mix_bwd_norm      RoPE, norm and temperature backward: dy [T, C], the gradient before the norms
//   cca_mix_bwd_values    gradients of the two value projections
//   cca_mix_bwd_input     both convolutions and q-k-mean backward: gradients of the query and key projections
//   cca_mix_bwd_weight    sums over rows for the second convolution's weight and bias
//   cca_mix_bwd_halo      gradients of the halo's rows, where there is one
//   cca_mix_bwd_conv1, cca_mix_bwd_params   add all partial sums to the gradients of the parameters, in a fixed order
//
// Numbers: dq, dk, dv come in as f32; dy, norms, q-k-mean and sums f32; products have bf16 operands; the gradients of the projections
// go out in bf16 (operands of the next products), those of the halo in f32. The temperatures' sums, whose terms cancel, are f64.
//
// The gradient of u is one product per head, the mirror of the forward's: row t of its left operand is [dy_t | dy_{t+1}], the
// second part 0 where the next row does not look back at this one.
#include "cca_mix.h"

#define NORM_ROWS 16
/// Rows of a tile whose input gradients a workgroup finishes: the last one only lends its gradient of u to the one before.
#define INPUT_ROWS (TILE_ROWS - 1)
#define WEIGHT_ROWS 32

// y = s x/|x|: dx = s/|x| (dy - x (x dy) / |x|^2); with the guard inside the root this form is exact too. A wave for each row and
// head; grid: NORM_ROWS rows each. temp_partial [blocks, kv_heads].
ZK_KERNEL(cca_mix_bwd_norm, BLOCK, const float* dq, const float* dk, const float* saved, const float* temp, const int* history,
          const float* rope, int rotary, float* dy, double* temp_partial, int tokens, int query_heads, int kv_heads, int d) {
    ZK_SHARED(double, sums, BLOCK);
    const int lane = zk_tid() % ZK_WAVE, wave = zk_tid() / ZK_WAVE, half = rotary / 2, channels = (query_heads + kv_heads) * d;
    const float root = __builtin_sqrtf((float)d);
    for (int head = 0; head < query_heads + kv_heads; head++) {
        const bool of_q = head < query_heads;
        const int kv_head = head - query_heads;
        const float scale = of_q ? 1.0f : temp[kv_head];
        double temp_sum = 0.0;
        for (int row = wave; row < NORM_ROWS; row += WAVES) {
            const int t = zk_bid_x() * NORM_ROWS + row;
            if (t >= tokens) break;
            const float* x = saved + (long)t * channels + head * d;
            const float* g = of_q ? dq + ((long)t * query_heads + head) * d : dk + ((long)t * kv_heads + kv_head) * d;
            const float *cosine = rope + (long)((const i32x4*)history)[t][2] * rotary, *sine = cosine + half;
            float squares = 0.0f, dot = 0.0f;
            for (int j = lane; j < d; j += ZK_WAVE) {
                float r = g[j];
                if (j < half) r = r * cosine[j] + g[j + half] * sine[j];
                else if (j < rotary) r = r * cosine[j - half] - g[j - half] * sine[j - half];
                dy[(long)t * channels + head * d + j] = r;
                squares += x[j] * x[j];
                dot += r * x[j];
            }
            squares = zk_wave_sum(squares);
            const float inverse = 1.0f / __builtin_sqrtf(squares + NORM_GUARD);
            temp_sum += (double)dot * (double)(root * inverse);
            dot = zk_wave_sum(dot) * inverse * inverse;
            for (int j = lane; j < d; j += ZK_WAVE) {
                float* to = dy + (long)t * channels + head * d + j;
                *to = root * inverse * scale * (*to - x[j] * dot);
            }
        }
        if (of_q) continue;
        sums[zk_tid()] = temp_sum;
        for (int step = BLOCK / 2; step; step >>= 1) {
            zk_barrier();
            if (zk_tid() < step) sums[zk_tid()] += sums[zk_tid() + step];
        }
        if (zk_tid() == 0) temp_partial[(long)zk_bid_x() * kv_heads + kv_head] = sums[0];
        zk_barrier();
    }
}
ZK_DEFINE_CPU_ENTRY(cca_mix_bwd_norm, BLOCK)

// dv [T, kv_dim] to the gradients of both value projections [T, kv_dim / 2]. One work-item for each number of one of them.
ZK_KERNEL(cca_mix_bwd_values, BLOCK, const float* dv, const int* history, bf16_t* d_current, bf16_t* d_delayed, int tokens, int kv_dim) {
    const long i = (long)zk_bid_x() * BLOCK + zk_tid();
    const int half = kv_dim / 2, t = (int)(i / half), c = (int)(i % half);
    if (t >= tokens) return;
    const CcaRows rows{(const i32x4*)history, tokens};
    d_current[i] = zk_f2bf(dv[(long)t * kv_dim + c]);
    d_delayed[i] = next_uses(rows, t) ? zk_f2bf(dv[(long)(t + 1) * kv_dim + half + c]) : (bf16_t)0;
}
ZK_DEFINE_CPU_ENTRY(cca_mix_bwd_values, BLOCK)

/// 64 rows of [dy_t | dy_{t+1}] of one head into LDS.
template <int D>
ZK_DEV void stage_gradients(const Cca& x, int head, int t0, const float* dy, bf16_t* lds) {
    const LdsTile<D> now{lds}, next{lds + TILE_ROWS * D};
    const int channels = (x.query_heads + x.kv_heads) * D;
    for (int i = zk_tid(); i < TILE_ROWS * (D / 4); i += BLOCK) {
        const int row = i / (D / 4), group = i % (D / 4), t = t0 + row;
        const float* from = dy + (long)t * channels + head * D + 4 * group;
        zk_store4(now.group(row, group), t < x.rows.tokens ? zk_load4(from) : (f32x4)(0.0f));
        zk_store4(next.group(row, group), next_uses(x.rows, t) ? zk_load4(from + channels) : (f32x4)(0.0f));
    }
}

/// Of the rows of a tile, whose gradients of u lie in `du`: the gradients of X, and the sums for the first convolution's weight,
/// before [0..D) and now [D..2D) of `sums`. A work-item keeps to one channel.
template <int D>
ZK_DEV void finish_input(const Cca& x, int head, int t0, const float* dy, float* du, bf16_t* out, float* sums) {
    constexpr int PARTS = BLOCK / D;
    const int j = zk_tid() % D, part = zk_tid() / D, channels = (x.query_heads + x.kv_heads) * D, group = x.group();
    const bool of_q = head < x.query_heads;
    const int kv_head = of_q ? head / group : head - x.query_heads, width = (of_q ? x.query_heads : x.kv_heads) * D;
    const HeadRows rows = x.head(head);
    const float before_weight = x.conv0_weight[2 * (head * D + j)], now_weight = x.conv0_weight[2 * (head * D + j) + 1];
    float before_sum = 0.0f, now_sum = 0.0f;
#pragma unroll 1
    for (int row = part; row < INPUT_ROWS; row += PARTS) {
        const int t = t0 + row;
        if (t >= x.rows.tokens) break;
        const float d = du[row * D + j];
        float dx = now_weight * d;
        if (next_uses(x.rows, t)) dx += before_weight * du[(row + 1) * D + j];
        now_sum += d * rows.number(t, j);
        before_sum += d * rows.number(x.rows.history[t][0], j);
        const float *of_row = dy + (long)t * channels + j, from_k = of_row[(x.query_heads + kv_head) * D] / (float)group;
        if (of_q) dx += 0.5f * (of_row[head * D] + from_k);
        else
            for (int a = 0; a < group; a++) dx += 0.5f * (of_row[(kv_head * group + a) * D] + from_k);
        out[(long)t * width + j] = zk_f2bf(dx);
    }
    zk_barrier();
    du[part * 2 * D + j] = before_sum;
    du[part * 2 * D + D + j] = now_sum;
    zk_barrier();
    for (int i = zk_tid(); i < 2 * D; i += BLOCK) {
        float sum = 0.0f;
        for (int p = 0; p < PARTS; p++) sum += du[p * 2 * D + i];
        sums[i] = sum;
    }
    zk_barrier();
}

template <int D>
ZK_DEV void backward_input(const Cca& x, bf16_t* lds, const bf16_t* packed, const float* dy, bf16_t* dq0, bf16_t* dk0, float* partial) {
    const int t0 = zk_bid_x() * INPUT_ROWS, kv_head = zk_bid_y(), group = x.group(), heads = x.query_heads + x.kv_heads;
    for (int i = 0; i <= group; i++) {
        const bool of_q = i < group;
        const int head = of_q ? kv_head * group + i : x.query_heads + kv_head;
        stage_gradients<D>(x, head, t0, dy, lds);
        zk_barrier();
        multiply_head<D>(lds, packed + (long)head * 2 * D * D);
        bf16_t* out = of_q ? dq0 + head * D : dk0 + kv_head * D;
        finish_input<D>(x, head, t0, dy, (float*)lds, out, partial + ((long)zk_bid_x() * heads + head) * 2 * D);
    }
}

/// Sums over `rows_per_block` rows of dy_t [u_{t-1} | u_t], [D, 2 D], and of dy_t, for one head.
template <int D>
ZK_DEV void backward_weight(const Cca& x, bf16_t* lds, const float* dy, float* partial, float* bias_partial, int rows_per_block) {
    constexpr int TILES = D / 16, OWN = (2 * TILES + WAVES - 1) / WAVES;
    const int lane = zk_tid() % ZK_WAVE, wave = zk_tid() / ZK_WAVE, head = zk_bid_y(), channels = (x.query_heads + x.kv_heads) * D;
    const LdsTile<WEIGHT_ROWS> grads{lds}, inputs{lds + D * WEIGHT_ROWS};
    const HeadRows rows = x.head(head);
    const float *weight = x.conv0_weight + 2 * head * D, *bias = x.conv0_bias + head * D;
    // Four rows and four channels a work-item; there are 2 D such patches.
    const int row0 = zk_tid() / (D / 4) * 4, group = zk_tid() % (D / 4);
    const bool stages = zk_tid() < 2 * D;
    zk_acc acc[TILES][OWN];
    for (int i = 0; i < TILES; i++)
        for (int j = 0; j < OWN; j++) zk_acc_zero(acc[i][j]);
    f32x4 bias_sum = (f32x4)(0.0f);
    const int first = zk_bid_x() * rows_per_block, end = zk_min_i(x.rows.tokens, first + rows_per_block);
    for (int t0 = first; t0 < end; t0 += WEIGHT_ROWS) {
        zk_barrier();
        if (stages) {
            Patch g, u_before, u;
            for (int r = 0; r < 4; r++) {
                const int t = t0 + row0 + r;
                g.row[r] = u_before.row[r] = u.row[r] = (u32x2)(0u);
                if (t >= end) continue;
                const i32x4 history = x.rows.history[t];
                const f32x4 d = zk_load4(dy + (long)t * channels + head * D + 4 * group), previous = rows.at(history[0], 4 * group);
                bias_sum += d;
                g.row[r] = zk_pack4(d);
                u_before.row[r] = zk_pack4(first_convolution(weight, bias, rows.at(history[1], 4 * group), previous, 4 * group));
                u.row[r] = zk_pack4(first_convolution(weight, bias, previous, rows.at(t, 4 * group), 4 * group));
            }
            g.store_turned(grads, row0, group);
            u_before.store_turned(inputs, row0, group);
            u.store_turned(LdsTile<WEIGHT_ROWS>{lds + 2 * D * WEIGHT_ROWS}, row0, group);
        }
        zk_barrier();
        for (int kk = 0; kk < WEIGHT_ROWS / 16; kk++) {
            zk_frag g[TILES];
            for (int i = 0; i < TILES; i++) g[i] = grads.frag(16 * i, 16 * kk, lane);
            for (int j = 0; j < OWN; j++) {
                const int tile = wave + WAVES * j;
                if (tile >= 2 * TILES) break;
                const LdsTile<WEIGHT_ROWS> of{lds + (tile < TILES ? D : 2 * D) * WEIGHT_ROWS};
                const zk_frag u = of.frag(16 * (tile % TILES), 16 * kk, lane);
                for (int i = 0; i < TILES; i++) zk_mma(acc[i][j], g[i], u);
            }
        }
    }
    float* out = partial + ((long)zk_bid_x() * (x.query_heads + x.kv_heads) + head) * 2 * D * D;
    for (int j = 0; j < OWN; j++) {
        const int tile = wave + WAVES * j;
        if (tile >= 2 * TILES) break;
        for (int i = 0; i < TILES; i++)
            for (int e = 0; e < ZK_ACC_N; e++)
                out[(16 * i + zk_acc_row(lane, e)) * 2 * D + 16 * tile + zk_acc_col(lane, e)] = zk_acc_get(acc[i][j], e);
    }
    float* sums = (float*)lds;
    zk_barrier();
    if (stages) zk_store4(sums + row0 / 4 * D + 4 * group, bias_sum);
    zk_barrier();
    if (zk_tid() < D) {
        float sum = 0.0f;
        for (int i = 0; i < WEIGHT_ROWS / 4; i++) sum += sums[i * D + zk_tid()];
        bias_partial[(long)zk_bid_x() * channels + head * D + zk_tid()] = sum;
    }
}

#define CCA_MIX_BACKWARD(D) \
    ZK_KERNEL(cca_mix_bwd_input_##D, BLOCK, CCA_ARGUMENTS, const bf16_t* packed, const float* dy, bf16_t* dq0, bf16_t* dk0, \
              float* partial) { \
        ZK_SHARED(bf16_t, lds, CCA_LDS(D)); \
        backward_input<D>(CCA(D), lds, packed, dy, dq0, dk0, partial); \
    } \
    ZK_DEFINE_CPU_ENTRY(cca_mix_bwd_input_##D, BLOCK) \
    ZK_KERNEL(cca_mix_bwd_weight_##D, BLOCK, CCA_ARGUMENTS, const float* dy, float* partial, float* bias_partial, int rows_per_block) { \
        ZK_SHARED(bf16_t, lds, 3 * D * WEIGHT_ROWS); \
        backward_weight<D>(CCA(D), lds, dy, partial, bias_partial, rows_per_block); \
    } \
    ZK_DEFINE_CPU_ENTRY(cca_mix_bwd_weight_##D, BLOCK)

CCA_MIX_BACKWARD(16)
CCA_MIX_BACKWARD(32)
CCA_MIX_BACKWARD(64)
CCA_MIX_BACKWARD(128)

// Gradients of the halo's two rows of each sequence and head, in f32, and what its use in u of the newer row adds to the sums for
// the first convolution's weight ([sequences, heads, 2, d], as in cca_mix_bwd_input). Grid: sequences, heads; d <= BLOCK.
ZK_KERNEL(cca_mix_bwd_halo, BLOCK, CCA_ARGUMENTS, const float* conv1_weight, const float* dy, const float* dv, float* d_halo_q,
          float* d_halo_k, float* d_halo_v, float* partial, int seq, int d) {
    const Cca x = CCA(d);
    const int sequence = zk_bid_x(), head = zk_bid_y(), heads = query_heads + kv_heads, j = zk_tid(), t = sequence * seq;
    const i32x4 of_row = x.rows.history[t];
    const bool newer = of_row[0] >= 0, older = of_row[1] >= 0, goes_on = next_uses(x.rows, t);
    const int kv_dim = kv_heads * d;
    if (head == 0)
        for (int c = j; c < kv_dim / 2; c += BLOCK)
            d_halo_v[(long)sequence * (kv_dim / 2) + c] = newer ? dv[(long)t * kv_dim + kv_dim / 2 + c] : 0.0f;
    if (j >= d) return;
    const bool of_q = head < query_heads;
    const int width = (of_q ? query_heads : kv_heads) * d, at = (of_q ? head : head - query_heads) * d + j;
    // Of u of the newer row, and of u of the sequence's first row.
    float du_before = 0.0f, du = 0.0f;
    for (int o = 0; o < d; o++) {
        const float* g = dy + (long)t * heads * d + head * d + o;
        const float* w = conv1_weight + ((long)(head * d + o) * d + j) * 2;
        du_before += g[0] * w[0];
        du += g[0] * w[1];
        if (goes_on) du += g[heads * d] * w[0];
    }
    const float before = conv0_weight[2 * (head * d + j)], now = conv0_weight[2 * (head * d + j) + 1];
    float* to = (of_q ? d_halo_q : d_halo_k) + (long)sequence * 2 * width + at;
    to[0] = older ? before * du_before : 0.0f;
    to[width] = newer ? now * du_before + before * du : 0.0f;
    const HeadRows rows = x.head(head);
    float* sums = partial + ((long)sequence * heads + head) * 2 * d;
    sums[j] = newer && older ? du_before * rows.number(of_row[1], j) : 0.0f;
    sums[d + j] = newer ? du_before * rows.number(of_row[0], j) : 0.0f;
}
ZK_DEFINE_CPU_ENTRY(cca_mix_bwd_halo, BLOCK)

// Adds the sums of cca_mix_bwd_weight over its `blocks` to the gradient of the second convolution's weight [C, d, 2]. One work-item a
// number, 2 C d in all.
ZK_KERNEL(cca_mix_bwd_conv1, BLOCK, const float* partial, float* d_weight, int blocks, int channels, int d) {
    const int n = zk_bid_x() * BLOCK + zk_tid(), size = channels * 2 * d;
    if (n >= size) return;
    float sum = 0.0f;
    for (int b = 0; b < blocks; b++) sum += partial[(long)b * size + n];
    const int channel = n / (2 * d), input = n % (2 * d);
    d_weight[((long)channel * d + input % d) * 2 + input / d] += sum;
}
ZK_DEFINE_CPU_ENTRY(cca_mix_bwd_conv1, BLOCK)

// The other parameters' gradients, one head a workgroup. The first convolution's bias is in every u, those before a document's start
// included, so its gradient is that of the second one's bias times the sum of both taps. `halos` sequences have a partial sum of
// cca_mix_bwd_halo, maybe none.
ZK_KERNEL(cca_mix_bwd_params, BLOCK, const float* input_partial, int input_blocks, const float* halo_partial, int halos,
          const float* bias_partial, int weight_blocks, const double* temp_partial, int norm_blocks, const float* conv1_weight,
          float* d_conv0_weight, float* d_conv0_bias, float* d_conv1_bias, float* d_temp, int query_heads, int kv_heads, int d) {
    ZK_SHARED(float, d_bias, 256);
    const int head = zk_bid_x(), heads = query_heads + kv_heads, j = zk_tid(), channel = head * d + j;
    if (j < d) {
        float sum = 0.0f;
        for (int b = 0; b < weight_blocks; b++) sum += bias_partial[(long)b * heads * d + channel];
        d_bias[j] = sum;
        d_conv1_bias[channel] += sum;
        for (int tap = 0; tap < 2; tap++) {
            float taps = 0.0f;
            for (int b = 0; b < input_blocks; b++) taps += input_partial[((long)b * heads + head) * 2 * d + tap * d + j];
            for (int s = 0; s < halos; s++) taps += halo_partial[((long)s * heads + head) * 2 * d + tap * d + j];
            d_conv0_weight[2 * channel + tap] += taps;
        }
    }
    zk_barrier();
    if (j < d) {
        float sum = 0.0f;
        for (int o = 0; o < d; o++) {
            const float* w = conv1_weight + ((long)(head * d + o) * d + j) * 2;
            sum += d_bias[o] * (w[0] + w[1]);
        }
        d_conv0_bias[channel] += sum;
    }
    if (head >= query_heads && j == 0) {
        double sum = 0.0;
        for (int b = 0; b < norm_blocks; b++) sum += temp_partial[(long)b * kv_heads + head - query_heads];
        d_temp[head - query_heads] += (float)sum;
    }
}
ZK_DEFINE_CPU_ENTRY(cca_mix_bwd_params, BLOCK)
