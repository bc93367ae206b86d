// What the kernels of this package share: 4-bit weights in registers, barriers and copies of Hopper.
//
// Put in front of each file by cuda_driver.py. Macros: BF16 (activations; else float16), SCALE_BF16 (scales; else float16), ZEROS (zero points are stored; else
// every one is 8), SUB (groups in a block of 128 inputs: 1, 2 or 4).

typedef unsigned int u32;
typedef unsigned short u16;
typedef unsigned char u8;
typedef unsigned long long u64;

#if BF16
#define MAGIC 0x43004300u // 128 + q in either half
#define OFFSET 128.f
#define ONES 0x3f803f80u
#define FMA2 "fma.rn.bf16x2"
#else
#define MAGIC 0x64006400u // 1024 + q
#define OFFSET 1024.f
#define ONES 0x3c003c00u
#define FMA2 "fma.rn.f16x2"
#endif
#define MINUS_ZERO 0x80008000u

// Weights as operands by masks alone. Numbers of 16 bits up to twice the smallest normal one are as many times the smallest of all as their bits, read as an integer, say; they go
// to 256 in bfloat16, whose smallest is 2^-133, and to 2048 in float16, 2^-24. So w & 0x000f000f holds two weights q and w & 0x00f000f0 two times 16 q, in units of the smallest
// number. fma2 and the tensor cores take such operands exactly. Results are then in small units as well: sums of numbers(w) x have to be multiplied by FROM_NUMBERS, those of
// centred(w) x by FROM_CENTRED.
#if BF16
#define EVEN 0x7f007f00u // 2^127 in either half
#define ODD 0x7d007d00u // 2^123
#define EVEN_X 0x5f805f80u // 2^64
#define ODD_X 0x5d805d80u // 2^60
#define ONE_EVEN 0x00010001u // the weight 1 as `numbers` makes it
#define ONE_ODD 0x00100010u
#define FROM_NUMBERS 0x1p69f
#define FROM_CENTRED 0x1p6f
#else
#define EVEN 0x78007800u // 2^15
#define ODD 0x68006800u // 2^11
#define ONE_EVEN 0x00010001u
#define ONE_ODD 0x00010001u
#define FROM_NUMBERS 0x1p24f
#define FROM_CENTRED 0x1p9f
#endif

__device__ __forceinline__ float widen(u32 bits, bool bf16) {
    if (bf16) return __uint_as_float(bits << 16);
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
    return f;
}

__device__ __forceinline__ u16 narrow(float f) {
    u16 h;
#if BF16
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(h) : "f"(f));
#else
    asm("cvt.rn.f16.f32 %0, %1;" : "=h"(h) : "f"(f));
#endif
    return h;
}

// (w & 0x000f000f) | magic in one instruction; the compiler, left alone, makes two of it.
__device__ __forceinline__ u32 spread(u32 w, u32 magic) {
    u32 d;
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(d) : "r"(w), "r"(magic));
    return d;
}

// a * b + c in both halves.
__device__ __forceinline__ u32 fma2(u32 a, u32 b, u32 c) {
    u32 d;
    asm(FMA2 " %0, %1, %2, %3;" : "=r"(d) : "r"(a), "r"(b), "r"(c));
    return d;
}

// A lane's word of step `step` of 32 inputs.
__device__ __forceinline__ u32 pick(const uint4& four, int step) { return step == 0 ? four.x : step == 1 ? four.y : step == 2 ? four.z : four.w; }

// The weights of a word in pairs: of even pairs q, of odd ones 16 q, in units of the smallest number.
__device__ __forceinline__ void nibbles(u32 (&a)[4], u32 w) {
    const u32 v = w >> 8;
    a[0] = w & 0x000f000fu, a[1] = w & 0x00f000f0u, a[2] = v & 0x000f000fu, a[3] = v & 0x00f000f0u;
}

// The weights of a word as operands for x that `scaled` has made, or its sums.
__device__ __forceinline__ void numbers(u32 (&a)[4], u32 w) {
#if BF16
    nibbles(a, w);
#else // x of odd pairs divided by 16 could lose bits
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = w >> 4 * p & 0x000f000fu;
#endif
}

// x of pair p for products with `numbers`. Bfloat16 is taken times 2^64, of odd pairs times 2^60, which loses nothing; numbers from 2^64 on become infinite, and what is infinite or no
// number stays so.
__device__ __forceinline__ u32 scaled(u32 x, int p) {
#if BF16
    return fma2(x, p % 2 ? ODD_X : EVEN_X, MINUS_ZERO);
#else
    return x;
#endif
}

// The weights of a word as q - z, divided by FROM_CENTRED; minus: of minus_zero(z).
__device__ __forceinline__ void centred(u32 (&a)[4], u32 w, u32 minus) {
    nibbles(a, w);
#pragma unroll
    for (int p = 0; p < 4; p++) a[p] = fma2(a[p], p % 2 ? ODD : EVEN, minus);
}

__device__ __forceinline__ u32 minus_zero(u32 z) { return fma2(z * 0x10001u, EVEN | MINUS_ZERO, MINUS_ZERO); }

// Four sums of one token, for outputs n to n + 3 of N, to where n lies in out.
__device__ __forceinline__ void store_4(u16* to, const u16* bias, int n, int N, float4 sum) {
    const float f[4] = {sum.x, sum.y, sum.z, sum.w};
    u16 h[4];
#pragma unroll
    for (int i = 0; i < 4; i++) h[i] = narrow(f[i] + (bias && n + i < N ? widen(bias[n + i], BF16) : 0.f));
    if (N % 4 == 0 && n < N)
        *(uint2*)to = make_uint2(h[0] | (u32)h[1] << 16, h[2] | (u32)h[3] << 16);
    else
        for (int i = 0; i < 4 && n + i < N; i++) to[i] = h[i];
}

// A warp's sums of sixteen outputs, as the tensor cores leave them, times `unit` to out [M, N]: number 4 j + e of lane (g, t) is that of token token0 + 8 j + 2 t + e % 2 and output
// n0 + g + e / 2 * 8.
template <int COUNT>
__device__ __forceinline__ void write_sums(u16* out, const u16* bias, int M, int N, int token0, int n0, const float (&sum)[COUNT], float unit) {
    const int lane = threadIdx.x % 32, n = n0 + lane / 4, token = token0 + lane % 4 * 2;
    const float low = bias && n < N ? widen(bias[n], BF16) : 0, high = bias && n + 8 < N ? widen(bias[n + 8], BF16) : 0;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        const int row = token + i / 4 * 8 + i % 2, at = n + i % 4 / 2 * 8;
        if (row < M && at < N) out[(size_t)row * N + at] = narrow(sum[i] * unit + (i % 4 < 2 ? low : high));
    }
}

// c [16, 8] += a [16, 16] b [16, 8]
__device__ __forceinline__ void mma(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if BF16
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#else
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
#endif
        : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
}

// Four 8x8 matrices of 16-bit numbers from shared memory; `row` is the address of row lane % 8 of matrix lane / 8. A lane (g, t) gets numbers 2t and 2t + 1 of
// row g of each. Volatile: in order with the waits for what it reads.
__device__ __forceinline__ uint4 ldmatrix(u32 row) {
    uint4 v;
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0,%1,%2,%3}, [%4];"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(row) : "memory");
    return v;
}

// Loads from an address of shared memory. Volatile: in order with the waits for what they read.
__device__ __forceinline__ uint4 load_shared_16(u32 at) {
    uint4 v;
    asm volatile("ld.shared.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ u32 load_shared_4(u32 at) {
    u32 v;
    asm volatile("ld.shared.u32 %0, [%1];" : "=r"(v) : "r"(at) : "memory");
    return v;
}

__device__ __forceinline__ u32 load_shared_2(u32 at) {
    u16 v;
    asm volatile("ld.shared.u16 %0, [%1];" : "=h"(v) : "r"(at) : "memory");
    return v;
}

#define HOPPER (__CUDA_ARCH__ >= 900)

__device__ __forceinline__ void launch_dependents() {
#if HOPPER
    asm volatile("griddepcontrol.launch_dependents;");
#endif
}

// Until the kernel before has ended and its results are visible.
__device__ __forceinline__ void wait_for_previous() {
#if HOPPER
    asm volatile("griddepcontrol.wait;" ::: "memory");
#endif
}

__device__ __forceinline__ void barrier_init(u32 barrier, u32 count) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(count));
}

// What has been initialised is seen by copies and by the other blocks of the cluster; for the threads of this one, a barrier has to follow.
__device__ __forceinline__ void barriers_ready() {
#if HOPPER
    asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
#endif
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
#if HOPPER
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
#else
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.test_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
#endif
                 :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("{\n.reg .b64 state;\nmbarrier.arrive.shared::cta.b64 state, [%0];\n}" :: "r"(barrier) : "memory");
}

// 16 bytes from global to shared memory, or zeros if not `inside`.
__device__ __forceinline__ void copy_16(u32 to, const void* from, bool inside) {
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" :: "r"(to), "l"(from), "r"(inside ? 16 : 0) : "memory");
}

// Arrives at the barrier once all copies that this thread has begun by `copy_16` have come.
__device__ __forceinline__ void arrive_when_copied(u32 barrier) {
    asm volatile("cp.async.mbarrier.arrive.noinc.shared::cta.b64 [%0];" :: "r"(barrier) : "memory");
}

#if HOPPER
// The thread arrives, and the barrier waits for that many bytes of copies as well.
__device__ __forceinline__ void arrive_expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

// Bytes (a multiple of 16, both ends aligned to 16) from global to shared memory; `barrier` counts them.
__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1], %2, [%3], %4;"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void bulk_copy(u32 to, const void* from, u32 bytes, u32 barrier) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier) : "memory");
}

__device__ __forceinline__ u64 evict_first() {
    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    return policy;
}

// Four floats to the shared memory of block `rank` of the cluster, where its barrier counts their bytes; both at the address that they have in this block's.
__device__ __forceinline__ void push_peer(u32 address, float4 v, u32 barrier, u32 rank) {
    asm volatile("{\n.reg .b32 there, counter;\nmapa.shared::cluster.u32 there, %0, %6;\nmapa.shared::cluster.u32 counter, %1, %6;\n"
                 "st.async.weak.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [there], {%2, %3, %4, %5}, [counter];\n}"
                 :: "r"(address), "r"(barrier), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w), "r"(rank) : "memory");
}

// The two halves of a barrier of the cluster that orders no memory but what barriers_ready has released.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }

// All threads of all blocks of the cluster, and their shared memory.
__device__ __forceinline__ void cluster_sync() {
    asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// No thread goes on before all blocks of the cluster are here, without an order of memory.
__device__ __forceinline__ void cluster_end() {
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.aligned;" ::: "memory");
}

// Four floats of the shared memory of block `rank` of the cluster, at the address that they have in this block's.
__device__ __forceinline__ float4 load_peer(u32 address, u32 rank) {
    float4 v;
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(rank));
    asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(there));
    return v;
}
#endif
