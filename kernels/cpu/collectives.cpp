#include "collectives.h"

namespace zk {

static float number(short bits) { return zk_bf2f((bf16_t)bits); }

/// v_mfma_f32_16x16x16_bf16: the sum over k is taken from k = 0 on, in f32, onto what c holds.
static void mfma(Wave& w) {
    float a[16][16], b[16][16];
    for (int lane = 0; lane < 64; lane++) {
        for (int i = 0; i < 4; i++) {
            a[lane & 15][4 * (lane >> 4) + i] = number((*w.a[lane])[i]);
            b[lane & 15][4 * (lane >> 4) + i] = number((*w.b[lane])[i]);
        }
    }
    for (int lane = 0; lane < 64; lane++) {
        for (int i = 0; i < 4; i++) {
            float sum = (*w.c[lane])[i];
            for (int k = 0; k < 16; k++) sum += a[4 * (lane >> 4) + i][k] * b[lane & 15][k];
            (*w.c[lane])[i] = sum;
        }
    }
}

void finish_collective(Wave& w) {
    switch (w.op) {
        case Op::Barrier:
            w.barriers++;
            break;
        case Op::Shuffle:
            // A lane that is not there gives 0, as on the device.
            for (int i = 0; i < w.lanes; i++) {
                const int from = (i ^ w.arg) & 63;
                w.result[i] = from < w.lanes ? w.value[from] : 0;
            }
            break;
        case Op::Mfma:
            mfma(w);
            break;
    }
}

}  // namespace zk
