// out = x W^T + bias for one to eight rows of x, W in 4 bits, on Hopper: every warp has a ring of weights of its own in shared memory.
//
// x [M, K] 16 bits, W [N, K] in the layout of packing.py, out [M, N]. The tensor cores compute out^T, as in w4a16.cu. GATED: out [M, N / 2] is act(gate) * value,
// where the first half of W makes the gate and the second the value; a warp has tiles of both.
//
// A block owns 16 * ROW_TILES * WARPS_N rows of W. Its WARPS_K sets of warps share its 128-input blocks of K, and the blocks of its cluster (gridDim.y) have a part
// of K each. A warp's first lane keeps STAGES bulk copies of ROW_TILES KB in flight. They begin, and scales and zero points with them, before the kernel that makes x
// has ended. Sums are added up in a fixed order: results do not vary between runs.
//
// SCALED 0: operands are of x's dtype; offset and zero point are subtracted from the products, by sums of x that the tensor cores make as well. 1: operands are
// float16 whatever x is, each group of x scaled by a power of two that brings it into range, which loses nothing. The inputs of odd pairs are divided by 16 besides, since their
// nibbles stay where they lie in a word: 5 instructions instead of 7 for 8 weights. Sums of x are made as it is read, which pays for few rows.
//
// PRIVATE: each warp reads the x that it needs for itself, and waits for no other; else the block reads x once. PRIVATE without SCALED: x goes through a ring too.
//
// Blocks past the last strip do nothing. The host adds them so that every multiprocessor has one: where two kernels fit on a multiprocessor, the one that
// follows has its weights on the way while this one ends, but two blocks of one kernel on one multiprocessor would hold up all the others.
//
// Macros besides those of common.cuh: SCALED, PRIVATE, GATED (0; 1: SiLU; 2: GELU in its tanh form), TOKENS (1, or the most rows of x), ROW_TILES (of 16, a warp; even
// where GATED), WARPS_N, WARPS_K, STAGES, SPLIT (products of a group are summed in two chains, which takes registers), MIN_BLOCKS (that a multiprocessor must
// hold), TAIL (K is no multiple of 128).

#define THREADS (32 * WARPS_N * WARPS_K)
#define TILES (ROW_TILES * WARPS_N)
#define PART (GATED ? ROW_TILES / 2 : ROW_TILES) // tiles of a warp that lie together
#define PITCH (16 * ROW_TILES + 4)
#define SLOT (ROW_TILES * 1024)
#define X_RING (PRIVATE && !SCALED)
#define X_ROW (TOKENS > 1 ? 272 : 256) // bytes of a row of a block of x in the ring; 16 more, so that ldmatrix meets no bank twice
#define X_SLOT (TOKENS * X_ROW)
#define CHUNKS (2 + ZEROS) // of 16 bytes, for scales and zero points of a tile

#if SCALED
#undef MAGIC
#define MAGIC 0x64006400u // 1024 + q in float16
#endif

// c [16, 8] += a [16, 16] b [16, 8] of what the operands are here.
__device__ __forceinline__ void multiply(float (&c)[4], u32 a0, u32 a1, u32 a2, u32 a3, u32 b0, u32 b1) {
#if SCALED
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.f16.f16.f32 {%0,%1,%2,%3}, {%4,%5,%6,%7}, {%8,%9}, {%0,%1,%2,%3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3]) : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b0), "r"(b1));
#else
    mma(c, a0, a1, a2, a3, b0, b1);
#endif
}

// (w & 0x00f000f0) | magic: 1024 + 16 q in float16.
__device__ __forceinline__ u32 spread_high(u32 w, u32 magic) {
    u32 d;
    asm("lop3.b32 %0, %1, 0x00f000f0, %2, 0xea;" : "=r"(d) : "r"(w), "r"(magic));
    return d;
}

__device__ __forceinline__ void store_shared_16(u32 at, u32 a, u32 b, u32 c, u32 d) {
    asm volatile("st.shared.v4.u32 [%0], {%1,%2,%3,%4};" :: "r"(at), "r"(a), "r"(b), "r"(c), "r"(d) : "memory");
}

// Eight inputs, past L1: it may hold what lay there before the kernel in front wrote them.
__device__ __forceinline__ uint4 load_8(const u16* p) {
    uint4 v;
    asm volatile("ld.global.cg.v4.u32 {%0,%1,%2,%3}, [%4];" : "=r"(v.x), "=r"(v.y), "=r"(v.z), "=r"(v.w) : "l"(p) : "memory");
    return v;
}

#if SCALED
// A chunk of eight inputs of a group, in as many lanes as the group has chunks, all of them in the call: to `to` in float16, scaled; and by the group's first lane to `note`
// what products need: -1024 times the sum of x as it is stored, -sum, both as they were before scaling, and what undoes it. odd: the chunk is of odd pairs.
__device__ __forceinline__ void scale_x(uint4 v, bool odd, bool stored, bool first, u32 to, u32 note) {
    const u32 w[4] = {v.x, v.y, v.z, v.w};
    float f[8], most = 0, sum = 0;
#pragma unroll
    for (int i = 0; i < 8; i++) {
        f[i] = widen(i % 2 ? w[i / 2] >> 16 : w[i / 2] & 0xffff, BF16);
        most = fmaxf(most, fabsf(f[i]));
        sum += f[i];
    }
#pragma unroll
    for (int d = 1; d < 16 / SUB; d *= 2) most = fmaxf(most, __shfl_xor_sync(0xffffffffu, most, d));
    const int exponent = min(max((int)(__float_as_uint(most) >> 23), 20), 254); // the largest comes to 2^14 up to 2^15
    const float scale = __uint_as_float((268 - exponent) << 23), factor = odd ? scale / 16 : scale;
    u32 h[4];
#pragma unroll
    for (int i = 0; i < 4; i++) asm("cvt.rn.f16x2.f32 %0, %1, %2;" : "=r"(h[i]) : "f"(f[2 * i + 1] * factor), "f"(f[2 * i] * factor));
    if (stored) store_shared_16(to, h[0], h[1], h[2], h[3]);
    float part = odd ? sum / 16 : sum;
#pragma unroll
    for (int d = 1; d < 16 / SUB; d *= 2) {
        sum += __shfl_xor_sync(0xffffffffu, sum, d);
        part += __shfl_xor_sync(0xffffffffu, part, d);
    }
    if (stored && first)
        store_shared_16(note, __float_as_uint(-1024 * part), __float_as_uint(-sum), (exponent - 14) << 23, 0);
}
#endif

#if GATED
__device__ __forceinline__ float act(float f) {
    const float twice = GATED == 2 ? 1.5957691216f * (f + 0.044715f * f * f * f) : f; // tanh(v) is 2 sigmoid(2 v) - 1
    return f / (1 + __expf(-twice));
}
#endif

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) narrow(
    const uint4* __restrict__ words, const uint4* __restrict__ scales, const uint4* __restrict__ zeros, const u16* x,
    const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K, int x_stride, int group_step) {
    extern __shared__ __align__(128) unsigned char memory[]; // rings of weights; scales; zero points; notes of scale_x; x
    __shared__ __align__(8) u64 barriers[WARPS_N * WARPS_K * STAGES];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    // Tiles of 16 rows; GATED: of the gate's, those of the value are `half` further.
    const int tiles = (N + 15) / 16, half = GATED ? tiles / 2 : tiles, tile0 = blockIdx.x * PART * WARPS_N, mine = tile0 + warp_n * PART;
    const int peers = gridDim.y, rank = blockIdx.y, blocks = (K + 127) / 128;
    const int first = blocks * rank / peers, count = blocks * (rank + 1) / peers - first; // this block's part of K
    const u32 base = (u32)__cvta_generic_to_shared(memory);
    const u32 ring = base + warp * STAGES * SLOT, full = (u32)__cvta_generic_to_shared(barriers) + warp * STAGES * 8;
    const u32 scales_at = base + WARPS_N * WARPS_K * STAGES * SLOT, zeros_at = scales_at + count * SUB * TILES * 32;
    const u32 notes_at = zeros_at + ZEROS * count * SUB * TILES * 16, x_at = notes_at + SCALED * count * SUB * TOKENS * 16;

    launch_dependents();
    if (tile0 >= half) {
        wait_for_previous();
        return;
    }

    const int valid = max(0, min(PART, half - mine)); // rows past the last tile keep whatever lies there: they are not written
    const int turns = valid && warp_k < count ? (count - warp_k + WARPS_K - 1) / WARPS_K : 0; // this warp's blocks of K
    const unsigned char* from = (const unsigned char*)words + ((size_t)(first + warp_k) * tiles + mine) * 1024;
    const size_t turn_bytes = (size_t)WARPS_K * tiles * 1024;
    const u64 policy = evict_first();
    auto fetch = [&](int s) {
        arrive_expect(full + 8 * s, valid * (GATED ? 2048 : 1024));
        bulk_copy(ring + s * SLOT, from, valid * 1024, full + 8 * s, policy);
        if (GATED) bulk_copy(ring + s * SLOT + PART * 1024, from + (size_t)half * 1024, valid * 1024, full + 8 * s, policy);
        from += turn_bytes;
    };
    if (lane == 0) {
#pragma unroll
        for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 1);
        barriers_ready();
#pragma unroll
        for (int s = 0; s < STAGES; s++)
            if (s < turns) fetch(s);
    }
    __syncwarp();

    // Scales and zero points, [group of this block][its tile].
    const int groups = PRIVATE ? turns * SUB : count * SUB, wide = PRIVATE ? ROW_TILES : TILES;
    for (int c = PRIVATE ? lane : threadIdx.x; c < groups * wide * CHUNKS; c += PRIVATE ? 32 : THREADS) {
        const int n = c / (wide * CHUNKS), i = c % (wide * CHUNKS), r = i < 2 * wide ? i / 2 : i - 2 * wide;
        const int group = PRIVATE ? (warp_k + n / SUB * WARPS_K) * SUB + n % SUB : n, j = PRIVATE ? warp_n * ROW_TILES + r : r;
        const int tile = tile0 + j / ROW_TILES * PART + j % ROW_TILES % PART;
        if (tile >= half) continue;
        const size_t row = SUB == 1 ? (size_t)(first + group) * group_step : (size_t)first * SUB + group;
        const size_t at = row * tiles + tile + (j % ROW_TILES >= PART ? half : 0);
        if (i < 2 * wide)
            copy_16(scales_at + ((group * TILES + j) * 2 + i % 2) * 16, scales + at * 2 + i % 2, true);
        else
            copy_16(zeros_at + (group * TILES + j) * 16, zeros + at, true);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");

    wait_for_previous(); // weights are written by no step; x is, by the kernel before
#if X_RING
    const u32 x_ring = x_at + warp * STAGES * X_SLOT;
    auto fetch_x = [&](int turn, int s) {
        const int k0 = (first + warp_k + turn * WARPS_K) * 128;
        if (turn < turns)
            for (int c = lane; c < (TOKENS == 1 ? 16 : 16 * M); c += 32) {
                const int k = k0 + c % 16 * 8;
                copy_16(x_ring + s * X_SLOT + c / 16 * X_ROW + c % 16 * 16, x + (size_t)(c / 16) * x_stride + (!TAIL || k < K ? k : 0), !TAIL || k < K);
            }
        asm volatile("cp.async.commit_group;" ::: "memory"); // empty past the last turn: there is one a turn
    };
#pragma unroll
    for (int s = 0; s < STAGES; s++) fetch_x(s, s);
    u32 row = x_ring + (TOKENS == 1 ? 0 : min(lane % 8, M - 1)) * X_ROW + lane / 8 * 16;
#else
    const u32 x_pitch = count * 256 + (TOKENS > 1 ? 16 : 0);
    const int chunks = (PRIVATE ? turns : count) * 16;
    for (int m = 0; m < (TOKENS == 1 ? 1 : M); m++) {
        const u16* from_x = x + (size_t)m * x_stride + first * 128;
        const u32 to = x_at + m * x_pitch;
#if SCALED
        constexpr int mates = PRIVATE ? 32 : THREADS;
        for (int c0 = PRIVATE ? 0 : warp * 32; c0 < chunks; c0 += 4 * mates) {
            uint4 v[4];
            int at[4]; // among the chunks of this block's part of K
#pragma unroll
            for (int n = 0; n < 4; n++) {
                const int c = c0 + n * mates + lane;
                at[n] = PRIVATE ? (warp_k + c / 16 * WARPS_K) * 16 + c % 16 : c;
                v[n] = make_uint4(0, 0, 0, 0);
                if (c < chunks && (!TAIL || first * 128 + at[n] * 8 < K)) v[n] = load_8(from_x + at[n] * 8);
            }
#pragma unroll
            for (int n = 0; n < 4; n++)
                if (c0 + n * mates < chunks) // alike in all lanes
                    scale_x(v[n], at[n] % 2, c0 + n * mates + lane < chunks, at[n] % (16 / SUB) == 0, to + at[n] * 16,
                            notes_at + (at[n] / (16 / SUB) * TOKENS + m) * 16);
        }
#else
        for (int c = threadIdx.x; c < chunks; c += THREADS) {
            const int k = first * 128 + c * 8;
            copy_16(to + c * 16, from_x + (!TAIL || k < K ? c * 8 : 0), !TAIL || k < K);
        }
#endif
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    if (PRIVATE)
        __syncwarp();
    else
        __syncthreads();
    u32 row = x_at + warp_k * 256 + (TOKENS == 1 ? 0 : min(lane % 8, M - 1)) * x_pitch + lane / 8 * 16;
#endif

    u32 magic = MAGIC;
    asm volatile("" : "+r"(magic)); // in a register once, not at each use
    float acc[ROW_TILES][4] = {};
    u32 scale_at = scales_at + (warp_k * SUB * TILES + warp_n * ROW_TILES) * 32 + g * 4;
    u32 zero_at = zeros_at + (warp_k * SUB * TILES + warp_n * ROW_TILES) * 16 + g * 2;
#if SCALED
    u32 note_at = notes_at + (warp_k * SUB * TOKENS + (TOKENS == 1 ? 0 : 2 * t)) * 16;
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
#if !SCALED
            float total[2][4] = {}; // of x, in every row alike
#endif
#pragma unroll
            for (int i = u * 4 / SUB; i < (u + 1) * 4 / SUB; i++) {
                if (i < 3) v[(i + 1) % 2] = ldmatrix(here + 64 * (i + 1));
                const uint4 b = v[i % 2];
#if !SCALED
                multiply(total[0], ONES, ONES, ONES, ONES, b.x, b.y);
                multiply(total[SPLIT], ONES, ONES, ONES, ONES, b.z, b.w);
#endif
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    u32 a[2][4]; // [row g or g + 8][pair of inputs]
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const uint4 four = word[r][h];
                        const u32 w = i == 0 ? four.x : i == 1 ? four.y : i == 2 ? four.z : four.w;
#if SCALED
                        a[h][0] = spread(w, magic), a[h][1] = spread_high(w, magic);
                        a[h][2] = spread(w >> 8, magic), a[h][3] = spread_high(w >> 8, magic);
#else
#pragma unroll
                        for (int p = 0; p < 4; p++) a[h][p] = spread(w >> 4 * p, magic);
#endif
                    }
                    multiply(part[r][0], a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
                    multiply(part[r][SPLIT], a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
                }
                if (i == 0) { // every lane has its words
                    __syncwarp();
                    if (lane == 0 && turn + STAGES < turns) fetch(s);
                }
            }
#if SCALED
            uint4 note[TOKENS == 1 ? 1 : 2]; // of tokens 2 t and 2 t + 1
#pragma unroll
            for (int e = 0; e < (TOKENS == 1 ? 1 : 2); e++) note[e] = load_shared_16(note_at + (u * TOKENS + e) * 16);
#endif
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                const float low = widen(both[r] & 0xffffu, SCALE_BF16), high = widen(both[r] >> 16, SCALE_BF16);
                const float below = zero[r] & 0xff, above = zero[r] >> 8;
#pragma unroll
                for (int e = 0; e < 4; e++) {
                    if (TOKENS == 1 && e % 2) continue; // of a token that is not there
                    float sum = part[r][0][e] + (SPLIT ? part[r][1][e] : 0);
#if SCALED
                    const uint4 n = note[TOKENS == 1 ? 0 : e % 2];
                    sum = sum * __uint_as_float(n.z) + __uint_as_float(n.x) + (e < 2 ? below : above) * __uint_as_float(n.y);
#else
                    sum -= (OFFSET + (e < 2 ? below : above)) * (total[0][e % 2] + (SPLIT ? total[1][e % 2] : 0));
#endif
                    acc[r][e] += (e < 2 ? low : high) * sum;
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
#if SCALED
        note_at += WARPS_K * SUB * TOKENS * 16;
#endif
        if (++s == STAGES) s = 0, parity ^= 1;
    }

    // The warp's ring has been read: its memory takes the sums, float [token][PITCH].
    float* sums = (float*)(memory + warp * STAGES * SLOT);
#pragma unroll
    for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
        for (int e = 0; e < 4; e++)
            if (2 * t + e % 2 < M) sums[(2 * t + e % 2) * PITCH + 16 * r + g + e / 2 * 8] = acc[r][e];
    if (peers > 1)
        cluster_sync();
    else
        __syncthreads();
    auto added = [&](int offset) { // four sums of all that share K
        float4 sum = make_float4(0, 0, 0, 0);
        for (int peer = 0; peer < peers; peer++)
#pragma unroll
            for (int k = 0; k < WARPS_K; k++) {
                const int at = offset + k * WARPS_N * STAGES * SLOT;
                const float4 more = peers > 1 ? load_peer(base + at, peer) : *(const float4*)(memory + at);
                sum.x += more.x, sum.y += more.y, sum.z += more.z, sum.w += more.w;
            }
        return sum;
    };
    for (int e = rank * THREADS + threadIdx.x; e < M * WARPS_N * PART * 4; e += peers * THREADS) {
        const int token = e / (WARPS_N * PART * 4), at = e % (WARPS_N * PART * 4) * 4, n = 16 * tile0 + at;
        const int offset = at / (16 * PART) * STAGES * SLOT + (token * PITCH + at % (16 * PART)) * 4;
        const float4 sum = added(offset);
#if GATED
        const float4 value = added(offset + 64 * PART);
        const int width = N / 2;
        const float v[4] = {value.x, value.y, value.z, value.w};
        float f[4] = {sum.x, sum.y, sum.z, sum.w};
#pragma unroll
        for (int i = 0; i < 4; i++) {
            const bool biased = bias && n < width;
            f[i] = act(f[i] + (biased ? widen(bias[n + i], BF16) : 0)) * (v[i] + (biased ? widen(bias[width + n + i], BF16) : 0));
        }
        store_4(out + (size_t)token * width + n, nullptr, n, width, make_float4(f[0], f[1], f[2], f[3]));
#else
        store_4(out + (size_t)token * N + n, bias, n, N, sum);
#endif
    }
    if (peers > 1) cluster_end(); // a block's shared memory must outlive its peers' reads
}
