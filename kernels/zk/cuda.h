// The CUDA target, compiled by clang without NVIDIA's headers. Kept compiling where it costs nothing; nothing runs on it.
#pragma once
#define ZK_CUDA 1
#define ZK_WAVE 32
#define ZK_DEV __attribute__((device)) static inline __attribute__((always_inline))
#define ZK_KERNEL(name, block, ...) \
    extern "C" __attribute__((global)) __attribute__((launch_bounds(block))) void name(__VA_ARGS__)
#define ZK_KERNEL_WAVES(waves, name, block, ...) ZK_KERNEL(name, block, __VA_ARGS__)
#define ZK_SHARED(T, name, n) static __attribute__((shared)) __attribute__((aligned(16))) T name[n]
#define ZK_DEFINE_CPU_ENTRY(name, block)

typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef unsigned u32x4 __attribute__((ext_vector_type(4)));
typedef unsigned u32x2 __attribute__((ext_vector_type(2)));

ZK_DEV int zk_tid() { return __nvvm_read_ptx_sreg_tid_x(); }
ZK_DEV int zk_bid_x() { return __nvvm_read_ptx_sreg_ctaid_x(); }
ZK_DEV int zk_bid_y() { return __nvvm_read_ptx_sreg_ctaid_y(); }
ZK_DEV int zk_bid_z() { return __nvvm_read_ptx_sreg_ctaid_z(); }
ZK_DEV void zk_barrier() { __syncthreads(); }
ZK_DEV void zk_wave_barrier() { __nvvm_bar_warp_sync(0xffffffffu); }
ZK_DEV float zk_shfl_xor(float v, int mask) { return __nvvm_shfl_sync_bfly_f32(0xffffffffu, v, mask, 31); }
ZK_DEV int zk_shfl_xor_i(int v, int mask) { return __nvvm_shfl_sync_bfly_i32(0xffffffffu, v, mask, 31); }
ZK_DEV void zk_keep_order() {}
ZK_DEV int zk_opaque(int x) { return x; }
ZK_DEV float zk_rsqrt(float x) { return __nvvm_rsqrt_approx_f(x); }
ZK_DEV float zk_exp2(float x) { return __nvvm_ex2_approx_f(x); }
ZK_DEV float zk_exp(float x) { return __nvvm_ex2_approx_f(x * 1.4426950408889634f); }
ZK_DEV float zk_log2(float x) { return __nvvm_lg2_approx_f(x); }
ZK_DEV void zk_atomic_add(float* p, float v) { __nvvm_atom_add_gen_f(p, v); }
