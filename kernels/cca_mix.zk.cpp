// CCA's mixer (spec 1.4, steps 2 to 9): a depthwise and a head-grouped causal convolution over queries and keys, q-k-mean, delayed
// values, norms with temperature, RoPE. Here the forward and the packing of weights; cca_mix_backward.zk.cpp has the rest.
//
// Numbers: the four projections and the halos f32 (what is cached stays f32), first convolution, q-k-mean and norms f32; the second
// convolution has bf16 operands and f32 sums; q, k, v come out in bf16, as attention takes them; q and k before their norm are
// kept in f32, [T, C], for the backward. RoPE's table has a row a position: rotary / 2 cosines, then the sines.
//
// The second convolution is one product per head: row t of its left operand is [u_{t-1} | u_t]. A workgroup takes 64 rows and, one
// after the other, the query heads of one key head and that one, which q-k-mean ties together.
#include "cca_mix.h"

/// 64 rows of [u_{t-1} | u_t] of one head into LDS.
template <int D>
ZK_DEV void stage_rows(const Cca& x, int head, int t0, bf16_t* lds) {
    const LdsTile<D> before{lds}, now{lds + TILE_ROWS * D};
    const HeadRows rows = x.head(head);
    const float *weight = x.conv0_weight + 2 * head * D, *bias = x.conv0_bias + head * D;
    for (int i = zk_tid(); i < TILE_ROWS * (D / 4); i += BLOCK) {
        const int row = i / (D / 4), group = i % (D / 4), t = t0 + row, j = 4 * group;
        f32x4 u_before = (f32x4)(0.0f), u = (f32x4)(0.0f);
        if (t < x.rows.tokens) {
            const i32x4 history = x.rows.history[t];
            const f32x4 previous = rows.at(history[0], j);
            // Without a previous token both inputs are zeros and the bias remains.
            u_before = first_convolution(weight, bias, rows.at(history[1], j), previous, j);
            u = first_convolution(weight, bias, previous, rows.at(t, j), j);
        }
        zk_store4(before.group(row, group), u_before);
        zk_store4(now.group(row, group), u);
    }
}

/// q-k-mean, norm with temperature and RoPE of 64 rows of one head, whose convolution lies in `y`. A wave takes 16 of the rows.
template <int D>
ZK_DEV void finish_head(const Cca& x, int head, int t0, float* y, float* saved, bf16_t* out, const float* conv1_bias, float temp,
                        const float* rope, int rotary) {
    constexpr int OWN = (D + ZK_WAVE - 1) / ZK_WAVE;
    const int lane = zk_tid() % ZK_WAVE, wave = zk_tid() / ZK_WAVE, group = x.group(), half = rotary / 2;
    const bool of_q = head < x.query_heads;
    const int width = (of_q ? x.query_heads : x.kv_heads) * D, channels = (x.query_heads + x.kv_heads) * D;
    const int kv_head = of_q ? head / group : head - x.query_heads;
    // q-k-mean: of a query head with its key head; of a key head the mean over its query heads.
    const int means = of_q ? 1 : group, first_q = of_q ? head : kv_head * group;
#pragma unroll 1
    for (int row = wave * (TILE_ROWS / WAVES); row < (wave + 1) * (TILE_ROWS / WAVES); row++) {
        const int t = t0 + row;
        if (t >= x.rows.tokens) break;
        const float *q = x.q + ((long)t * x.query_heads + first_q) * D, *k = x.k + ((long)t * x.kv_heads + kv_head) * D;
        float v[OWN], squares = 0.0f;
        for (int i = 0; i < OWN; i++) {
            const int j = lane + i * ZK_WAVE;
            v[i] = 0.0f;
            if (j >= D) continue;
            v[i] = y[row * D + j] + conv1_bias[head * D + j];
#pragma unroll 1
            for (int a = 0; a < means; a++) v[i] += 0.5f * (q[a * D + j] + k[j]) / (float)means;
            saved[(long)t * channels + head * D + j] = v[i];
            squares += v[i] * v[i];
        }
        const float by = __builtin_sqrtf((float)D) / __builtin_sqrtf(zk_wave_sum(squares) + NORM_GUARD) * temp;
        for (int i = 0; i < OWN; i++)
            if (lane + i * ZK_WAVE < D) y[row * D + lane + i * ZK_WAVE] = v[i] * by;
        zk_wave_barrier();
        const float *cosine = rope + (long)x.rows.history[t][2] * rotary, *sine = cosine + half;
        for (int i = 0; i < OWN; i++) {
            const int j = lane + i * ZK_WAVE;
            if (j >= D) continue;
            // Without branches: channels that do not rotate are multiplied with 1, and their partners with 0.
            const bool low = j < half, rotates = j < rotary;
            const int partner = low ? j + half : rotates ? j - half : j, angle = low ? j : rotates ? j - half : 0;
            const float sign = low ? -1.0f : rotates ? 1.0f : 0.0f;
            const float r = v[i] * by * (rotates ? cosine[angle] : 1.0f) + sign * (y[row * D + partner] * sine[angle]);
            out[(long)t * width + j] = zk_f2bf(r);
        }
    }
}

template <int D>
ZK_DEV void forward(const Cca& x, bf16_t* lds, const bf16_t* packed, const float* conv1_bias, const float* temp, const float* rope,
                    int rotary, bf16_t* q_out, bf16_t* k_out, float* saved) {
    const int t0 = zk_bid_x() * TILE_ROWS, kv_head = zk_bid_y(), group = x.group();
    for (int i = 0; i <= group; i++) {
        const bool of_q = i < group;
        const int head = of_q ? kv_head * group + i : x.query_heads + kv_head;
        stage_rows<D>(x, head, t0, lds);
        zk_barrier();
        multiply_head<D>(lds, packed + (long)head * 2 * D * D);
        bf16_t* out = of_q ? q_out + head * D : k_out + kv_head * D;
        finish_head<D>(x, head, t0, (float*)lds, saved, out, conv1_bias, of_q ? 1.0f : temp[kv_head], rope, rotary);
        zk_barrier();
    }
}

#define CCA_MIX(D) \
    ZK_KERNEL(cca_mix_fwd_##D, BLOCK, CCA_ARGUMENTS, const bf16_t* packed, const float* conv1_bias, const float* temp, \
              const float* rope, int rotary, bf16_t* q_out, bf16_t* k_out, float* saved) { \
        ZK_SHARED(bf16_t, lds, CCA_LDS(D)); \
        forward<D>(CCA(D), lds, packed, conv1_bias, temp, rope, rotary, q_out, k_out, saved); \
    } \
    ZK_DEFINE_CPU_ENTRY(cca_mix_fwd_##D, BLOCK)

CCA_MIX(16)
CCA_MIX(32)
CCA_MIX(64)
CCA_MIX(128)

// Values [T, kv_dim]: this token's half, then the previous token's. One work-item a number.
ZK_KERNEL(cca_mix_values_fwd, BLOCK, const float* current, const float* delayed, const float* halo, const int* history, bf16_t* v,
          int tokens, int kv_dim) {
    const long i = (long)zk_bid_x() * BLOCK + zk_tid();
    const int half = kv_dim / 2, t = (int)(i / kv_dim), c = (int)(i % kv_dim), of_half = c < half ? c : c - half;
    if (t >= tokens) return;
    const int previous = ((const i32x4*)history)[t][0];
    const float* from = current + (long)t * half;
    if (c >= half) {
        // Of a sequence's halo only the newer row has values.
        if (previous < tokens) from = delayed + (long)previous * half;
        else from = halo ? halo + (long)((previous - tokens) / 2) * half : nullptr;
        if (previous < 0) from = nullptr;
    }
    v[i] = from ? zk_f2bf(from[of_half]) : (bf16_t)0;
}
ZK_DEFINE_CPU_ENTRY(cca_mix_values_fwd, BLOCK)

// The history of each row, [T, 4] (see CcaRows), from the first row (chunks: position) of its document, or null, and the position of
// each chunk's first row, or null for whole sequences.
ZK_KERNEL(cca_mix_history, BLOCK, const int* doc_start, const int* chunk_start, int* history, int tokens, int seq) {
    const int t = zk_bid_x() * BLOCK + zk_tid();
    if (t >= tokens) return;
    const int first = t / seq * seq, chunk = t / seq, start = chunk_start ? chunk_start[chunk] : 0;
    // Tokens of row t's document before it. A sequence's halo belongs to the document of its first row, a chunk's as far as the
    // document reaches back.
    const int document = doc_start ? doc_start[t] : 0, before_chunk = chunk_start ? zk_min_i(start - (doc_start ? doc_start[first] : 0), 2) : 2;
    int place[2];
    for (int back = 1; back <= 2; back++) {
        const int row = t - back;
        const bool here = row >= first && start + row - first >= document;
        const bool in_halo = row < first && document <= (chunk_start ? start : 0) && first - row <= before_chunk;
        place[back - 1] = here ? row : in_halo ? tokens + 2 * chunk + 2 - (first - row) : -1;
    }
    for (int i = 0; i < 2; i++) history[4 * t + i] = place[i];
    history[4 * t + 2] = start + t - first;
    history[4 * t + 3] = 0;
}
ZK_DEFINE_CPU_ENTRY(cca_mix_history, BLOCK)

// The second convolution's weight [C, d, 2] in bf16, in the order of the fragments that multiply_head reads, for both directions:
// of each head [d / 16 tiles of outputs, 2 d / 16 steps of inputs, 64 lanes, 4]. Inputs of the forward are [u_{t-1} | u_t] and
// outputs y_t; of the backward [dy_t | dy_{t+1}] and du_t. One work-item a number, 2 C d in all.
ZK_KERNEL(cca_mix_pack, BLOCK, const float* weight, bf16_t* forward, bf16_t* backward, int heads, int d) {
    const int n = zk_bid_x() * BLOCK + zk_tid();
    if (n >= heads * d * 2 * d) return;
    const int head = n / (2 * d * d), i = n % 4, lane = n / 4 % 64, step = n / 256 % (2 * d / 16), tile = n / 256 / (2 * d / 16) % (d / 16);
    const int output = 16 * tile + lane % 16, input = 16 * step + 4 * (lane / 16) + i, second = input / d, channel = input % d;
    forward[n] = zk_f2bf(weight[((long)(head * d + output) * d + channel) * 2 + second]);
    backward[n] = zk_f2bf(weight[((long)(head * d + channel) * d + output) * 2 + 1 - second]);
}
ZK_DEFINE_CPU_ENTRY(cca_mix_pack, BLOCK)
