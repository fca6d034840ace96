// Attention's rows that see no key at all: padding before a sequence's first real token. Such a row weighs every key of its
// sequence alike, and its scores have a gradient all the same, as in Hugging Face's code, which hides keys by adding a huge negative
// number. attention_fwd leaves them (lse = +infinity); these kernels run after it, and after the backward, only where there is
// padding. They are rare: plain loops in f32, a wave for each row (or key) and head.
#include "attention.h"

#define BLOCK 64
#define ROW_KERNEL(name, ...) ZK_KERNEL(name, BLOCK, __VA_ARGS__, int d, SIGHT_ARGUMENTS)

/// dot of d bf16 numbers, in all lanes.
ZK_DEV float dot(const bf16_t* a, const bf16_t* b, int d) {
    float sum = 0.0f;
    for (int c = zk_tid(); c < d; c += BLOCK) sum += zk_bf2f(a[c]) * zk_bf2f(b[c]);
    return zk_wave_sum(sum);
}

// Grid: columns of a unit, units. out = mean of the values.
ROW_KERNEL(attention_padding_fwd, const bf16_t* v, bf16_t* out, const float* lse) {
    const Sight s = SIGHT;
    const Unit unit(s, zk_bid_y());
    const long place = unit.place(s, zk_bid_x());
    if (lse[place] != INFINITE) return;
    for (int c = zk_tid(); c < d; c += BLOCK) {
        float sum = 0.0f;
        for (int key = 0; key < keys; key++) sum += zk_bf2f(v[unit.key(s, key) * d + c]);
        out[place * d + c] = zk_f2bf(sum / (float)keys);
    }
}
ZK_DEFINE_CPU_ENTRY(attention_padding_fwd, BLOCK)

ZK_DEV float score_gradient(const Sight& s, const bf16_t* d_out, const bf16_t* v, float delta, int d) {
    return (dot(d_out, v, d) - delta) / (float)s.keys * (s.keys == 1 ? 0.0f : s.scale);
}

// Grid: columns of a unit, units. Writes dq of such rows.
ROW_KERNEL(attention_padding_bwd_q, const bf16_t* k, const bf16_t* v, const float* lse, const float* delta, const bf16_t* d_out,
           float* dq) {
    const Sight s = SIGHT;
    const Unit unit(s, zk_bid_y());
    const long place = unit.place(s, zk_bid_x());
    if (lse[place] != INFINITE) return;
    for (int c0 = 0; c0 < d; c0 += BLOCK) {
        const int c = c0 + zk_tid();
        float sum = 0.0f;
        for (int key = 0; key < keys; key++) {
            const long at = unit.key(s, key) * d;
            const float ds = score_gradient(s, d_out + place * d, v + at, delta[place], d);
            if (c < d) sum += ds * zk_bf2f(k[at + c]);
        }
        if (c < d) dq[place * d + c] = sum;
    }
}
ZK_DEFINE_CPU_ENTRY(attention_padding_bwd_q, BLOCK)

// Grid: keys, units. Adds to dk and dv what such rows give, in the order of the columns.
ROW_KERNEL(attention_padding_bwd_kv, const bf16_t* q, const bf16_t* v, const float* lse, const float* delta, const bf16_t* d_out,
           float* dk, float* dv) {
    const Sight s = SIGHT;
    const Unit unit(s, zk_bid_y());
    const long at = unit.key(s, zk_bid_x()) * d;
    for (int c0 = 0; c0 < d; c0 += BLOCK) {
        const int c = c0 + zk_tid();
        float sum_k = 0.0f, sum_v = 0.0f;
        for (int column = 0; column < unit.columns; column++) {
            const long place = unit.place(s, column);
            if (lse[place] != INFINITE) continue;
            const float ds = score_gradient(s, d_out + place * d, v + at, delta[place], d);
            if (c >= d) continue;
            sum_k += ds * zk_bf2f(q[place * d + c]);
            sum_v += zk_bf2f(d_out[place * d + c]) / (float)keys;
        }
        if (c >= d) continue;
        dk[at + c] += sum_k;
        dv[at + c] += sum_v;
    }
}
ZK_DEFINE_CPU_ENTRY(attention_padding_bwd_kv, BLOCK)
