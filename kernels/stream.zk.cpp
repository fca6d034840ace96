// Patterns of memory traffic, for `zaya bench`: what the device's memory gives to a program that does nothing else.
//
// A work-item moves four vectors of 16 bytes, a workgroup apart, so that a wave asks for whole lines and has several under way.
// `count`: vectors of 4 numbers. Grid count / 1024 rounded up.
#include "zk.h"

#define BLOCK 256
#define VECTORS 4

/// Number of a work-item's i-th vector.
ZK_DEV long vector_at(int i) { return ((long)zk_bid_x() * VECTORS + i) * BLOCK + zk_tid(); }

/// One sum of each wave, which keeps the compiler from leaving the reading out; 64 sums' worth of vectors for one number written.
ZK_DEV void write_sum(float* sums, float sum) {
    sum = zk_wave_sum(sum);
    if (zk_tid() % ZK_WAVE == 0) sums[zk_bid_x() * (BLOCK / ZK_WAVE) + zk_tid() / ZK_WAVE] = sum;
}

ZK_DEV float sum_of(f32x4 v) { return (v[0] + v[1]) + (v[2] + v[3]); }

/// Reads `from` [4 count]; sums [4 workgroups].
ZK_KERNEL(stream_read, BLOCK, const float* from, float* sums, long count) {
    f32x4 v[VECTORS];
    for (int i = 0; i < VECTORS; i++) v[i] = vector_at(i) < count ? zk_load4(from + 4 * vector_at(i)) : f32x4{0.0f, 0.0f, 0.0f, 0.0f};
    float sum = 0.0f;
    for (int i = 0; i < VECTORS; i++) sum += sum_of(v[i]);
    write_sum(sums, sum);
}
ZK_DEFINE_CPU_ENTRY(stream_read, BLOCK)

/// to = value
ZK_KERNEL(stream_write, BLOCK, float* to, float value, long count) {
    for (int i = 0; i < VECTORS; i++)
        if (vector_at(i) < count) zk_store4(to + 4 * vector_at(i), f32x4{value, value, value, value});
}
ZK_DEFINE_CPU_ENTRY(stream_write, BLOCK)

/// to = from
ZK_KERNEL(stream_copy, BLOCK, const float* from, float* to, long count) {
    for (int i = 0; i < VECTORS; i++)
        if (vector_at(i) < count) zk_store4(to + 4 * vector_at(i), zk_load4(from + 4 * vector_at(i)));
}
ZK_DEFINE_CPU_ENTRY(stream_copy, BLOCK)

/// to = a + factor b
ZK_KERNEL(stream_triad, BLOCK, const float* a, const float* b, float* to, float factor, long count) {
    for (int i = 0; i < VECTORS; i++)
        if (vector_at(i) < count) zk_store4(to + 4 * vector_at(i), zk_load4(a + 4 * vector_at(i)) + factor * zk_load4(b + 4 * vector_at(i)));
}
ZK_DEFINE_CPU_ENTRY(stream_triad, BLOCK)

/// Which of 2^32 places the i-th read goes to: every place once (each line is a bijection), in an order without a pattern.
ZK_DEV unsigned scattered(unsigned i) {
    i = (i ^ i >> 16) * 0x85ebca6bu;
    i = (i ^ i >> 13) * 0xc2b2ae35u;
    return i ^ i >> 16;
}

/// Reads pieces of 64 bytes, four lanes each, at places without a pattern. `from` has `mask` + 1 pieces, a power of two; sums as above.
ZK_KERNEL(stream_random, BLOCK, const float* from, float* sums, long count, unsigned mask) {
    f32x4 v[VECTORS];
    for (int i = 0; i < VECTORS; i++) {
        const long at = vector_at(i), piece = scattered((unsigned)(at / 4)) & mask;
        v[i] = at < count ? zk_load4(from + 16 * piece + 4 * (at % 4)) : f32x4{0.0f, 0.0f, 0.0f, 0.0f};
    }
    float sum = 0.0f;
    for (int i = 0; i < VECTORS; i++) sum += sum_of(v[i]);
    write_sum(sums, sum);
}
ZK_DEFINE_CPU_ENTRY(stream_random, BLOCK)
