// zk.h - what a kernel may use. One source runs on three kinds of machine; no vendor header is needed for any of them:
//
//   AMD   clang -x hip --offload-arch=gfx942 --cuda-device-only -nogpuinc -nogpulib      zk/amd.h
//   CPU   any clang: a fiber for each work-item, see cpu/                                zk/cpu.h
//   CUDA  clang -x cuda --cuda-gpu-arch=sm_90 -nocudainc -nocudalib --cuda-device-only   zk/cuda.h
//
// Kernels that build fragments in registers, or ask for ZK_WAVE == 64, leave CUDA out with `#if !defined(ZK_CUDA)`.
//
// Each target defines
//   ZK_KERNEL(name, block, arguments...)     a kernel of `block` work-items a workgroup
//   ZK_KERNEL_WAVES(waves, name, block, ...) the same, compiled for at least `waves` waves a SIMD (AMD)
//   ZK_SHARED(type, name, count)             an array in LDS, in the kernel's own body; its contents are undefined at first
//   ZK_DEFINE_CPU_ENTRY(name, block)         after each kernel: registers it with the fiber runtime
//   ZK_DEV                                   a function of the device
//   ZK_WAVE                                  lanes of a wave
//   zk_tid, zk_bid_x, zk_bid_y, zk_bid_z     number of the work-item, and of its workgroup
//   zk_barrier()                             of the workgroup; all of its work-items must come
//   zk_wave_barrier()                        orders what lanes of one wave write to LDS before what its lanes read
//   zk_keep_order()                          a line the compiler moves nothing across, to save registers
//   zk_opaque(int)                           the same number, of which the compiler knows nothing
//   zk_shfl_xor(v, mask), zk_shfl_xor_i      the value (float, int) of lane `lane ^ mask`; all lanes must come
//   zk_rsqrt, zk_exp, zk_exp2, zk_log2       to about 1 ulp
//   zk_mfma_16x16x16_bf16(a, b, c)           (AMD and CPU)
#pragma once

typedef unsigned short bf16_t;

#define ZK_PASTE2(a, b) a##b
#define ZK_PASTE(a, b) ZK_PASTE2(a, b)

#if defined(__AMDGCN__)
#include "zk/amd.h"
#elif defined(__CUDA_ARCH__) || defined(__CUDACC__) || defined(__NVPTX__)
#include "zk/cuda.h"
#else
#include "zk/cpu.h"
#endif

#include "zk/math.h"
#include "zk/mma.h"
