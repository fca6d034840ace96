// stream.zk.cpp against plain loops.
#include "check.h"

namespace {

/// Whole numbers, so that sums in any order are exact.
Array<float> whole_numbers(int count, int seed) {
    Random random(seed);
    Array<float> x(count);
    for (float& v : x.v) v = (float)random.below(100);
    return x;
}

void stream(int vectors) {
    const std::string name = "stream of " + std::to_string(vectors);
    const int count = 4 * vectors, groups = (vectors + 1023) / 1024, pieces = 64;
    Array<float> a = whole_numbers(count, 1), b = whole_numbers(count, 2), table = whole_numbers(16 * pieces, 3);
    Array<float> written(count), copied(count), triad(count), sums(4 * groups), random_sums(4 * groups);
    launch("stream_read", {groups}, 256, {a, sums, (long)vectors});
    launch("stream_write", {groups}, 256, {written, 2.5f, (long)vectors});
    launch("stream_copy", {groups}, 256, {a, copied, (long)vectors});
    launch("stream_triad", {groups}, 256, {a, b, triad, 0.5f, (long)vectors});
    launch("stream_random", {groups}, 256, {table, random_sums, (long)vectors, pieces - 1});
    double want = 0.0, got = 0.0, of_pieces = 0.0;
    for (int i = 0; i < count; i++) {
        expect(written[i] == 2.5f && copied[i] == a[i] && triad[i] == a[i] + 0.5f * b[i], name);
        want += a[i];
    }
    for (float s : sums.v) got += s;
    expect(got == want, name + " sum");
    // Multiplications of 32 bits, and the last steps of murmur3's finalizer by hand.
    for (int v = 0; v < vectors; v++) {
        unsigned long long i = (unsigned)(v / 4);
        i = (i ^ i >> 16) * 0x85ebca6bULL % 0x100000000ULL;
        i = (i ^ i >> 13) * 0xc2b2ae35ULL % 0x100000000ULL;
        const unsigned piece = (unsigned)(i ^ i >> 16) % pieces;
        for (int e = 0; e < 4; e++) of_pieces += table[16 * piece + 4 * (v % 4) + e];
    }
    got = 0.0;
    for (float s : random_sums.v) got += s;
    expect(got == of_pieces, name + " random");
}

}  // namespace

ZK_TEST(stream) {
    stream(1);
    stream(1024);
    stream(2500);
}
