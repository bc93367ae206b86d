// Rows to e4m3 with a scale a row, for few rows: as they are, after a norm, or after SwiGLU. quantise.py's arithmetic.
//
// A row belongs to the CLUSTER blocks along y, each of which has THREADS threads with ITEMS vectors of eight channels: so a long row is read
// at once, and the blocks are small enough to wait beside the product in front. They agree on the row's peak through shared memory.
// A NaN or an infinity in a row makes its scale, and with it the whole row, not finite: it is never hidden.
//
// Macros: KIND (0 as they are, 1 after a norm with a residual, 2 after SwiGLU), BF16 (x is bfloat16, else float16), WEIGHT (bits of a norm's
// weight: 32, or 16 of x's type), CLUSTER, THREADS, ITEMS.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned int u32;

#define WARPS (THREADS / 32)

__device__ __forceinline__ float widened(u32 bits) {
#if BF16
    return __uint_as_float(bits << 16);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"((u16)bits));
    return f;
#endif
}

__device__ __forceinline__ void widened(float (&v)[8], uint4 x) {
    const u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int i = 0; i < 4; ++i) v[2 * i] = widened(words[i] & 0xffff), v[2 * i + 1] = widened(words[i] >> 16);
}

// Eight values at a multiple of 16 bytes.
__device__ __forceinline__ void load8(float (&v)[8], const u16* p) { widened(v, *(const uint4*)p); }

__device__ __forceinline__ void load8(float (&v)[8], const float* p) {
    const float4 a = *(const float4*)p, b = *(const float4*)(p + 4);
    v[0] = a.x, v[1] = a.y, v[2] = a.z, v[3] = a.w, v[4] = b.x, v[5] = b.y, v[6] = b.z, v[7] = b.w;
}

// Of what another kernel of the step has written, which may still run while this one begins: neither a load of the compiler's that it may put
// before griddepcontrol.wait, nor one through the cache of constants, as of a `const __restrict__` pointer.
__device__ __forceinline__ uint4 load_written(const void* p) {
    uint4 x;
    asm volatile("ld.global.v4.u32 {%0, %1, %2, %3}, [%4];" : "=r"(x.x), "=r"(x.y), "=r"(x.z), "=r"(x.w) : "l"(p) : "memory");
    return x;
}

__device__ __forceinline__ void load8_written(float (&v)[8], const u16* p) { widened(v, load_written(p)); }

__device__ __forceinline__ void load8_written(float (&v)[8], const float* p) {
    const uint4 a = load_written(p), b = load_written(p + 4);
    const u32 words[8] = {a.x, a.y, a.z, a.w, b.x, b.y, b.z, b.w};
#pragma unroll
    for (int i = 0; i < 8; ++i) v[i] = __uint_as_float(words[i]);
}

__device__ __forceinline__ float larger(float a, float b) {
    float r;
    asm("max.NaN.f32 %0, %1, %2;" : "=f"(r) : "f"(a), "f"(b));
    return r;
}

// Two floats to two e4m3, to nearest even, saturated; NaN stays NaN.
__device__ __forceinline__ u32 pack(float low, float high) {
    u16 r;
    asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(r) : "f"(high), "f"(low));
    return r;
}

// (sum, peak) over all threads of the row's blocks, the same for each: parts are added in a fixed order. barrier: of this block, for what the
// others send.
__device__ __forceinline__ float2 over_row(float sum, float peak, u32 barrier) {
    __shared__ float2 parts[WARPS];
#pragma unroll
    for (int i = 16; i > 0; i /= 2) {
        sum += __shfl_xor_sync(~0u, sum, i);
        peak = larger(peak, __shfl_xor_sync(~0u, peak, i));
    }
    if (threadIdx.x % 32 == 0) parts[threadIdx.x / 32] = make_float2(sum, peak);
    __syncthreads();
    float2 r = parts[0];
#pragma unroll
    for (int i = 1; i < WARPS; ++i) r.x += parts[i].x, r.y = larger(r.y, parts[i].y);
#if CLUSTER > 1
    // To every block of the row, which waits for the bytes at its own barrier: no fence, and none leaves before what it is sent has come.
    __shared__ float2 sent[CLUSTER];
    if (threadIdx.x < CLUSTER) {
        u32 to, there;
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(to) : "r"((u32)__cvta_generic_to_shared(&sent[blockIdx.y])), "r"(threadIdx.x));
        asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(barrier), "r"(threadIdx.x));
        asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v2.f32 [%0], {%1, %2}, [%3];"
                     :: "r"(to), "f"(r.x), "f"(r.y), "r"(there) : "memory");
    }
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], 0;\n@!done bra again;\n}" :: "r"(barrier) : "memory");
    r = make_float2(0.0f, 0.0f);
#pragma unroll
    for (int i = 0; i < CLUSTER; ++i) r.x += sent[i].x, r.y = larger(r.y, sent[i].y);
#endif
    return r;
}

// x [M, SIZE] (KIND 2: [M, 2 SIZE], gate beside up), x_stride apart; residual float32 [M, SIZE] becomes the sum (KIND 1). data e4m3
// [M, SIZE], scale float32 [M]. Values past `bound` saturate (KIND 0).
extern "C" __global__ void __launch_bounds__(THREADS) quantise(
    const u16* x, float* residual, const void* __restrict__ weight, u8* __restrict__ data, float* __restrict__ scale,
    int size, int x_stride, int residual_stride, float eps, float bound) {
    const int row = blockIdx.x;
    float v[ITEMS][8];
    float sum = 0.0f, peak = 0.0f;
    asm volatile("griddepcontrol.launch_dependents;");
#if CLUSTER > 1
    __shared__ __align__(8) unsigned long long arrivals;
    const u32 barrier = (u32)__cvta_generic_to_shared(&arrivals);
    if (threadIdx.x == 0) {
        asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(barrier) : "memory");
        asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "n"(8 * CLUSTER) : "memory");
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
    }
    __syncthreads();
    asm volatile("barrier.cluster.arrive.relaxed.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
#else
    const u32 barrier = 0;
#endif
#if KIND == 1
    float w[ITEMS][8]; // no step writes weights
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int d = ((i * CLUSTER + blockIdx.y) * THREADS + threadIdx.x) * 8;
#if WEIGHT == 32
        if (d < size) load8(w[i], (const float*)weight + d);
#else
        if (d < size) load8(w[i], (const u16*)weight + d);
#endif
    }
#endif
    asm volatile("griddepcontrol.wait;" ::: "memory");
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int d = ((i * CLUSTER + blockIdx.y) * THREADS + threadIdx.x) * 8;
        if (d >= size) continue;
        load8_written(v[i], x + (size_t)row * x_stride + d);
#if KIND == 1
        float* at = residual + (size_t)row * residual_stride + d;
        float r[8];
        load8_written(r, at);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] += r[j];
        *(float4*)at = make_float4(v[i][0], v[i][1], v[i][2], v[i][3]);
        *(float4*)(at + 4) = make_float4(v[i][4], v[i][5], v[i][6], v[i][7]);
#pragma unroll
        for (int j = 0; j < 8; ++j) sum += v[i][j] * v[i][j], v[i][j] *= w[i][j];
#elif KIND == 2
        float up[8];
        load8_written(up, x + (size_t)row * x_stride + size + d);
#pragma unroll
        for (int j = 0; j < 8; ++j) v[i][j] = v[i][j] / (1.0f + __expf(-v[i][j])) * up[j];
#endif
#pragma unroll
        for (int j = 0; j < 8; ++j) peak = larger(peak, fabsf(v[i][j]));
    }
    const float2 all = over_row(sum, peak, barrier);
    float factor = 1.0f; // of every value before it is quantised
#if KIND == 1
    factor = 1.0f / sqrtf(all.x / size + eps);
#endif
    float top = all.y * factor;
#if KIND == 0
    asm("min.NaN.f32 %0, %0, %1;" : "+f"(top) : "f"(bound));
#endif
    const float found = larger(top, 1e-12f) * (1.0f / 448.0f), inverse = 1.0f / found * factor;
    if (blockIdx.y == 0 && threadIdx.x == 0) scale[row] = found;
#pragma unroll
    for (int i = 0; i < ITEMS; ++i) {
        const int d = ((i * CLUSTER + blockIdx.y) * THREADS + threadIdx.x) * 8;
        if (d >= size) continue;
        u32 q[4];
#pragma unroll
        for (int j = 0; j < 4; ++j) q[j] = pack(v[i][2 * j] * inverse, v[i][2 * j + 1] * inverse);
        *(uint2*)(data + (size_t)row * size + d) = make_uint2(q[0] | q[1] << 16, q[2] | q[3] << 16);
    }
}
