// out = x W^T + bias for 1 to 64 rows of x, W in 4 bits: weights go from memory to tensor cores through registers only.
//
// x [M, K] 16 bits, W [N, K] in the layout of packing.py (rows padded to tiles of 16), out [M, N]. The tensor cores compute out^T: a fragment of W is
// the left operand (16 rows), eight tokens are the right one, so few tokens waste little. A lane's words of 128 inputs are one
// 16-byte load.
// The products of one group are summed apart and multiplied by their scale in float32: a weight is an exact integer.
//
// A block owns 16 * ROW_TILES * WARPS_N rows; its WARPS_K sets of warps, and the blocks of its cluster (gridDim.y), share the
// 128-input blocks of K between them and add up through shared memory, in a fixed order: results do not vary between runs.
//
// Blocks along z take 8 * TOKEN_TILES tokens each. group_step is 1, or 0 where all inputs are one group.
//
// Macros: BF16 (x, out and bias; else float16), SCALE_BF16, ZEROS (else every zero point is 8), SUB (groups in a block: 1, 2,
// 4), TOKEN_TILES (of 8), ROW_TILES (of 16, a warp), WARPS_N, WARPS_K,
// STAGES (blocks of weights in flight, a warp), SUMS (subtract offset and zero point from the products, by sums of x that the tensor
// cores make as well, instead of from every weight), MIN_BLOCKS (blocks of this kernel that a multiprocessor must hold), TAIL (K is no multiple of 128).

#define THREADS (32 * WARPS_N * WARPS_K)
#define ROWS (16 * ROW_TILES * WARPS_N)
#define PITCH (ROWS + 4)
#define SLICE (8 * TOKEN_TILES * PITCH)

__device__ __forceinline__ uint4 load_weights(const uint4* p, u64 policy) {
    uint4 v;
    asm volatile("ld.global.nc.L1::no_allocate.L2::cache_hint.v4.u32 {%0,%1,%2,%3}, [%4], %5;"
                 : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p), "l"(policy));
    return v;
}

// Two neighbours of x. Volatile: x may only be read after the wait for the kernel that writes it, and not so early that it takes registers away.
__device__ __forceinline__ u32 load_x(const u16* p) {
    u32 v;
    asm volatile("ld.global.u32 %0, [%1];" : "=r"(v) : "l"(p));
    return v;
}

// One block of 128 inputs of a warp's rows: words, and per group the scales and zero points of rows g (low half) and g + 8.
struct Stage {
    uint4 word[ROW_TILES][2];
    u32 scale[ROW_TILES][SUB];
    u16 zero[ROW_TILES][SUB];
};

__device__ __forceinline__ u32 zero(const Stage& s, int r, int u, int high) {
#if ZEROS
    return high ? s.zero[r][u] >> 8 : s.zero[r][u] & 0xff;
#else
    return 8;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) w4a16(
    const uint4* __restrict__ words, const u32* __restrict__ scales, const u16* __restrict__ zeros, const u16* __restrict__ x,
    const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K, int x_stride, int group_step) {
    extern __shared__ __align__(16) float sums[]; // [WARPS_K][8 * TOKEN_TILES][PITCH]
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const int tiles = (N + 15) / 16, tile0 = (blockIdx.x * WARPS_N + warp_n) * ROW_TILES; // tiles of 16 rows
    const int blocks = (K + 127) / 128, stride = gridDim.y * WARPS_K;
    const int token0 = blockIdx.z * 8 * TOKEN_TILES;
    x += (size_t)token0 * x_stride, out += (size_t)token0 * N, M = min(M - token0, 8 * TOKEN_TILES);

    u64 policy;
    asm("createpolicy.fractional.L2::evict_first.b64 %0, 1.0;" : "=l"(policy));
    launch_dependents();

    // Rows past the last tile read the last one again, tokens past M the last one: neither is written.
    Stage stage[STAGES];
    auto load = [&](Stage& s, int block) {
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++) {
            const int tile = min(tile0 + r, tiles - 1);
            const uint4* p = words + ((size_t)block * tiles + tile) * 64 + lane;
            s.word[r][0] = load_weights(p, policy), s.word[r][1] = load_weights(p + 32, policy);
#pragma unroll
            for (int u = 0; u < SUB; u++) {
                const int at = ((SUB == 1 ? block * group_step : block * SUB + u) * tiles + tile) * 8 + g;
                s.scale[r][u] = __ldg(scales + at);
#if ZEROS
                s.zero[r][u] = __ldg(zeros + at);
#endif
            }
        }
    };

    // A lane's inputs of a step of 32 are pairs at 8 p + 2 t, p of 0 to 3.
    const u16* from[TOKEN_TILES];
#pragma unroll
    for (int j = 0; j < TOKEN_TILES; j++) {
        from[j] = x + (size_t)min(8 * j + g, M - 1) * x_stride + 2 * t;
        asm volatile("" : "+l"(from[j])); // computed once: the compiler would rather do it again for every block
    }
    auto load_step = [&](uint4 (&v)[TOKEN_TILES], int block, int i) {
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; j++) {
            u32 pair[4];
#pragma unroll
            for (int p = 0; p < 4; p++) {
                const int k = block * 128 + 32 * i + 8 * p;
                pair[p] = !TAIL || k < K ? load_x(from[j] + k) : 0;
            }
            v[j] = make_uint4(pair[0], pair[1], pair[2], pair[3]);
        }
    };
    uint4 v[2][TOKEN_TILES]; // x for this step of 32 inputs, and for the next

    u32 magic = MAGIC, one[4] = {ONES, ONES, ONES, ONES};
    asm volatile("" : "+r"(magic), "+r"(one[0]), "+r"(one[1]), "+r"(one[2]), "+r"(one[3])); // in registers once, not at each use
    float acc[ROW_TILES][TOKEN_TILES][4] = {};
    auto compute = [&](const Stage& s, int block, int next) {
#pragma unroll
        for (int u = 0; u < SUB; u++) {
            float part[ROW_TILES][TOKEN_TILES][4] = {};
#if SUMS
            float total[TOKEN_TILES][4] = {}; // of x, in every row alike
#endif
#pragma unroll
            for (int i = u * 4 / SUB; i < (u + 1) * 4 / SUB; i++) {
                load_step(v[(i + 1) % 2], i < 3 ? block : next, (i + 1) % 4);
#if SUMS
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; j++) {
                    mma(total[j], one[0], one[1], one[2], one[3], v[i % 2][j].x, v[i % 2][j].y);
                    mma(total[j], one[0], one[1], one[2], one[3], v[i % 2][j].z, v[i % 2][j].w);
                }
#endif
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    u32 a[2][4]; // [row g or g + 8][pair of inputs]
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const uint4 four = s.word[r][h];
                        const u32 w = i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
#if SUMS
#pragma unroll
                        for (int p = 0; p < 4; p++) a[h][p] = spread(w >> 4 * p, magic);
#else
                        const u32 minus = (MAGIC | MINUS_ZERO) + zero(s, r, u, h) * 0x10001u;
#pragma unroll
                        for (int p = 0; p < 4; p++) a[h][p] = fma2(spread(w >> 4 * p, magic), ONES, minus);
#endif
                    }
#pragma unroll
                    for (int j = 0; j < TOKEN_TILES; j++) mma(part[r][j], a[0][0], a[1][0], a[0][1], a[1][1], v[i % 2][j].x, v[i % 2][j].y);
#pragma unroll
                    for (int j = 0; j < TOKEN_TILES; j++) mma(part[r][j], a[0][2], a[1][2], a[0][3], a[1][3], v[i % 2][j].z, v[i % 2][j].w);
                }
            }
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                const float low = widen(s.scale[r][u] & 0xffffu, SCALE_BF16), high = widen(s.scale[r][u] >> 16, SCALE_BF16);
#if SUMS
                const float below = -(OFFSET + (float)zero(s, r, u, 0)), above = -(OFFSET + (float)zero(s, r, u, 1));
#endif
#pragma unroll
                for (int j = 0; j < TOKEN_TILES; j++)
#pragma unroll
                    for (int e = 0; e < 4; e++) {
#if SUMS
                        part[r][j][e] += (e < 2 ? below : above) * total[j][e % 2];
#endif
                        acc[r][j][e] += (e < 2 ? low : high) * part[r][j][e];
                    }
            }
        }
    };

    const int first = blockIdx.y * WARPS_K + warp_k;
#pragma unroll
    for (int d = 0; d < STAGES; d++)
        if (first + d * stride < blocks) load(stage[d], first + d * stride);
    wait_for_previous(); // weights are written by no step; x is, by the kernel before
    if (first < blocks) load_step(v[0], first, 0);
    for (int block = first; block < blocks; block += STAGES * stride) {
#pragma unroll
        for (int d = 0; d < STAGES; d++) {
            const int here = block + d * stride;
            if (here < blocks) {
                compute(stage[d], here, min(here + stride, blocks - 1));
                if (here + STAGES * stride < blocks) load(stage[d], here + STAGES * stride);
            }
        }
    }

#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int j = 0; j < TOKEN_TILES; j++)
#pragma unroll
            for (int e = 0; e < 4; e++)
                sums[warp_k * SLICE + (8 * j + 2 * t + e % 2) * PITCH + warp_n * 16 * ROW_TILES + 16 * r + g + e / 2 * 8] = acc[r][j][e];

    const int peers = gridDim.y, rank = blockIdx.y;
#if HOPPER
    if (peers > 1)
        cluster_sync();
    else
#endif
        __syncthreads();
    const u32 base = (u32)__cvta_generic_to_shared(sums);
    for (int e = rank * THREADS + threadIdx.x; e < M * (ROWS / 4); e += peers * THREADS) {
        const int token = e / (ROWS / 4), row = e % (ROWS / 4) * 4, n = blockIdx.x * ROWS + row;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 2
        for (int peer = 0; peer < peers; peer++)
#pragma unroll
            for (int k = 0; k < WARPS_K; k++) {
                const int at = k * SLICE + token * PITCH + row;
#if HOPPER
                const float4 more = load_peer(base + 4 * at, peer);
#else
                const float4 more = *(const float4*)(sums + at);
#endif
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
        store_4(out + (size_t)token * N + n, bias, n, N, sum);
    }
#if HOPPER
    if (peers > 1) cluster_end(); // a block's shared memory must outlive its peers' reads
#endif
}
