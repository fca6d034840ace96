// adamw - one update in one pass: gradient scaling, both moments, bias correction, decay (spec 3.3), and the bf16 copy of the
// weight that the next forward multiplies. Masters and moments are f32: 16 bytes read, 12 (and 2) written a number.
#include "zk.h"

static constexpr int ADAMW_ITEMS = 256;

struct AdamwStep {
    float lr, beta1, beta2, eps, keep, correct1, correct2, grad_scale;
};

ZK_DEV void adamw_one(const AdamwStep& s, float& w, float g, float& m, float& v) {
    g *= s.grad_scale;
    m = s.beta1 * m + (1.0f - s.beta1) * g;
    v = s.beta2 * v + (1.0f - s.beta2) * g * g;
    w = w * s.keep - s.lr * (m / s.correct1) / (__builtin_sqrtf(v / s.correct2) + s.eps);
}

/// Four numbers a work-item. `keep` is 1 - lr * weight_decay, `correct*` are 1 - beta^t (powers in f64 on the host). `half` may be
/// null. All pointers at multiples of 16 bytes, `half` of 8.
ZK_KERNEL(adamw, ADAMW_ITEMS, float* w, const float* g, float* m, float* v, bf16_t* half, long n, float lr, float beta1,
          float beta2, float eps, float keep, float correct1, float correct2, float grad_scale) {
    const AdamwStep s = {lr, beta1, beta2, eps, keep, correct1, correct2, grad_scale};
    const long i = ((long)zk_bid_x() * ADAMW_ITEMS + zk_tid()) * 4;
    if (i + 4 <= n) {
        f32x4 w4 = zk_load4(w + i), m4 = zk_load4(m + i), v4 = zk_load4(v + i);
        const f32x4 g4 = zk_load4(g + i);
        for (int e = 0; e < 4; e++) {
            float we = w4[e], me = m4[e], ve = v4[e];
            adamw_one(s, we, g4[e], me, ve);
            w4[e] = we;
            m4[e] = me;
            v4[e] = ve;
        }
        zk_store4(w + i, w4);
        zk_store4(m + i, m4);
        zk_store4(v + i, v4);
        if (half) zk_store4(half + i, w4);
        return;
    }
    for (long j = i; j < n; j++) {
        adamw_one(s, w[j], g[j], m[j], v[j]);
        if (half) half[j] = zk_f2bf(w[j]);
    }
}
ZK_DEFINE_CPU_ENTRY(adamw, ADAMW_ITEMS)
