// experts - top-1 experts without padding or capacity (spec 1.6): rows sorted by expert (experts_rows) go through their expert's
// SwiGLU as tiles of one launch, however many there are. The host never learns the counts.
//
// A fixed number of work-groups walks over the tiles of all experts, expert after expert, so that those of one chiplet share an
// expert's weights in their cache. The tiles of a layer follow from `first` (tiles of rows before each expert's first), which
// experts_plan leaves on the device. An expert without rows has no tiles.
//
// Forward:   permute h -> gate_up (saves gate and up, makes act = silu(gate) * up) -> down (times p, back to the rows' places).
// Backward:  permute h, dy and p dy -> d_act (gradients of gate and up, act anew, parts of d_prob) -> d_input, weight gradients.
#include "mma_tile.h"

/// A tile of some expert.
struct GroupTile {
    int expert;
    /// Its first row in the order, and how many rows there are from it to the expert's last.
    int row, rows;
    /// Number of the tile along the columns.
    int column;
};

/// Walks over the tiles of one work-group. `groups` work-groups share all tiles.
struct GroupWalk {
    const int* offsets;
    const int* first;
    int experts, columns, tile, step;
    int next, end, expert;

    ZK_METHOD GroupWalk(const int* offsets, const int* first, int experts, int columns, int tile, int groups)
        : offsets(offsets), first(first), experts(experts), columns(columns), tile(tile), expert(0) {
        // Each chiplet takes a stretch of the tiles.
        const int all = uniform(first[experts]) * columns, group = zk_bid_x(), xcd = group % XCDS;
        const int each = (all + XCDS - 1) / XCDS;
        next = xcd * each + group / XCDS;
        end = (xcd + 1) * each < all ? (xcd + 1) * each : all;
        step = groups / XCDS;
    }

    ZK_METHOD bool take(GroupTile& out) {
        if (next >= end) return false;
        while (uniform(first[expert + 1]) * columns <= next) expert++;
        const int before = uniform(first[expert]), high = uniform(first[expert + 1]) - before, inside = next - before * columns;
        const int m = inside % high;
        out.expert = expert;
        out.row = uniform(offsets[expert]) + m * tile;
        out.rows = uniform(offsets[expert + 1]) - out.row;
        out.column = inside / high;
        next += step;
        return true;
    }
};

ZK_DEV float sigmoid(float x) { return 1.0f / (1.0f + zk_exp(-x)); }

/// Where expert e's matrix begins, in numbers from `weights` on. (Offsets and not pointers: the compiler then knows the memory.)
ZK_DEV long place_of(const long* places, int expert) { return uniform(places[expert]); }

/// gate and up of all rows `[T, 2F]` and act = silu(gate) * up `[T, F]`. x `[T, D]` in the order, weights `[2F, D]` each.
template <class T>
ZK_DEV void gate_up_forward(const T* x, const T* weights, const long* places, const int* offsets, const int* first, T* gate_up,
                            T* act, int experts, int d, int f, int groups, bf16_t* lds_a, bf16_t* lds_b) {
    constexpr int B = tile_rows<T>, PAIRS = tile_frags<T> / 2;
    GroupWalk walk(offsets, first, experts, (f + B / 2 - 1) / (B / 2), B, groups);
    const TilePlace<T> place(zk_tid());
    for (GroupTile at; walk.take(at);) {
        const int f0 = at.column * (B / 2);
        const T* w = weights + place_of(places, at.expert);
        Operand<T, ALONG_K> left = {x + (long)at.row * d, d, d, {at.rows}};
        Operand<T, ALONG_K, Interleaved> right = {w + (long)f0 * d, d, d, {f - f0, f}};
        Tile<T> tile;
        tile.clear();
        multiply(tile, left, right, lds_a, lds_b);
#pragma unroll
        for (int i = 0; i < tile_frags<T>; i++) {
            if (place.row(i) >= at.rows) continue;
            const long row = at.row + place.row(i);
#pragma unroll
            for (int p = 0; p < PAIRS; p++) {
                // Of 32 columns of the tile the first sixteen are gates.
                const int col = f0 + (place.col(2 * p) >> 5) * 16 + (place.col(2 * p) & 15);
                if (col >= f) continue;
                float gate[4], up[4], out[4];
                sums(tile.acc[i][2 * p], gate);
                sums(tile.acc[i][2 * p + 1], up);
                for (int e = 0; e < 4; e++) out[e] = gate[e] * sigmoid(gate[e]) * up[e];
                write4(gate_up + row * 2 * f + col, f - col, gate);
                write4(gate_up + row * 2 * f + f + col, f - col, up);
                write4(act + row * f + col, f - col, out);
            }
        }
    }
}

/// Rows of `out` `[T, N]` in the rows' own places: x w^T (NT) or x w (NN), times the probability where `prob` is given.
template <class T, Lay LB>
ZK_DEV void scattered(const T* x, const T* weights, const long* places, const int* offsets, const int* first, const int* order,
                      const float* prob, float* out, int experts, int k, int n, int groups, bf16_t* lds_a, bf16_t* lds_b) {
    constexpr int B = tile_rows<T>;
    GroupWalk walk(offsets, first, experts, (n + B - 1) / B, B, groups);
    const TilePlace<T> place(zk_tid());
    for (GroupTile at; walk.take(at);) {
        const int n0 = at.column * B;
        const T* w = weights + place_of(places, at.expert);
        Operand<T, ALONG_K> left = {x + (long)at.row * k, k, k, {at.rows}};
        Operand<T, LB> right = {LB == ALONG_K ? w + (long)n0 * k : w + n0, LB == ALONG_K ? k : n, k, {n - n0}};
        Tile<T> tile;
        tile.clear();
        multiply(tile, left, right, lds_a, lds_b);
#pragma unroll
        for (int i = 0; i < tile_frags<T>; i++) {
            if (place.row(i) >= at.rows) continue;
            const int token = order[at.row + place.row(i)];
            const float by = prob ? prob[token] : 1.0f;
#pragma unroll
            for (int j = 0; j < tile_frags<T>; j++) {
                const int col = n0 + place.col(j);
                if (col >= n) continue;
                float v[4];
                sums(tile.acc[i][j], v);
                for (int e = 0; e < 4; e++) v[e] *= by;
                write4(out + (long)token * n + col, n - col, v);
            }
        }
    }
}

/// Columns of `prob_parts` for width F.
template <class T>
ZK_DEV int prob_columns(int f) {
    return (f + tile_rows<T> - 1) / tile_rows<T> * 2;
}

/// Backward through down and SwiGLU. dy `[T, D]` in the order, not yet times p; down `[D, F]` each; gate_up as saved. Writes the
/// gradients of gate and up `[T, 2F]`, act `[T, F]`, and sums of act * d_act over half tiles `[T, prob_columns]`.
template <class T>
ZK_DEV void act_backward(const T* dy, const T* weights, const long* places, const int* offsets, const int* first, const int* order,
                         const float* prob, const T* gate_up, T* d_gate_up, T* act, float* prob_parts, int experts, int d, int f,
                         int groups, bf16_t* lds_a, bf16_t* lds_b) {
    constexpr int B = tile_rows<T>;
    GroupWalk walk(offsets, first, experts, (f + B - 1) / B, B, groups);
    const TilePlace<T> place(zk_tid());
    const int lane = zk_tid() % 64, half = zk_tid() / 64 & 1;
    for (GroupTile at; walk.take(at);) {
        const int f0 = at.column * B;
        Operand<T, ALONG_K> left = {dy + (long)at.row * d, d, d, {at.rows}};
        Operand<T, ALONG_ROWS> right = {weights + place_of(places, at.expert) + f0, f, d, {f - f0}};
        Tile<T> tile;
        tile.clear();
        multiply(tile, left, right, lds_a, lds_b);
#pragma unroll
        for (int i = 0; i < tile_frags<T>; i++) {
            const bool has_row = place.row(i) < at.rows;
            const long row = at.row + (has_row ? place.row(i) : 0);
            const float p = prob[order[row]];
            float sum = 0.0f;
#pragma unroll
            for (int j = 0; j < tile_frags<T>; j++) {
                const int col = f0 + place.col(j), n = has_row ? f - col : 0;
                if (n <= 0) continue;
                float gate[4], up[4], d_act[4], d_gate[4], d_up[4], a[4];
                read4(gate_up + row * 2 * f + col, n, gate);
                read4(gate_up + row * 2 * f + f + col, n, up);
                sums(tile.acc[i][j], d_act);
                for (int e = 0; e < 4; e++) {
                    const float s = sigmoid(gate[e]), silu = gate[e] * s, da = p * d_act[e];
                    a[e] = silu * up[e];
                    d_gate[e] = da * up[e] * s * (1.0f + gate[e] * (1.0f - s));
                    d_up[e] = da * silu;
                    sum += e < n ? a[e] * d_act[e] : 0.0f;
                }
                write4(d_gate_up + row * 2 * f + col, n, d_gate);
                write4(d_gate_up + row * 2 * f + f + col, n, d_up);
                write4(act + row * f + col, n, a);
            }
            // Four lanes hold the columns of a row.
            sum += zk_shfl_xor(sum, 16);
            sum += zk_shfl_xor(sum, 32);
            if (has_row && lane < 16) prob_parts[row * prob_columns<T>(f) + at.column * 2 + half] = sum;
        }
    }
}

/// dw += dy^T x over the rows of an expert: dy `[T, M]`, x `[T, N]`, both in the order; dw `[M, N]`. A work-group a tile, an expert
/// a `y`.
template <class T>
ZK_DEV void weight_gradient(const T* dy, const T* x, float* gradients, const long* places, const int* offsets, int m, int n,
                            bf16_t* lds_a, bf16_t* lds_b) {
    constexpr int B = tile_rows<T>;
    const int expert = zk_bid_y(), begin = uniform(offsets[expert]), rows = uniform(offsets[expert + 1]) - begin;
    if (rows == 0) return;
    const int tiles_m = (m + B - 1) / B, tiles_n = (n + B - 1) / B;
    int tm, tn;
    tile_at(by_chiplet(zk_bid_x(), tiles_m * tiles_n), tiles_m, tiles_n, tm, tn);
    const int m0 = uniform(tm * B), n0 = uniform(tn * B);
    Operand<T, ALONG_ROWS> left = {dy + (long)begin * m + m0, m, rows, {m - m0}};
    Operand<T, ALONG_ROWS> right = {x + (long)begin * n + n0, n, rows, {n - n0}};
    Tile<T> tile;
    tile.clear();
    multiply(tile, left, right, lds_a, lds_b);
    float* out = gradients + place_of(places, expert);
    const TilePlace<T> place(zk_tid());
#pragma unroll
    for (int i = 0; i < tile_frags<T>; i++) {
        const int row = m0 + place.row(i);
        if (row >= m) continue;
#pragma unroll
        for (int j = 0; j < tile_frags<T>; j++) {
            const int col = n0 + place.col(j);
            if (col >= n) continue;
            float v[4], old[4];
            float* to = out + (long)row * n + col;
            sums(tile.acc[i][j], v);
            read4(to, n - col, old);
            for (int e = 0; e < 4; e++) v[e] += old[e];
            write4(to, n - col, v);
        }
    }
}

#define EXPERTS(suffix, T) \
    ZK_KERNEL(experts_gate_up_##suffix, TILE_ITEMS, const T* x, const T* weights, const long* places, const int* offsets, \
              const int* first, T* gate_up, T* act, int experts, int d, int f, int groups) { \
        ZK_SHARED(bf16_t, lds_a, tile_lds<T>); \
        ZK_SHARED(bf16_t, lds_b, tile_lds<T>); \
        gate_up_forward<T>(x, weights, places, offsets, first, gate_up, act, experts, d, f, groups, lds_a, lds_b); \
    } \
    ZK_DEFINE_CPU_ENTRY(experts_gate_up_##suffix, TILE_ITEMS) \
\
    ZK_KERNEL(experts_down_##suffix, TILE_ITEMS, const T* act, const T* weights, const long* places, const int* offsets, \
              const int* first, const int* order, const float* prob, float* out, int experts, int d, int f, int groups) { \
        ZK_SHARED(bf16_t, lds_a, tile_lds<T>); \
        ZK_SHARED(bf16_t, lds_b, tile_lds<T>); \
        scattered<T, ALONG_K>(act, weights, places, offsets, first, order, prob, out, experts, f, d, groups, lds_a, lds_b); \
    } \
    ZK_DEFINE_CPU_ENTRY(experts_down_##suffix, TILE_ITEMS) \
\
    ZK_KERNEL(experts_d_act_##suffix, TILE_ITEMS, const T* dy, const T* weights, const long* places, const int* offsets, \
              const int* first, const int* order, const float* prob, const T* gate_up, T* d_gate_up, T* act, float* prob_parts, \
              int experts, int d, int f, int groups) { \
        ZK_SHARED(bf16_t, lds_a, tile_lds<T>); \
        ZK_SHARED(bf16_t, lds_b, tile_lds<T>); \
        act_backward<T>(dy, weights, places, offsets, first, order, prob, gate_up, d_gate_up, act, prob_parts, experts, d, f, \
                        groups, lds_a, lds_b); \
    } \
    ZK_DEFINE_CPU_ENTRY(experts_d_act_##suffix, TILE_ITEMS) \
\
    ZK_KERNEL(experts_d_input_##suffix, TILE_ITEMS, const T* d_gate_up, const T* weights, const long* places, const int* offsets, \
              const int* first, const int* order, float* dh, int experts, int d, int f, int groups) { \
        ZK_SHARED(bf16_t, lds_a, tile_lds<T>); \
        ZK_SHARED(bf16_t, lds_b, tile_lds<T>); \
        scattered<T, ALONG_ROWS>(d_gate_up, weights, places, offsets, first, order, nullptr, dh, experts, 2 * f, d, groups, lds_a, \
                                 lds_b); \
    } \
    ZK_DEFINE_CPU_ENTRY(experts_d_input_##suffix, TILE_ITEMS) \
\
    ZK_KERNEL(experts_weight_gradient_##suffix, TILE_ITEMS, const T* dy, const T* x, float* gradients, const long* places, \
              const int* offsets, int m, int n) { \
        ZK_SHARED(bf16_t, lds_a, tile_lds<T>); \
        ZK_SHARED(bf16_t, lds_b, tile_lds<T>); \
        weight_gradient<T>(dy, x, gradients, places, offsets, m, n, lds_a, lds_b); \
    } \
    ZK_DEFINE_CPU_ENTRY(experts_weight_gradient_##suffix, TILE_ITEMS)

EXPERTS(bf16, bf16_t)
EXPERTS(f32, float)

/// d_prob of the rows of experts: the sum of their parts, in order. A work-item a row of the order.
ZK_KERNEL(experts_d_prob, TILE_ITEMS, const float* prob_parts, const int* order, const int* offsets, float* d_prob, int experts,
          int columns) {
    const int i = zk_bid_x() * TILE_ITEMS + zk_tid();
    if (i >= offsets[experts]) return;
    float sum = 0.0f;
    for (int c = 0; c < columns; c++) sum += prob_parts[(long)i * columns + c];
    d_prob[order[i]] = sum;
}
ZK_DEFINE_CPU_ENTRY(experts_d_prob, TILE_ITEMS)
