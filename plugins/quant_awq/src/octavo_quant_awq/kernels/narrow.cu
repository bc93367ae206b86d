// out = x W^T + bias for one to eight rows of x, W in 4 bits, on Hopper: every warp has a ring of weights of its own in shared memory.
//
// x [M, K] 16 bits, W [N, K] in the layout of packing.py, out [M, N]. The tensor cores compute out^T, as in w4a16.cu.
//
// A block owns 16 * ROW_TILES * WARPS_N rows of W, and its WARPS_K sets of warps share K by blocks of 128 inputs. A warp's first lane keeps STAGES bulk copies of
// ROW_TILES KB in flight. The first begins, and scales and zero points with it, before the kernel that makes x has ended; the others once x has been asked for, which would
// come after them. Sums are added up in a fixed order: results do not vary between runs.
//
// x: where WARPS_N is 1, every warp has a ring of it too and waits for no other; else the block reads all of it first. Operands are the integers q; what zero points add too much is
// subtracted from the products of a group, by its sum of x: that of a ring is made by the tensor cores, else it is made as x is read.
//
// few.cuh comes before this file. Macros besides those of common.cuh: TOKENS (1, or the most rows of x), ROW_TILES (of 16, a warp), WARPS_N, WARPS_K, STAGES, SPLIT (0 or 1: products of a group
// are summed in two chains, which takes registers), TAIL (K is no multiple of 128).

#define X_RING (WARPS_N == 1)
#define X_ROW (TOKENS > 1 ? 272 : 256) // bytes of a row of a block of x in the ring; 16 more, so that ldmatrix meets no bank twice
#define X_SLOT (TOKENS * X_ROW)
#define COLUMNS (TOKENS == 1 ? 1 : 2) // tokens of which a lane has sums

// Eight inputs, past L1: it may hold what lay there before the kernel in front wrote them.
__device__ __forceinline__ uint4 load_8(const u16* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

#if !X_RING
// Chunk `c` of eight inputs, in as many lanes as its group has chunks, all of them in the call: scaled to `to`; and by the group's first lane to `minus` what zero points are multiplied by.
__device__ __forceinline__ void keep_x(uint4 v, int c, bool stored, u32 to, u32 minus) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    float sum = 0;
#pragma unroll
    for (int i = 0; i < 4; i++) sum += widen(w[i] & 0xffff, BF16) + widen(w[i] >> 16, BF16);
#pragma unroll
    for (int d = 1; d < 16 / SUB; d *= 2) sum += __shfl_xor_sync(0xffffffffu, sum, d);
    if (!stored) return;
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" :: "r"(to), "r"(scaled(v.x, c)), "r"(scaled(v.y, c)), "r"(scaled(v.z, c)), "r"(scaled(v.w, c)) : "memory");
    if (c % (16 / SUB) == 0) asm volatile("st.shared.f32 [%0], %1;" :: "r"(minus), "f"(-sum / FROM_NUMBERS) : "memory");
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, THREADS <= 256 ? 2 : 1) narrow(
    const uint4* __restrict__ words, const uint4* __restrict__ scales, const uint4* __restrict__ zeros, const u16* x,
    const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K, int x_stride, int group_step) {
    extern __shared__ __align__(128) unsigned char memory[]; // rings of weights; scales; zero points; minus the sums of groups of x; x
    __shared__ __align__(8) u64 barriers[WARPS * STAGES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const int tiles = (N + 15) / 16, tile0 = blockIdx.x * TILES, mine = tile0 + warp_n * ROW_TILES; // of 16 rows
    const int blocks = (K + 127) / 128;
    const u32 base = (u32)__cvta_generic_to_shared(memory);
    const u32 ring = base + warp * STAGES * SLOT, full = (u32)__cvta_generic_to_shared(barriers) + warp * STAGES * 8;
    const u32 scales_at = base + WARPS * STAGES * SLOT, zeros_at = scales_at + blocks * SUB * TILES * 32;
    const u32 sums_at = zeros_at + ZEROS * blocks * SUB * TILES * 16, x_at = sums_at + (X_RING ? 0 : (blocks * SUB * TOKENS * 4 + 15) / 16 * 16);

    launch_dependents();
    const int valid = max(0, min(ROW_TILES, tiles - mine)); // rows past the last tile keep whatever lies there: they are not written
    const int turns = valid && warp_k < blocks ? (blocks - warp_k + WARPS_K - 1) / WARPS_K : 0; // this warp's blocks of K
    const unsigned char* from = (const unsigned char*)words + ((size_t)warp_k * tiles + mine) * 1024;
    const size_t turn_bytes = (size_t)WARPS_K * tiles * 1024;
    const u64 policy = evict_first();
    auto fetch = [&](int s) {
        arrive_expect(full + 8 * s, valid * 1024);
        bulk_copy(ring + s * SLOT, from, valid * 1024, full + 8 * s, policy);
        from += turn_bytes;
    };
    if (lane == 0) {
#pragma unroll
        for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 1);
        barriers_ready();
#pragma unroll
        for (int s = 0; s < FIRST; s++)
            if (s < turns) fetch(s);
    }
    __syncwarp();

    // Scales and zero points, [group][tile of this block]: a warp's own, or those of all by all.
    for (int c = X_RING ? lane : threadIdx.x; c < (X_RING ? turns : blocks) * SUB * TILES * CHUNKS; c += X_RING ? 32 : THREADS) {
        const int n = c / (TILES * CHUNKS), group = X_RING ? (warp_k + n / SUB * WARPS_K) * SUB + n % SUB : n;
        copy_scales(scales_at, zeros_at, scales, zeros, group, group, c % (TILES * CHUNKS), tile0, tiles, group_step);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");

    auto fetch_rest = [&] {
        if (lane == 0) {
#pragma unroll
            for (int s = FIRST; s < STAGES; s++)
                if (s < turns) fetch(s);
        }
    };
    wait_for_previous(); // weights are written by no step; x is, by the kernel before
#if X_RING
    const u32 x_ring = x_at + warp * STAGES * X_SLOT;
    auto fetch_x = [&](int turn, int s) {
        const int k0 = (warp_k + turn * WARPS_K) * 128;
        if (turn < turns)
            for (int c = lane; c < (TOKENS == 1 ? 16 : 16 * M); c += 32) {
                const int k = k0 + c % 16 * 8;
                copy_16(x_ring + s * X_SLOT + c / 16 * X_ROW + c % 16 * 16, x + (size_t)(c / 16) * x_stride + (!TAIL || k < K ? k : 0), !TAIL || k < K);
            }
        asm volatile("cp.async.commit_group;" ::: "memory"); // empty past the last turn: there is one a turn
    };
#pragma unroll
    for (int s = 0; s < STAGES; s++) fetch_x(s, s);
    fetch_rest();
    u32 row = x_ring + (TOKENS == 1 ? 0 : min(lane % 8, M - 1)) * X_ROW + lane / 8 * 16;
#else
    const u32 x_pitch = blocks * 256 + (TOKENS > 1 ? 16 : 0);
    const int chunks = blocks * 16; // of eight inputs
    for (int c = threadIdx.x; c - lane < chunks; c += THREADS) { // alike in all lanes
        uint4 v[TOKENS];
#pragma unroll
        for (int m = 0; m < TOKENS; m++) {
            v[m] = make_uint4(0, 0, 0, 0);
            if (m < M && c < chunks && (!TAIL || c * 8 < K)) v[m] = load_8(x + (size_t)m * x_stride + c * 8);
        }
        if (c < THREADS) fetch_rest();
#pragma unroll
        for (int m = 0; m < TOKENS; m++)
            if (m < M) keep_x(v[m], c, c < chunks, x_at + m * x_pitch + c * 16, sums_at + (c / (16 / SUB) * TOKENS + m) * 4);
    }
    if (warp * 32 >= chunks) fetch_rest(); // had no part of x
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();
    u32 row = x_at + warp_k * 256 + (TOKENS == 1 ? 0 : min(lane % 8, M - 1)) * x_pitch + lane / 8 * 16;
#endif

    float acc[ROW_TILES][1][4] = {};
    u32 scale_at = scales_at + (warp_k * SUB * TILES + warp_n * ROW_TILES) * 32 + g * 4;
    u32 zero_at = zeros_at + (warp_k * SUB * TILES + warp_n * ROW_TILES) * 16 + g * 2;
#if !X_RING
    u32 sum_at = sums_at + (warp_k * SUB * TOKENS + (TOKENS == 1 ? 0 : 2 * t)) * 4;
#endif
    int s = 0, parity = 0;
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
        wait(full + 8 * s, parity);
        uint4 word[ROW_TILES][2];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) word[r][h] = load_shared_16(ring + s * SLOT + r * 1024 + h * 512 + lane * 16);
#if X_RING
        asm volatile("cp.async.wait_group %0;" :: "n"(STAGES - 1) : "memory");
        __syncwarp();
        const u32 here = row + s * X_SLOT;
#else
        const u32 here = row;
#endif
        uint4 v[2]; // x for this step of 32 inputs, and for the next
        v[0] = ldmatrix(here);
#pragma unroll
        for (int u = 0; u < SUB; u++) {
            u32 both[ROW_TILES], zero[ROW_TILES]; // scales and zero points of rows g (low half) and g + 8
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                both[r] = load_shared_4(scale_at + (u * TILES + r) * 32);
                zero[r] = ZEROS ? load_shared_2(zero_at + (u * TILES + r) * 16) : 0x0808;
            }
            float part[ROW_TILES][2][4] = {}; // [1] is used where SPLIT
#if X_RING
            float total[2][4] = {}; // of x, in every row alike
#endif
#pragma unroll
            for (int i = u * 4 / SUB; i < (u + 1) * 4 / SUB; i++) {
                if (i < 3) v[(i + 1) % 2] = ldmatrix(here + 64 * (i + 1));
#if X_RING
                const uint4 b = make_uint4(scaled(v[i % 2].x, 0), scaled(v[i % 2].y, 1), scaled(v[i % 2].z, 2), scaled(v[i % 2].w, 3));
                mma(total[0], ONE_EVEN, ONE_EVEN, ONE_ODD, ONE_ODD, b.x, b.y);
                mma(total[SPLIT], ONE_EVEN, ONE_EVEN, ONE_ODD, ONE_ODD, b.z, b.w);
#else
                const uint4 b = v[i % 2];
#endif
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    u32 a[2][4]; // [row g or g + 8][pair of inputs]
#pragma unroll
                    for (int h = 0; h < 2; h++) numbers(a[h], pick(word[r][h], i));
                    mma(part[r][0], a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
                    mma(part[r][SPLIT], a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
                }
                if (i == 0) { // every lane has its words
                    __syncwarp();
                    if (lane == 0 && turn + STAGES < turns) fetch(s);
                }
            }
            float minus[COLUMNS]; // the sums of x
#pragma unroll
            for (int e = 0; e < COLUMNS; e++)
#if X_RING
                minus[e] = -total[0][e] - (SPLIT ? total[1][e] : 0);
#else
                minus[e] = __uint_as_float(load_shared_4(sum_at + (u * TOKENS + e) * 4));
#endif
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                const float low = widen(both[r] & 0xffffu, SCALE_BF16), high = widen(both[r] >> 16, SCALE_BF16);
                const float below = zero[r] & 0xff, above = zero[r] >> 8;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (TOKENS == 1 && e % 2) continue; // of a token that is not there
                    const float sum = part[r][0][e] + (SPLIT ? part[r][1][e] : 0) + (e < 2 ? below : above) * minus[e % COLUMNS];
                    acc[r][0][e] += (e < 2 ? low : high) * sum;
                }
            }
        }
#if X_RING
        __syncwarp(); // every lane has read this block of x
        fetch_x(turn + STAGES, s);
#else
        row += WARPS_K * 256;
#endif
        scale_at += WARPS_K * SUB * TILES * 32, zero_at += WARPS_K * SUB * TILES * 16;
#if !X_RING
        sum_at += WARPS_K * SUB * TOKENS * 4;
#endif
        if (++s == STAGES) s = 0, parity ^= 1;
    }

    keep_sums(memory, M, acc);
    __syncthreads();
    for (int e = threadIdx.x; e < M * TILES * 4; e += THREADS) {
        const int token = e / (TILES * 4), at = e % (TILES * 4) * 4, n = 16 * tile0 + at;
        float4 sum = add_sums(memory, token, at);
        sum.x *= FROM_NUMBERS, sum.y *= FROM_NUMBERS, sum.z *= FROM_NUMBERS, sum.w *= FROM_NUMBERS;
        store_4(out + (size_t)token * N + n, bias, n, N, sum);
    }
}
