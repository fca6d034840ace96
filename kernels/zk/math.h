// Conversions, copies and reductions that are the same everywhere.
#pragma once

ZK_DEV float zk_bf2f(bf16_t h) {
    return __builtin_bit_cast(float, (unsigned)h << 16);
}
// To the nearest, ties to even. A NaN may become an infinity: no kernel makes one from finite input.
ZK_DEV bf16_t zk_f2bf(float f) {
    unsigned u = __builtin_bit_cast(unsigned, f);
    return (bf16_t)((u + 0x7fffu + ((u >> 16) & 1u)) >> 16);
}
ZK_DEV float zk_max(float a, float b) { return a > b ? a : b; }
ZK_DEV float zk_min(float a, float b) { return a < b ? a : b; }
ZK_DEV int zk_max_i(int a, int b) { return a > b ? a : b; }
ZK_DEV int zk_min_i(int a, int b) { return a < b ? a : b; }

// One load and one store each. Both places must be aligned to their size.
ZK_DEV void zk_copy16(bf16_t* to, const bf16_t* from) {
    *(u32x4*)__builtin_assume_aligned(to, 16) = *(const u32x4*)__builtin_assume_aligned(from, 16);
}
ZK_DEV void zk_copy8(bf16_t* to, const bf16_t* from) {
    *(u32x2*)__builtin_assume_aligned(to, 8) = *(const u32x2*)__builtin_assume_aligned(from, 8);
}
ZK_DEV f32x4 zk_load4(const float* from) { return *(const f32x4*)__builtin_assume_aligned(from, 16); }
ZK_DEV void zk_store4(float* to, f32x4 v) { *(f32x4*)__builtin_assume_aligned(to, 16) = v; }
ZK_DEV f32x4 zk_load4(const bf16_t* from) {
    u32x2 u = *(const u32x2*)__builtin_assume_aligned(from, 8);
    f32x4 v;
    v[0] = __builtin_bit_cast(float, u[0] << 16);
    v[1] = __builtin_bit_cast(float, u[0] & 0xffff0000u);
    v[2] = __builtin_bit_cast(float, u[1] << 16);
    v[3] = __builtin_bit_cast(float, u[1] & 0xffff0000u);
    return v;
}
ZK_DEV u32x2 zk_pack4(f32x4 v) {
    u32x2 u;
    u[0] = (unsigned)zk_f2bf(v[0]) | (unsigned)zk_f2bf(v[1]) << 16;
    u[1] = (unsigned)zk_f2bf(v[2]) | (unsigned)zk_f2bf(v[3]) << 16;
    return u;
}
ZK_DEV void zk_store4(bf16_t* to, f32x4 v) { *(u32x2*)__builtin_assume_aligned(to, 8) = zk_pack4(v); }

// Single numbers of either storage type.
ZK_DEV float zk_load(const float* p) { return *p; }
ZK_DEV float zk_load(const bf16_t* p) { return zk_bf2f(*p); }
ZK_DEV void zk_store(float* p, float v) { *p = v; }
ZK_DEV void zk_store(bf16_t* p, float v) { *p = zk_f2bf(v); }

// Over all lanes of a wave; every lane gets the same bits, since a pair adds the same two numbers.
ZK_DEV float zk_wave_sum(float v) {
    for (int mask = ZK_WAVE / 2; mask; mask >>= 1) v += zk_shfl_xor(v, mask);
    return v;
}
ZK_DEV float zk_wave_max(float v) {
    for (int mask = ZK_WAVE / 2; mask; mask >>= 1) v = zk_max(v, zk_shfl_xor(v, mask));
    return v;
}
