// Lanes and waves working together: shuffles, LDS, barriers, atomics.
#include "device.h"

DEVICE float shuffle_xor(float x, u32 mask) {
  return __builtin_bit_cast(float, __builtin_amdgcn_ds_bpermute((int)((lane() ^ mask) << 2), __builtin_bit_cast(int, x)));
}

// Sum of each row: shuffles within a wave, LDS across the waves of a workgroup.
KERNEL(row_sums, 256, float* out, const float* in, u32 n) {
  SHARED float partial[4];
  float sum = 0;
  for (u32 i = item(); i < n; i += 256) sum += in[group() * n + i];
  for (u32 mask = 32; mask; mask >>= 1) sum += shuffle_xor(sum, mask);
  if (lane() == 0) partial[item() / 64] = sum;
  barrier();
  if (item() == 0) out[group()] = partial[0] + partial[1] + partial[2] + partial[3];
}

// A row of results per way of moving lanes.
KERNEL(lane_moves, 64, u32* out, const u32* in) {
  int x = (int)in[item()];
  out[0 * 64 + item()] = (u32)__builtin_amdgcn_ds_swizzle(x, 0x041f);                             // xor 1
  out[1 * 64 + item()] = (u32)__builtin_amdgcn_mov_dpp(x, 0xb1, 0xf, 0xf, true);                   // quad_perm 1,0,3,2
  out[2 * 64 + item()] = (u32)__builtin_amdgcn_update_dpp(7, x, 0x111, 0xf, 0xf, false);           // row_shr 1
  out[3 * 64 + item()] = (u32)__builtin_amdgcn_update_dpp(7, x, 0x102, 0xf, 0xf, true);            // row_shl 2
  out[4 * 64 + item()] = (u32)__builtin_amdgcn_update_dpp(7, x, 0x140, 0xf, 0xf, false);           // row_mirror
  out[5 * 64 + item()] = (u32)__builtin_amdgcn_update_dpp(7, x, 0x142, 0xa, 0xf, false);           // row_bcast 15
  out[6 * 64 + item()] = (u32)__builtin_amdgcn_readlane(x, 17);
  out[7 * 64 + item()] = (u32)__builtin_amdgcn_readfirstlane(x);
  out[8 * 64 + item()] = (u32)__builtin_amdgcn_ds_permute((int)((lane() + 3) << 2), x);
  out[9 * 64 + item()] = (u32)__builtin_amdgcn_update_dpp(7, x, 0x123, 0xf, 0xf, false);           // row_ror 3
  out[10 * 64 + item()] = (u32)__builtin_amdgcn_ds_swizzle(x, 0x80b1);                            // quad_perm 1,0,3,2
}

// Transposes a 64 x 64 tile through LDS with 16-byte accesses; 256 items.
KERNEL(transpose, 256, float* out, const float* in) {
  SHARED float tile[64 * 65 + 3];
  for (u32 c = item(); c < 1024; c += 256) {
    f32x4 v = ((const f32x4*)in)[c];
    for (u32 k = 0; k < 4; k++) tile[(c / 16) * 65 + (c % 16) * 4 + k] = v[k];
  }
  barrier();
  for (u32 c = item(); c < 1024; c += 256) {
    f32x4 v;
    for (u32 k = 0; k < 4; k++) v[k] = tile[((c % 16) * 4 + k) * 65 + c / 16];
    ((f32x4*)out)[c] = v;
  }
}

// Counts, float sums and maxima by atomics.
KERNEL(histogram, 256, u32* counts, float* sums, int* maxima, const int* in, u32 n) {
  SHARED u32 local[16];
  if (item() < 16) local[item()] = 0;
  barrier();
  u32 i = global_item();
  if (i < n) {
    u32 bin = (u32)in[i] & 15;
    __hip_atomic_fetch_add(&local[bin], 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_WORKGROUP);
    __hip_atomic_fetch_add(&sums[bin], 0.5f * (float)in[i], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
    __hip_atomic_fetch_max(&maxima[bin], in[i], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
  }
  barrier();
  if (item() < 16) __hip_atomic_fetch_add(&counts[item()], local[item()], __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// Each item takes a ticket: the old values must be all different.
KERNEL(tickets, 256, u32* old, u32* counter) {
  old[global_item()] = __hip_atomic_fetch_add(counter, 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

// All three dimensions of grid and workgroup.
KERNEL(indices, 256, u32* out) {
  u32 x = __builtin_amdgcn_workgroup_id_x() * __builtin_amdgcn_workgroup_size_x() + __builtin_amdgcn_workitem_id_x();
  u32 y = __builtin_amdgcn_workgroup_id_y() * __builtin_amdgcn_workgroup_size_y() + __builtin_amdgcn_workitem_id_y();
  u32 z = __builtin_amdgcn_workgroup_id_z() * __builtin_amdgcn_workgroup_size_z() + __builtin_amdgcn_workitem_id_z();
  u32 width = __builtin_amdgcn_grid_size_x(), height = __builtin_amdgcn_grid_size_y();
  out[(z * height + y) * width + x] = x + 100 * y + 10000 * z;
}
