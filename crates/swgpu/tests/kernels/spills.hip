// A kernel that needs scratch memory, which is refused when it is loaded.
#include "device.h"

KERNEL(uses_scratch, 64, u32* out, const u32* in) {
  u32 local[64];
  for (u32 i = 0; i < 64; i++) local[i] = in[i] * 3;
  out[item()] = local[in[item()] & 63];
}
