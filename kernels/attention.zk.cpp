// Causal softmax attention with grouped query heads, windows, documents, padding and chunks of sequences, in tiles; forward and
// backward (spec 1.4 step 10). Scores are never kept: the backward computes them anew from the log-sum-exp.
//
// Numbers: q, k, v, out and d_out bf16; scores, softmax, log-sum-exp and all sums f32; probabilities and the gradients of scores
// are rounded to bf16 as operands; dq, dk and dv f32 (norms and RoPE come next). The softmax works with powers of 2.
//
// Tiles of scores lie so that a wave's accumulator is the next product's operand as it stands. The forward and the gradient of q
// have a lane's four numbers along the keys and a column (a query) per lane; the gradients of k and v the other way round. A wave
// holds 32 columns (or keys) in registers, so that each fragment read from LDS serves two products.
//
// Each number has one owner and one order of summation: no atomics; the gradients of q and those of k and v are two kernels.
// A row that sees no key at all (padding) is left to attention_padding.zk.cpp: it gets out 0 and lse +infinity here.
#include "attention.h"

#define BLOCK 256
#define WAVES 4
// Columns or keys of a wave: two groups of 16.
#define OWN 32
#define FWD_KEYS 64
#define BWD_KEYS 32
#define BWD_COLUMNS 16

/// Stores keys key0 .. key0 + KEYS - 1 of a unit in LDS, as they are and turned; 0 beyond the last.
template <int D, int KEYS, bool PLAIN, bool TURNED>
ZK_DEV void stage_keys(const Sight& s, const Unit& unit, const bf16_t* from, int key0, LdsTile<D> plain, LdsTile<KEYS> turned) {
    from += unit.key(s, 0) * D;
    for (int i = zk_tid(); i < KEYS / 4 * (D / 4); i += BLOCK) {
        const int row = i / (D / 4) * 4, group = i % (D / 4);
        Patch patch;
        for (int r = 0; r < 4; r++) {
            const int key = key0 + row + r;
            patch.set(r, from, unit.key_from_first(s, key) * D + 4 * group, key < s.keys);
        }
        if (PLAIN) patch.store(plain, row, group);
        if (TURNED) patch.store_turned(turned, row, group);
    }
}

/// The same of columns; `places`: `place_from_first` of each of them, divisions that are not to be made for every number.
template <int D, int COLUMNS>
ZK_DEV void stage_columns(const Sight& s, const Unit& unit, const bf16_t* from, int column0, const unsigned* places, LdsTile<D> plain,
                          LdsTile<COLUMNS> turned) {
    from += unit.place(s, 0) * D;
    for (int i = zk_tid(); i < COLUMNS / 4 * (D / 4); i += BLOCK) {
        const int row = i / (D / 4) * 4, group = i % (D / 4);
        Patch patch;
        for (int r = 0; r < 4; r++) patch.set(r, from, places[row + r] * D + 4 * group, column0 + row + r < unit.columns);
        patch.store(plain, row, group);
        patch.store_turned(turned, row, group);
    }
}

/// The D / 16 fragments of 16 rows, one a lane modulo 16, that begin at `from` in each lane.
template <int D>
ZK_DEV void own_rows(zk_frag (&f)[D / 16], const bf16_t* from, int lane) {
    for (int kk = 0; kk < D / 16; kk++) f[kk].v = *(const s16x4*)__builtin_assume_aligned(from + 16 * kk + 4 * (lane >> 4), 8);
}

/// The two columns of a lane, and the keys that they, the wave and the workgroup see.
struct Columns {
    int column[2];
    Span own[2];
    /// Keys that some, and that all of the wave's columns see.
    Span some, all;
    /// Keys that some column of the workgroup sees.
    Span block;
};

ZK_DEV int wave_min(int v) {
    for (int mask = 8; mask; mask >>= 1) v = zk_min_i(v, zk_shfl_xor_i(v, mask));
    return v;
}
ZK_DEV int wave_max(int v) { return -wave_min(-v); }

/// `lds`: 2 WAVES numbers, free again after the next barrier. Columns after the last repeat it.
ZK_DEV void find_columns(Columns& c, const Sight& s, const Unit& unit, int column0, int* lds) {
    const int lane = zk_tid() % ZK_WAVE, wave = zk_tid() / ZK_WAVE;
    for (int g = 0; g < 2; g++) {
        c.column[g] = column0 + wave * OWN + 16 * g + (lane & 15);
        c.own[g] = visible(s, unit.row(s, zk_min_i(c.column[g], unit.columns - 1)));
    }
    c.some = {wave_min(zk_min_i(c.own[0].first, c.own[1].first)), wave_max(zk_max_i(c.own[0].end, c.own[1].end))};
    c.all = {wave_max(zk_max_i(c.own[0].first, c.own[1].first)), wave_min(zk_min_i(c.own[0].end, c.own[1].end))};
    if (lane == 0) {
        lds[2 * wave] = c.some.first;
        lds[2 * wave + 1] = c.some.end;
    }
    zk_barrier();
    c.block = {lds[0], lds[1]};
    for (int w = 1; w < WAVES; w++) {
        c.block.first = zk_min_i(c.block.first, lds[2 * w]);
        c.block.end = zk_max_i(c.block.end, lds[2 * w + 1]);
    }
}

/// Sets to -infinity the scores of keys key .. key + 3 that a column must not see.
ZK_DEV void hide(const Sight& s, int sequence, f32x4& score, int key, Span own) {
    for (int i = 0; i < 4; i++) {
        const int k = key + i;
        if (k < own.first || k >= own.end || is_padding(s, sequence, k)) score[i] = -INFINITE;
    }
}

template <int D>
ZK_DEV void forward(const Sight& s, const bf16_t* q, const bf16_t* k, const bf16_t* v, bf16_t* out, float* lse, bf16_t* lds_k,
                    bf16_t* lds_v) {
    constexpr int STEPS = D / 16, KEY_TILES = FWD_KEYS / 16;
    const int lane = zk_tid() % ZK_WAVE;
    const Unit unit(s, zk_bid_y());
    // The last columns see the most keys and come first.
    const int blocks = (unit.columns + WAVES * OWN - 1) / (WAVES * OWN);
    Columns c;
    find_columns(c, s, unit, (blocks - 1 - zk_bid_x()) * WAVES * OWN, (int*)lds_k);
    const LdsTile<D> keys{lds_k};
    const LdsTile<FWD_KEYS> values{lds_v};

    zk_frag query[2][STEPS];
    zk_acc sum[STEPS][2];
    float top[2] = {-3e38f, -3e38f}, total[2] = {0.0f, 0.0f};
    for (int g = 0; g < 2; g++) {
        own_rows<D>(query[g], q + unit.place(s, zk_min_i(c.column[g], unit.columns - 1)) * D, lane);
        for (int d = 0; d < STEPS; d++) zk_acc_zero(sum[d][g]);
    }
    const float by = s.scale * LOG2_E;
    for (int key0 = c.block.first / FWD_KEYS * FWD_KEYS; key0 < c.block.end; key0 += FWD_KEYS) {
        zk_barrier();
        stage_keys<D, FWD_KEYS, true, false>(s, unit, k, key0, keys, values);
        stage_keys<D, FWD_KEYS, false, true>(s, unit, v, key0, keys, values);
        zk_barrier();
        if (key0 >= c.some.end || key0 + FWD_KEYS <= c.some.first) continue;
        zk_acc score[KEY_TILES][2];
        for (int i = 0; i < KEY_TILES; i++) zk_acc_zero(score[i][0]), zk_acc_zero(score[i][1]);
        for (int kk = 0; kk < STEPS; kk++) {
            for (int i = 0; i < KEY_TILES; i++) {
                const zk_frag key = keys.frag(16 * i, 16 * kk, lane);
                for (int g = 0; g < 2; g++) zk_mma(score[i][g], key, query[g][kk]);
            }
        }
        const bool masked = s.key_valid || key0 < c.all.first || key0 + FWD_KEYS > c.all.end;
        for (int g = 0; g < 2; g++) {
            float high = -INFINITE;
            // The vector unit has more to do here than the matrix unit: the largest score is found before they are scaled, and scaling and
            // subtracting are one instruction, as is `fmax`. (A NaN is passed over here, and comes through the exponential.)
            for (int i = 0; i < KEY_TILES; i++) {
                if (masked) hide(s, unit.sequence, score[i][g].v, key0 + 16 * i + 4 * (lane >> 4), c.own[g]);
                for (int e = 0; e < 4; e++) high = __builtin_fmaxf(high, score[i][g].v[e]);
            }
            high = __builtin_fmaxf(high, zk_shfl_xor(high, 16));
            high = __builtin_fmaxf(high, zk_shfl_xor(high, 32));
            high = __builtin_fmaxf(high * by, top[g]);
            const float shrink = zk_exp2(top[g] - high);
            top[g] = high;
            f32x4 added = (f32x4)(0.0f);
            for (int i = 0; i < KEY_TILES; i++) {
                for (int e = 0; e < 4; e++) score[i][g].v[e] = zk_exp2(__builtin_fmaf(score[i][g].v[e], by, -high));
                added += score[i][g].v;
            }
            total[g] = total[g] * shrink + ((added[0] + added[1]) + (added[2] + added[3]));
            for (int d = 0; d < STEPS; d++) sum[d][g].v *= shrink;
        }
        for (int i = 0; i < KEY_TILES; i++) {
            const zk_frag p[2] = {zk_acc_as_right(score[i][0]), zk_acc_as_right(score[i][1])};
            for (int d = 0; d < STEPS; d++) {
                const zk_frag value = values.frag(16 * d, 16 * i, lane);
                for (int g = 0; g < 2; g++) zk_mma(sum[d][g], value, p[g]);
            }
        }
    }
    for (int g = 0; g < 2; g++) {
        total[g] += zk_shfl_xor(total[g], 16);
        total[g] += zk_shfl_xor(total[g], 32);
        if (c.column[g] >= unit.columns) continue;
        const long place = unit.place(s, c.column[g]);
        const float inverse = total[g] > 0.0f ? 1.0f / total[g] : 0.0f;
        for (int d = 0; d < STEPS; d++) zk_store4(out + place * D + 16 * d + 4 * (lane >> 4), sum[d][g].v * inverse);
        if (lane < 16) lse[place] = total[g] > 0.0f ? (top[g] + zk_log2(total[g])) * LN_2 : INFINITE;
    }
}

/// A score's probability, from its product times scale and log2 e. 0 where hidden, and where the row sees nothing.
ZK_DEV float probability(float score, float lse) { return zk_exp2(score - lse * LOG2_E); }

template <int D>
ZK_DEV void backward_queries(const Sight& s, const bf16_t* q, const bf16_t* k, const bf16_t* v, const float* lse, const float* delta,
                             const bf16_t* d_out, float* dq, bf16_t* lds_k, bf16_t* lds_v, bf16_t* lds_turned) {
    constexpr int STEPS = D / 16;
    const int lane = zk_tid() % ZK_WAVE;
    const Unit unit(s, zk_bid_y());
    const int blocks = (unit.columns + WAVES * OWN - 1) / (WAVES * OWN);
    Columns c;
    find_columns(c, s, unit, (blocks - 1 - zk_bid_x()) * WAVES * OWN, (int*)lds_k);
    const LdsTile<D> keys{lds_k}, values{lds_v};
    const LdsTile<BWD_KEYS> turned{lds_turned};

    zk_frag query[2][STEPS], grad[2][STEPS];
    zk_acc sum[STEPS][2];
    float own_lse[2], own_delta[2], own_slope[2];
    for (int g = 0; g < 2; g++) {
        const long place = unit.place(s, zk_min_i(c.column[g], unit.columns - 1));
        own_rows<D>(query[g], q + place * D, lane);
        own_rows<D>(grad[g], d_out + place * D, lane);
        own_lse[g] = lse[place];
        own_delta[g] = delta[place];
        own_slope[g] = slope(s, c.own[g]);
        for (int d = 0; d < STEPS; d++) zk_acc_zero(sum[d][g]);
    }
    const float by = s.scale * LOG2_E;
    for (int key0 = c.block.first / BWD_KEYS * BWD_KEYS; key0 < c.block.end; key0 += BWD_KEYS) {
        zk_barrier();
        stage_keys<D, BWD_KEYS, true, true>(s, unit, k, key0, keys, turned);
        stage_keys<D, BWD_KEYS, true, false>(s, unit, v, key0, values, turned);
        zk_barrier();
        if (key0 >= c.some.end || key0 + BWD_KEYS <= c.some.first) continue;
        const bool masked = s.key_valid || key0 < c.all.first || key0 + BWD_KEYS > c.all.end;
        for (int i = 0; i < BWD_KEYS / 16; i++) {
            zk_acc score[2], dp[2];
            for (int g = 0; g < 2; g++) zk_acc_zero(score[g]), zk_acc_zero(dp[g]);
            for (int kk = 0; kk < STEPS; kk++) {
                const zk_frag key = keys.frag(16 * i, 16 * kk, lane), value = values.frag(16 * i, 16 * kk, lane);
                for (int g = 0; g < 2; g++) {
                    zk_mma(score[g], key, query[g][kk]);
                    zk_mma(dp[g], value, grad[g][kk]);
                }
            }
            zk_frag ds[2];
            for (int g = 0; g < 2; g++) {
                score[g].v *= by;
                if (masked) hide(s, unit.sequence, score[g].v, key0 + 16 * i + 4 * (lane >> 4), c.own[g]);
                for (int e = 0; e < 4; e++) {
                    const float p = probability(score[g].v[e], own_lse[g]);
                    dp[g].v[e] = p * (dp[g].v[e] - own_delta[g]) * own_slope[g];
                }
                ds[g] = zk_acc_as_right(dp[g]);
            }
            for (int d = 0; d < STEPS; d++) {
                const zk_frag key = turned.frag(16 * d, 16 * i, lane);
                for (int g = 0; g < 2; g++) zk_mma(sum[d][g], key, ds[g]);
            }
        }
    }
    for (int g = 0; g < 2; g++) {
        if (c.column[g] >= unit.columns) continue;
        float* to = dq + unit.place(s, c.column[g]) * D;
        for (int d = 0; d < STEPS; d++) zk_store4(to + 16 * d + 4 * (lane >> 4), sum[d][g].v);
    }
}

/// What the gradients of keys need of BWD_COLUMNS columns, in LDS.
struct ColumnNumbers {
    float *lse, *delta, *slope;
    int *first, *end;
    /// Of the columns at hand and of the next ones, in turn.
    unsigned* places;
};

/// The first row of a sequence whose position is `at` or more (positions rise from row to row).
ZK_DEV int first_row_at(const Sight& s, int sequence, int at) {
    int low = 0, high = s.rows;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (position(s, sequence * s.rows + middle) < at) low = middle + 1;
        else high = middle;
    }
    return low;
}

/// The columns of a unit before the first one that sees none of the keys up to `last`: first visible keys rise from row to row.
ZK_DEV int columns_that_see(const Sight& s, const Unit& unit, int last) {
    int low = 0, high = s.rows;
    while (low < high) {
        const int middle = (low + high) / 2;
        if (visible(s, unit.sequence * s.rows + middle).first <= last) low = middle + 1;
        else high = middle;
    }
    return low * unit.group;
}

template <int D>
ZK_DEV void backward_keys(const Sight& s, const bf16_t* q, const bf16_t* k, const bf16_t* v, const float* lse, const float* delta,
                          const bf16_t* d_out, float* dk, float* dv, bf16_t* lds_q, bf16_t* lds_grad, bf16_t* lds_q_turned,
                          bf16_t* lds_grad_turned, ColumnNumbers n) {
    constexpr int STEPS = D / 16;
    const int t = zk_tid(), lane = t % ZK_WAVE, wave = t / ZK_WAVE;
    const Unit unit(s, zk_bid_y());
    const int block0 = zk_bid_x() * WAVES * OWN, key0 = block0 + wave * OWN, last = zk_min_i(s.keys, block0 + WAVES * OWN) - 1;
    const LdsTile<D> queries{lds_q}, grads{lds_grad};
    const LdsTile<BWD_COLUMNS> queries_turned{lds_q_turned}, grads_turned{lds_grad_turned};

    int own[2];
    bool padding[2];
    zk_frag key[2][STEPS], value[2][STEPS];
    zk_acc sum_k[STEPS][2], sum_v[STEPS][2];
    for (int g = 0; g < 2; g++) {
        own[g] = key0 + 16 * g + (lane & 15);
        const int there = zk_min_i(own[g], s.keys - 1);
        padding[g] = is_padding(s, unit.sequence, there);
        own_rows<D>(key[g], k + unit.key(s, there) * D, lane);
        own_rows<D>(value[g], v + unit.key(s, there) * D, lane);
        for (int d = 0; d < STEPS; d++) zk_acc_zero(sum_k[d][g]), zk_acc_zero(sum_v[d][g]);
    }
    const float by = s.scale * LOG2_E;
    const int from = first_row_at(s, unit.sequence, block0) * unit.group / BWD_COLUMNS * BWD_COLUMNS;
    const int to = columns_that_see(s, unit, last);
    if (t < BWD_COLUMNS) n.places[t] = unit.place_from_first(s, from + t);
    const unsigned *places = n.places, *next = n.places + BWD_COLUMNS;
    for (int column0 = from; column0 < to; column0 += BWD_COLUMNS) {
        zk_barrier();
        stage_columns<D, BWD_COLUMNS>(s, unit, q, column0, places, queries, queries_turned);
        stage_columns<D, BWD_COLUMNS>(s, unit, d_out, column0, places, grads, grads_turned);
        if (t < BWD_COLUMNS) {
            ((unsigned*)next)[t] = unit.place_from_first(s, column0 + BWD_COLUMNS + t);
            const bool there = column0 + t < unit.columns;
            const int column = zk_min_i(column0 + t, unit.columns - 1);
            const Span span = visible(s, unit.row(s, column));
            n.lse[t] = there ? lse[unit.place(s, column)] : INFINITE;
            n.delta[t] = delta[unit.place(s, column)];
            n.slope[t] = slope(s, span);
            n.first[t] = span.first;
            n.end[t] = span.end;
        }
        zk_barrier();
        const unsigned* now = places;
        places = next;
        next = now;
        // Ends rise from row to row, too, so the first and the last column tell whether all see all keys of the wave.
        const bool all_seen = !s.key_valid && n.first[BWD_COLUMNS - 1] <= key0 && n.end[0] >= key0 + OWN;
        for (int i = 0; i < BWD_COLUMNS / 16; i++) {
            const int l = zk_opaque(lane);
            zk_acc score[2], dp[2];
            for (int g = 0; g < 2; g++) zk_acc_zero(score[g]), zk_acc_zero(dp[g]);
            for (int kk = 0; kk < STEPS; kk++) {
                const zk_frag query = queries.frag(16 * i, 16 * kk, l), grad = grads.frag(16 * i, 16 * kk, l);
                for (int g = 0; g < 2; g++) {
                    zk_mma(score[g], query, key[g][kk]);
                    zk_mma(dp[g], grad, value[g][kk]);
                }
                if (kk % 4 == 3) zk_keep_order();
            }
            zk_frag p[2], ds[2];
            for (int g = 0; g < 2; g++) {
                for (int e = 0; e < 4; e++) {
                    const int c = 16 * i + 4 * (lane >> 4) + e;
                    float probable = probability(score[g].v[e] * by, n.lse[c]);
                    if (!all_seen && (own[g] < n.first[c] || own[g] >= n.end[c] || padding[g])) probable = 0.0f;
                    score[g].v[e] = probable;
                    dp[g].v[e] = probable * (dp[g].v[e] - n.delta[c]) * n.slope[c];
                }
                p[g] = zk_acc_as_right(score[g]);
                ds[g] = zk_acc_as_right(dp[g]);
            }
            for (int d = 0; d < STEPS; d++) {
                const zk_frag query = queries_turned.frag(16 * d, 16 * i, l), grad = grads_turned.frag(16 * d, 16 * i, l);
                for (int g = 0; g < 2; g++) {
                    zk_mma(sum_k[d][g], query, ds[g]);
                    zk_mma(sum_v[d][g], grad, p[g]);
                }
                if (d % 4 == 3) zk_keep_order();
            }
        }
    }
    for (int g = 0; g < 2; g++) {
        if (own[g] >= s.keys) continue;
        const long at = unit.key(s, own[g]) * D + 4 * (lane >> 4);
        for (int d = 0; d < STEPS; d++) {
            zk_store4(dk + at + 16 * d, sum_k[d][g].v);
            zk_store4(dv + at + 16 * d, sum_v[d][g].v);
        }
    }
}

#define ATTENTION(D) \
    ZK_KERNEL_WAVES(2, attention_fwd_##D, BLOCK, const bf16_t* q, const bf16_t* k, const bf16_t* v, bf16_t* out, float* lse, SIGHT_ARGUMENTS) { \
        ZK_SHARED(bf16_t, lds_k, FWD_KEYS* D); \
        ZK_SHARED(bf16_t, lds_v, FWD_KEYS* D); \
        forward<D>(SIGHT, q, k, v, out, lse, lds_k, lds_v); \
    } \
    ZK_DEFINE_CPU_ENTRY(attention_fwd_##D, BLOCK) \
    ZK_KERNEL_WAVES(2, attention_bwd_q_##D, BLOCK, const bf16_t* q, const bf16_t* k, const bf16_t* v, const float* lse, const float* delta, \
              const bf16_t* d_out, float* dq, SIGHT_ARGUMENTS) { \
        ZK_SHARED(bf16_t, lds_k, BWD_KEYS* D); \
        ZK_SHARED(bf16_t, lds_v, BWD_KEYS* D); \
        ZK_SHARED(bf16_t, lds_turned, BWD_KEYS* D); \
        backward_queries<D>(SIGHT, q, k, v, lse, delta, d_out, dq, lds_k, lds_v, lds_turned); \
    } \
    ZK_DEFINE_CPU_ENTRY(attention_bwd_q_##D, BLOCK) \
    ZK_KERNEL_WAVES(2, attention_bwd_kv_##D, BLOCK, const bf16_t* q, const bf16_t* k, const bf16_t* v, const float* lse, const float* delta, \
              const bf16_t* d_out, float* dk, float* dv, SIGHT_ARGUMENTS) { \
        ZK_SHARED(bf16_t, lds_q, BWD_COLUMNS* D); \
        ZK_SHARED(bf16_t, lds_grad, BWD_COLUMNS* D); \
        ZK_SHARED(bf16_t, lds_q_turned, BWD_COLUMNS* D); \
        ZK_SHARED(bf16_t, lds_grad_turned, BWD_COLUMNS* D); \
        ZK_SHARED(float, lds_numbers, 3 * BWD_COLUMNS); \
        ZK_SHARED(int, lds_spans, 2 * BWD_COLUMNS); \
        ZK_SHARED(unsigned, lds_places, 2 * BWD_COLUMNS); \
        const ColumnNumbers numbers{lds_numbers, lds_numbers + BWD_COLUMNS, lds_numbers + 2 * BWD_COLUMNS, lds_spans, \
                                    lds_spans + BWD_COLUMNS, lds_places}; \
        backward_keys<D>(SIGHT, q, k, v, lse, delta, d_out, dk, dv, lds_q, lds_grad, lds_q_turned, lds_grad_turned, numbers); \
    } \
    ZK_DEFINE_CPU_ENTRY(attention_bwd_kv_##D, BLOCK)

ATTENTION(16)
ATTENTION(32)
ATTENTION(64)
ATTENTION(128)

// delta[i] = sum of out * d_out over the D numbers of row and head i, which the gradient of the softmax needs. A wave for each.
ZK_KERNEL(attention_bwd_delta, BLOCK, const bf16_t* out, const bf16_t* d_out, float* delta, int count, int d) {
    const int i = zk_bid_x() * WAVES + zk_tid() / ZK_WAVE, lane = zk_tid() % ZK_WAVE;
    if (i >= count) return;
    float sum = 0.0f;
    for (int c = lane; c < d; c += ZK_WAVE) sum += zk_bf2f(out[(long)i * d + c]) * zk_bf2f(d_out[(long)i * d + c]);
    sum = zk_wave_sum(sum);
    if (lane == 0) delta[i] = sum;
}
ZK_DEFINE_CPU_ENTRY(attention_bwd_delta, BLOCK)
