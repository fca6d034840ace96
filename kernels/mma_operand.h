// mma_operand.h - the operands of mma_tile.h: from memory through registers into local memory, and from there as fragments.
//
// Local memory holds TILE_K = 64 numbers of k of each row: 128 bytes, all banks once. The eight pieces of 16 bytes of a row are
// permuted by the row (`swizzled`), so that neither the reads of fragments (16 bytes a work-item, rows along lanes) nor the writes
// of transposed operands (8 bytes) meet in a bank.
#pragma once
#include "zk.h"

/// A member function that runs on the device.
#if defined(ZK_AMD)
#define ZK_METHOD __attribute__((device)) __attribute__((always_inline)) inline
#else
#define ZK_METHOD inline
#endif

static constexpr int TILE_ITEMS = 256;
static constexpr int TILE_K = 64;

enum Lay { ALONG_K, ALONG_ROWS };

template <class T>
struct TileShape;
template <>
struct TileShape<bf16_t> {
    static constexpr int ROWS = 128, PARTS = 1;
};
template <>
struct TileShape<float> {
    static constexpr int ROWS = 64, PARTS = 3;
};

template <class T>
static constexpr int tile_rows = TileShape<T>::ROWS;
/// Fragments of 16 rows (or columns) of a wave: half a tile.
template <class T>
static constexpr int tile_frags = TileShape<T>::ROWS / 32;
/// Numbers (bf16) of local memory that one operand takes.
template <class T>
static constexpr int tile_lds = TileShape<T>::ROWS * TILE_K * TileShape<T>::PARTS;
/// Numbers in 16 bytes.
template <class T>
static constexpr int vector_len = 16 / (int)sizeof(T);

/// The same number in all lanes, told to the compiler: addresses that come from it need no vector registers.
ZK_DEV int uniform(int x) {
#if defined(ZK_AMD)
    return __builtin_amdgcn_readfirstlane(x);
#else
    return x;
#endif
}

ZK_DEV long uniform(long x) {
    unsigned low = (unsigned)uniform((int)(unsigned)x), high = (unsigned)uniform((int)(unsigned)((unsigned long)x >> 32));
    return (long)((unsigned long)high << 32 | low);
}

/// Rows of a tile are rows of the operand, the last one standing in for those beyond the end.
struct Straight {
    int rows;
    ZK_METHOD int row(int r) const { return r < rows ? r : rows - 1; }
    ZK_METHOD bool has(int r) const { return r < rows; }
};

/// Sixteen rows of the first half of a matrix, then sixteen of its second half (`half` rows further), and so on: of a fused
/// gate and up matrix a work-item gets both numbers that belong together.
struct Interleaved {
    int rows, half;
    ZK_METHOD int at(int r) const { return (r >> 5) * 16 + (r & 15); }
    ZK_METHOD int row(int r) const { return (at(r) < rows ? at(r) : rows - 1) + (r >> 4 & 1) * half; }
    ZK_METHOD bool has(int r) const { return at(r) < rows; }
};

/// One operand of a tile, from its first row on.
template <class T, Lay LAY, class Map = Straight>
struct Operand {
    const T* data;
    /// Numbers between rows (ALONG_K) or between values of k (ALONG_ROWS).
    int stride;
    /// Values of k.
    int depth;
    Map map;

    /// Whether what exists can be read 16 bytes at a time.
    ZK_METHOD bool aligned() const {
        constexpr int V = vector_len<T>;
        return ((unsigned long)data & 15) == 0 && stride % V == 0 && (LAY == ALONG_K ? depth : map.rows) % V == 0;
    }
};

/// 16 bytes as numbers.
template <class T>
union Vector {
    u32x4 all;
    T of[vector_len<T>];
    unsigned words[4];
};

/// What a work-item brings from memory for one operand: 4 times 16 bytes. ALONG_K: of four rows, `vector_len` values of k each.
/// ALONG_ROWS: of four values of k, `vector_len` rows each.
template <class T>
struct Staged {
    Vector<T> v[4];
};

/// Place of a work-item among the pieces of an operand.
template <class T, Lay LAY>
struct Seat {
    int row, k;
    ZK_METHOD Seat(int t) {
        constexpr int V = vector_len<T>;
        if (LAY == ALONG_K) {
            row = t / (TILE_K / V);
            k = t % (TILE_K / V) * V;
        } else {
            // Sixteen neighbours write to all 32 banks, and read at least 128 contiguous bytes.
            row = ((t & 7) | (t >> 4 & 1) << 3) * V;
            k = ((t >> 3 & 1) | (t >> 5) << 1) * 4;
        }
    }
    /// Rows between the four vectors of ALONG_K.
    static constexpr int STEP = TILE_ITEMS / (TILE_K / vector_len<T>);
};

/// Loads the whole vectors of k0..k0+64, all of which exist. `at` are offsets in bytes that `offsets` made.
template <class T, Lay LAY, class Map>
ZK_DEV void offsets(const Operand<T, LAY, Map>& x, int t, unsigned (&at)[4]) {
    Seat<T, LAY> seat(t);
    for (int i = 0; i < 4; i++) {
        if (LAY == ALONG_K) {
            at[i] = ((unsigned)x.map.row(seat.row + i * seat.STEP) * (unsigned)x.stride + seat.k) * sizeof(T);
        } else {
            int last = x.map.rows - vector_len<T>;
            at[i] = ((unsigned)(seat.k + i) * (unsigned)x.stride + (seat.row < last ? seat.row : last)) * sizeof(T);
        }
    }
}

template <class T, Lay LAY, class Map>
ZK_DEV void load(const Operand<T, LAY, Map>& x, int k0, const unsigned (&at)[4], Staged<T>& out) {
    const char* base = (const char*)(x.data + (LAY == ALONG_K ? (long)k0 : (long)k0 * x.stride));
    for (int i = 0; i < 4; i++) __builtin_memcpy(&out.v[i].all, __builtin_assume_aligned(base + at[i], 16), 16);
}

/// Loads what exists of k0..k0+64 and sets the rest to 0. The operand is aligned.
template <class T, Lay LAY, class Map>
ZK_DEV void load_checked(const Operand<T, LAY, Map>& x, int k0, int t, Staged<T>& out) {
    Seat<T, LAY> seat(t);
#pragma unroll
    for (int i = 0; i < 4; i++) {
        int row = LAY == ALONG_K ? seat.row + i * seat.STEP : seat.row;
        int k = k0 + (LAY == ALONG_K ? seat.k : seat.k + i);
        for (int w = 0; w < 4; w++) out.v[i].words[w] = 0;
        if (!x.map.has(row) || k >= x.depth) continue;
        const T* p = x.data + (LAY == ALONG_K ? (long)x.map.row(row) * x.stride + k : (long)k * x.stride + row);
        __builtin_memcpy(&out.v[i].all, __builtin_assume_aligned(p, 16), 16);
    }
}

/// Which of the eight pieces of a row in local memory holds piece `piece` of its numbers.
ZK_DEV int swizzled(int row, int piece) { return piece ^ ((row ^ row >> 3) & 7); }

ZK_DEV unsigned bits_of(float x) { return __builtin_bit_cast(unsigned, x); }
ZK_DEV float float_of(unsigned x) { return __builtin_bit_cast(float, x); }

/// High halves of two words, the first one below.
ZK_DEV unsigned high_halves(unsigned first, unsigned second) { return first >> 16 | (second & 0xffff0000u); }
ZK_DEV unsigned low_halves(unsigned first, unsigned second) { return (first & 0xffffu) | second << 16; }

/// Writes four values of k of one row, `k` being a multiple of four, as the three parts of their bits. (Infinity becomes NaN.)
ZK_DEV void write_parts(bf16_t* lds, int row, int k, const float (&x)[4]) {
    constexpr int PLANE = tile_rows<float> * TILE_K;
    bf16_t* place = lds + row * TILE_K + swizzled(row, k >> 3) * 8 + (k & 4);
    float rest[4] = {x[0], x[1], x[2], x[3]};
    for (int part = 0; part < TileShape<float>::PARTS; part++) {
        u32x2 packed = {high_halves(bits_of(rest[0]), bits_of(rest[1])), high_halves(bits_of(rest[2]), bits_of(rest[3]))};
        __builtin_memcpy(__builtin_assume_aligned(place + part * PLANE, 8), &packed, 8);
        for (int e = 0; e < 4; e++) rest[e] -= float_of(bits_of(rest[e]) & 0xffff0000u);
    }
}

/// Keeps the compiler from moving loads to where their numbers are used, a whole round later.
ZK_DEV void issue_loads() { asm volatile("" ::: "memory"); }

/// Place in local memory of value `k` of row `row`.
ZK_DEV int element_place(int row, int k) { return row * TILE_K + swizzled(row, k >> 3) * 8 + (k & 7); }

ZK_DEV void write_element(bf16_t* lds, int row, int k, bf16_t x) { lds[element_place(row, k)] = x; }
ZK_DEV void write_element(bf16_t* lds, int row, int k, float x) {
    for (int part = 0; part < TileShape<float>::PARTS; part++) {
        lds[part * tile_rows<float> * TILE_K + element_place(row, k)] = (bf16_t)(bits_of(x) >> 16);
        x -= float_of(bits_of(x) & 0xffff0000u);
    }
}

/// Brings k0..k0+64 into local memory number by number: shapes and places that 16 bytes do not fit. Small code, not fast.
template <class T, Lay LAY, class Map>
ZK_DEV void copy_elements(const Operand<T, LAY, Map>& x, int k0, int t, bf16_t* lds) {
    constexpr int ROWS = tile_rows<T>;
#pragma unroll 1
    for (int i = t; i < ROWS * TILE_K; i += TILE_ITEMS) {
        int row = LAY == ALONG_K ? i / TILE_K : i % ROWS, k = LAY == ALONG_K ? i % TILE_K : i / ROWS;
        T value = 0;
        if (x.map.has(row) && k0 + k < x.depth)
            value = x.data[LAY == ALONG_K ? (long)x.map.row(row) * x.stride + k0 + k : (long)(k0 + k) * x.stride + row];
        write_element(lds, row, k, value);
    }
}

/// Puts what `load` brought into local memory, rows of k.
template <Lay LAY>
ZK_DEV void store(const Staged<bf16_t>& x, bf16_t* lds, int t) {
    Seat<bf16_t, LAY> seat(t);
    if (LAY == ALONG_K) {
        for (int i = 0; i < 4; i++) {
            int row = seat.row + i * seat.STEP;
            __builtin_memcpy(__builtin_assume_aligned(lds + row * TILE_K + swizzled(row, seat.k >> 3) * 8, 16), &x.v[i].all, 16);
        }
        return;
    }
    for (int e = 0; e < 8; e++) {
        int row = seat.row + e;
        unsigned w[4];
        for (int i = 0; i < 4; i++) w[i] = x.v[i].all[e / 2];
        u32x2 packed = {e & 1 ? high_halves(w[0], w[1]) : low_halves(w[0], w[1]),
                        e & 1 ? high_halves(w[2], w[3]) : low_halves(w[2], w[3])};
        __builtin_memcpy(__builtin_assume_aligned(lds + row * TILE_K + swizzled(row, seat.k >> 3) * 8 + (seat.k & 4), 8), &packed,
                         8);
    }
}

template <Lay LAY>
ZK_DEV void store(const Staged<float>& x, bf16_t* lds, int t) {
    Seat<float, LAY> seat(t);
    for (int i = 0; i < 4; i++) {
        float four[4];
        for (int e = 0; e < 4; e++) four[e] = float_of(LAY == ALONG_K ? x.v[i].all[e] : x.v[e].all[i]);
        write_parts(lds, LAY == ALONG_K ? seat.row + i * seat.STEP : seat.row + i, seat.k, four);
    }
}
