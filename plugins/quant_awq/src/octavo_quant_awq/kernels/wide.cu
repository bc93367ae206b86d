// out = x W^T + bias for tens to hundreds of rows of x, W in 4 bits, on Hopper's warpgroup instructions (sm_90a).
//
// W and its scales lie as packing.py says. A warpgroup owns 64 rows of W: each lane dequantises what is its part of the left
// operand in registers, just as it lies in memory, and one instruction multiplies it with TOKENS rows of x out of shared memory.
// Weights are rounded to 16 bits once they are scaled, as when they are dequantised for a library.
//
// `arrange` brings x into the form that the instruction reads: for every 128 inputs two tiles of [TOKENS][64], swizzled, inputs in the
// order of the words of W, zeros past the last token and input. So a block of x is one bulk copy, which a warp of its own keeps
// STAGES ahead. Blocks of a cluster (gridDim.y) share K and add up through shared memory, in a fixed order.
//
// Macros: BF16, SCALE_BF16, ZEROS, SUB as in w4a16.cu; TOKENS (32, 64, 128 or 256), GROUPS (warpgroups, 64 rows each), STAGES,
// DEPTH (blocks of weights that a warp has in flight).
// The function wgmma(acc, a, descriptor) for TOKENS is put in front of this file.

typedef unsigned short u16;
typedef unsigned long long u64;

#define ROWS (64 * GROUPS)
#define CONSUMERS (128 * GROUPS)
#define PITCH (ROWS + 4)
#define TILE_BYTES (TOKENS * 128)
#define STAGE_BYTES (2 * TILE_BYTES)

#if BF16
#define MAGIC 0x43004300u
#define ONES 0x3f803f80u
#define FMA2 "fma.rn.bf16x2"
#define MINUS_ZERO 0x80008000u
#else
#define MAGIC 0x64006400u
#define ONES 0x3c003c00u
#define FMA2 "fma.rn.f16x2"
#define MINUS_ZERO 0x80008000u
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

// A scale in both halves, in the activations' dtype. bits: 16.
__device__ __forceinline__ u32 twice(u32 bits) {
#if BF16 == SCALE_BF16
    return bits * 0x10001u;
#else
    return narrow(widen(bits, SCALE_BF16)) * 0x10001u;
#endif
}

// Two weights of bits 0-3 and 16-19: (q - z) * s, rounded once; minus is -(offset + z).
__device__ __forceinline__ u32 weights(u32 word, u32 magic, u32 minus, u32 scale) {
    u32 q, centred, w;
    asm("lop3.b32 %0, %1, 0x000f000f, %2, 0xea;" : "=r"(q) : "r"(word), "r"(magic));
    asm(FMA2 " %0, %1, %2, %3;" : "=r"(centred) : "r"(q), "r"(ONES), "r"(minus));
    asm(FMA2 " %0, %1, %2, %3;" : "=r"(w) : "r"(centred), "r"(scale), "r"(MINUS_ZERO));
    return w;
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
                 :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

// x [M, K] -> [token block][block of inputs][2][TOKENS][64], the form of the right operand. One thread: 32 inputs of one token.
extern "C" __global__ void arrange(const u16* __restrict__ x, uint4* __restrict__ arranged, int M, int K, int x_stride) {
    asm volatile("griddepcontrol.launch_dependents;");
    asm volatile("griddepcontrol.wait;" ::: "memory");
    const int unit = blockIdx.x * blockDim.x + threadIdx.x, blocks = (K + 127) / 128;
    const int step = unit % 4, block = unit / 4 % blocks, row = unit / 4 / blocks; // row: of all token blocks
    if (row >= (M + TOKENS - 1) / TOKENS * TOKENS) return;
    const int k = block * 128 + step * 32, token = row % TOKENS;
    uint4 v[4]; // a lane's eight inputs each
#pragma unroll
    for (int t = 0; t < 4; t++) {
        v[t] = make_uint4(0, 0, 0, 0);
        if (row < M && k + 8 * t < K)
            asm volatile("ld.global.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v[t].x), "=r"(v[t].y), "=r"(v[t].z), "=r"(v[t].w)
                         : "l"(x + (size_t)row * x_stride + k + 8 * t));
    }
    uint4* tile = arranged + (((size_t)(row / TOKENS) * blocks + block) * 2 + step / 2) * TOKENS * 8 + token * 8;
    const int chunk = step % 2 * 4;
    tile[(chunk + 0) ^ (token & 7)] = make_uint4(v[0].x, v[1].x, v[2].x, v[3].x);
    tile[(chunk + 1) ^ (token & 7)] = make_uint4(v[0].y, v[1].y, v[2].y, v[3].y);
    tile[(chunk + 2) ^ (token & 7)] = make_uint4(v[0].z, v[1].z, v[2].z, v[3].z);
    tile[(chunk + 3) ^ (token & 7)] = make_uint4(v[0].w, v[1].w, v[2].w, v[3].w);
}

struct Stage {
    uint4 word[2]; // rows g and g + 8
    u32 scale[SUB];
    u16 zero[SUB];
};

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, 1) wide(
    const uint4* __restrict__ words, const u32* __restrict__ scales, const u16* __restrict__ zeros, const uint4* __restrict__ arranged,
    const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K, int group_step) {
    extern __shared__ __align__(1024) unsigned char memory[]; // STAGES of x; afterwards sums float [TOKENS][PITCH]
    __shared__ __align__(8) u64 barriers[2 * STAGES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tiles = (N + 15) / 16, tile = min((int)blockIdx.x * (ROWS / 16) + warp, tiles - 1);
    const int blocks = (K + 127) / 128, stride = gridDim.y, first = blockIdx.y;
    const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES;
    const u32 base = (u32)__cvta_generic_to_shared(memory);

    asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) {
            asm volatile("mbarrier.init.shared::cta.b64 [%0], 1;" :: "r"(full + 8 * s));
            asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(empty + 8 * s), "n"(4 * GROUPS));
        }
        asm volatile("fence.mbarrier_init.release.cluster;\nfence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();

    float acc[TOKENS / 2] = {};
    if (warp == CONSUMERS / 32) {
        if (lane == 0) {
            asm volatile("griddepcontrol.wait;" ::: "memory");
            int s = 0, phase = 0;
            for (int block = first; block < blocks; block += stride) {
                wait(empty + 8 * s, phase ^ 1);
                asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(full + 8 * s), "n"(STAGE_BYTES) : "memory");
                const uint4* from = arranged + ((size_t)blockIdx.z * blocks + block) * (STAGE_BYTES / 16);
                asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];"
                             :: "r"(base + s * STAGE_BYTES), "l"(from), "n"(STAGE_BYTES), "r"(full + 8 * s) : "memory");
                if (++s == STAGES) s = 0, phase ^= 1;
            }
        }
    } else {
        u32 magic = MAGIC;
        asm volatile("" : "+r"(magic));
        auto load = [&](Stage& s, int block) {
            const uint4* p = words + ((size_t)block * tiles + tile) * 64 + lane;
            s.word[0] = __ldcs(p), s.word[1] = __ldcs(p + 32);
#pragma unroll
            for (int u = 0; u < SUB; u++) {
                const int at = ((SUB == 1 ? block * group_step : block * SUB + u) * tiles + tile) * 8 + g;
                s.scale[u] = __ldg(scales + at);
#if ZEROS
                s.zero[u] = __ldg(zeros + at);
#endif
            }
        };
        u32 a[2][8];
        // The left operand of 32 inputs: two of 16, as [row g, g + 8, g, g + 8] with pairs of inputs.
        auto dequantise = [&](u32 (&to)[8], const Stage& s, int i) {
            const int u = i * SUB / 4;
#pragma unroll
            for (int h = 0; h < 2; h++) {
                const uint4 four = s.word[h];
                const u32 w = i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
#if ZEROS
                const u32 z = h ? s.zero[u] >> 8 : s.zero[u] & 0xff;
                const u32 minus = (MAGIC | 0x80008000u) + z * 0x10001u;
#else
                const u32 minus = MAGIC | 0x80088008u;
#endif
                const u32 scale = twice(h ? s.scale[u] >> 16 : s.scale[u] & 0xffff);
#pragma unroll
                for (int p = 0; p < 4; p++) to[p / 2 * 4 + p % 2 * 2 + h] = weights(w >> 4 * p, magic, minus, scale);
            }
        };
        const u64 layout = (u64)1 << 62 | (u64)64 << 32 | (u64)1 << 16; // 128-byte swizzle, 1024 bytes between eight rows
        int s = 0, phase = 0;
        auto multiply = [&](const Stage& stage, bool release, int last) {
            wait(full + 8 * s, phase);
#pragma unroll
            for (int i = 0; i < 4; i++) {
                dequantise(a[i % 2], stage, i);
                const u64 descriptor = layout | (u64)((base + s * STAGE_BYTES + i / 2 * TILE_BYTES + i % 2 * 64) >> 4 & 0x3fff);
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
                wgmma(acc, a[i % 2][0], a[i % 2][1], a[i % 2][2], a[i % 2][3], descriptor);
                wgmma(acc, a[i % 2][4], a[i % 2][5], a[i % 2][6], a[i % 2][7], descriptor + 2);
                asm volatile("wgmma.commit_group.sync.aligned;\nwgmma.wait_group.sync.aligned 1;" ::: "memory");
                if (i == 0 && release && lane == 0) arrive(empty + 8 * last); // all that read the stage before is done
            }
        };
        Stage stage[DEPTH];
#pragma unroll
        for (int d = 0; d < DEPTH; d++)
            if (first + d * stride < blocks) load(stage[d], first + d * stride);
        for (int block = first; block < blocks; block += DEPTH * stride) {
#pragma unroll
            for (int d = 0; d < DEPTH; d++) {
                const int here = block + d * stride;
                if (here < blocks) {
                    multiply(stage[d], here > first, s ? s - 1 : STAGES - 1);
                    if (here + DEPTH * stride < blocks) load(stage[d], here + DEPTH * stride);
                    if (++s == STAGES) s = 0, phase ^= 1;
                }
            }
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
    }

    __syncthreads(); // x has been read: its memory takes the sums
    float* sums = (float*)memory;
    if (warp < CONSUMERS / 32) {
#pragma unroll
        for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
            for (int e = 0; e < 4; e++) sums[(8 * j + 2 * t + e % 2) * PITCH + 16 * warp + g + e / 2 * 8] = acc[4 * j + e];
    }
    const int peers = gridDim.y;
    if (peers > 1)
        asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
    else
        __syncthreads();
    const int token0 = blockIdx.z * TOKENS, count = min(M - token0, TOKENS);
    for (int e = first * (CONSUMERS + 32) + threadIdx.x; e < count * (ROWS / 4); e += peers * (CONSUMERS + 32)) {
        const int token = e / (ROWS / 4), row = e % (ROWS / 4) * 4, n = blockIdx.x * ROWS + row;
        float4 sum = make_float4(0, 0, 0, 0);
        for (int peer = 0; peer < peers; peer++) {
            float4 v;
            u32 address;
            asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(address) : "r"(base + 4 * (token * PITCH + row)), "r"(peer));
            asm volatile("ld.shared::cluster.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "r"(address));
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        const float f[4] = {sum.x, sum.y, sum.z, sum.w};
        u16 h[4];
#pragma unroll
        for (int i = 0; i < 4; i++) h[i] = narrow(f[i] + (bias && n + i < N ? widen(bias[n + i], BF16) : 0.f));
        u16* to = out + (size_t)(token0 + token) * N + n;
        if (N % 4 == 0 && n < N)
            *(uint2*)to = make_uint2(h[0] | (u32)h[1] << 16, h[2] | (u32)h[3] << 16);
        else
            for (int i = 0; i < 4 && n + i < N; i++) to[i] = h[i];
    }
    // a block's shared memory must outlive its peers' reads
    if (peers > 1) asm volatile("barrier.cluster.arrive.release.aligned;\nbarrier.cluster.wait.acquire.aligned;" ::: "memory");
}

// out [rows, K], rows from FIRST on: W as 16-bit numbers. One thread: 32 inputs of one row.
extern "C" __global__ void dequantise(
    const uint4* __restrict__ words, const u16* __restrict__ scales, const unsigned char* __restrict__ zeros, u16* __restrict__ out,
    int first, int count, int N, int K, int group_step) {
    const int unit = blockIdx.x * blockDim.x + threadIdx.x, t = unit % 4, row = unit / 4, block = blockIdx.y;
    if (row >= count) return;
    const int n = first + row, tiles = (N + 15) / 16;
    const uint4 four = __ldcs(words + ((size_t)block * tiles * 16 + n) * 4 + t);
    const u32 word[4] = {four.x, four.y, four.z, four.w};
#pragma unroll
    for (int i = 0; i < 4; i++) {
        const int k = block * 128 + 32 * i + 8 * t;
        const size_t at = (size_t)(SUB == 1 ? block * group_step : block * SUB + i * SUB / 4) * tiles * 16 + n / 16 * 16 + n % 8 * 2 + n % 16 / 8;
        const float scale = widen(scales[at], SCALE_BF16);
#if ZEROS
        const int z = zeros[at];
#else
        const int z = 8;
#endif
        u32 pair[4];
#pragma unroll
        for (int p = 0; p < 4; p++) {
            const int low = (int)(word[i] >> 4 * p & 15) - z, high = (int)(word[i] >> (16 + 4 * p) & 15) - z;
            pair[p] = narrow(low * scale) | (u32)narrow(high * scale) << 16;
        }
        if (k < K) *(uint4*)(out + (size_t)row * K + k) = make_uint4(pair[0], pair[1], pair[2], pair[3]);
    }
}
