// Elementwise arithmetic: each output row is one function of the inputs.
#include "device.h"

KERNEL(divide, 256, float* out, const float* a, const float* b, u32 n) {
  u32 i = global_item();
  if (i < n) out[i] = a[i] / b[i];
}

KERNEL(square_root, 256, float* out, const float* a, u32 n) {
  u32 i = global_item();
  if (i < n) out[i] = __builtin_sqrtf(a[i]);
}

// exp, log, sin of 2 pi x, reciprocal, reciprocal root, fused multiply-add, rounding, conversions: `rows` of n.
KERNEL(functions, 256, float* out, const float* a, u32 n) {
  u32 i = global_item();
  if (i >= n) return;
  float x = a[i];
  out[0 * n + i] = __builtin_expf(x);
  out[1 * n + i] = __builtin_logf(__builtin_fabsf(x));
  out[2 * n + i] = __builtin_amdgcn_rcpf(x);
  out[3 * n + i] = __builtin_amdgcn_rsqf(__builtin_fabsf(x));
  out[4 * n + i] = __builtin_fmaf(x, x, -1.5f);
  out[5 * n + i] = __builtin_rintf(x);
  out[6 * n + i] = __builtin_floorf(x);
  out[7 * n + i] = (float)(int)x;
  out[8 * n + i] = (float)(u32)(int)x;
  out[9 * n + i] = __builtin_fminf(__builtin_fmaxf(x, -2.0f), 3.0f);
  out[10 * n + i] = from_bf16(to_bf16(x));
  out[11 * n + i] = __builtin_ldexpf(x, (int)(i % 300) - 150);
  out[12 * n + i] = (float)((double)x * 1.0000001 + 3.0);
}

KERNEL(integers, 256, u64* out, const u64* a, const u64* b, u32 n) {
  u32 i = global_item();
  if (i >= n) return;
  u64 x = a[i], y = b[i];
  long sx = (long)x, sy = (long)y;
  out[0 * n + i] = x + y;
  out[1 * n + i] = x - y;
  out[2 * n + i] = x * y;
  out[3 * n + i] = x << (y & 63);
  out[4 * n + i] = x >> (y & 63);
  out[5 * n + i] = (u64)(sx >> (y & 63));
  out[6 * n + i] = sx < sy ? x : y;
  out[7 * n + i] = x > y ? 1 : 2;
  out[8 * n + i] = __builtin_popcountl(x);
  out[9 * n + i] = (u32)x == 0 ? 77 : __builtin_clz((u32)x);
  out[10 * n + i] = (u32)x == 0 ? 77 : __builtin_ctz((u32)x);
  out[11 * n + i] = (u32)x / ((u32)y | 1);
  out[12 * n + i] = (u64)((int)x % ((int)y | 1));
  out[13 * n + i] = x / (y | 1);
  out[14 * n + i] = __builtin_bitreverse32((u32)x);
  out[15 * n + i] = (u64)(short)x + (unsigned char)y;
  out[16 * n + i] = (u64)((int)x >> ((u32)y & 31)) ^ ((u32)y << 7 | (u32)y >> 25);
}

KERNEL(packed, 256, f32x2* out, const f32x2* a, const f32x2* b, const f32x2* c, u32 n) {
  u32 i = global_item();
  if (i >= n) return;
  f32x2 x = a[i], y = b[i], z = c[i];
  out[i] = __builtin_elementwise_fma(x, y, z);
  out[n + i] = x * y;
  out[2 * n + i] = x + y.yx;
  out[3 * n + i] = __builtin_elementwise_fma(x.yx, y, -z);
}

KERNEL(bytes, 256, signed char* out8, short* out16, const signed char* in8, const short* in16, u32 n) {
  u32 i = global_item();
  if (i >= n) return;
  out8[i] = (signed char)(in8[i] * 3);
  out16[i] = (short)(in16[i] - in8[i]);
}

// Uniform work: scalar loads, a loop on the scalar side, a table in constant memory.
__attribute__((device)) __attribute__((address_space(4))) static const int table[8] = {3, 1, 4, 1, 5, 9, 2, 6};
KERNEL(uniform, 64, long* out, const int* weights, u32 n) {
  long sum = 0;
  for (u32 k = 0; k < n; k++) sum = sum * 31 + (long)weights[k] * table[(k * 5) & 7];
  if (item() == 0) out[group()] = sum + group();
}
