// Thin names for the PTX that the kernels use, and nothing else: no address arithmetic of the cache, no policy.
//
// There are no standard headers under NVRTC, so 16-bit and 8-bit floats are bit patterns in unsigned registers here,
// and every conversion is one instruction. BF16 says what T16 is (bfloat16 or float16).
#pragma once
#include "integers.cuh"

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned long long u64;

#define DEVICE __device__ __forceinline__
#define HOPPER (__CUDA_ARCH__ >= 900)

#define NEGATIVE_INFINITY (__int_as_float(0xff800000))
constexpr float LN2 = 0.6931471805599453f;
constexpr float LOG2E = 1.4426950408889634f;

// ---------------------------------------------------------------- arithmetic

DEVICE float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

// tanh to about 1e-6 (tanh.approx is good to 5e-4 only): 1 - 2 / (e^2x + 1), which is right at both infinities.
DEVICE float tanh_exact(float x) { return 1.0f - __fdividef(2.0f, exp2_fast(2.0f * LOG2E * x) + 1.0f); }

// Two floats to two 16-bit values, `low` in the lower half.
DEVICE u32 pack_bf16(float low, float high) {
    u32 r;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

DEVICE u32 pack_f16(float low, float high) {
    u32 r;
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
    return r;
}

DEVICE float f16_to_float(u32 bits) {
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
    return f;
}

DEVICE float bf16_to_float(u32 bits) { return __uint_as_float(bits << 16); }

template <bool bf16> DEVICE float to_float(u32 bits) { return bf16 ? bf16_to_float(bits & 0xffff) : f16_to_float(bits & 0xffff); }
template <bool bf16> DEVICE u32 pack(float low, float high) { return bf16 ? pack_bf16(low, high) : pack_f16(low, high); }

// Two FP8 values in the lower half of `x` to two float16.
template <bool e5m2> DEVICE u32 fp8_to_f16(u32 x) {
    if (e5m2) return __byte_perm(x, 0, 0x1404);  // e5m2 is the upper byte of a float16
    u32 r;
    asm("cvt.rn.f16x2.e4m3x2 %0, %1;" : "=r"(r) : "h"((u16)x));
    return r;
}

// Two floats to two FP8 values, round to nearest even, saturating; NaN stays NaN.
template <bool e5m2> DEVICE u32 pack_fp8(float low, float high) {
    u16 r;
    if (e5m2)
        asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    else
        asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}

// ---------------------------------------------------------------- tensor cores

// d[16 x 8] += a[16 x 16] b[16 x 8]. Lane l = 4g + t holds
//   a: (g, 2t), (g + 8, 2t), (g, 2t + 8), (g + 8, 2t + 8), each with its right neighbour;
//   b: (2t, g), (2t + 8, g), each with the value below it;  d: (g, 2t), (g, 2t + 1), (g + 8, 2t), (g + 8, 2t + 1).
template <bool bf16> DEVICE void mma(float (&d)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
    if (bf16)
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
    else
        asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                     : "+f"(d[0]), "+f"(d[1]), "+f"(d[2]), "+f"(d[3])
                     : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8 x 8 matrices of 16-bit values; lane l gives the address of row l % 8 of matrix l / 8 and receives, of each,
// row g, columns 2t and 2t + 1.
DEVICE void load_matrices(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

// The same, each matrix transposed: rows 2t and 2t + 1 of column g.
DEVICE void load_matrices_transposed(u32 (&r)[4], u32 address) {
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(r[0]), "=r"(r[1]), "=r"(r[2]), "=r"(r[3])
                 : "r"(address)
                 : "memory");
}

DEVICE u32 transpose_matrix(u32 x) {
    u32 r;
    asm volatile("movmatrix.sync.aligned.m8n8.trans.b16 %0, %1;" : "=r"(r) : "r"(x));
    return r;
}

// ---------------------------------------------------------------- memory

DEVICE u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

DEVICE void zero_16_bytes(u32 address) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%1,%1,%1};" ::"r"(address), "r"(0) : "memory");
}

DEVICE void load_16_bytes(u32 (&x)[4], u32 address) {
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3]) : "r"(address) : "memory");
}

DEVICE void store_4_bytes(u32 address, u32 x) { asm volatile("st.shared.u32 [%0], %1;" ::"r"(address), "r"(x) : "memory"); }

DEVICE void store_16_bytes(u32 address, u32 x, u32 y, u32 z, u32 w) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" ::"r"(address), "r"(x), "r"(y), "r"(z), "r"(w) : "memory");
}

DEVICE void store_16_bytes(void* to, const u32 (&x)[4]) {
    asm volatile("st.global.v4.u32 [%0], {%1,%2,%3,%4};" ::"l"(__cvta_generic_to_global(to)), "r"(x[0]), "r"(x[1]), "r"(x[2]), "r"(x[3])
                 : "memory");
}

// Reads that must see what other multiprocessors wrote during this launch: past the first-level cache.
DEVICE float2 load_pair_l2(const float* p) {
    float2 v;
    asm volatile("ld.global.cg.v2.f32 {%0,%1}, [%2];" : "=f"(v.x), "=f"(v.y) : "l"(p) : "memory");
    return v;
}

DEVICE float4 load_quad_l2(const float* p) {
    float4 v;
    asm volatile("ld.global.cg.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}

// Add one to a counter that blocks share; returns what it was. All that this thread has seen happen (through a block barrier,
// its whole block's work) comes before it, and what other blocks did before their turn is seen after it.
DEVICE u32 arrive_at(u32* counter) {
    u32 before;
    asm volatile("atom.add.acq_rel.gpu.global.u32 %0, [%1], 1;" : "=r"(before) : "l"(__cvta_generic_to_global(counter)) : "memory");
    return before;
}

// Programmatic dependent launch: wait for the kernel before this one; let the one after it start. Both do nothing
// in a kernel that was launched the plain way.
DEVICE void wait_for_predecessor() {
#if HOPPER
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

DEVICE void release_successor() {
#if HOPPER
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// ---------------------------------------------------------------- asynchronous copies

// Every chip: 16 bytes a lane, in commit groups.
DEVICE void copy_16_bytes(u32 target, const void* source) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16;" ::"r"(target), "l"(__cvta_generic_to_global(source)) : "memory");
}

DEVICE void copies_commit() { asm volatile("cp.async.commit_group;" ::: "memory"); }

template <int pending> DEVICE void copies_wait() { asm volatile("cp.async.wait_group %0;" ::"n"(pending) : "memory"); }

// Hopper and later: bulk copies that count their bytes on an mbarrier.
#if HOPPER

DEVICE void barrier_init(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(barrier), "r"(arrivals) : "memory");
}

DEVICE void barrier_init_visible() { asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory"); }

// Ordinary accesses to shared memory so far come before the copy engine's later ones.
DEVICE void fence_copy_engine() { asm volatile("fence.proxy.async.shared::cta;" ::: "memory"); }

DEVICE void barrier_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(barrier), "r"(bytes) : "memory");
}

DEVICE void barrier_arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(barrier) : "memory");
}

DEVICE void barrier_wait(u32 barrier, u32 parity) {
    asm volatile(
        "{\n"
        ".reg .pred done;\n"
        "again:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n"
        "@done bra over;\n"
        "bra again;\n"
        "over:\n"
        "}" ::"r"(barrier),
        "r"(parity)
        : "memory");
}

DEVICE u64 evict_first_policy() {
    u64 policy;
    asm volatile("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// `bytes` (a multiple of 16) from global to shared memory, both aligned to 16 bytes.
DEVICE void bulk_copy(u32 target, const void* source, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(target),
                 "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier)
                 : "memory");
}

DEVICE void bulk_copy(u32 target, const void* source, u32 bytes, u32 barrier, u64 policy) {
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;" ::"r"(target),
        "l"(__cvta_generic_to_global(source)), "r"(bytes), "r"(barrier), "l"(policy)
        : "memory");
}

#endif
