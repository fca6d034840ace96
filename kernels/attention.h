// What the attention kernels share: which keys a row sees, and how columns are numbered.
#pragma once
#include "lds_tile.h"

/// Lengths and masks of a launch. A sequence has `rows` rows of queries here (in chunks of `seq` rows where it is cut) and `keys`
/// rows of keys and values. The numbers of the first visible keys of a sequence's rows must not fall from row to row.
struct Sight {
    /// First row of a row's document, or null; position of a chunk's first row, or null for whole sequences.
    const int *doc_start, *chunk_start;
    /// 1 = real, 0 = padding, for [sequences * keys]; or null.
    const unsigned char* key_valid;
    int rows, seq, keys, heads, kv_heads, past;
    /// Keys seen, the present one included; 0 = all.
    int window;
    float scale;
};

/// Keys first .. end - 1, padding aside.
struct Span {
    int first, end;
};

ZK_DEV int position(const Sight& s, int t) { return (s.chunk_start ? s.chunk_start[t / s.seq] : s.past) + t % s.seq; }

ZK_DEV Span visible(const Sight& s, int t) {
    Span v;
    v.end = position(s, t) + 1;
    const int document = s.doc_start ? s.doc_start[t] : 0;
    // A document that starts at the batch's first row goes on from the cache.
    v.first = document ? s.past + document : 0;
    if (s.window) v.first = zk_max_i(v.first, v.end - s.window);
    return v;
}

/// One key/value head of one sequence. Its columns are the queries that attend to it: row after row, and in a row the query heads
/// of the group.
struct Unit {
    int sequence, kv_head, group, columns;
    ZK_MEMBER Unit(const Sight& s, int unit)
        : sequence(unit / s.kv_heads), kv_head(unit % s.kv_heads), group(s.heads / s.kv_heads), columns(s.rows * (s.heads / s.kv_heads)) {}
    ZK_MEMBER int row(const Sight& s, int column) const { return sequence * s.rows + column / group; }
    /// Row and head as one index: of [T, heads], and of [T, heads, D] in steps of D.
    ZK_MEMBER long place(const Sight& s, int column) const {
        return (long)row(s, column) * s.heads + kv_head * group + column % group;
    }
    ZK_MEMBER long key(const Sight& s, int key) const { return ((long)sequence * s.keys + key) * s.kv_heads + kv_head; }
    /// The same from `place` of column 0 and `key` of key 0 on: 32 bits, so that an address takes one register.
    ZK_MEMBER unsigned place_from_first(const Sight& s, int column) const {
        return (unsigned)(column / group) * (unsigned)s.heads + (unsigned)(column % group);
    }
    ZK_MEMBER unsigned key_from_first(const Sight& s, int key) const { return (unsigned)key * (unsigned)s.kv_heads; }
};

constexpr float LOG2_E = 1.4426950408889634f, LN_2 = 0.6931471805599453f;
constexpr float INFINITE = __builtin_inff();

/// What a row's scores are multiplied with in the backward: 0 where a row sees a single key, whose score has no gradient.
ZK_DEV float slope(const Sight& s, Span v) { return s.keys == 1 || v.end - v.first == 1 ? 0.0f : s.scale; }

ZK_DEV bool is_padding(const Sight& s, int sequence, int key) { return s.key_valid && !s.key_valid[(long)sequence * s.keys + key]; }

#define SIGHT_ARGUMENTS \
    const int *doc_start, const int *chunk_start, const unsigned char *key_valid, int rows, int seq, int keys, int heads, int kv_heads, \
        int past, int window, float scale
#define SIGHT Sight{doc_start, chunk_start, key_valid, rows, seq, keys, heads, kv_heads, past, window, scale}
