// Kernels with a fault each, which the fiber runtime must find; and the same without the fault, in which it must find none.
#include "../zk.h"

enum Fault {
    NONE,
    NO_BARRIER_BEFORE_READ,
    NO_BARRIER_BEFORE_NEXT_WRITE,
    BARRIER_OF_SOME,
    TWO_BARRIERS,
    SHUFFLE_OF_SOME,
    SHUFFLE_WITH_OTHER_MASK,
    LEAVES_BEFORE_BARRIER,
    GLOBAL_RACE,
    RACE_OF_GROUPS,
    NO_WAVE_BARRIER,
    BEYOND_LDS,
    BEYOND_BUFFER,
    PARTIAL_MFMA,
    UNWRITTEN_LDS,
    WRONG_LANE,
    NUM_FAULTS
};

// out[group * 128 + i] = 2 * (sum of the 64 numbers of wave i / 64) of x[group * 128 ..], by way of LDS, twice.
ZK_KERNEL(detector, 128, const float* x, float* out, int fault) {
    ZK_SHARED(float, lds, 128);
    ZK_SHARED(bf16_t, tile, 16 * 20);
    const int t = zk_tid(), lane = t % 64, at = zk_bid_x() * 128;
    if (fault == LEAVES_BEFORE_BARRIER && t == 5) return;
    if (fault != UNWRITTEN_LDS || t != 77) lds[t] = x[at + t];
    if (fault == BARRIER_OF_SOME) {
        if (t < 100) zk_barrier();
    } else if (fault == TWO_BARRIERS) {
        if (t < 64) zk_barrier();
        else zk_barrier();
    } else if (fault != NO_BARRIER_BEFORE_READ) {
        zk_barrier();
    }
    float v = lds[t ^ 127];
    for (int mask = 32; mask; mask >>= 1) {
        if (fault == SHUFFLE_OF_SOME) {
            if (lane < 40) v += zk_shfl_xor(v, mask);
        } else {
            v += zk_shfl_xor(v, fault == SHUFFLE_WITH_OTHER_MASK && lane == 3 ? 1 : fault == WRONG_LANE && mask == 16 ? 8 : mask);
        }
    }
    if (fault != NO_BARRIER_BEFORE_NEXT_WRITE) zk_barrier();
    lds[fault == BEYOND_LDS && t == 127 ? 128 : t] = v;
    if (fault != NO_WAVE_BARRIER) zk_wave_barrier();
    v += lds[t ^ 1];
    // A product of zeros, which adds nothing.
    for (int i = t; i < 16 * 20; i += 128) tile[i] = 0;
    zk_barrier();
    if (fault != PARTIAL_MFMA || lane < 32) {
        zk_acc acc;
        zk_acc_zero(acc);
        const zk_frag f = zk_load_frag(tile, 20, lane);
        zk_mma(acc, f, f);
        v += zk_acc_get(acc, 0);
    }
    int place = at + (t ^ 64);
    if (fault == GLOBAL_RACE && t == 9) place = at;
    if (fault == RACE_OF_GROUPS && t == 64) place = 0;
    if (fault == BEYOND_BUFFER && t == 1) place = 256;
    out[place] = v;
}
ZK_DEFINE_CPU_ENTRY(detector, 128)
