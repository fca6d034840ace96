// mma_tile.h - a product of two matrices tile by tile, as gemm, experts, cross_entropy and newton_schulz share it.
//
// A work-group of 256 work-items (four waves of 64, two by two) computes a tile C[m, n] = A[m, k] B[n, k]^T. Either operand may lie
// with the summed index k contiguous (ALONG_K) or with its rows contiguous (ALONG_ROWS).
//
// bf16 operands: tile 128 x 128, one product. f32 operands: tile 64 x 64, each number is cut into three bf16 numbers that hold its
// 24 bits exactly, and the six products that matter are summed in f32: as exact as a product in f32, and a third faster on gfx942
// than its f32 matrix instruction (96 cycles instead of 128 for 16x16x16).
//
// While 64 values of k are multiplied from local memory, the next ones come from memory into registers; a second work-group on the
// compute unit (bf16) fills the time at barriers.
#pragma once
#include "mma_operand.h"

/// Chiplets of an MI300X: work-groups go to them in turn, each has its own second-level cache.
static constexpr int XCDS = 8;

/// Sums of a work-item: of row 16 i + lane % 16 of its wave the columns 16 j + 4 (lane / 16) + 0..3.
template <class T>
struct Tile {
    static constexpr int FRAGS = tile_frags<T>;
    zk_acc acc[FRAGS][FRAGS];
    ZK_METHOD void clear() {
        for (int i = 0; i < FRAGS; i++)
            for (int j = 0; j < FRAGS; j++) zk_acc_zero(acc[i][j]);
    }
};

/// Where the sums of a work-item lie in the tile.
template <class T>
struct TilePlace {
    int row0, col0;
    ZK_METHOD TilePlace(int t) {
        int lane = t % 64, wave = t / 64;
        row0 = (wave >> 1) * (tile_rows<T> / 2) + zk_acc_col(lane, 0);
        col0 = (wave & 1) * (tile_rows<T> / 2) + zk_acc_row(lane, 0);
    }
    ZK_METHOD int row(int i) const { return row0 + 16 * i; }
    ZK_METHOD int col(int j) const { return col0 + 16 * j; }
};

/// Sixteen rows of 32 values of k: eight values a lane. Which of them an instruction takes does not matter, as long as it takes
/// the same ones of both operands.
struct FragPair {
    zk_frag half[2];
};

template <class T>
ZK_DEV FragPair fragment(const bf16_t* lds, int part, int row0, int k_half, int lane) {
    // Rows 0..15 from row0, a multiple of 16 - the permutation of a row is that of its lane and of row0 apart.
    int piece = swizzled(lane & 15, 4 * k_half + (lane >> 4)) ^ (row0 >> 3 & 7);
    FragPair f;
    const bf16_t* p = lds + part * tile_rows<T> * TILE_K + (row0 + (lane & 15)) * TILE_K + piece * 8;
    __builtin_memcpy(&f, __builtin_assume_aligned(p, 16), 16);
    return f;
}

/// Adds the product of what lies in local memory.
template <class T>
ZK_DEV void multiply_lds(Tile<T>& c, const bf16_t* lds_a, const bf16_t* lds_b, int lane, int wave) {
    constexpr int F = tile_frags<T>, PARTS = TileShape<T>::PARTS;
    int row0 = (wave >> 1) * F * 16, col0 = (wave & 1) * F * 16;
    for (int k_half = 0; k_half < 2; k_half++) {
        FragPair a[F][PARTS], b[F][PARTS];
        for (int i = 0; i < F; i++)
            for (int p = 0; p < PARTS; p++) {
                a[i][p] = fragment<T>(lds_a, p, row0 + 16 * i, k_half, lane);
                b[i][p] = fragment<T>(lds_b, p, col0 + 16 * i, k_half, lane);
            }
        for (int h = 0; h < 2; h++)
            for (int i = 0; i < F; i++)
                for (int j = 0; j < F; j++)
                    // Columns as the instruction's rows: a lane then holds neighbours in memory.
                    for (int p = PARTS - 1; p >= 0; p--)
                        for (int q = PARTS - 1 - p; q >= 0; q--) zk_mma(c.acc[i][j], b[j][q].half[h], a[i][p].half[h]);
    }
}

/// c += a b^T for one tile. `lds_a`, `lds_b`: `tile_lds<T>` numbers each, free from the call on until the next barrier.
template <class T, Lay LA, Lay LB, class MA, class MB>
ZK_DEV void multiply(Tile<T>& c, const Operand<T, LA, MA>& a, const Operand<T, LB, MB>& b, bf16_t* lds_a, bf16_t* lds_b) {
    const int t = zk_tid(), lane = t % 64, wave = uniform(t / 64), depth = a.depth;
    const bool aligned = a.aligned() && b.aligned();
    const int whole = aligned ? depth / TILE_K * TILE_K : 0;
    Staged<T> next_a, next_b;
    if (whole > 0) {
        unsigned at_a[4], at_b[4];
        offsets(a, t, at_a);
        offsets(b, t, at_b);
        load(a, 0, at_a, next_a);
        load(b, 0, at_b, next_b);
        for (int k0 = 0; k0 < whole; k0 += TILE_K) {
            zk_barrier();
            store<LA>(next_a, lds_a, t);
            store<LB>(next_b, lds_b, t);
            zk_barrier();
            // The last round loads its own numbers again, which saves a branch.
            int k1 = k0 + TILE_K < whole ? k0 + TILE_K : k0;
            load(a, k1, at_a, next_a);
            load(b, k1, at_b, next_b);
            issue_loads();
            multiply_lds<T>(c, lds_a, lds_b, lane, wave);
        }
    }
#pragma unroll 1
    for (int k0 = whole; k0 < depth; k0 += TILE_K) {
        if (aligned) {
            load_checked(a, k0, t, next_a);
            load_checked(b, k0, t, next_b);
            zk_barrier();
            store<LA>(next_a, lds_a, t);
            store<LB>(next_b, lds_b, t);
        } else {
            zk_barrier();
            copy_elements(a, k0, t, lds_a);
            copy_elements(b, k0, t, lds_b);
        }
        zk_barrier();
        multiply_lds<T>(c, lds_a, lds_b, lane, wave);
    }
}

/// Number `i` of `n` work-groups, renamed so that those of one chiplet get neighbouring numbers. A permutation of 0..n.
ZK_DEV int by_chiplet(int i, int n) {
    int each = n / XCDS, more = n % XCDS, xcd = i % XCDS;
    return xcd * each + (xcd < more ? xcd : more) + i / XCDS;
}

/// Tile `i` of `tiles_m` x `tiles_n`: stripes of eight rows of tiles, down its columns, so that operands stay in the cache.
ZK_DEV void tile_at(int i, int tiles_m, int tiles_n, int& m, int& n) {
    constexpr int STRIPE = 8;
    int stripe = i / (STRIPE * tiles_n), first = stripe * STRIPE;
    int rows = tiles_m - first < STRIPE ? tiles_m - first : STRIPE;
    int rest = i - stripe * STRIPE * tiles_n;
    m = first + rest % rows;
    n = rest / rows;
}

/// Four neighbouring numbers of a row, of which `n` exist.
ZK_DEV void read4(const float* p, int n, float (&x)[4]) {
    if (n >= 4 && ((unsigned long)p & 15) == 0) {
        f32x4 v;
        __builtin_memcpy(&v, __builtin_assume_aligned(p, 16), 16);
        for (int e = 0; e < 4; e++) x[e] = v[e];
    } else {
        for (int e = 0; e < 4; e++) x[e] = e < n ? p[e] : 0.f;
    }
}

ZK_DEV void read4(const bf16_t* p, int n, float (&x)[4]) {
    if (n >= 4 && ((unsigned long)p & 7) == 0) {
        u32x2 v;
        __builtin_memcpy(&v, __builtin_assume_aligned(p, 8), 8);
        for (int e = 0; e < 4; e++) x[e] = float_of(e & 1 ? v[e / 2] & 0xffff0000u : v[e / 2] << 16);
    } else {
        for (int e = 0; e < 4; e++) x[e] = e < n ? zk_bf2f(p[e]) : 0.f;
    }
}

ZK_DEV void write4(float* p, int n, const float (&x)[4]) {
    if (n >= 4 && ((unsigned long)p & 15) == 0) {
        f32x4 v = {x[0], x[1], x[2], x[3]};
        __builtin_memcpy(__builtin_assume_aligned(p, 16), &v, 16);
    } else {
        for (int e = 0; e < 4; e++)
            if (e < n) p[e] = x[e];
    }
}

ZK_DEV void write4(bf16_t* p, int n, const float (&x)[4]) {
    bf16_t h[4] = {zk_f2bf(x[0]), zk_f2bf(x[1]), zk_f2bf(x[2]), zk_f2bf(x[3])};
    if (n >= 4 && ((unsigned long)p & 7) == 0) {
        __builtin_memcpy(__builtin_assume_aligned(p, 8), h, 8);
    } else {
        for (int e = 0; e < 4; e++)
            if (e < n) p[e] = h[e];
    }
}

/// A row of `width` numbers, copied by the whole work-group.
ZK_DEV void copy_row(const float* from, float* to, int width) {
    for (int j = zk_tid() * 4; j < width; j += TILE_ITEMS * 4) {
        float v[4];
        read4(from + j, width - j, v);
        write4(to + j, width - j, v);
    }
}

/// Sums of one lane as an array.
ZK_DEV void sums(const zk_acc& c, float (&x)[4]) {
    for (int e = 0; e < 4; e++) x[e] = zk_acc_get(c, e);
}
