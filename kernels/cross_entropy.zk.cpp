// cross_entropy - the tied head with its loss: logits = y headᵀ in f32, their softmax, and both gradients, for a chunk of rows at
// a time. The logits of a whole micro-batch never exist, and those of a chunk only as the numbers its gradients need.
//
//  1. head_gather: the chunk's labelled rows of y, one after the other.
//  2. head_logits: tiles of 64 rows x 64 entries. Of each row of a tile the largest logit `top`, the sum of exp(logit - top), and the
//     label's logit; the exponentials are kept when gradients are wanted.
//  3. head_normalise: each row's logsumexp and loss from the tops and sums of its tiles, in order (the online softmax), and for each
//     tile the factor that turns exponentials into gradients, so that no exponential is taken twice.
//  4. head_scale: gradients of the logits, scale (softmax - one at the label).
//  5. gemm_nn_f32_f32: gradient of y, which head_scatter puts back; gemm_tn_f32_f32: gradient of the head, added.
//  6. head_loss: sum of all rows' losses, in order, in f64.
//
// Everything is f32 (spec 1.7), products as exact as f32. Chunks may be cut along the vocabulary too, for 1 and 2 (`begin`, of
// whole tiles): what a part leaves are columns of the same tables.
#include "mma_tile.h"

static constexpr int HEAD_TILE = tile_rows<float>;
static constexpr float LN2 = 0.693147180559945f;

/// Row i of `out` = row `rows[i]` of `y`. A work-group a row.
ZK_KERNEL(head_gather, TILE_ITEMS, const float* y, const int* rows, float* out, int width) {
    copy_row(y + (long)uniform(rows[zk_bid_x()]) * width, out + (long)zk_bid_x() * width, width);
}
ZK_DEFINE_CPU_ENTRY(head_gather, TILE_ITEMS)

/// The reverse.
ZK_KERNEL(head_scatter, TILE_ITEMS, const float* x, const int* rows, float* out, int width) {
    copy_row(x + (long)zk_bid_x() * width, out + (long)uniform(rows[zk_bid_x()]) * width, width);
}
ZK_DEFINE_CPU_ENTRY(head_scatter, TILE_ITEMS)

/// x `[n, D]`, head `[V, D]`, labels `[n]`. Writes `top` and `sum` `[n, tiles]` (tiles of the whole vocabulary), `target` `[n]`
/// (the label's logit), and `exps` `[n, stride]` unless it is null. Entries from `begin` on, as many tiles as the grid has for each
/// 64 rows.
ZK_KERNEL(head_logits, TILE_ITEMS, const float* x, const float* head, const int* labels, float* exps, float* top, float* sum,
          float* target, int n, int vocab, int d, int stride, int begin, int end) {
    ZK_SHARED(bf16_t, lds_a, tile_lds<float>);
    ZK_SHARED(bf16_t, lds_b, tile_lds<float>);
    ZK_SHARED(float, halves, 2 * HEAD_TILE);
    constexpr int F = tile_frags<float>;
    const int t = zk_tid(), lane = t % 64, half = t / 64 & 1;
    const int tiles_m = (n + HEAD_TILE - 1) / HEAD_TILE, tiles_n = (end - begin + HEAD_TILE - 1) / HEAD_TILE;
    // Down the rows first: the tiles at work at one time share the head's rows.
    const int at = by_chiplet(zk_bid_x(), tiles_m * tiles_n);
    const int m0 = uniform(at % tiles_m * HEAD_TILE), n0 = uniform(begin + at / tiles_m * HEAD_TILE);
    Operand<float, ALONG_K> left = {x + (long)m0 * d, d, d, {n - m0}}, right = {head + (long)n0 * d, d, d, {vocab - n0}};
    Tile<float> tile;
    tile.clear();
    multiply(tile, left, right, lds_a, lds_b);

    const TilePlace<float> place(t);
    float z[F][F][4], highest[F];
#pragma unroll
    for (int i = 0; i < F; i++) {
        highest[i] = -__builtin_inff();
#pragma unroll
        for (int j = 0; j < F; j++) {
            sums(tile.acc[i][j], z[i][j]);
            for (int e = 0; e < 4; e++)
                if (n0 + place.col(j) + e < vocab) highest[i] = zk_max(highest[i], z[i][j][e]);
        }
        // Four lanes and two waves hold the columns of a row.
        highest[i] = zk_max(highest[i], zk_shfl_xor(highest[i], 16));
        highest[i] = zk_max(highest[i], zk_shfl_xor(highest[i], 32));
        if (lane < 16) halves[half * HEAD_TILE + place.row(i)] = highest[i];
    }
    zk_barrier();
#pragma unroll
    for (int i = 0; i < F; i++) highest[i] = zk_max(halves[place.row(i)], halves[HEAD_TILE + place.row(i)]);
    zk_barrier();
#pragma unroll
    for (int i = 0; i < F; i++) {
        const int row = m0 + place.row(i), label = row < n ? labels[row] : -1;
        float total = 0.0f;
#pragma unroll
        for (int j = 0; j < F; j++) {
            const int col = n0 + place.col(j);
            float e4[4];
            for (int e = 0; e < 4; e++) {
                if (col + e == label) target[row] = z[i][j][e];
                e4[e] = col + e < vocab ? zk_exp(z[i][j][e] - highest[i]) : 0.0f;
                total += e4[e];
            }
            if (exps && row < n && col < vocab) write4(exps + (long)row * stride + (col - begin), vocab - col, e4);
        }
        total += zk_shfl_xor(total, 16);
        total += zk_shfl_xor(total, 32);
        if (lane < 16) halves[half * HEAD_TILE + place.row(i)] = total;
    }
    zk_barrier();
    if (t < HEAD_TILE && m0 + t < n) {
        const int tiles = (vocab + HEAD_TILE - 1) / HEAD_TILE;
        sum[(long)(m0 + t) * tiles + n0 / HEAD_TILE] = halves[t] + halves[HEAD_TILE + t];
    }
#pragma unroll
    for (int i = 0; i < F; i++) {
        const int row = m0 + place.row(i), tiles = (vocab + HEAD_TILE - 1) / HEAD_TILE;
        if (half == 0 && lane < 16 && row < n) top[(long)row * tiles + n0 / HEAD_TILE] = highest[i];
    }
}
ZK_DEFINE_CPU_ENTRY(head_logits, TILE_ITEMS)

/// A work-group a row: `losses[i]` in nats, and `top` becomes each tile's factor. `target` as head_logits left it.
ZK_KERNEL(head_normalise, TILE_ITEMS, float* top, const float* sum, const float* target, float* losses, int tiles, float scale) {
    ZK_SHARED(float, parts, TILE_ITEMS);
    const int t = zk_tid();
    const long row = (long)zk_bid_x() * tiles;
    float highest = -__builtin_inff();
    for (int i = t; i < tiles; i += TILE_ITEMS) highest = zk_max(highest, top[row + i]);
    parts[t] = highest;
    for (int half = TILE_ITEMS / 2; half; half /= 2) {
        zk_barrier();
        if (t < half) parts[t] = zk_max(parts[t], parts[t + half]);
    }
    zk_barrier();
    highest = parts[0];
    zk_barrier();
    float total = 0.0f;
    for (int i = t; i < tiles; i += TILE_ITEMS) total += sum[row + i] * zk_exp(top[row + i] - highest);
    parts[t] = total;
    for (int half = TILE_ITEMS / 2; half; half /= 2) {
        zk_barrier();
        if (t < half) parts[t] += parts[t + half];
    }
    zk_barrier();
    total = parts[0];
    if (t == 0) losses[zk_bid_x()] = LN2 * zk_log2(total) - (target[zk_bid_x()] - highest);
    const float factor = scale / total;
    for (int i = t; i < tiles; i += TILE_ITEMS) top[row + i] = factor * zk_exp(top[row + i] - highest);
}
ZK_DEFINE_CPU_ENTRY(head_normalise, TILE_ITEMS)

/// Gradients of the logits in place of the exponentials, of entries begin..end. Four numbers a work-item; grid x along the entries,
/// y the rows.
ZK_KERNEL(head_scale, TILE_ITEMS, float* exps, const float* factors, const int* labels, int vocab, int stride, int begin, int end,
          float scale) {
    const int row = zk_bid_y(), tiles = (vocab + HEAD_TILE - 1) / HEAD_TILE;
    const int col = begin + (zk_bid_x() * TILE_ITEMS + zk_tid()) * 4;
    if (col >= end) return;
    const float factor = factors[(long)row * tiles + col / HEAD_TILE];
    const int label = labels[row];
    float* p = exps + (long)row * stride + (col - begin);
    float v[4];
    read4(p, end - col, v);
    for (int e = 0; e < 4; e++) v[e] = factor * v[e] - (col + e == label ? scale : 0.0f);
    write4(p, end - col, v);
}
ZK_DEFINE_CPU_ENTRY(head_scale, TILE_ITEMS)

/// One work-group: `out` = (add ? out : 0) + the sum of `losses`, in f64.
ZK_KERNEL(head_loss, TILE_ITEMS, const float* losses, double* out, int n, int add) {
    ZK_SHARED(double, parts, TILE_ITEMS);
    const int t = zk_tid();
    double sum = 0.0;
    for (int i = t; i < n; i += TILE_ITEMS) sum += (double)losses[i];
    parts[t] = sum;
    for (int half = TILE_ITEMS / 2; half; half /= 2) {
        zk_barrier();
        if (t < half) parts[t] += parts[t + half];
    }
    if (t == 0) out[0] = parts[0] + (add ? out[0] : 0.0);
}
ZK_DEFINE_CPU_ENTRY(head_loss, TILE_ITEMS)
