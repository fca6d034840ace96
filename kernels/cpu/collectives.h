// What the lanes of a wave do together.
#pragma once
#include "../zk.h"

namespace zk {

enum class Op { Barrier, Shuffle, Mfma };

struct Wave {
    /// Lanes that have come to the collective `op` at `site`, and what they brought.
    int arrived;
    Op op;
    int arg;
    const char* site;
    int lanes;
    /// How often the wave was ordered by a barrier of its own.
    unsigned barriers;
    int value[64], result[64];
    const s16x4* a[64];
    const s16x4* b[64];
    f32x4* c[64];
};

/// Computes the result once all lanes have come.
void finish_collective(Wave& w);

}  // namespace zk
