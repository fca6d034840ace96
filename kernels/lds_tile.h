// Tiles of bf16 numbers in LDS, laid out so that neither the fragments of a product nor transposed writes meet in a bank.
#pragma once
#include "zk.h"

#if defined(ZK_AMD)
#define ZK_MEMBER __attribute__((device)) __attribute__((always_inline)) inline
#else
#define ZK_MEMBER inline
#endif

/// Rows of N numbers, N a multiple of 16. The groups of 4 numbers (8 bytes, what a lane reads of a fragment) of a row are permuted
/// by the row's number: 16 rows that a fragment reads, and 16 rows four apart that a transposed write meets, lie in 32 banks.
template <int N>
struct LdsTile {
    bf16_t* at;

    static constexpr int GROUPS = N / 4;
    /// Rows that lie side by side in the banks need not be told apart.
    static constexpr int SHIFT = GROUPS >= 16 ? 0 : GROUPS == 8 ? 1 : 2;
    static constexpr int MASK = (GROUPS >= 16 ? 16 : GROUPS) - 1;

    ZK_MEMBER bf16_t* group(int row, int g) const { return at + row * N + 4 * (g ^ (((row >> SHIFT) ^ (row >> 4)) & MASK)); }

    /// Numbers k .. k + 15 of rows row .. row + 15, as an operand whose summed index runs along the row.
    ZK_MEMBER zk_frag frag(int row, int k, int lane) const {
        zk_frag f;
        f.v = *(const s16x4*)__builtin_assume_aligned(group(row + (lane & 15), (k >> 2) + (lane >> 4)), 8);
        return f;
    }
};

/// Four rows of four numbers: fetched from memory, then stored as they are or turned.
struct Patch {
    u32x2 row[4];

    /// Four numbers from `at` on, or zeros.
    ZK_MEMBER void set(int i, const bf16_t* from, unsigned at, bool there) {
        row[i] = there ? *(const u32x2*)__builtin_assume_aligned(from + at, 8) : (u32x2)(0u);
    }
    template <int N>
    ZK_MEMBER void store(LdsTile<N> tile, int row0, int group) const {
        for (int i = 0; i < 4; i++) *(u32x2*)tile.group(row0 + i, group) = row[i];
    }
    /// Into rows 4 * group .. + 3 of a tile whose rows run along row0.
    template <int N>
    ZK_MEMBER void store_turned(LdsTile<N> tile, int row0, int group) const {
        for (int j = 0; j < 4; j++) {
            unsigned of[4];
            for (int i = 0; i < 4; i++) of[i] = j & 1 ? row[i][j >> 1] >> 16 : row[i][j >> 1] & 0xffffu;
            u32x2 turned;
            turned[0] = of[0] | of[1] << 16;
            turned[1] = of[2] | of[3] << 16;
            *(u32x2*)tile.group(4 * group + j, row0 >> 2) = turned;
        }
    }
};
