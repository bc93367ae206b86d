// out = x W^T + bias for up to sixteen rows of x, W in 4 bits, on Hopper: K over gridDim.y / PAIR blocks, for matrices with many inputs and few outputs.
//
// x [M, K] 16 bits, W [N, K] in the layout of packing.py, K a multiple of 128, out [M, N]. narrow.cu gives a block few outputs and all inputs there, so that every
// multiprocessor reads all of x, as many bytes as weights at eight rows. Here a block has 16 * TILES rows of W and one of the parts of K, and that part of x.
//
// Weights come as in narrow.cu: every warp has a ring of its own. x comes by bulk copies into shared memory, a block of 128 inputs at a time, each with a barrier; the PAIR blocks
// of a cluster, whose rows of W are neighbours, copy every other one for both.
//
// The sums of the blocks of a strip meet in `partial` [strip][part of K but the last][TOKENS * TILES * 4] float4, whose numbers are all EMPTY between launches, a NaN that no addition
// gives. The block of the last part waits until none of them is, adds them up in their order, so that results do not vary between runs, and empties them again. A counter
// instead, by which the last to arrive adds up, took 0.3 to 0.4 us more: three trips to the L2 instead of one. At most one in `parts` blocks waits, those that the GPU starts last, for blocks
// that wait for none: some multiprocessor is left for them. `partial` is used after wait_for_previous alone, when every launch before has ended, so launches that follow each
// other share it, overlapping as dependent launches do. Launches on two streams at once must not.
//
// few.cuh comes before this file. Macros besides those of common.cuh: TOKENS (8 or 16), ROW_TILES (of 16, a warp), WARPS_N, WARPS_K, STAGES, PAIR (1 or 2), SPLIT (0 or 1: products of a group
// are summed in two chains, which takes registers).

#define EIGHTS (TOKENS / 8)
#define MOST_BLOCKS 64 // of inputs, a part
#define PARTS 8 // of K, at most
#define EMPTY 0xffffffffu
#define MOST_TRIES (1 << 22) // some seconds: an error instead of a wait without end, should ever two streams have met

__device__ __forceinline__ void store_l2(float4* p, float4 v) {
    asm volatile("st.relaxed.gpu.global.v4.f32 [%0], {%1,%2,%3,%4};" :: "l"(p), "f"(v.x), "f"(v.y), "f"(v.z), "f"(v.w) : "memory");
}

__device__ __forceinline__ float4 load_l2(const float4* p) {
    float4 v;
    asm volatile("ld.relaxed.gpu.global.v4.f32 {%0,%1,%2,%3}, [%4];" : "=f"(v.x), "=f"(v.y), "=f"(v.z), "=f"(v.w) : "l"(p) : "memory");
    return v;
}

__device__ __forceinline__ bool empty(float f) { return __float_as_uint(f) == EMPTY; }

// As bulk_copy, to the same place of every block of the cluster that `blocks` has a bit for, each of which counts the bytes at its own barrier.
__device__ __forceinline__ void bulk_copy_all(u32 to, const void* from, u32 bytes, u32 barrier, u16 blocks) {
    asm volatile("cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes.multicast::cluster [%0], [%1], %2, [%3], %4;"
                 :: "r"(to), "l"(from), "r"(bytes), "r"(barrier), "h"(blocks) : "memory");
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) split(
    const uint4* __restrict__ words, const uint4* __restrict__ scales, const uint4* __restrict__ zeros, const u16* x,
    const u16* __restrict__ bias, u16* __restrict__ out, float4* partial, int M, int N, int K, int x_stride, int group_step) {
    extern __shared__ __align__(128) unsigned char memory[]; // rings of weights; scales; zero points; x
    __shared__ __align__(8) u64 barriers[WARPS * STAGES + MOST_BLOCKS];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int warp_n = warp % WARPS_N, warp_k = warp / WARPS_N;
    const int rank = blockIdx.y % PAIR, part = blockIdx.y / PAIR, parts = gridDim.y / PAIR, strip = blockIdx.x * PAIR + rank;
    const int tiles = (N + 15) / 16, tile0 = strip * TILES, mine = tile0 + warp_n * ROW_TILES; // of 16 rows
    const int blocks = K / 128, first = blocks * part / parts, count = blocks * (part + 1) / parts - first, most = (blocks + parts - 1) / parts; // of 128 inputs
    const u32 base = (u32)__cvta_generic_to_shared(memory);
    const u32 ring = base + warp * STAGES * SLOT, full = (u32)__cvta_generic_to_shared(barriers) + warp * STAGES * 8;
    const u32 x_full = (u32)__cvta_generic_to_shared(barriers) + WARPS * STAGES * 8;
    const u32 scales_at = base + WARPS * STAGES * SLOT, zeros_at = scales_at + most * SUB * TILES * 32;
    const u32 x_at = zeros_at + ZEROS * most * SUB * TILES * 16, x_pitch = most * 256 + 16; // bytes of a row; 16 more, so that ldmatrix meets no bank twice

    launch_dependents();
    const int valid = max(0, min(ROW_TILES, tiles - mine)); // rows past the last tile keep whatever lies there: they are not written
    const int turns = valid && warp_k < count ? (count - warp_k + WARPS_K - 1) / WARPS_K : 0; // this warp's blocks of inputs
    const unsigned char* from = (const unsigned char*)words + ((size_t)(first + warp_k) * tiles + mine) * 1024;
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
        for (int b = warp; b < count; b += WARPS) barrier_init(x_full + 8 * b, 1);
        barriers_ready();
#pragma unroll
        for (int s = 0; s < FIRST; s++)
            if (s < turns) fetch(s);
    }
    __syncwarp();
    if (PAIR > 1) cluster_arrive(); // barriers of x are ready for what the other block copies

    for (int c = threadIdx.x; c < count * SUB * TILES * CHUNKS; c += THREADS) { // scales and zero points, [group][tile of this block]
        const int n = c / (TILES * CHUNKS);
        copy_scales(scales_at, zeros_at, scales, zeros, n, first * SUB + n, c % (TILES * CHUNKS), tile0, tiles, group_step);
    }
    asm volatile("cp.async.commit_group;" ::: "memory");

    wait_for_previous(); // weights are written by no step; x is, by the kernel before
    if (PAIR > 1) cluster_wait();
    for (int b = warp; b < count; b += WARPS) { // a row a lane
        if (lane == 0) arrive_expect(x_full + 8 * b, M * 256);
        __syncwarp();
        const u32 to = x_at + lane * x_pitch + b * 256;
        const u16* row = x + (size_t)lane * x_stride + (first + b) * 128;
        if (lane < M && PAIR == 1) bulk_copy(to, row, 256, x_full + 8 * b);
        if (lane < M && PAIR > 1 && b % PAIR == rank) bulk_copy_all(to, row, 256, x_full + 8 * b, (1 << PAIR) - 1);
    }
    if (lane == 0) {
#pragma unroll
        for (int s = FIRST; s < STAGES; s++)
            if (s < turns) fetch(s);
    }
    asm volatile("cp.async.wait_all;" ::: "memory");
    __syncthreads();

    u32 row[EIGHTS]; // of x, that this lane names to ldmatrix
#pragma unroll
    for (int j = 0; j < EIGHTS; j++) row[j] = x_at + warp_k * 256 + min(8 * j + lane % 8, M - 1) * x_pitch + lane / 8 * 16;
    float acc[ROW_TILES][EIGHTS][4] = {};
    u32 scale_at = scales_at + (warp_k * SUB * TILES + warp_n * ROW_TILES) * 32 + g * 4;
    u32 zero_at = zeros_at + (warp_k * SUB * TILES + warp_n * ROW_TILES) * 16 + g * 2;
    int s = 0, parity = 0;
#pragma unroll 1
    for (int turn = 0; turn < turns; turn++) {
        wait(x_full + 8 * (warp_k + turn * WARPS_K), 0);
        wait(full + 8 * s, parity);
        uint4 word[ROW_TILES][2];
#pragma unroll
        for (int r = 0; r < ROW_TILES; r++)
#pragma unroll
            for (int h = 0; h < 2; h++) word[r][h] = load_shared_16(ring + s * SLOT + r * 1024 + h * 512 + lane * 16);
        uint4 v[2][EIGHTS]; // x for this step of 32 inputs, and for the next
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) v[0][j] = ldmatrix(row[j]);
#pragma unroll
        for (int u = 0; u < SUB; u++) {
            u32 both[ROW_TILES], minus[ROW_TILES][2]; // scales of rows g (low half) and g + 8, and what centres their weights
#pragma unroll
            for (int r = 0; r < ROW_TILES; r++) {
                both[r] = load_shared_4(scale_at + (u * TILES + r) * 32);
                const u32 zero = ZEROS ? load_shared_2(zero_at + (u * TILES + r) * 16) : 0x0808;
                minus[r][0] = minus_zero(zero & 0xff), minus[r][1] = minus_zero(zero >> 8);
            }
            float sums[ROW_TILES][EIGHTS][2][4] = {}; // [1] is used where SPLIT
#pragma unroll
            for (int i = u * 4 / SUB; i < (u + 1) * 4 / SUB; i++) {
#pragma unroll
                for (int j = 0; j < EIGHTS; j++)
                    if (i < 3) v[(i + 1) % 2][j] = ldmatrix(row[j] + 64 * (i + 1));
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    u32 a[2][4]; // [row g or g + 8][pair of inputs]
#pragma unroll
                    for (int h = 0; h < 2; h++) centred(a[h], pick(word[r][h], i), minus[r][h]);
#pragma unroll
                    for (int j = 0; j < EIGHTS; j++) {
                        const uint4 b = v[i % 2][j];
                        mma(sums[r][j][0], a[0][0], a[1][0], a[0][1], a[1][1], b.x, b.y);
                        mma(sums[r][j][SPLIT], a[0][2], a[1][2], a[0][3], a[1][3], b.z, b.w);
                    }
                }
                if (i == 0) { // every lane has its words
                    __syncwarp();
                    if (lane == 0 && turn + STAGES < turns) fetch(s);
                }
            }
#pragma unroll
            for (int j = 0; j < EIGHTS; j++) {
#pragma unroll
                for (int r = 0; r < ROW_TILES; r++) {
                    const float low = widen(both[r] & 0xffffu, SCALE_BF16), high = widen(both[r] >> 16, SCALE_BF16);
#pragma unroll
                    for (int e = 0; e < 4; e++) {
                        acc[r][j][e] += (e < 2 ? low : high) * (sums[r][j][0][e] + (SPLIT ? sums[r][j][1][e] : 0));
                    }
                }
            }
        }
#pragma unroll
        for (int j = 0; j < EIGHTS; j++) row[j] += WARPS_K * 256;
        scale_at += WARPS_K * SUB * TILES * 32, zero_at += WARPS_K * SUB * TILES * 16;
        if (++s == STAGES) s = 0, parity ^= 1;
    }

    keep_sums(memory, M, acc);
    if (PAIR > 1 && tile0 >= tiles && warp == 0)
        for (int b = 0; b < count; b++) wait(x_full + 8 * b, 0); // a block without weights ends no earlier than the other's copies to it
    __syncthreads();
    float4* const of_strip = partial + (size_t)strip * (parts - 1) * (TOKENS * TILES * 4);
    for (int e = threadIdx.x; e < M * TILES * 4; e += THREADS) {
        const int token = e / (TILES * 4), at = e % (TILES * 4) * 4, n = 16 * tile0 + at;
        const float4 sum = add_sums(memory, token, at);
        if (part + 1 < parts) {
            store_l2(of_strip + part * (TOKENS * TILES * 4) + e, sum);
            continue;
        }
        float4 more[PARTS - 1], total = make_float4(0, 0, 0, 0);
        bool came;
        int tries = 0;
        do { // all places of this thread at once, until none is empty
            came = true;
#pragma unroll
            for (int k = 0; k < PARTS - 1; k++)
                if (k + 1 < parts) {
                    more[k] = load_l2(of_strip + k * (TOKENS * TILES * 4) + e);
                    came &= !empty(more[k].x) & !empty(more[k].y) & !empty(more[k].z) & !empty(more[k].w);
                }
            if (++tries == MOST_TRIES) __trap();
        } while (!came);
        const float nothing = __uint_as_float(EMPTY);
#pragma unroll
        for (int k = 0; k < PARTS - 1; k++)
            if (k + 1 < parts) {
                store_l2(of_strip + k * (TOKENS * TILES * 4) + e, make_float4(nothing, nothing, nothing, nothing));
                total.x += more[k].x, total.y += more[k].y, total.z += more[k].z, total.w += more[k].w;
            }
        total.x = FROM_CENTRED * (total.x + sum.x), total.y = FROM_CENTRED * (total.y + sum.y);
        total.z = FROM_CENTRED * (total.z + sum.z), total.w = FROM_CENTRED * (total.w + sum.w);
        store_4(out + (size_t)token * N + n, bias, n, N, total);
    }
}
