// newton_schulz - Muon (spec 3.3) for many matrices a launch: momentum, norm, Newton-Schulz, decay and update.
//
//   M <- mu M + (1 - mu) G;  U = (1 - mu) G + mu M;  X = U / max(|U|, 1e-7)
//   steps times:  A = X X^T;  B = b A + c A^2;  X <- a X + B X           (X with the short side first)
//   W <- (1 - lr wd) W - lr 0.2 sqrt(max(rows, cols)) X
//
// A and A^2 are symmetric: only tiles on and above the diagonal are computed and the others are their mirror images, which saves
// half of two of the three products. A matrix with more rows than columns is never transposed: its A is X^T X and its update
// X B, so wide (rows < cols) and tall ones have launches of their own.
//
// All matrices lie in one table of `Matrix`. A launch has one work-group a tile (or a chunk) of any matrix; `first`, one entry
// a matrix and the total, says how many come before each. bf16: products of bf16 numbers, X and A kept in f32 beside them. f32:
// products as exact as f32.
#include "mma_tile.h"

/// One matrix, or one block of rows that is orthogonalised apart. Offsets are in numbers from the arguments' pointers on.
struct Matrix {
    /// In `weights`, `gradients` and `momenta`.
    long weight, gradient, momentum;
    /// In `halves`: the bf16 copy of the weight that the next forward multiplies; negative = none.
    long half;
    /// In `work`, multiples of 4: X in f32 `[rows, cols]`; the two places, taken in turn, of the operand X; A in f32
    /// `[short, short]`; the operands A and B. f32: `x` is `operand[0]`'s place and `a_operand` that of `a`.
    long x, operand[2], a, a_operand, b;
    int rows, cols;
};

/// Numbers of an elementwise work-group: 16 a work-item.
static constexpr int MUON_CHUNK = TILE_ITEMS * 16;

static constexpr float NS_A = 3.4445f, NS_B = -4.7750f, NS_C = 2.0315f;

/// Which matrix work-group `group` has a part of, and the number of that part.
ZK_DEV int find_matrix(const int* first, int count, int group, int& part) {
    int low = 0, high = count;
    while (high - low > 1) {
        const int middle = (low + high) / 2;
        if (uniform(first[middle]) <= group)
            low = middle;
        else
            high = middle;
    }
    part = group - uniform(first[low]);
    return low;
}

ZK_DEV long len_of(const Matrix& m) { return (long)m.rows * m.cols; }

/// The table's entry, as a number that is the same in all lanes.
ZK_DEV Matrix entry(const Matrix* table, int i) {
    Matrix m = table[i];
    m.rows = uniform(m.rows);
    m.cols = uniform(m.cols);
    return m;
}

// ------------------------------------------------------------------------------------------------------------ elementwise

/// Momentum and U, which goes to X in f32, and the sum of squares of each chunk. Chunks of matrix i begin at `first[i]`.
ZK_KERNEL(muon_mix, TILE_ITEMS, const Matrix* table, const int* first, const float* gradients, float* momenta, float* work,
          double* squares, int count, float mu, float grad_scale) {
    ZK_SHARED(double, sums_lds, TILE_ITEMS);
    const int t = zk_tid();
    int chunk;
    const Matrix m = entry(table, find_matrix(first, count, zk_bid_x(), chunk));
    const long begin = (long)chunk * MUON_CHUNK, len = len_of(m);
    const long end = begin + MUON_CHUNK < len ? begin + MUON_CHUNK : len;
    double sum = 0.0;
    for (long i = begin + t * 4; i < end; i += TILE_ITEMS * 4) {
        const int n = end - i < 4 ? (int)(end - i) : 4;
        float g[4], v[4], u[4];
        read4(gradients + m.gradient + i, n, g);
        read4(momenta + m.momentum + i, n, v);
        for (int e = 0; e < 4; e++) {
            g[e] *= grad_scale;
            v[e] = mu * v[e] + (1.0f - mu) * g[e];
            u[e] = (1.0f - mu) * g[e] + mu * v[e];
            if (e < n) sum += (double)u[e] * (double)u[e];
        }
        write4(momenta + m.momentum + i, n, v);
        write4(work + m.x + i, n, u);
    }
    sums_lds[t] = sum;
    for (int half = TILE_ITEMS / 2; half; half /= 2) {
        zk_barrier();
        if (t < half) sums_lds[t] += sums_lds[t + half];
    }
    if (t == 0) squares[zk_bid_x()] = sums_lds[0];
}
ZK_DEFINE_CPU_ENTRY(muon_mix, TILE_ITEMS)

/// One work-group a matrix: `inverse[i]` = 1 / max(|U|, 1e-7).
ZK_KERNEL(muon_norm, TILE_ITEMS, const int* first, const double* squares, float* inverse) {
    ZK_SHARED(double, sums_lds, TILE_ITEMS);
    const int t = zk_tid(), begin = first[zk_bid_x()], end = first[zk_bid_x() + 1];
    double sum = 0.0;
    for (int i = begin + t; i < end; i += TILE_ITEMS) sum += squares[i];
    sums_lds[t] = sum;
    for (int half = TILE_ITEMS / 2; half; half /= 2) {
        zk_barrier();
        if (t < half) sums_lds[t] += sums_lds[t + half];
    }
    if (t == 0) {
        const float norm = __builtin_sqrtf((float)sums_lds[0]);
        inverse[zk_bid_x()] = 1.0f / (norm > 1e-7f ? norm : 1e-7f);
    }
}
ZK_DEFINE_CPU_ENTRY(muon_norm, TILE_ITEMS)

ZK_DEV bf16_t* operand_at(float* work, long at, bf16_t*) { return (bf16_t*)(work + at); }
ZK_DEV float* operand_at(float* work, long at, float*) { return work + at; }

/// (No index: the entry stays in registers.)
ZK_DEV long operand_place(const Matrix& m, int which) { return uniform(which ? m.operand[1] : m.operand[0]); }

/// X of norm 1: in f32, and as operand 0.
template <class T>
ZK_DEV void scale(const Matrix* table, const int* first, const float* inverse, float* work, int count) {
    int chunk;
    const int i_matrix = find_matrix(first, count, zk_bid_x(), chunk);
    const Matrix m = entry(table, i_matrix);
    const float by = inverse[i_matrix];
    T* operand = operand_at(work, m.operand[0], (T*)nullptr);
    const long begin = (long)chunk * MUON_CHUNK, len = len_of(m);
    const long end = begin + MUON_CHUNK < len ? begin + MUON_CHUNK : len;
    for (long i = begin + zk_tid() * 4; i < end; i += TILE_ITEMS * 4) {
        const int n = end - i < 4 ? (int)(end - i) : 4;
        float x[4];
        read4(work + m.x + i, n, x);
        for (int e = 0; e < 4; e++) x[e] *= by;
        write4(work + m.x + i, n, x);
        if (sizeof(T) == sizeof(bf16_t)) write4(operand + i, n, x);
    }
}

ZK_KERNEL(muon_scale_bf16, TILE_ITEMS, const Matrix* table, const int* first, const float* inverse, float* work, int count) {
    scale<bf16_t>(table, first, inverse, work, count);
}
ZK_DEFINE_CPU_ENTRY(muon_scale_bf16, TILE_ITEMS)

ZK_KERNEL(muon_scale_f32, TILE_ITEMS, const Matrix* table, const int* first, const float* inverse, float* work, int count) {
    scale<float>(table, first, inverse, work, count);
}
ZK_DEFINE_CPU_ENTRY(muon_scale_f32, TILE_ITEMS)

/// The weights' update. `place`: 0 = X lies at `x` (bf16, or f32 after an even number of steps), 1 = at `operand[1]`.
ZK_KERNEL(muon_update, TILE_ITEMS, const Matrix* table, const int* first, const float* work, float* weights, bf16_t* halves,
          int count, int place, float lr, float weight_decay) {
    int chunk;
    const Matrix m = entry(table, find_matrix(first, count, zk_bid_x(), chunk));
    const float keep = 1.0f - lr * weight_decay;
    const float by = lr * 0.2f * __builtin_sqrtf((float)(m.rows > m.cols ? m.rows : m.cols));
    const float* x = work + (place ? m.operand[1] : m.x);
    const long begin = (long)chunk * MUON_CHUNK, len = len_of(m);
    const long end = begin + MUON_CHUNK < len ? begin + MUON_CHUNK : len;
    for (long i = begin + zk_tid() * 4; i < end; i += TILE_ITEMS * 4) {
        const int n = end - i < 4 ? (int)(end - i) : 4;
        float w[4], v[4];
        read4(weights + m.weight + i, n, w);
        read4(x + i, n, v);
        for (int e = 0; e < 4; e++) w[e] = w[e] * keep - by * v[e];
        write4(weights + m.weight + i, n, w);
        if (m.half >= 0) write4(halves + m.half + i, n, w);
    }
}
ZK_DEFINE_CPU_ENTRY(muon_update, TILE_ITEMS)

// --------------------------------------------------------------------------------------------------------------- products

/// Pair `i` of rows and columns of tiles of a symmetric matrix, row <= column, column after column.
ZK_DEV void upper_pair(int i, int& row, int& column) {
    column = 0;
    while ((column + 1) * (column + 2) / 2 <= i) column++;
    row = i - column * (column + 1) / 2;
}

/// What a tile of a symmetric product becomes.
enum Becomes { GRAM, POLYNOMIAL };

/// Writes the tile at (row0, col0) of a symmetric [n, n] matrix and its mirror image. GRAM: to `a` in f32 and to `out`.
/// POLYNOMIAL: b a + c tile, to `out`. `out` may be `a`.
template <class T, Becomes HOW>
ZK_DEV void write_symmetric(const Tile<T>& tile, int row0, int col0, int n, float* a, T* out) {
    constexpr bool BOTH = HOW == GRAM && sizeof(T) == sizeof(bf16_t);
    const TilePlace<T> place(zk_tid());
#pragma unroll
    for (int i = 0; i < tile_frags<T>; i++) {
        const int row = row0 + place.row(i);
#pragma unroll
        for (int j = 0; j < tile_frags<T>; j++) {
            const int col = col0 + place.col(j);
            if (row >= n || col >= n) continue;
            const long here = (long)row * n + col;
            float v[4], old[4];
            sums(tile.acc[i][j], v);
            if (HOW == POLYNOMIAL) {
                read4(a + here, n - col, old);
                for (int e = 0; e < 4; e++) v[e] = NS_B * old[e] + NS_C * v[e];
            }
            // A tile on the diagonal has both images of a number, summed in another order: the upper one is taken for both.
            const int skip = row0 == col0 && col < row ? (row - col < 4 ? row - col : 4) : 0;
            if (skip == 0) {
                write4(out + here, n - col, v);
                if (BOTH) write4(a + here, n - col, v);
            }
            for (int e = skip; e < 4; e++) {
                if (col + e >= n) continue;
                const long mirrored = (long)(col + e) * n + row;
                zk_store(out + mirrored, v[e]);
                if (BOTH) a[mirrored] = v[e];
                if (skip == 0) continue;
                zk_store(out + here + e, v[e]);
                if (BOTH) a[here + e] = v[e];
            }
        }
    }
}

/// A = X X^T (wide: LAY = ALONG_K) or X^T X (tall: ALONG_ROWS), tiles on and above the diagonal.
template <class T, Lay LAY>
ZK_DEV void gram(const Matrix* table, const int* first, float* work, int count, int from, bf16_t* lds_a, bf16_t* lds_b) {
    constexpr int B = tile_rows<T>;
    int pair, tm, tn;
    const Matrix m = entry(table, find_matrix(first, count, zk_bid_x(), pair));
    upper_pair(pair, tm, tn);
    const int n = LAY == ALONG_K ? m.rows : m.cols, depth = LAY == ALONG_K ? m.cols : m.rows;
    const int row0 = uniform(tm * B), col0 = uniform(tn * B), stride = m.cols;
    const T* x = operand_at(work, operand_place(m, from), (T*)nullptr);
    Operand<T, LAY> left = {LAY == ALONG_K ? x + (long)row0 * stride : x + row0, stride, depth, {n - row0}};
    Operand<T, LAY> right = {LAY == ALONG_K ? x + (long)col0 * stride : x + col0, stride, depth, {n - col0}};
    Tile<T> tile;
    tile.clear();
    multiply(tile, left, right, lds_a, lds_b);
    write_symmetric<T, GRAM>(tile, row0, col0, n, work + m.a, operand_at(work, m.a_operand, (T*)nullptr));
}

/// B = b A + c A^2, tiles on and above the diagonal.
template <class T>
ZK_DEV void square(const Matrix* table, const int* first, float* work, int count, bf16_t* lds_a, bf16_t* lds_b) {
    constexpr int B = tile_rows<T>;
    int pair, tm, tn;
    const Matrix m = entry(table, find_matrix(first, count, zk_bid_x(), pair));
    upper_pair(pair, tm, tn);
    const int n = m.rows < m.cols ? m.rows : m.cols, row0 = uniform(tm * B), col0 = uniform(tn * B);
    const T* a = operand_at(work, uniform(m.a_operand), (T*)nullptr);
    Operand<T, ALONG_K> left = {a + (long)row0 * n, n, n, {n - row0}}, right = {a + (long)col0 * n, n, n, {n - col0}};
    Tile<T> tile;
    tile.clear();
    multiply(tile, left, right, lds_a, lds_b);
    write_symmetric<T, POLYNOMIAL>(tile, row0, col0, n, work + m.a, operand_at(work, m.b, (T*)nullptr));
}

/// X <- a X + B X (wide) or a X + X B (tall), from operand `from` to the other one.
template <class T, bool WIDE>
ZK_DEV void apply(const Matrix* table, const int* first, float* work, int count, int from, bf16_t* lds_a, bf16_t* lds_b) {
    constexpr int SIDE = tile_rows<T>;
    int part, tm, tn;
    const Matrix m = entry(table, find_matrix(first, count, zk_bid_x(), part));
    const int rows = m.rows, cols = m.cols, n = WIDE ? rows : cols;
    tile_at(part, (rows + SIDE - 1) / SIDE, (cols + SIDE - 1) / SIDE, tm, tn);
    const int row0 = uniform(tm * SIDE), col0 = uniform(tn * SIDE);
    const T* x = operand_at(work, operand_place(m, from), (T*)nullptr);
    const T* b = operand_at(work, uniform(m.b), (T*)nullptr);
    Tile<T> tile;
    tile.clear();
    if constexpr (WIDE) {
        Operand<T, ALONG_K> left = {b + (long)row0 * n, n, n, {rows - row0}};
        Operand<T, ALONG_ROWS> right = {x + col0, cols, n, {cols - col0}};
        multiply(tile, left, right, lds_a, lds_b);
    } else {
        // B is symmetric: its rows are its columns.
        Operand<T, ALONG_K> left = {x + (long)row0 * cols, cols, n, {rows - row0}};
        Operand<T, ALONG_K> right = {b + (long)col0 * n, n, n, {cols - col0}};
        multiply(tile, left, right, lds_a, lds_b);
    }
    T* to = operand_at(work, operand_place(m, 1 - from), (T*)nullptr);
    float* master = work + m.x;
    const TilePlace<T> place(zk_tid());
#pragma unroll
    for (int i = 0; i < tile_frags<T>; i++) {
        const int row = row0 + place.row(i);
        if (row >= rows) continue;
#pragma unroll
        for (int j = 0; j < tile_frags<T>; j++) {
            const int col = col0 + place.col(j);
            if (col >= cols) continue;
            const long at = (long)row * cols + col;
            float v[4], old[4];
            sums(tile.acc[i][j], v);
            if (sizeof(T) == sizeof(bf16_t))
                read4(master + at, cols - col, old);
            else
                read4(x + at, cols - col, old);
            for (int e = 0; e < 4; e++) v[e] += NS_A * old[e];
            write4(to + at, cols - col, v);
            if (sizeof(T) == sizeof(bf16_t)) write4(master + at, cols - col, v);
        }
    }
}

#define NS_PRODUCT(name, T, call) \
    ZK_KERNEL(name, TILE_ITEMS, const Matrix* table, const int* first, float* work, int count, int from) { \
        ZK_SHARED(bf16_t, lds_a, tile_lds<T>); \
        ZK_SHARED(bf16_t, lds_b, tile_lds<T>); \
        call(table, first, work, count, from, lds_a, lds_b); \
    } \
    ZK_DEFINE_CPU_ENTRY(name, TILE_ITEMS)

NS_PRODUCT(ns_gram_wide_bf16, bf16_t, (gram<bf16_t, ALONG_K>))
NS_PRODUCT(ns_gram_tall_bf16, bf16_t, (gram<bf16_t, ALONG_ROWS>))
NS_PRODUCT(ns_apply_wide_bf16, bf16_t, (apply<bf16_t, true>))
NS_PRODUCT(ns_apply_tall_bf16, bf16_t, (apply<bf16_t, false>))
NS_PRODUCT(ns_gram_wide_f32, float, (gram<float, ALONG_K>))
NS_PRODUCT(ns_gram_tall_f32, float, (gram<float, ALONG_ROWS>))
NS_PRODUCT(ns_apply_wide_f32, float, (apply<float, true>))
NS_PRODUCT(ns_apply_tall_f32, float, (apply<float, false>))

#define NS_SQUARE(name, T) \
    ZK_KERNEL(name, TILE_ITEMS, const Matrix* table, const int* first, float* work, int count) { \
        ZK_SHARED(bf16_t, lds_a, tile_lds<T>); \
        ZK_SHARED(bf16_t, lds_b, tile_lds<T>); \
        square<T>(table, first, work, count, lds_a, lds_b); \
    } \
    ZK_DEFINE_CPU_ENTRY(name, TILE_ITEMS)

NS_SQUARE(ns_square_bf16, bf16_t)
NS_SQUARE(ns_square_f32, float)
