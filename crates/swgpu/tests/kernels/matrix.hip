// One wave multiplies one tile with each matrix instruction. A is M x K, B is N x K (row by row), C and D are M x N.
#include "device.h"

DEVICE s16x4 fragment(const bf16* rows, u32 width, u32 m, u32 k) {
  s16x4 v;
  for (u32 j = 0; j < 4; j++) v[j] = (short)rows[m * width + k + j];
  return v;
}

KERNEL(tile_16x16, 64, float* d, const bf16* a, const bf16* b, const float* c, u32 depth) {
  u32 l = item();
  f32x4 sum;
  for (u32 r = 0; r < 4; r++) sum[r] = c[(4 * (l / 16) + r) * 16 + l % 16];
  for (u32 k = 0; k < depth; k += 16)
    sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(
        fragment(a, depth, l % 16, k + 4 * (l / 16)), fragment(b, depth, l % 16, k + 4 * (l / 16)), sum, 0, 0, 0);
  for (u32 r = 0; r < 4; r++) d[(4 * (l / 16) + r) * 16 + l % 16] = sum[r];
}

KERNEL(tile_32x32, 64, float* d, const bf16* a, const bf16* b, const float* c, u32 depth) {
  u32 l = item();
  f32x16 sum;
  for (u32 r = 0; r < 16; r++) sum[r] = c[(8 * (r / 4) + 4 * (l / 32) + r % 4) * 32 + l % 32];
  for (u32 k = 0; k < depth; k += 8)
    sum = __builtin_amdgcn_mfma_f32_32x32x8bf16_1k(
        fragment(a, depth, l % 32, k + 4 * (l / 32)), fragment(b, depth, l % 32, k + 4 * (l / 32)), sum, 0, 0, 0);
  for (u32 r = 0; r < 16; r++) d[(8 * (r / 4) + 4 * (l / 32) + r % 4) * 32 + l % 32] = sum[r];
}

KERNEL(tile_16x16_f32, 64, float* d, const float* a, const float* b, u32 depth) {
  u32 l = item();
  f32x4 sum = {0, 0, 0, 0};
  for (u32 k = 0; k < depth; k += 4)
    sum = __builtin_amdgcn_mfma_f32_16x16x4f32(a[(l % 16) * depth + k + l / 16], b[(l % 16) * depth + k + l / 16], sum, 0, 0, 0);
  for (u32 r = 0; r < 4; r++) d[(4 * (l / 16) + r) * 16 + l % 16] = sum[r];
}

// Wrong: half of the wave takes part.
KERNEL(tile_half_wave, 64, float* d, const bf16* a) {
  u32 l = item();
  f32x4 sum = {0, 0, 0, 0};
  if (l < 32) sum = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(fragment(a, 16, l % 16, 4 * (l / 16)), fragment(a, 16, l % 16, 4 * (l / 16)), sum, 0, 0, 0);
  d[l] = sum[0];
}

// For measuring: `rounds` rounds of 16 independent products.
KERNEL(product_speed, 64, float* d, u32 rounds) {
  f32x4 sum[4] = {};
  s16x4 a = {(short)item(), 0x3f80, 0x3f81, 0x3f82}, b = {0x3f80, 0x3f80, 0x3f81, 0x3f83};
  for (u32 i = 0; i < rounds; i++)
    for (u32 j = 0; j < 4; j++) sum[j] = __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, sum[j], 0, 0, 0);
  for (u32 j = 0; j < 4; j++) d[item() * 4 + j] = sum[j][0] + sum[j][1] + sum[j][2] + sum[j][3];
}
