// out = x W^T + bias for 2 to 16 rows of x, W in 4 bits, on Hopper: x stands in registers while W passes.
//
// x [M, K] 16 bits, W [N, K] in the layout of packing.py, out [M, N]. The tensor cores compute out^T, as in w4a16.cu.
//
// A block owns TILES times 16 rows of W and all of K, which its warps share: each has TURNS blocks of 128 inputs, and holds what belongs to them of x in registers, as the tensor
// cores want it. So x is read from shared memory once, and the loop is over the tiles: 16 rows of W by the warp's inputs, words of which come by bulk copies into a ring of
// the warp's own, STAGES tiles deep. The warps' sums of a tile meet in shared memory, where x lay, and one warp adds them up LAG tiles later, in a fixed order: results do not vary
// between runs.
//
// Only the first tile is asked for before the kernel that makes x has ended, and the next ones after x: what stands in line for memory before x delays it, and with it everything. x goes
// into registers while the first tile is multiplied, two blocks of inputs ahead: reading 128 KB of it from shared memory takes a multiprocessor a thousand cycles at least.
//
// Operands are integers that tensor cores sum exactly. Where a group is a block of inputs, they are q, and what zero points add too much is subtracted from the products, by sums of
// x; sums of more groups have no room in registers, and there zero points are subtracted from every weight.
//
// Macros besides those of common.cuh: TOKENS (8 or 16: the most rows of x), TILES, WARPS, TURNS, STAGES, UNEVEN (not every warp has TURNS blocks), TAIL (K is no multiple of
// 128).

#define THREADS (32 * WARPS)
#define COLUMNS (TOKENS / 8)
#define SUMS (SUB == 1)
#define BACK (SUMS ? FROM_NUMBERS : FROM_CENTRED)
#define PAIR (UNEVEN || TURNS % 2 ? 1 : 2) // blocks of inputs whose instructions are mixed
#define LAG (TILES > 3 ? 2 : 1)
#define SLOT (TURNS * 1024)
#define RING (STAGES * SLOT)
#define X_HALF (TOKENS * 128) // 64 inputs; a token's chunks of 16 bytes stand at their number xor the token's, so that ldmatrix meets no bank twice
#define X_BLOCK (2 * X_HALF)
#define PIECE (TOKENS * 64) // a warp's sums of a tile
#define PLACES (TURNS * 4) // for as many of them as what x took has room for
#define SCALES (SUB * TILES * 32)
#define ZERO_POINTS (ZEROS * SUB * TILES * 16)

// Until no more than `left` of the groups of copies that this thread has begun are on their way. A constant once loops are unrolled.
__device__ __forceinline__ void wait_copies(int left) {
    if (left >= 7) asm volatile("cp.async.wait_group 7;" ::: "memory");
    else if (left == 6) asm volatile("cp.async.wait_group 6;" ::: "memory");
    else if (left == 5) asm volatile("cp.async.wait_group 5;" ::: "memory");
    else if (left == 4) asm volatile("cp.async.wait_group 4;" ::: "memory");
    else if (left == 3) asm volatile("cp.async.wait_group 3;" ::: "memory");
    else if (left == 2) asm volatile("cp.async.wait_group 2;" ::: "memory");
    else if (left == 1) asm volatile("cp.async.wait_group 1;" ::: "memory");
    else asm volatile("cp.async.wait_group 0;" ::: "memory");
}

template <bool first>
struct First {
    static constexpr bool value = first;
};

extern "C" __global__ void __launch_bounds__(THREADS, 1) stationary(
    const uint4* __restrict__ words, const u32* __restrict__ scales, const u16* __restrict__ zeros, const u16* x,
    const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K, int x_stride, int group_step) {
    extern __shared__ __align__(1024) unsigned char memory[]; // x, then sums; rings; scales; zero points
    __shared__ __align__(8) u64 barriers[WARPS * (STAGES + 1) + 2 * PLACES];
    const int warp = __shfl_sync(0xffffffffu, threadIdx.x / 32, 0), lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int tiles = (N + 15) / 16, tile0 = blockIdx.x * TILES, count = min(TILES, tiles - tile0);
    const int block0 = warp * TURNS, turns = UNEVEN ? max(0, min(TURNS, (K + 127) / 128 - block0)) : TURNS; // this warp's blocks of inputs
    const u32 base = (u32)__cvta_generic_to_shared(memory), full = (u32)__cvta_generic_to_shared(barriers) + warp * (STAGES + 1) * 8;
    const u32 scales_full = full + STAGES * 8, summed = (u32)__cvta_generic_to_shared(barriers) + WARPS * (STAGES + 1) * 8, added = summed + PLACES * 8;
    const u32 mine = base + warp * TURNS * X_BLOCK, ring = base + WARPS * TURNS * X_BLOCK + warp * RING;
    const u32 scales_at = base + WARPS * (TURNS * X_BLOCK + RING) + warp * TURNS * (SCALES + ZERO_POINTS), zeros_at = scales_at + TURNS * SCALES;

    launch_dependents();
    const u64 policy = evict_first();
    const uint4* from = words + ((size_t)block0 * tiles + tile0) * 64; // of the next tile
    auto fetch = [&](int s) {
        arrive_expect(full + 8 * s, turns * 1024);
#pragma unroll
        for (int b = 0; b < TURNS; b++)
            if (b < turns) bulk_copy(ring + s * SLOT + b * 1024, from + (size_t)b * tiles * 64, 1024, full + 8 * s, policy);
        from += 64;
    };
    if (lane == 0) {
#pragma unroll
        for (int s = 0; s <= STAGES; s++) barrier_init(full + 8 * s, 1);
        if (warp == 0)
            for (int p = 0; p < PLACES; p++) barrier_init(summed + 8 * p, WARPS), barrier_init(added + 8 * p, 1);
        barriers_ready();
        fetch(0);
        arrive_expect(scales_full, turns * count * SUB * (32 + 16 * ZEROS));
        for (int b = 0; b < turns; b++)
#pragma unroll
            for (int u = 0; u < SUB; u++) {
                const size_t at = ((size_t)(SUB == 1 ? (block0 + b) * group_step : (block0 + b) * SUB + u) * tiles + tile0) * 8;
                bulk_copy(scales_at + b * SCALES + u * TILES * 32, scales + at, count * 32, scales_full);
                if (ZEROS) bulk_copy(zeros_at + b * ZERO_POINTS + u * TILES * 16, zeros + at, count * 16, scales_full);
            }
    }
    __syncthreads();

    // A lane's chunks of 16 bytes of a block of x: of rows 2 c + lane / 16, row M as row M - 1. Further rows are whatever lies there: nobody reads their products, and reading a row
    // several times takes longer than to read as many. Addresses are ready when the wait is over: every instruction after it delays x.
    const int part = lane % 16;
    const u16* from_x[TOKENS / 2];
    u32 to_x[4]; // of rows 8 to 15, 1024 bytes further
#pragma unroll
    for (int c = 0; c < TOKENS / 2; c++) {
        from_x[c] = x + (size_t)min(2 * c + lane / 16, M - 1) * x_stride + block0 * 128 + part * 8;
        asm volatile("" : "+l"(from_x[c]));
    }
#pragma unroll
    for (int c = 0; c < 4; c++) {
        to_x[c] = mine + part / 8 * X_HALF + (2 * c + lane / 16) * 128 + (part % 8 ^ 2 * c + lane / 16) * 16;
        asm volatile("" : "+r"(to_x[c]));
    }
    wait_for_previous(); // weights are written by no step; x is, by the kernel before
#pragma unroll
    for (int b = 0; b < TURNS; b++) {
        const bool inside = !UNEVEN && !TAIL || (block0 + b) * 128 + part * 8 < K;
#pragma unroll
        for (int c = 0; c < TOKENS / 2; c++)
            if (2 * c < M) copy_16(to_x[c % 4] + c / 4 * 1024 + b * X_BLOCK, inside ? from_x[c] + b * 128 : x, inside);
        asm volatile("cp.async.commit_group;" ::: "memory");
    }
    if (lane == 0)
#pragma unroll
        for (int s = 1; s < STAGES; s++)
            if (s < count) fetch(s);
    __syncwarp();

    u32 held[TURNS][COLUMNS][4][4]; // x: [block of inputs][eight tokens][step of 32 inputs][pair]
    float minus[TURNS][COLUMNS][2]; // minus the sum of a block of inputs, of the tokens that this lane adds up
    const u32 x_row = mine + lane % 8 * 128 + (lane / 8 ^ lane % 8) * 16;
    auto load_x = [&](int b) {
        wait_copies(TURNS - 1 - b);
        __syncwarp();
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                const uint4 v = ldmatrix((x_row + b * X_BLOCK ^ i % 2 * 64) + i / 2 * X_HALF + j * 1024);
                held[b][j][i][0] = v.x, held[b][j][i][1] = v.y, held[b][j][i][2] = v.z, held[b][j][i][3] = v.w;
            }
    };
    auto scale_x = [&](int b) { // and sum it up
#if SUMS
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
#pragma unroll
            for (int i = 0; i < 4; i++)
#pragma unroll
                for (int p = 0; p < 4; p++) held[b][j][i][p] = scaled(held[b][j][i][p], p);
        // The sums by the tensor cores: x of eight tokens is the left operand, in pairs as registers hold them, so that even ones are rows 0 to 7 and odd ones rows 8 to 15.
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            float total[4] = {};
#pragma unroll
            for (int i = 0; i < 4; i++) mma(total, held[b][j][i][0], held[b][j][i][1], held[b][j][i][2], held[b][j][i][3], ONE_EVEN, ONE_EVEN);
            const float sum = total[0] + (BF16 ? 16 : 1) * total[2]; // of token 8 j + g; those of tokens 8 j + 2 t and 2 t + 1 are wanted
#pragma unroll
            for (int e = 0; e < 2; e++) minus[b][j][e] = -__shfl_sync(0xffffffffu, sum, 8 * t + 4 * e);
        }
#endif
    };

    // Sums of tile p, when all warps have theirs, to out.
    auto add_up = [&](int p) {
        const int place = p % PLACES;
        wait(summed + 8 * place, p / PLACES & 1);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++) {
            float sum[4] = {};
#pragma unroll
            for (int k = 0; k < WARPS; k++) {
                const uint4 v = load_shared_16(base + k * TURNS * X_BLOCK + place * PIECE + j * 512 + lane * 16);
                sum[0] += __uint_as_float(v.x), sum[1] += __uint_as_float(v.y), sum[2] += __uint_as_float(v.z), sum[3] += __uint_as_float(v.w);
            }
            write_sums(out, bias, M, N, 8 * j, (tile0 + p) * 16, sum, BACK);
        }
        if (TILES > PLACES) {
            __syncwarp();
            if (lane == 0) arrive(added + 8 * place);
        }
    };

    wait(scales_full, 0);
    u32 words_at = ring + lane * 16, scale_at = scales_at + g * 4, zero_at = zeros_at + g * 2;
    asm volatile("" : "+r"(words_at), "+r"(scale_at), "+r"(zero_at)); // in registers once, not at each use
    int s = 0, parity = 0;
    auto multiply = [&](int n, auto tile) {
        constexpr bool first = decltype(tile)::value;
        wait(full + 8 * s, parity);
        uint4 word[TURNS][2];
#pragma unroll
        for (int b = 0; b < TURNS; b++)
#pragma unroll
            for (int h = 0; h < 2; h++) word[b][h] = load_shared_16(words_at + s * SLOT + b * 1024 + h * 512);
        float acc[COLUMNS][4] = {};
        if (first)
#pragma unroll
            for (int b = 0; b < PAIR; b++) load_x(b);
#pragma unroll
        for (int b0 = 0; b0 < TURNS; b0 += PAIR) {
            if (first) {
#pragma unroll
                for (int q = 0; q < PAIR; q++) scale_x(b0 + q);
#pragma unroll
                for (int q = 0; q < PAIR; q++)
                    if (b0 + PAIR + q < TURNS) load_x(b0 + PAIR + q);
            }
            if (!UNEVEN || b0 < turns)
#pragma unroll
                for (int u = 0; u < SUB; u++) {
                    float sum[PAIR][COLUMNS][4], low[PAIR], high[PAIR];
                    u32 below[PAIR], above[PAIR]; // of rows g and g + 8: zero points, or what is added to operands
#pragma unroll
                    for (int q = 0; q < PAIR; q++) {
                        const u32 both = load_shared_4(scale_at + (b0 + q) * SCALES + u * TILES * 32);
                        low[q] = widen(both & 0xffff, SCALE_BF16), high[q] = widen(both >> 16, SCALE_BF16);
                        const u32 zero = ZEROS ? load_shared_2(zero_at + (b0 + q) * ZERO_POINTS + u * TILES * 16) : 0x0808;
                        below[q] = zero & 0xff, above[q] = zero >> 8;
#pragma unroll
                        for (int j = 0; j < COLUMNS; j++)
#pragma unroll
                            for (int e = 0; e < 4; e++) sum[q][j][e] = SUMS ? (float)(e < 2 ? below[q] : above[q]) * minus[b0 + q][j][e % 2] : 0;
                        if (!SUMS) below[q] = minus_zero(below[q]), above[q] = minus_zero(above[q]);
                    }
#pragma unroll
                    for (int i = u * 4 / SUB; i < (u + 1) * 4 / SUB; i++) {
                        u32 a[PAIR][2][4]; // [block][row g or g + 8][pair of inputs]
#pragma unroll
                        for (int q = 0; q < PAIR; q++)
#pragma unroll
                            for (int h = 0; h < 2; h++) {
                                const u32 w = pick(word[b0 + q][h], i);
                                if (SUMS)
                                    numbers(a[q][h], w);
                                else
                                    centred(a[q][h], w, h ? above[q] : below[q]);
                            }
#pragma unroll
                        for (int p = 0; p < 4; p += 2)
#pragma unroll
                            for (int q = 0; q < PAIR; q++)
#pragma unroll
                                for (int j = 0; j < COLUMNS; j++)
                                    mma(sum[q][j], a[q][0][p], a[q][1][p], a[q][0][p + 1], a[q][1][p + 1], held[b0 + q][j][i][p], held[b0 + q][j][i][p + 1]);
                    }
#pragma unroll
                    for (int q = 0; q < PAIR; q++)
#pragma unroll
                        for (int j = 0; j < COLUMNS; j++)
#pragma unroll
                            for (int e = 0; e < 4; e++) acc[j][e] += (e < 2 ? low[q] : high[q]) * sum[q][j][e];
                }
            if (b0 == 0) { // every lane has its words
                __syncwarp();
                if (lane == 0 && n + STAGES < count) fetch(s);
            }
        }
        if (++s == STAGES) s = 0, parity ^= 1;
        scale_at += 32, zero_at += 16;
        const int place = n % PLACES;
        if (TILES > PLACES && n >= PLACES) wait(added + 8 * place, n / PLACES - 1 & 1);
#pragma unroll
        for (int j = 0; j < COLUMNS; j++)
            asm volatile("st.shared.v4.f32 [%0], {%1, %2, %3, %4};"
                         :: "r"(mine + place * PIECE + j * 512 + lane * 16), "f"(acc[j][0]), "f"(acc[j][1]), "f"(acc[j][2]), "f"(acc[j][3]) : "memory");
        __syncwarp();
        if (lane == 0) arrive(summed + 8 * place);
        if (!first && n >= LAG && (n - LAG) % WARPS == warp) add_up(n - LAG);
    };
    multiply(0, First<true>());
#pragma unroll 1
    for (int n = 1; n < count; n++) multiply(n, First<false>());
    for (int p = max(0, count - LAG); p < count; p++)
        if (p % WARPS == warp) add_up(p);
}
