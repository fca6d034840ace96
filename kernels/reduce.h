// Sums over the work-items of a workgroup.
#pragma once
#include "zk.h"

/// Sum of `v` over a workgroup of BLOCK work-items, the same bits in all. `lds`: BLOCK / ZK_WAVE numbers that nobody else uses
/// until the next barrier after this.
template <int BLOCK>
ZK_DEV float block_sum(float v, float* lds) {
    v = zk_wave_sum(v);
    if (zk_tid() % ZK_WAVE == 0) lds[zk_tid() / ZK_WAVE] = v;
    zk_barrier();
    float sum = 0.0f;
    for (int i = 0; i < BLOCK / ZK_WAVE; i++) sum += lds[i];
    return sum;
}
