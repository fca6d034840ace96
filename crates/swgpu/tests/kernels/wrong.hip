// Kernels that do something wrong, one thing each.
#include "device.h"

KERNEL(beyond_the_end, 64, float* out, u32 n) { out[item() + n] = 1.0f; }

KERNEL(read_anywhere, 64, float* out, const float* in) { out[item()] = in[item()]; }

KERNEL(beyond_lds, 64, float* out, u32 offset) {
  SHARED float values[64];
  values[item()] = 1.0f;
  barrier();
  out[item()] = ((volatile __attribute__((address_space(3))) float*)values)[item() + offset];
}

KERNEL(unwritten_lds, 64, float* out, u32 written) {
  SHARED float values[64];
  if (item() < written) values[item()] = 1.0f;
  barrier();
  out[item()] = values[63 - item()];
}

KERNEL(early_exit, 128, float* out) {
  SHARED float values[128];
  values[item()] = (float)item();
  if (item() >= 64) return;
  __builtin_amdgcn_s_barrier();
  out[item()] = values[item() + 64];
}

KERNEL(endless, 64, u32* out) {
  volatile u32* flag = out;
  while (*flag == 0) {}
  out[1] = 1;
}

KERNEL(unknown_instruction, 64, u32* out) {
  u32 x = item();
  asm volatile("v_msad_u8 %0, %0, %0, %0" : "+v"(x));
  out[item()] = x;
}

KERNEL(traps, 64, u32* out) {
  if (out[0] == 7) __builtin_trap();
  out[1] = 1;
}

KERNEL(misaligned_atomic, 64, u32* out, u64 offset) {
  __hip_atomic_fetch_add((u32*)((u64)out + offset), 1u, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}

KERNEL(store_constant, 64, float* out, float value) { out[global_item()] = value; }

// For measuring: a long chain of ordinary vector arithmetic.
KERNEL(arithmetic_speed, 64, float* out, u32 rounds) {
  float x = (float)item(), y = 0.5f;
  u32 n = item();
  for (u32 i = 0; i < rounds; i++) {
    x = x * 0.999f + y;
    y = y + 0.001f * x;
    n = (n ^ (n << 5)) + i;
    x += (n & 1) ? 1.0f : -1.0f;
  }
  out[item()] = x + y;
}
