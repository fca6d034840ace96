// gemm - dense products, the fall-back where hipBLASLt is missing: C = A B^T (nt), A B (nn), A^T B (tn).
//
// Row-major, any m, n, k; sums in f32. bf16 operands go to the matrix unit as they are, f32 operands in three parts each,
// which is as exact as f32 (see mma_tile.h). With `splits` > 1 the summed index is cut into that many ranges; each writes
// its partial product, and gemm_reduce_* adds them in order: the same bits every time.
#include "mma_tile.h"

/// A tile of C, or of partial product z: `c` is `[m, n]`, `parts` is `[splits, m, n]`.
template <class T, class O, Lay LA, Lay LB>
ZK_DEV void gemm(const T* a, const T* b, O* c, float* parts, int m, int n, int k, int lda, int ldb, int ldc, int splits,
                 int accumulate, bf16_t* lds_a, bf16_t* lds_b) {
    constexpr int B = tile_rows<T>;
    const int tiles_m = (m + B - 1) / B, tiles_n = (n + B - 1) / B, z = zk_bid_y();
    int tm, tn;
    tile_at(by_chiplet(zk_bid_x(), tiles_m * tiles_n), tiles_m, tiles_n, tm, tn);
    const int m0 = uniform(tm * B), n0 = uniform(tn * B);
    const int range = ((k + TILE_K - 1) / TILE_K + splits - 1) / splits * TILE_K, k0 = z * range;
    const int depth = k - k0 < 0 ? 0 : k - k0 < range ? k - k0 : range;
    Operand<T, LA> left = {LA == ALONG_K ? a + (long)m0 * lda + k0 : a + (long)k0 * lda + m0, lda, depth, {m - m0}};
    Operand<T, LB> right = {LB == ALONG_K ? b + (long)n0 * ldb + k0 : b + (long)k0 * ldb + n0, ldb, depth, {n - n0}};
    Tile<T> tile;
    tile.clear();
    multiply(tile, left, right, lds_a, lds_b);
    const TilePlace<T> place(zk_tid());
#pragma unroll
    for (int i = 0; i < tile_frags<T>; i++) {
        const int row = m0 + place.row(i);
        if (row >= m) continue;
#pragma unroll
        for (int j = 0; j < tile_frags<T>; j++) {
            const int col = n0 + place.col(j);
            if (col >= n) continue;
            float x[4];
            sums(tile.acc[i][j], x);
            if (splits > 1) {
                write4(parts + ((long)z * m + row) * n + col, n - col, x);
                continue;
            }
            O* out = c + (long)row * ldc + col;
            if (accumulate) {
                float old[4];
                read4(out, n - col, old);
                for (int e = 0; e < 4; e++) x[e] += old[e];
            }
            write4(out, n - col, x);
        }
    }
}

#define GEMM(name, T, O, LA, LB) \
    ZK_KERNEL(name, TILE_ITEMS, const T* a, const T* b, O* c, float* parts, int m, int n, int k, int lda, int ldb, int ldc, \
              int splits, int accumulate) { \
        ZK_SHARED(bf16_t, lds_a, tile_lds<T>); \
        ZK_SHARED(bf16_t, lds_b, tile_lds<T>); \
        gemm<T, O, LA, LB>(a, b, c, parts, m, n, k, lda, ldb, ldc, splits, accumulate, lds_a, lds_b); \
    } \
    ZK_DEFINE_CPU_ENTRY(name, TILE_ITEMS)

GEMM(gemm_nt_bf16_f32, bf16_t, float, ALONG_K, ALONG_K)
GEMM(gemm_nn_bf16_f32, bf16_t, float, ALONG_K, ALONG_ROWS)
GEMM(gemm_tn_bf16_f32, bf16_t, float, ALONG_ROWS, ALONG_ROWS)
GEMM(gemm_nt_bf16_bf16, bf16_t, bf16_t, ALONG_K, ALONG_K)
GEMM(gemm_nn_bf16_bf16, bf16_t, bf16_t, ALONG_K, ALONG_ROWS)
GEMM(gemm_tn_bf16_bf16, bf16_t, bf16_t, ALONG_ROWS, ALONG_ROWS)
GEMM(gemm_nt_f32_f32, float, float, ALONG_K, ALONG_K)
GEMM(gemm_nn_f32_f32, float, float, ALONG_K, ALONG_ROWS)
GEMM(gemm_tn_f32_f32, float, float, ALONG_ROWS, ALONG_ROWS)

/// c = (c +) the sum of all partial products, four numbers of a row a work-item.
template <class O>
ZK_DEV void reduce(const float* parts, O* c, int m, int n, int ldc, int splits, int accumulate) {
    const int quads = (n + 3) / 4;
    const long i = (long)zk_bid_x() * TILE_ITEMS + zk_tid();
    if (i >= (long)m * quads) return;
    const int row = (int)(i / quads), col = (int)(i % quads) * 4;
    O* out = c + (long)row * ldc + col;
    float sum[4] = {0.f, 0.f, 0.f, 0.f}, x[4];
    for (int z = 0; z < splits; z++) {
        read4(parts + ((long)z * m + row) * n + col, n - col, x);
        for (int e = 0; e < 4; e++) sum[e] += x[e];
    }
    if (accumulate) {
        read4(out, n - col, x);
        for (int e = 0; e < 4; e++) sum[e] += x[e];
    }
    write4(out, n - col, sum);
}

ZK_KERNEL(gemm_reduce_f32, TILE_ITEMS, const float* parts, float* c, int m, int n, int ldc, int splits, int accumulate) {
    reduce(parts, c, m, n, ldc, splits, accumulate);
}
ZK_DEFINE_CPU_ENTRY(gemm_reduce_f32, TILE_ITEMS)

ZK_KERNEL(gemm_reduce_bf16, TILE_ITEMS, const float* parts, bf16_t* c, int m, int n, int ldc, int splits, int accumulate) {
    reduce(parts, c, m, n, ldc, splits, accumulate);
}
ZK_DEFINE_CPU_ENTRY(gemm_reduce_bf16, TILE_ITEMS)
