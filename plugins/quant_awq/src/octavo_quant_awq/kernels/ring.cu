// out = x W^T + bias for up to TOKENS rows of x, W in 4 bits: a ring of weights in shared memory, multiplied by the tensor cores of single warps (sm_90a).
//
// W and its scales lie as packing.py says. A block owns ROWS = 16 * TILES * WARPS rows of W and all rows of x: weights are the left operand, dequantised in
// registers. The products of one group are summed apart and multiplied by their scale in float32, so a weight is an exact integer.
//
// Two threads keep a ring of STAGES blocks of 128 inputs full (one could not issue copies as fast as they come): one words, scales and zero points by bulk
// copies, which start before the kernel that makes x has ended; the other x by tensor copies, two tiles [TOKENS][64] swizzled by 128 bytes, zeros past the
// last token and input.
// PARTS sets of warps, and the gridDim.y blocks of a cluster, share K and add up through shared memory, in a fixed order. STAGES is a multiple of PARTS: a
// stage is always one set's, else a set that is ahead of another could take a stage's last phase for the one after the next.
//
// Blocks of this kernel and of the next share a multiprocessor, so that the next one's weights come while this one multiplies. That needs as many blocks as
// there are multiprocessors: with fewer, the next kernel's would gather on those left free. Blocks past the last row only hold their place.
//
// cluster.cuh comes before this file. Macros besides those of common.cuh: TOKENS (8, 16 or 32), TILES (of 16 rows, a warp), WARPS, PARTS, STAGES, MIN_BLOCKS (blocks that a multiprocessor must hold).

#define ROWS (16 * TILES * WARPS)
#define THREADS (32 * WARPS * PARTS + 64)

// One stage: x [2][TOKENS][64], words [ROWS][4][4] u32, scales [SUB][ROWS], zero points [SUB][ROWS].
#define X_TILE (TOKENS * 128)
#define WORDS_AT (2 * X_TILE)
#define SCALES_AT (WORDS_AT + ROWS * 64)
#define ZEROS_AT (SCALES_AT + SUB * ROWS * 2)
#define STAGE_BYTES ((ZEROS_AT + ZEROS * SUB * ROWS + 1023) / 1024 * 1024)

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) ring(
    const __grid_constant__ TensorMap map, const uint4* __restrict__ words, const u32* __restrict__ scales, const u16* __restrict__ zeros,
    const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K, int group_step) {
    extern __shared__ __align__(1024) unsigned char memory[]; // the ring, then pieces of sums
    __shared__ __align__(8) u64 barriers[2 * STAGES + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tiles = (N + 15) / 16, tile0 = blockIdx.x * (ROWS / 16), blocks = (K + 127) / 128;
    const int peers = gridDim.y, rank = blockIdx.y, count = rank < blocks ? (blocks - rank + peers - 1) / peers : 0;
    const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES, pushed = full + 16 * STAGES;
    const u32 base = (u32)__cvta_generic_to_shared(memory), pieces = base + STAGES * STAGE_BYTES;

    launch_dependents();
    if (tile0 >= tiles) {
        wait_for_previous();
        return;
    }
    // Every sixteen rows have a block of the cluster that adds them up; what all have of them comes to `pieces`.
    const int sets = peers * PARTS, most = (ROWS / 16 + peers - 1) / peers, owned = max(0, min(most, ROWS / 16 - rank * most));
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 2), barrier_init(empty + 8 * s, WARPS);
        barrier_init(pushed, 1);
        barriers_ready();
        if (peers > 1 && owned) arrive_expect(pushed, owned * sets * TOKENS * 64);
    }
    __syncwarp();
    if (peers > 1) cluster_arrive();
    __syncthreads();

    if (warp >= WARPS * PARTS) {
        int s = 0, parity = 1; // a stage is free at first
        auto advance = [&] {
            if (++s == STAGES) s = 0, parity ^= 1;
        };
        if (lane == 0 && warp == WARPS * PARTS) {
            const u64 policy = evict_first();
            const int valid = min(ROWS / 16, tiles - tile0); // rows past the last tile keep whatever lies there: they are not written
#pragma unroll 1
            for (int i = 0; i < count; i++) {
                const int block = rank + i * peers;
                const u32 to = base + s * STAGE_BYTES, barrier = full + 8 * s;
                wait(empty + 8 * s, parity);
                arrive_expect(barrier, valid * (1024 + SUB * (32 + 16 * ZEROS)));
                bulk_copy(to + WORDS_AT, words + ((size_t)block * tiles + tile0) * 64, valid * 1024, barrier, policy);
#pragma unroll
                for (int u = 0; u < SUB; u++) {
                    const size_t at = ((size_t)(SUB == 1 ? block * group_step : block * SUB + u) * tiles + tile0) * 8;
                    bulk_copy(to + SCALES_AT + u * ROWS * 2, scales + at, valid * 32, barrier);
#if ZEROS
                    bulk_copy(to + ZEROS_AT + u * ROWS, zeros + at, valid * 16, barrier);
#endif
                }
                advance();
            }
        }
        if (lane == 0 && warp > WARPS * PARTS) {
            asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
            wait_for_previous(); // weights are written by no step; x is, by the kernel before
#pragma unroll 1
            for (int i = 0; i < count; i++) {
                const int k = (rank + i * peers) * 128;
                wait(empty + 8 * s, parity);
                arrive_expect(full + 8 * s, 2 * X_TILE);
#pragma unroll
                for (int half = 0; half < 2; half++) copy_x(base + s * STAGE_BYTES + half * X_TILE, &map, k + 64 * half, 0, full + 8 * s);
                advance();
            }
        }
        if (peers > 1) __syncwarp(), cluster_wait();
        return;
    }

    const int part = PARTS == 1 ? 0 : __shfl_sync(0xffffffffu, warp / WARPS, 0); // of those that share K
    const int tile = warp % WARPS * TILES; // of sixteen rows: this warp's first
    float acc[TILES][TOKENS / 2] = {};
    // This lane's words, scales and zero points of a stage, and the row of x that it names to ldmatrix. Of sixteen tokens and inputs: tokens 0-7 with
    // inputs 0-7 and 8-15, then tokens 8-15; of eight tokens, inputs 0-31.
    const int chunk = TOKENS == 8 ? lane / 8 : lane / 8 % 2, named = TOKENS == 8 ? lane % 8 : lane / 16 * 8 + lane % 8;
    u32 words_at = base + WORDS_AT + (tile * 64 + lane) * 16, scales_at = base + SCALES_AT + (tile * 8 + g) * 4;
    u32 zeros_at = base + ZEROS_AT + (tile * 8 + g) * 2, x_row = base + named * 128 + (chunk ^ lane % 8) * 16, barrier = full;
    asm volatile("" : "+r"(words_at), "+r"(scales_at), "+r"(zeros_at), "+r"(x_row), "+r"(barrier)); // in registers once, not at each use
    int s = part, parity = 0;
#pragma unroll 1
    for (int i = part; i < count; i += PARTS) {
        wait(barrier + 8 * s, parity);
        const u32 stage = s * STAGE_BYTES;
        uint4 word[TILES][2];
#pragma unroll
        for (int r = 0; r < TILES; r++)
            word[r][0] = load_shared_16(words_at + stage + r * 1024), word[r][1] = load_shared_16(words_at + stage + r * 1024 + 512);
#pragma unroll
        for (int u = 0; u < SUB; u++) {
            float sum[TILES][TOKENS / 8][4] = {};
            u32 minus[TILES][2], later[2], a[TILES][2][4]; // a: of 32 inputs, [row g or g + 8][pair of inputs]
#pragma unroll
            for (int r = 0; r < TILES; r++) {
                const u32 zero = ZEROS ? load_shared_2(zeros_at + stage + u * ROWS + r * 16) : 0x0808;
                minus[r][0] = minus_zero(zero & 0xff), minus[r][1] = minus_zero(zero >> 8);
            }
#pragma unroll
            for (int k = u * 8 / SUB; k < (u + 1) * 8 / SUB; k++) { // sixteen inputs
                u32 x[TOKENS / 8][2];
                if (TOKENS == 8) {
                    if (k % 2 == 0) {
                        const uint4 v = ldmatrix((x_row + stage ^ k % 4 * 32) + k / 4 * X_TILE);
                        x[0][0] = v.x, x[0][1] = v.y, later[0] = v.z, later[1] = v.w;
                    } else {
                        x[0][0] = later[0], x[0][1] = later[1];
                    }
                } else {
#pragma unroll
                    for (int q = 0; q < TOKENS / 16; q++) {
                        const uint4 v = ldmatrix((x_row + stage ^ k % 4 * 32) + k / 4 * X_TILE + q * 2048);
                        x[2 * q][0] = v.x, x[2 * q][1] = v.y, x[2 * q + 1][0] = v.z, x[2 * q + 1][1] = v.w;
                    }
                }
#pragma unroll
                for (int r = 0; r < TILES; r++) {
                    const int p = k % 2 * 2;
#pragma unroll
                    for (int h = 0; h < 2; h++)
                        if (p == 0) centred(a[r][h], pick(word[r][h], k / 2), minus[r][h]);
#pragma unroll
                    for (int j = 0; j < TOKENS / 8; j++) mma(sum[r][j], a[r][0][p], a[r][1][p], a[r][0][p + 1], a[r][1][p + 1], x[j][0], x[j][1]);
                }
            }
#pragma unroll
            for (int r = 0; r < TILES; r++) {
                const u32 both = load_shared_4(scales_at + stage + u * ROWS * 2 + r * 32);
                const float low = widen(both & 0xffff, SCALE_BF16), high = widen(both >> 16, SCALE_BF16);
#pragma unroll
                for (int e = 0; e < TOKENS / 2; e++) acc[r][e] += (e % 4 < 2 ? low : high) * sum[r][e / 4][e % 4];
            }
        }
        __syncwarp();
        if (lane == 0) arrive(barrier + 8 * (STAGES + s));
        s += PARTS;
        if (s >= STAGES) s -= STAGES, parity ^= 1;
    }

    auto write = [&](int at, const float (&sum)[TOKENS / 2]) { write_sums(out, bias, M, N, 0, (tile0 + at) * 16, sum, FROM_CENTRED); };
    if (sets == 1) {
#pragma unroll
        for (int r = 0; r < TILES; r++) write(tile + r, acc[r]);
        return;
    }
    if (peers > 1) cluster_wait(); // all blocks have begun
#pragma unroll
    for (int r = 0; r < TILES; r++) {
        const int at = tile + r;
        const u32 to = pieces + ((at % most * peers + rank) * PARTS + part) * TOKENS * 64;
        if (peers > 1)
            push_sums(to, acc[r], pushed, at / most);
        else
            keep_sums(to, acc[r]);
    }
    if (peers == 1) asm volatile("bar.sync 1, %0;" :: "n"(32 * WARPS * PARTS) : "memory");
    if (warp >= owned) return;
    if (peers > 1) wait_cluster(pushed, 0);
#pragma unroll 1
    for (int at = warp; at < owned; at += WARPS * PARTS) {
        float sum[TOKENS / 2] = {};
        add_sums(sum, pieces + at * sets * TOKENS * 64, sets);
        write(rank * most + at, sum);
    }
}
