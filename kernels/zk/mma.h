// Products of 16x16 tiles: D[16][16] += A[16][16] Bt[16][16]^T. A is row-major [m][k], Bt row-major [n][k]; bf16 in, f32 out.
#pragma once

#if defined(ZK_AMD) || defined(ZK_CPU)
// Lane l holds, of A and Bt alike: row l % 16, k = 4 * (l / 16) .. + 3.
struct zk_frag {
    s16x4 v;
};
// Lane l holds D[4 * (l / 16) + i][l % 16].
struct zk_acc {
    f32x4 v;
};
#define ZK_ACC_N 4
ZK_DEV zk_frag zk_load_frag(const bf16_t* tile, int ld, int lane) {
    zk_frag f;
    f.v = *(const s16x4*)__builtin_assume_aligned(tile + (lane & 15) * ld + 4 * (lane >> 4), 8);
    return f;
}
ZK_DEV void zk_mma(zk_acc& c, const zk_frag& a, const zk_frag& b) { c.v = zk_mfma_16x16x16_bf16(a.v, b.v, c.v); }
ZK_DEV int zk_acc_row(int lane, int i) { return 4 * (lane >> 4) + i; }
ZK_DEV int zk_acc_col(int lane, int) { return lane & 15; }
ZK_DEV float zk_acc_get(const zk_acc& c, int i) { return c.v[i]; }
ZK_DEV void zk_acc_zero(zk_acc& c) { c.v = (f32x4)(0.0f); }

// A tile of products D[m][n] as the right operand [n][k = m] of the next one: lane l of an accumulator holds just the four
// numbers that lane l of a fragment must hold, so nothing moves between lanes.
ZK_DEV zk_frag zk_acc_as_right(const zk_acc& c) {
    zk_frag f;
    f.v = __builtin_bit_cast(s16x4, zk_pack4(c.v));
    return f;
}
#else
struct zk_frag {
    unsigned r[4];
};
struct zk_acc {
    float v[8];
};
#define ZK_ACC_N 8
ZK_DEV zk_frag zk_load_frag(const bf16_t* tile, int ld, int lane) {
    const int row = lane >> 2, k = (lane & 3) * 2;
    zk_frag f;
    f.r[0] = *(const unsigned*)(tile + row * ld + k);
    f.r[1] = *(const unsigned*)(tile + (row + 8) * ld + k);
    f.r[2] = *(const unsigned*)(tile + row * ld + k + 8);
    f.r[3] = *(const unsigned*)(tile + (row + 8) * ld + k + 8);
    return f;
}
// Two m16n8k16 products, one for each half of the columns.
ZK_DEV void zk_mma(zk_acc& c, const zk_frag& a, const zk_frag& b) {
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c.v[0]), "+f"(c.v[1]), "+f"(c.v[2]), "+f"(c.v[3])
                 : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[0]), "r"(b.r[2]));
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3},{%4,%5,%6,%7},{%8,%9},{%0,%1,%2,%3};"
                 : "+f"(c.v[4]), "+f"(c.v[5]), "+f"(c.v[6]), "+f"(c.v[7])
                 : "r"(a.r[0]), "r"(a.r[1]), "r"(a.r[2]), "r"(a.r[3]), "r"(b.r[1]), "r"(b.r[3]));
}
ZK_DEV int zk_acc_row(int lane, int i) { return (lane >> 2) + ((i & 2) ? 8 : 0); }
ZK_DEV int zk_acc_col(int lane, int i) { return (lane & 3) * 2 + (i & 1) + ((i & 4) ? 8 : 0); }
ZK_DEV float zk_acc_get(const zk_acc& c, int i) { return c.v[i]; }
ZK_DEV void zk_acc_zero(zk_acc& c) {
    for (int i = 0; i < 8; i++) c.v[i] = 0.0f;
}
#endif
