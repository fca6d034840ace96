// Exact (erf) GELU and its derivative.
#pragma once
#include "zk.h"

/// Distribution function of the standard normal, to a few units of 1e-7 of itself, also where it is tiny: `exp(-z^2 / 2) t P(t)` with
/// `z = |x|`, `t = 1 / (1 + 0.3 z)` is the part beyond z. P is the least-squares fit of the relative error (4e-9) over z in
/// [0, 13.5]; the same as the CPU backend's.
ZK_DEV float normal_cdf(float x) {
    const float z = __builtin_fabsf(x), t = 1.0f / (1.0f + 0.3f * z);
    const float c[] = {-2.088185e-2f, 1.1382606e-1f, -2.3144637e-1f, 1.9603578e-1f, -8.289886e-2f,
                       9.7983254e-2f, 7.777434e-2f,  1.1036323e-1f,  1.19557e-1f,   1.1968742e-1f};
    float p = c[0];
    for (int i = 1; i < 10; i++) p = p * t + c[i];
    const float beyond = zk_exp(-0.5f * z * z) * t * p;
    return x > 0.0f ? 1.0f - beyond : beyond;
}
ZK_DEV float gelu(float x) { return x * normal_cdf(x); }
ZK_DEV float gelu_derivative(float x) { return normal_cdf(x) + x * 0.3989423f * zk_exp(-0.5f * x * x); }
