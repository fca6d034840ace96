// The CPU target: a fiber for each work-item. The runtime (cpu/) runs the workgroups one after the other, finds divergent
// barriers and collectives, deadlocks and data races, and computes what lanes do together.
#pragma once
#define ZK_CPU 1
#define ZK_WAVE 64
#include <cmath>
#include <cstddef>
#include <cstdint>
#include <cstring>
#include <type_traits>
#include <utility>

#define ZK_DEV static inline
// Arguments are read apart from the kernel, where the race detector does not look.
#define ZK_UNWATCHED __attribute__((disable_sanitizer_instrumentation))
#define ZK_KERNEL(name, block, ...) __attribute__((noinline)) static void name(__VA_ARGS__)

typedef float f32x4 __attribute__((ext_vector_type(4)));
typedef short s16x4 __attribute__((ext_vector_type(4)));
typedef unsigned u32x4 __attribute__((ext_vector_type(4)));
typedef unsigned u32x2 __attribute__((ext_vector_type(2)));

extern "C" {
int zk_rt_item(void);
int zk_rt_group(int axis);
void zk_rt_barrier(const char* site);
void zk_rt_wave_barrier(const char* site);
int zk_rt_shfl_xor(int v, int mask, const char* site);
void zk_rt_mfma_16x16x16_bf16(const s16x4* a, const s16x4* b, f32x4* c, const char* site);
void* zk_rt_lds(const char* name, unsigned bytes);
void zk_rt_atomic_add(float* p, float v);

struct zk_cpu_kernel {
    const char* name;
    void (*call)(void** params);
    int block;
    int num_params;
    const int* param_bytes;
};
void zk_register(const zk_cpu_kernel*);
}

// A place in the source: tells barriers and collectives apart, and names them in messages.
#define ZK_TEXT2(x) #x
#define ZK_TEXT(x) ZK_TEXT2(x)
#define ZK_SITE __FILE__ ":" ZK_TEXT(__LINE__)
#define ZK_KERNEL_WAVES(waves, name, block, ...) ZK_KERNEL(name, block, __VA_ARGS__)
#define ZK_SHARED(T, name, n) T* const name = (T*)zk_rt_lds(#name, sizeof(T) * (n))

ZK_DEV int zk_tid() { return zk_rt_item(); }
ZK_DEV int zk_bid_x() { return zk_rt_group(0); }
ZK_DEV int zk_bid_y() { return zk_rt_group(1); }
ZK_DEV int zk_bid_z() { return zk_rt_group(2); }
#define zk_barrier() zk_rt_barrier(ZK_SITE)
#define zk_wave_barrier() zk_rt_wave_barrier(ZK_SITE)
#define zk_shfl_xor_i(v, mask) zk_rt_shfl_xor(v, mask, ZK_SITE)
#define zk_shfl_xor(v, mask) __builtin_bit_cast(float, zk_rt_shfl_xor(__builtin_bit_cast(int, (float)(v)), mask, ZK_SITE))
ZK_DEV void zk_keep_order() {}
ZK_DEV int zk_opaque(int x) { return x; }
ZK_DEV float zk_rsqrt(float x) { return 1.0f / std::sqrt(x); }
ZK_DEV float zk_exp(float x) { return std::exp(x); }
ZK_DEV float zk_exp2(float x) { return std::exp2(x); }
ZK_DEV float zk_log2(float x) { return std::log2(x); }
ZK_DEV f32x4 zk_mfma_16x16x16_bf16(s16x4 a, s16x4 b, f32x4 c) {
    zk_rt_mfma_16x16x16_bf16(&a, &b, &c, ZK_SITE);
    return c;
}
ZK_DEV void zk_atomic_add(float* p, float v) { zk_rt_atomic_add(p, v); }

template <class... A, size_t... I>
ZK_UNWATCHED static inline void zk_apply(void (*f)(A...), void** p, std::index_sequence<I...>) {
    f(*(std::remove_reference_t<A>*)p[I]...);
}
template <class F>
struct zk_signature;
template <class... A>
struct zk_signature<void (*)(A...)> {
    static constexpr int count = sizeof...(A);
    static constexpr int bytes[sizeof...(A)] = {(int)sizeof(A)...};
};
#define ZK_DEFINE_CPU_ENTRY(fn, blk) \
    ZK_UNWATCHED static void ZK_PASTE(zk_call_, fn)(void** p) { \
        zk_apply(&fn, p, std::make_index_sequence<(size_t)zk_signature<decltype(&fn)>::count>{}); \
    } \
    static const zk_cpu_kernel ZK_PASTE(zk_kernel_, fn) = {#fn, &ZK_PASTE(zk_call_, fn), blk, \
        zk_signature<decltype(&fn)>::count, zk_signature<decltype(&fn)>::bytes}; \
    __attribute__((constructor)) static void ZK_PASTE(zk_add_, fn)() { zk_register(&ZK_PASTE(zk_kernel_, fn)); }
