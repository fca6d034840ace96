// What the CCA kernels share: widths, which rows precede which, the first convolution.
//
// Names: X_t = [q | k] of token t, u = first convolution, y = second. "Previous" means the token before in the same document; where
// there is none, X is 0 and u is the first convolution's bias (its inputs are zeros, its bias is not). Before the first row of a
// sequence (or of a chunk of one) a halo holds the two tokens that may be needed.
#pragma once
#include "lds_tile.h"

typedef int i32x4 __attribute__((ext_vector_type(4)));

/// What precedes each row of a micro-batch, the same for all layers (cca_mix_history): the row before it, the one before that, and
/// its row in the RoPE tables. Rows from `tokens` on are those of the halo, two a sequence, the older first; -1 = none.
struct CcaRows {
    const i32x4* history;
    int tokens;
};

/// Whether row t is the previous one of row t + 1.
ZK_DEV bool next_uses(const CcaRows& r, int t) { return t + 1 < r.tokens && r.history[t + 1][0] == t; }

/// One head's channels of the projections of queries or of keys.
struct HeadRows {
    /// The channels of row 0, and of the halo's row 0 or null; how far rows are apart; rows before the halo's.
    const float *x, *halo;
    int width, tokens;

    /// Channels j .. j + 3 of a row of the history; zeros where there is none.
    ZK_MEMBER f32x4 at(int row, int j) const {
        const float* from = row < tokens ? x : halo;
        if (row < 0 || !from) return (f32x4)(0.0f);
        return zk_load4(from + (long)(row < tokens ? row : row - tokens) * width + j);
    }
    /// Channel j alone.
    ZK_MEMBER float number(int row, int j) const {
        const float* from = row < tokens ? x : halo;
        return row < 0 || !from ? 0.0f : from[(long)(row < tokens ? row : row - tokens) * width + j];
    }
};

/// First convolution: u from X of two tokens. `weight` [.., 2] and `bias` begin at the head's first channel; a column 0 meets the
/// token before.
ZK_DEV f32x4 first_convolution(const float* weight, const float* bias, f32x4 before, f32x4 now, int j) {
    const f32x4 a = zk_load4(weight + 2 * j), b = zk_load4(weight + 2 * j + 4);
    f32x4 u = zk_load4(bias + j);
    u[0] += a[0] * before[0] + a[1] * now[0];
    u[1] += a[2] * before[1] + a[3] * now[1];
    u[2] += b[0] * before[2] + b[1] * now[2];
    u[3] += b[2] * before[3] + b[3] * now[3];
    return u;
}

/// Inputs and parameters of the mix.
struct Cca {
    CcaRows rows;
    /// [T, q_dim], [T, kv_dim]; halos [2 * sequences, ..] or null.
    const float *q, *k, *halo_q, *halo_k;
    /// [C, 2], [C].
    const float *conv0_weight, *conv0_bias;
    int query_heads, kv_heads, d;

    ZK_MEMBER int group() const { return query_heads / kv_heads; }
    /// Heads: those of queries, then those of keys.
    ZK_MEMBER HeadRows head(int h) const {
        if (h < query_heads) return {q + h * d, halo_q ? halo_q + h * d : nullptr, query_heads * d, rows.tokens};
        const int at = (h - query_heads) * d;
        return {k + at, halo_k ? halo_k + at : nullptr, kv_heads * d, rows.tokens};
    }
};

#define CCA_ARGUMENTS \
    const float *q, const float *k, const float *halo_q, const float *halo_k, const float *conv0_weight, const float *conv0_bias, \
        const int *history, int tokens, int query_heads, int kv_heads
#define CCA(D) Cca{CcaRows{(const i32x4*)history, tokens}, q, k, halo_q, halo_k, conv0_weight, conv0_bias, query_heads, kv_heads, D}

/// Guard of the norms: 1 / sqrt(|x|^2 + this).
constexpr float NORM_GUARD = 1e-12f;

#define BLOCK 256
#define WAVES 4
/// Rows of a workgroup's tile.
#define TILE_ROWS 64

/// Numbers of LDS for a tile's operand, [TILE_ROWS, 2 D] bf16, or its product, [TILE_ROWS, D] f32.
#define CCA_LDS(D) (TILE_ROWS * 2 * (D))

/// Product of a tile with one head's weights, which lie in the order of their fragments (cca_mix_pack): [TILE_ROWS, 2 D] as two
/// tiles one after the other, to [TILE_ROWS, D] in the same place.
template <int D>
ZK_DEV void multiply_head(bf16_t* lds, const bf16_t* weights) {
    constexpr int TILES = D / 16, OWN = (TILES + WAVES - 1) / WAVES, STEPS = 2 * D / 16;
    const int lane = zk_tid() % ZK_WAVE, wave = zk_tid() / ZK_WAVE;
    const LdsTile<D> left{lds}, right{lds + TILE_ROWS * D};
    zk_acc acc[OWN][TILE_ROWS / 16];
    for (int j = 0; j < OWN; j++)
        for (int i = 0; i < TILE_ROWS / 16; i++) zk_acc_zero(acc[j][i]);
    // Not all at once: each load of weights would keep an address of its own.
#pragma unroll 4
    for (int kk = 0; kk < STEPS; kk++) {
        zk_frag rows[TILE_ROWS / 16];
        for (int i = 0; i < TILE_ROWS / 16; i++) rows[i] = (kk < STEPS / 2 ? left : right).frag(16 * i, 16 * kk % D, lane);
        for (int j = 0; j < OWN; j++) {
            const int tile = wave + WAVES * j;
            if (tile >= TILES) break;
            zk_frag w;
            w.v = *(const s16x4*)__builtin_assume_aligned(weights + ((tile * STEPS + kk) * 64 + lane) * 4, 8);
            for (int i = 0; i < TILE_ROWS / 16; i++) zk_mma(acc[j][i], w, rows[i]);
        }
    }
    zk_barrier();
    float* out = (float*)lds;
    for (int j = 0; j < OWN; j++) {
        const int tile = wave + WAVES * j;
        if (tile >= TILES) break;
        for (int i = 0; i < TILE_ROWS / 16; i++) zk_store4(out + (16 * i + (lane & 15)) * D + 16 * tile + 4 * (lane >> 4), acc[j][i].v);
    }
    zk_barrier();
}
