// out [M, N] = x [M, K] W^T, both e4m3, on Hopper's warpgroup instructions (sm_90a): for few rows W is read once, at the speed of memory.
//
// W is the left operand: a warpgroup owns 64 of its rows, and TOKENS rows of x are the columns of the product. One warp copies tiles
// of both through tensor maps, STAGES ahead of W and X_STAGES ahead of x. Its first tiles of W are asked for before the kernel in front has
// ended (no step writes weights), so that memory works while norms and quantising run. What lies past the last row or input arrives as zero.
// A tile is CHUNKS panels of 128 inputs; the copies of W take BOX rows of each panel in turn, so that what is next to each other in a row
// is asked for at nearly the same time.
//
// Blocks of a cluster along y (SPLIT) share the inputs. Each finishes some rows of W: the others send it their sums, and it adds them in a
// fixed order. Grid: (blocks of ROWS rows of W, SPLIT, blocks of TOKENS rows of x).
//
// Macros: TOKENS (a multiple of 8 up to 256), GROUPS (warpgroups), CHUNKS, BOX, STAGES (at least 2), X_STAGES, SPLIT, REUSE (0 or 1: sums that
// are sent take the room of tiles, for which the blocks of a cluster wait), MIN_BLOCKS (that a multiprocessor must hold), OUT (0 bfloat16,
// 1 float16, 2 float32), BIAS (0 or 1, of the same type). The function wgmma for TOKENS is put in front of this file.

typedef unsigned char u8;
typedef unsigned short u16;
typedef unsigned long long u64;

#define ROWS (64 * GROUPS)
#define WARPS (4 * GROUPS)
#define CONSUMERS (32 * WARPS)
#define PANEL 128                        // inputs of a panel, one swizzled row of 128 bytes
#define DEPTH (PANEL * CHUNKS)           // inputs of a tile
#define W_PANEL (ROWS * PANEL)
#define X_PANEL (TOKENS * PANEL)
#define W_BYTES (W_PANEL * CHUNKS)
#define X_BYTES (X_PANEL * CHUNKS)
#define SLICE (ROWS / SPLIT)             // rows of W that a block of the cluster finishes: a multiple of a warp's 16
#define QUADS (SLICE / 4)                // a thread finishes the same four rows of every STEP-th token
#define STEP (CONSUMERS / QUADS)
#define TURNS ((TOKENS + STEP - 1) / STEP)
#define PITCH (ROWS + 4)                 // SPLIT 1: floats from one token's sums to the next; no two lanes of a store share a bank
#define PART (SLICE / 16)                // SPLIT > 1: warps of a block whose rows one block finishes
#define RING (STAGES < X_STAGES ? STAGES : X_STAGES)

struct __align__(64) TensorMap {
    u64 words[16];
};

__device__ __forceinline__ u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }

__device__ __forceinline__ void begin_barrier(u32 barrier, u32 arrivals) {
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" :: "r"(barrier), "r"(arrivals) : "memory");
}

__device__ __forceinline__ void wait(u32 barrier, u32 parity) {
    asm volatile("{\n.reg .pred done;\nagain:\nmbarrier.try_wait.parity.shared::cta.b64 done, [%0], %1;\n@!done bra again;\n}"
                 :: "r"(barrier), "r"(parity) : "memory");
}

__device__ __forceinline__ void arrive(u32 barrier) {
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" :: "r"(barrier) : "memory");
}

__device__ __forceinline__ void expect(u32 barrier, u32 bytes) {
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" :: "r"(barrier), "r"(bytes) : "memory");
}

__device__ __forceinline__ void consumers_meet() { asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory"); }

// The tile at (input, row) of a matrix.
__device__ __forceinline__ void copy(u32 to, const TensorMap& map, int input, int row, u32 barrier, u64 policy) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes.L2::cache_hint [%0], [%1, {%2, %3}], [%4], %5;"
                 :: "r"(to), "l"(&map), "r"(input), "r"(row), "r"(barrier), "l"(policy) : "memory");
}

__device__ __forceinline__ void copy(u32 to, const TensorMap& map, int input, int row, u32 barrier) {
    asm volatile("cp.async.bulk.tensor.2d.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1, {%2, %3}], [%4];"
                 :: "r"(to), "l"(&map), "r"(input), "r"(row), "r"(barrier) : "memory");
}

// An operand whose rows are 128 bytes under the 128-byte swizzle, eight of them 1024 bytes.
__device__ __forceinline__ u64 descriptor(u32 address) {
    return (u64)(address >> 4 & 0x3fff) | 1ull << 16 | 64ull << 32 | 1ull << 62;
}

// Of what another kernel of the step has written, which may still run while this one begins: neither a load of the compiler's that it may put
// before griddepcontrol.wait, nor one through the cache of constants, as of a `const __restrict__` pointer.
__device__ __forceinline__ float load_written(const float* p) {
    float f;
    asm volatile("ld.global.f32 %0, [%1];" : "=f"(f) : "l"(p) : "memory");
    return f;
}

// Of weights' scales, which no step writes: before the wait.
__device__ __forceinline__ float4 load_early(const float* p) {
    float4 f;
    asm volatile("ld.global.nc.v4.f32 {%0, %1, %2, %3}, [%4];" : "=f"(f.x), "=f"(f.y), "=f"(f.z), "=f"(f.w) : "l"(p));
    return f;
}

#if SPLIT > 1
__device__ __forceinline__ u32 in_block(u32 address, u32 block) {
    u32 there;
    asm("mapa.shared::cluster.u32 %0, %1, %2;" : "=r"(there) : "r"(address), "r"(block));
    return there;
}

// To the shared memory of a block of the cluster, which waits for so many bytes at a barrier of its own: no fence, and no sender waits.
__device__ __forceinline__ void send(u32 to, float a, float b, float c, float d, u32 barrier) {
    asm volatile("st.async.shared::cluster.mbarrier::complete_tx::bytes.v4.f32 [%0], {%1, %2, %3, %4}, [%5];"
                 :: "r"(to), "f"(a), "f"(b), "f"(c), "f"(d), "r"(barrier) : "memory");
}

// Relaxed: what the others write then is not read here through any cache, and a fence would wait for global memory.
__device__ __forceinline__ void cluster_arrive() { asm volatile("barrier.cluster.arrive.relaxed.aligned;" ::: "memory"); }
__device__ __forceinline__ void cluster_wait() { asm volatile("barrier.cluster.wait.acquire.aligned;" ::: "memory"); }
#endif

#if OUT == 2
typedef float Out;
__device__ __forceinline__ float widened(Out x) { return x; }
__device__ __forceinline__ void store4(Out* out, float4 y) { *(float4*)out = y; }
#else
typedef u16 Out;
__device__ __forceinline__ float widened(Out x) {
#if OUT == 0
    return __uint_as_float((u32)x << 16);
#else
    float f;
    asm("cvt.f32.f16 %0, %1;" : "=f"(f) : "h"(x));
    return f;
#endif
}
__device__ __forceinline__ u32 narrowed(float low, float high) {
    u32 r;
#if OUT == 0
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#else
    asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(r) : "f"(high), "f"(low));
#endif
    return r;
}
__device__ __forceinline__ void store4(Out* out, float4 y) { *(uint2*)out = make_uint2(narrowed(y.x, y.y), narrowed(y.z, y.w)); }
#endif

extern "C" __global__ void __launch_bounds__(CONSUMERS + 32, MIN_BLOCKS) rows(
    const __grid_constant__ TensorMap weights, const __grid_constant__ TensorMap inputs, const float* x_scale,
    const float* __restrict__ scale, const Out* __restrict__ bias, Out* __restrict__ out, int M, int N, int K) {
    extern __shared__ __align__(1024) u8 memory[]; // tiles of W, tiles of x, sums that are sent here; SPLIT 1: sums float [TOKENS][PITCH] in the end
    __shared__ __align__(8) u64 barriers[STAGES + X_STAGES + RING + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    const u32 base = shared_address(memory), x_base = base + STAGES * W_BYTES;
    const u32 w_full = shared_address(barriers), x_full = w_full + 8 * STAGES, consumed = x_full + 8 * X_STAGES;
    const int total = (K + DEPTH - 1) / DEPTH, first = total * (int)blockIdx.y / SPLIT, steps = total * ((int)blockIdx.y + 1) / SPLIT - first;
    const int row = blockIdx.x * ROWS, token = blockIdx.z * TOKENS;
#if SPLIT > 1
    const u32 sums_full = consumed + 8 * RING;
#endif

    asm volatile("griddepcontrol.launch_dependents;");
    if (threadIdx.x == 0) {
        asm volatile("prefetch.tensormap [%0];" :: "l"(&weights) : "memory");
        asm volatile("prefetch.tensormap [%0];" :: "l"(&inputs) : "memory");
        for (int s = 0; s < STAGES + X_STAGES + RING; ++s) begin_barrier(w_full + 8 * s, s < STAGES + X_STAGES ? 1 : WARPS);
#if SPLIT > 1
        begin_barrier(sums_full, 1);
        expect(sums_full, TOKENS * ROWS * 4);
        asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#endif
        asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
    }
    __syncthreads();
#if SPLIT > 1
    cluster_arrive(); // its barriers are ready
#endif

    if (warp == WARPS) {
        u64 once;
        asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(once));
        // Each lane copies some of the boxes of a tile of W, and lane c the panel c of x.
        auto copy_weights = [&](int s) {
            const u32 to = base + s % STAGES * W_BYTES, barrier = w_full + 8 * (s % STAGES);
            if (lane == 0) expect(barrier, W_BYTES);
            __syncwarp();
#pragma unroll
            for (int i = lane; i < ROWS / BOX * CHUNKS; i += 32) {
                const int panel = i % CHUNKS, at = i / CHUNKS * BOX;
                copy(to + panel * W_PANEL + at * PANEL, weights, (first + s) * DEPTH + panel * PANEL, row + at, barrier, once);
            }
        };
        for (int s = 0; s < min(steps, STAGES); ++s) copy_weights(s);
        asm volatile("griddepcontrol.wait;" ::: "memory");
        auto copy_inputs = [&](int s) {
            const u32 to = x_base + s % X_STAGES * X_BYTES, barrier = x_full + 8 * (s % X_STAGES);
            if (lane == 0) expect(barrier, X_BYTES);
            __syncwarp();
            if (lane < CHUNKS) copy(to + lane * X_PANEL, inputs, (first + s) * DEPTH + lane * PANEL, token, barrier);
        };
        for (int s = 0; s < min(steps, X_STAGES); ++s) copy_inputs(s);
        // Tile s has been multiplied: there is room for the tile of W STAGES after it, and for that of x X_STAGES after it.
        for (int s = 0; s + RING < steps; ++s) {
            wait(consumed + 8 * (s % RING), s / RING & 1);
            if (s + STAGES < steps) copy_weights(s + STAGES);
            if (s + X_STAGES < steps) copy_inputs(s + X_STAGES);
        }
        __syncwarp();
#if SPLIT > 1
        cluster_wait();
#if REUSE
        cluster_arrive();
        cluster_wait();
#endif
#endif
    } else {
        // What a thread needs at the end, asked for now: it arrives while tiles are multiplied.
        const int count = min(M - token, TOKENS), quad = threadIdx.x % QUADS * 4, n = row + (SPLIT == 1 ? 0 : blockIdx.y * SLICE) + quad;
        float4 s4 = make_float4(0.0f, 0.0f, 0.0f, 0.0f), b4 = s4;
        if (n < N) {
            s4 = load_early(scale + n);
            if (BIAS) b4 = make_float4(widened(bias[n]), widened(bias[n + 1]), widened(bias[n + 2]), widened(bias[n + 3]));
        }
        asm volatile("griddepcontrol.wait;" ::: "memory");
#if SPLIT > 1
        cluster_wait(); // every block's barriers are ready
#endif
        float t[TURNS];
#pragma unroll
        for (int j = 0; j < TURNS; ++j) {
            const int m = threadIdx.x / QUADS + j * STEP;
            t[j] = 0.0f;
            if (m < count) t[j] = load_written(x_scale + token + m);
        }

        const int group = warp / 4;
        float c[TOKENS / 2];
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) c[i] = 0.0f;
        for (int s = 0; s < steps; ++s) {
            const int w_stage = s % STAGES, x_stage = s % X_STAGES;
            wait(w_full + 8 * w_stage, s / STAGES & 1);
            wait(x_full + 8 * x_stage, s / X_STAGES & 1);
            const u64 a = descriptor(base + w_stage * W_BYTES + group * 64 * PANEL), b = descriptor(x_base + x_stage * X_BYTES);
#pragma unroll
            for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(c[i]) :: "memory");
            asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
            for (int k = 0; k < DEPTH / 32; ++k) wgmma(c, a + k / 4 * (W_PANEL >> 4) + k % 4 * 2, b + k / 4 * (X_PANEL >> 4) + k % 4 * 2);
            asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
            // The tile before this one has been read once its products are done.
            asm volatile("wgmma.wait_group.sync.aligned 1;" ::: "memory");
            if (s > 0 && lane == 0) arrive(consumed + 8 * ((s - 1) % RING));
        }
        asm volatile("wgmma.wait_group.sync.aligned 0;" ::: "memory");
#pragma unroll
        for (int i = 0; i < TOKENS / 2; ++i) asm volatile("" : "+f"(c[i]) :: "memory");
#if SPLIT > 1
        // A warp's sums are of one block's rows, and go there as they lie in registers: float4 [SPLIT][TOKENS / 8][PART][32], of rows
        // lane / 4 and 8 more, tokens lane % 4 * 2 and 1 more.
#if REUSE
        cluster_arrive(); // its tiles have been read
        cluster_wait();
#endif
        const float* sums = (const float*)(memory + (REUSE ? 0 : STAGES * W_BYTES + X_STAGES * X_BYTES));
        const u32 there = in_block(sums_full, warp / PART);
        const u32 at = in_block(shared_address(sums) + (blockIdx.y * (TOKENS / 8) * PART * 32 + warp % PART * 32 + lane) * 16, warp / PART);
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) send(at + j * PART * 32 * 16, c[4 * j], c[4 * j + 1], c[4 * j + 2], c[4 * j + 3], there);
        wait(sums_full, 0);
        sums += (quad / 16 * 32 + quad % 8 * 4) * 4 + quad % 16 / 8 * 2;
#else
        consumers_meet(); // every warpgroup has read the last tiles
        float* sums = (float*)memory;
        const int r = warp * 16 + lane / 4;
#pragma unroll
        for (int j = 0; j < TOKENS / 8; ++j) {
            float* to = sums + (8 * j + lane % 4 * 2) * PITCH + r;
            to[0] = c[4 * j], to[PITCH] = c[4 * j + 1], to[8] = c[4 * j + 2], to[PITCH + 8] = c[4 * j + 3];
        }
        consumers_meet();
#endif
#pragma unroll
        for (int j = 0; j < TURNS; ++j) {
            const int m = threadIdx.x / QUADS + j * STEP;
            if (m >= count || n >= N) continue;
            float4 y = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#if SPLIT > 1
#pragma unroll
            for (int part = 0; part < SPLIT; ++part) {
                const float* p = sums + ((part * (TOKENS / 8) + m / 8) * PART * 32 + m % 8 / 2) * 4 + m % 2;
                y.x += p[0], y.y += p[16], y.z += p[32], y.w += p[48];
            }
#else
            y = *(const float4*)(sums + m * PITCH + quad);
#endif
            y.x = y.x * s4.x * t[j] + b4.x, y.y = y.y * s4.y * t[j] + b4.y, y.z = y.z * s4.z * t[j] + b4.z, y.w = y.w * s4.w * t[j] + b4.w;
            store4(out + (size_t)(token + m) * N + n, y);
        }
    }
}
