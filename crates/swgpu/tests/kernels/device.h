// What the tests' kernels need of HIP, without vendor headers.
#pragma once
#define KERNEL(name, items, ...) \
  extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(1, items))) void name(__VA_ARGS__)
#define DEVICE __attribute__((device)) static inline __attribute__((always_inline))
#define SHARED static __attribute__((shared))
typedef unsigned u32;
typedef unsigned long u64;
typedef unsigned short bf16;
typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef float f32x16 __attribute__((ext_vector_type(16)));
typedef float f32x2 __attribute__((ext_vector_type(2)));
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef u32 u32x4 __attribute__((ext_vector_type(4)));

DEVICE u32 item() { return __builtin_amdgcn_workitem_id_x(); }
DEVICE u32 group() { return __builtin_amdgcn_workgroup_id_x(); }
DEVICE u32 global_item() { return group() * __builtin_amdgcn_workgroup_size_x() + item(); }
DEVICE u32 lane() { return __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u)); }
DEVICE void barrier() {
  __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
  __builtin_amdgcn_s_barrier();
  __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
DEVICE float from_bf16(bf16 x) { return __builtin_bit_cast(float, (u32)x << 16); }
DEVICE bf16 to_bf16(float x) {
  u32 bits = __builtin_bit_cast(u32, x);
  return (bf16)((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}
