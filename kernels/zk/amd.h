// The AMD target: compiler builtins only, so that no ROCm is needed to compile.
#pragma once
#define ZK_AMD 1
#define ZK_WAVE 64
#define ZK_DEV __attribute__((device)) static inline __attribute__((always_inline))
// launch_bounds has no effect without AMD's headers; this attribute is what it becomes there.
#define ZK_KERNEL(name, block, ...) \
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(block, block))) void name(__VA_ARGS__)
// The same, with registers for at least `waves` waves on each of a compute unit's four SIMDs.
#define ZK_KERNEL_WAVES(waves, name, block, ...) \
    extern "C" __attribute__((global)) __attribute__((amdgpu_flat_work_group_size(block, block), amdgpu_waves_per_eu(waves))) void \
    name(__VA_ARGS__)
#define ZK_SHARED(T, name, n) static __attribute__((shared)) __attribute__((aligned(16))) T name[n]
#define ZK_DEFINE_CPU_ENTRY(name, block)

typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef unsigned u32x4 __attribute__((ext_vector_type(4)));
typedef unsigned u32x2 __attribute__((ext_vector_type(2)));

ZK_DEV int zk_tid() { return __builtin_amdgcn_workitem_id_x(); }
ZK_DEV int zk_bid_x() { return __builtin_amdgcn_workgroup_id_x(); }
ZK_DEV int zk_bid_y() { return __builtin_amdgcn_workgroup_id_y(); }
ZK_DEV int zk_bid_z() { return __builtin_amdgcn_workgroup_id_z(); }

ZK_DEV void zk_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "workgroup");
    __builtin_amdgcn_s_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "workgroup");
}
// LDS works a wave's accesses off in order: only the compiler has to be kept from moving them.
ZK_DEV void zk_wave_barrier() {
    __builtin_amdgcn_fence(__ATOMIC_RELEASE, "wavefront");
    __builtin_amdgcn_wave_barrier();
    __builtin_amdgcn_fence(__ATOMIC_ACQUIRE, "wavefront");
}
// Nothing is moved across by the compiler: bounds how many registers loads on their way take.
ZK_DEV void zk_keep_order() { __builtin_amdgcn_sched_barrier(0); }
// A number the compiler must not know: what is computed from it in a loop is computed there, not kept in registers.
ZK_DEV int zk_opaque(int x) {
    asm volatile("" : "+v"(x));
    return x;
}
ZK_DEV int zk_shfl_xor_i(int v, int mask) {
    int lane = __builtin_amdgcn_mbcnt_hi(~0u, __builtin_amdgcn_mbcnt_lo(~0u, 0u));
    return __builtin_amdgcn_ds_bpermute((lane ^ mask) << 2, v);
}
ZK_DEV float zk_shfl_xor(float v, int mask) {
    return __builtin_bit_cast(float, zk_shfl_xor_i(__builtin_bit_cast(int, v), mask));
}
ZK_DEV float zk_rsqrt(float x) { return __builtin_amdgcn_rsqf(x); }
ZK_DEV float zk_exp(float x) { return __builtin_expf(x); }
// Results below the least normal number become 0.
ZK_DEV float zk_exp2(float x) { return __builtin_amdgcn_exp2f(x); }
ZK_DEV float zk_log2(float x) { return __builtin_amdgcn_logf(x); }
ZK_DEV f32x4 zk_mfma_16x16x16_bf16(s16x4 a, s16x4 b, f32x4 c) {
    return __builtin_amdgcn_mfma_f32_16x16x16bf16_1k(a, b, c, 0, 0, 0);
}
ZK_DEV void zk_atomic_add(float* p, float v) {
    __hip_atomic_fetch_add(p, v, __ATOMIC_RELAXED, __HIP_MEMORY_SCOPE_AGENT);
}
