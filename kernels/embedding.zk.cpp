// Token embedding and its gradient. Numbers: f32 throughout (the stream, master weights and their gradients).
//
// The gradient adds each row of dy to the table row of its token, rows of one token in their order in the batch, without atomics: the
// rows are first sorted by (id, row) - a bitonic sort of keys that are all different, so the order is the only possible one - and
// then each run of one id has one owner.
//
// Sorting: embedding_keys, then for size = 2, 4, .. P (P = rows rounded up to a power of two) and distance = size/2, size/4, .. 1
// embedding_sort_step; embedding_sort_block does all steps of sizes up to SORT_ROWS, and those of a larger size whose distance is below it.
#include "zk.h"

#define BLOCK 256
#define SORT_ROWS 1024

/// Grid: rows. table[ids] into y [T, D].
ZK_KERNEL(embedding_fwd, BLOCK, const int* ids, const float* table, float* y, int d) {
    const long from = (long)ids[zk_bid_x()] * d, to = (long)zk_bid_x() * d;
    for (int c = zk_tid(); c < d; c += BLOCK) y[to + c] = table[from + c];
}
ZK_DEFINE_CPU_ENTRY(embedding_fwd, BLOCK)

typedef unsigned long long sort_key;
#define NO_ROW (~0ull)

/// Keys id << 32 | row of `padded` rows; of those beyond the last and those of token `pad` (-1 = none) one that sorts last.
ZK_KERNEL(embedding_keys, BLOCK, const int* ids, sort_key* keys, int tokens, int padded, int pad) {
    const int t = zk_bid_x() * BLOCK + zk_tid();
    if (t >= padded) return;
    keys[t] = t < tokens && ids[t] != pad ? (sort_key)(unsigned)ids[t] << 32 | (unsigned)t : NO_ROW;
}
ZK_DEFINE_CPU_ENTRY(embedding_keys, BLOCK)

/// Place of the first number of pair i at a distance, and whether the pair belongs in rising order.
ZK_DEV int pair_place(int i, int distance) { return 2 * i - (i & (distance - 1)); }
ZK_DEV bool rises(int place, int size) { return (place & size) == 0; }

/// Grid: padded / SORT_ROWS, at least 1. The steps of sizes size_from to size_to whose distance is below SORT_ROWS.
ZK_KERNEL(embedding_sort_block, BLOCK, sort_key* keys, int padded, int size_from, int size_to) {
    ZK_SHARED(sort_key, lds, SORT_ROWS);
    const int at = zk_bid_x() * SORT_ROWS, rows = padded < SORT_ROWS ? padded : SORT_ROWS;
    for (int i = zk_tid(); i < rows; i += BLOCK) lds[i] = keys[at + i];
    zk_barrier();
    for (int size = size_from; size <= size_to; size *= 2) {
        for (int distance = (size < rows ? size : rows) / 2; distance > 0; distance /= 2) {
            for (int i = zk_tid(); i < rows / 2; i += BLOCK) {
                const int place = pair_place(i, distance);
                const sort_key a = lds[place], b = lds[place + distance];
                if ((a > b) == rises(at + place, size)) {
                    lds[place] = b;
                    lds[place + distance] = a;
                }
            }
            zk_barrier();
        }
    }
    for (int i = zk_tid(); i < rows; i += BLOCK) keys[at + i] = lds[i];
}
ZK_DEFINE_CPU_ENTRY(embedding_sort_block, BLOCK)

/// Grid: padded / 2 / BLOCK. One step of a size and a distance.
ZK_KERNEL(embedding_sort_step, BLOCK, sort_key* keys, int padded, int size, int distance) {
    const int i = zk_bid_x() * BLOCK + zk_tid();
    if (i >= padded / 2) return;
    const int place = pair_place(i, distance);
    const sort_key a = keys[place], b = keys[place + distance];
    if ((a > b) == rises(place, size)) {
        keys[place] = b;
        keys[place + distance] = a;
    }
}
ZK_DEFINE_CPU_ENTRY(embedding_sort_step, BLOCK)

/// Grid: rows, pieces of BLOCK channels. The workgroup of a run's first key adds the whole run to the table's row.
ZK_KERNEL(embedding_bwd, BLOCK, const sort_key* keys, const float* dy, float* d_table, int tokens, int d) {
    const int i = zk_bid_x(), c = zk_bid_y() * BLOCK + zk_tid();
    const unsigned id = (unsigned)(keys[i] >> 32);
    if (keys[i] == NO_ROW || (i > 0 && (unsigned)(keys[i - 1] >> 32) == id) || c >= d) return;
    float sum = d_table[(long)id * d + c];
    for (int j = i; j < tokens && keys[j] != NO_ROW && (unsigned)(keys[j] >> 32) == id; j++)
        sum += dy[(long)(unsigned)keys[j] * d + c];
    d_table[(long)id * d + c] = sum;
}
ZK_DEFINE_CPU_ENTRY(embedding_bwd, BLOCK)
