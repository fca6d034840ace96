// experts_rows - rows of tokens on their way to the experts and back: sorting by class, permutation, and the skip class (spec 1.6).
//
// Sorting: experts_count (a work-group a chunk of rows), experts_plan (one work-group), experts_place. Stable: rows of one class
// keep their order, so sums over rows have one order too. Classes are 0..experts, the last one being the skip class. The counts
// stay on the device.
#include "mma_tile.h"

static constexpr int MAX_CLASSES = 256;

/// Rows of a chunk of the sort: one a work-item.
static constexpr int CHUNK = TILE_ITEMS;

/// How many rows of each chunk have each class, `[chunks, classes]`, and how many of them are real, `[chunks, classes]`. `valid`
/// (a byte a row, 0 = padding) may be null.
ZK_KERNEL(experts_count, CHUNK, const unsigned* choice, const unsigned char* valid, int* counts, int* real, int tokens,
          int classes) {
    ZK_SHARED(int, chosen, CHUNK);
    ZK_SHARED(int, is_real, CHUNK);
    const int t = zk_tid(), token = zk_bid_x() * CHUNK + t;
    chosen[t] = token < tokens ? (int)choice[token] : -1;
    is_real[t] = token < tokens && (!valid || valid[token]);
    zk_barrier();
    if (t >= classes) return;
    int n = 0, n_real = 0;
    for (int i = 0; i < CHUNK; i++) {
        n += chosen[i] == t;
        n_real += chosen[i] == t && is_real[i];
    }
    counts[(long)zk_bid_x() * classes + t] = n;
    real[(long)zk_bid_x() * classes + t] = n_real;
}
ZK_DEFINE_CPU_ENTRY(experts_count, CHUNK)

/// One work-group. Turns `counts` into where each chunk's rows of each class begin. `offsets` `[classes + 1]`: where each class
/// begins in the order. `real_counts` `[classes]`. `first` `[classes]`: tiles of `tile` rows before each expert's first, the skip
/// class having none, so that its entry is the number of all tiles.
ZK_KERNEL(experts_plan, CHUNK, int* counts, const int* real, int* offsets, int* real_counts, int* first, int chunks, int classes,
          int tile) {
    ZK_SHARED(int, total, MAX_CLASSES);
    const int t = zk_tid();
    int n = 0, n_real = 0;
    if (t < classes) {
        for (int c = 0; c < chunks; c++) {
            n += counts[(long)c * classes + t];
            n_real += real[(long)c * classes + t];
        }
        total[t] = n;
        real_counts[t] = n_real;
    }
    zk_barrier();
    if (t >= classes) return;
    int begin = 0, tiles = 0;
    for (int c = 0; c < t; c++) {
        begin += total[c];
        tiles += (total[c] + tile - 1) / tile;
    }
    offsets[t] = begin;
    first[t] = tiles;
    if (t == classes - 1) offsets[classes] = begin + n;
    for (int c = 0; c < chunks; c++) {
        const int here = counts[(long)c * classes + t];
        counts[(long)c * classes + t] = begin;
        begin += here;
    }
}
ZK_DEFINE_CPU_ENTRY(experts_plan, CHUNK)

/// `order[i]` is the row that comes i-th when rows are sorted by class.
ZK_KERNEL(experts_place, CHUNK, const unsigned* choice, const int* starts, int* order, int tokens, int classes) {
    ZK_SHARED(int, chosen, CHUNK);
    const int t = zk_tid(), token = zk_bid_x() * CHUNK + t;
    chosen[t] = token < tokens ? (int)choice[token] : -1;
    zk_barrier();
    if (token >= tokens) return;
    const int own = chosen[t];
    int before = 0;
    for (int i = 0; i < CHUNK; i++) before += i < t && chosen[i] == own;
    order[starts[(long)zk_bid_x() * classes + own] + before] = token;
}
ZK_DEFINE_CPU_ENTRY(experts_place, CHUNK)

/// Row i of `out` = row `order[i]` of `x`, times its probability where `prob` is given. A work-group a row.
template <class T, class O>
ZK_DEV void permute(const T* x, const int* order, const float* prob, O* out, int width) {
    const int i = zk_bid_x(), token = uniform(order[i]);
    const float by = prob ? prob[token] : 1.0f;
    for (int j = zk_tid() * 4; j < width; j += TILE_ITEMS * 4) {
        float v[4];
        read4(x + (long)token * width + j, width - j, v);
        for (int e = 0; e < 4; e++) v[e] *= by;
        write4(out + (long)i * width + j, width - j, v);
    }
}

#define PERMUTE(name, T, O) \
    ZK_KERNEL(name, TILE_ITEMS, const T* x, const int* order, const float* prob, O* out, int width) { \
        permute<T, O>(x, order, prob, out, width); \
    } \
    ZK_DEFINE_CPU_ENTRY(name, TILE_ITEMS)

PERMUTE(experts_permute_f32_bf16, float, bf16_t)
PERMUTE(experts_permute_bf16_bf16, bf16_t, bf16_t)
PERMUTE(experts_permute_f32_f32, float, float)

/// The reverse: row `order[i]` of `out` = row i of `x`.
ZK_KERNEL(experts_unpermute_f32, TILE_ITEMS, const float* x, const int* order, float* out, int width) {
    copy_row(x + (long)zk_bid_x() * width, out + (long)uniform(order[zk_bid_x()]) * width, width);
}
ZK_DEFINE_CPU_ENTRY(experts_unpermute_f32, TILE_ITEMS)

/// Outputs of rows of the skip class: 0, or (`identity`) the row times its probability. A work-group a row of the order; those of
/// other classes have nothing to do.
ZK_KERNEL(experts_skip_forward, TILE_ITEMS, const float* h, const int* order, const int* offsets, const float* prob, float* out,
          int experts, int width, int identity) {
    const int i = zk_bid_x();
    if (i < offsets[experts]) return;
    const int token = uniform(order[i]);
    const float by = identity ? prob[token] : 0.0f;
    for (int j = zk_tid() * 4; j < width; j += TILE_ITEMS * 4) {
        float v[4] = {0.f, 0.f, 0.f, 0.f};
        if (identity) read4(h + (long)token * width + j, width - j, v);
        for (int e = 0; e < 4; e++) v[e] *= by;
        write4(out + (long)token * width + j, width - j, v);
    }
}
ZK_DEFINE_CPU_ENTRY(experts_skip_forward, TILE_ITEMS)

/// Gradients of these rows: dh = p dy and d_prob = dy h, or 0.
ZK_KERNEL(experts_skip_backward, TILE_ITEMS, const float* h, const int* order, const int* offsets, const float* prob,
          const float* dy, float* dh, float* d_prob, int experts, int width, int identity) {
    ZK_SHARED(float, parts, TILE_ITEMS / ZK_WAVE);
    const int i = zk_bid_x(), t = zk_tid();
    if (i < offsets[experts]) return;
    const int token = uniform(order[i]);
    const float by = identity ? prob[token] : 0.0f;
    float sum = 0.0f;
    for (int j = t * 4; j < width; j += TILE_ITEMS * 4) {
        float v[4] = {0.f, 0.f, 0.f, 0.f}, x[4] = {0.f, 0.f, 0.f, 0.f};
        if (identity) {
            read4(dy + (long)token * width + j, width - j, v);
            read4(h + (long)token * width + j, width - j, x);
        }
        for (int e = 0; e < 4; e++) {
            sum += v[e] * x[e];
            v[e] *= by;
        }
        write4(dh + (long)token * width + j, width - j, v);
    }
    sum = zk_wave_sum(sum);
    if (t % ZK_WAVE == 0) parts[t / ZK_WAVE] = sum;
    zk_barrier();
    if (t == 0) d_prob[token] = (parts[0] + parts[1]) + (parts[2] + parts[3]);
}
ZK_DEFINE_CPU_ENTRY(experts_skip_backward, TILE_ITEMS)
