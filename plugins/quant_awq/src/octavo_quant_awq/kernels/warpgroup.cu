// out = x W^T + bias for tens of rows of x and more, W in 4 bits, on Hopper's warpgroup instructions (sm_90a).
//
// W and its scales lie as packing.py says. A block owns ROWS = 64 * TILES * GROUPS rows of W and TOKENS of x. Each lane dequantises what is its part of the
// left operand in registers, while the tensor cores multiply the part before with TOKENS rows of x out of shared memory. EXACT: the products of one
// group are summed apart and multiplied by their scale in float32, so a weight is an exact integer; this takes registers, and time with TOKENS. Else weights are
// rounded to 16 bits once they are scaled, as when they are dequantised for a library.
//
// One thread keeps a ring of STAGES blocks of 128 inputs full: words, scales and zero points by bulk copies, which start before the kernel that makes
// x has ended, and x by tensor copies, two tiles [TOKENS][64] with the swizzle that the instruction reads, zeros past the last token and input.
// gridDim.y blocks of a cluster share K and add up through shared memory, in a fixed order.
//
// blockIdx.x counts blocks of tokens, then of rows: blocks that need the same weights run together.
//
// Macros besides those of common.cuh: TOKENS (a multiple of 8 up to 256), TILES (of 64 rows, a warpgroup), GROUPS (warpgroups), STAGES, EXACT,
// SLOTS (left operands in registers, of 32 inputs each), UNITS (blocks of
// inputs that are multiplied before their sums are scaled), PUSH (sums go straight to the block that adds them up), MIN_BLOCKS (blocks of this kernel that a multiprocessor must hold), REGISTERS (of a thread that multiplies, taken from those that copy; 0: all have the same).
// cluster.cuh comes before this file, and then functions: wgmma(acc, a, operand) and wgmma_new, which overwrites acc, for TOKENS.

#define ROWS (64 * TILES * GROUPS)
#define CONSUMERS (128 * GROUPS)
#define THREADS (CONSUMERS + (REGISTERS ? 128 : 32))
#define PITCH (ROWS + 4)

// One stage: x [2][TOKENS][64], words [ROWS][4][4] u32, scales [SUB][ROWS], zero points [SUB][ROWS].
#define X_TILE (TOKENS * 128)
#define WORDS_AT (2 * X_TILE)
#define SCALES_AT (WORDS_AT + ROWS * 64)
#define ZEROS_AT (SCALES_AT + SUB * ROWS * 2)
#define STAGE_BYTES ((ZEROS_AT + ZEROS * SUB * ROWS + 1023) / 1024 * 1024)

#define STEPS (4 / SUB) // of 32 inputs, a group

template <int N>
struct Number {
    static constexpr int value = N;
};

template <int PENDING>
__device__ __forceinline__ void wgmma_wait() { asm volatile("wgmma.wait_group.sync.aligned %0;" :: "n"(PENDING) : "memory"); }

// A scale in both halves, in the activations' dtype. bits: 16.
__device__ __forceinline__ u32 twice(u32 bits) {
#if BF16 == SCALE_BF16
    return bits * 0x10001u;
#else
    return narrow(widen(bits, SCALE_BF16)) * 0x10001u;
#endif
}

extern "C" __global__ void __launch_bounds__(THREADS, MIN_BLOCKS) warpgroup(
    const __grid_constant__ TensorMap map, const uint4* __restrict__ words, const u32* __restrict__ scales, const u16* __restrict__ zeros,
    const u16* __restrict__ bias, u16* __restrict__ out, int M, int N, int K, int group_step) {
    extern __shared__ __align__(1024) unsigned char memory[]; // the ring; afterwards sums float [TOKENS][PITCH]
    __shared__ __align__(8) u64 barriers[2 * STAGES + 1];
    const int warp = threadIdx.x / 32, lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    const int token_blocks = (M + TOKENS - 1) / TOKENS, strip = blockIdx.x / token_blocks, token0 = blockIdx.x % token_blocks * TOKENS;
    const int tiles = (N + 15) / 16, tile0 = strip * (ROWS / 16), blocks = (K + 127) / 128;
    const int peers = gridDim.y, rank = blockIdx.y, count = rank < blocks ? (blocks - rank + peers - 1) / peers : 0;
    const u32 full = (u32)__cvta_generic_to_shared(barriers), empty = full + 8 * STAGES;
    const u32 base = (u32)__cvta_generic_to_shared(memory);

    launch_dependents();
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; s++) barrier_init(full + 8 * s, 1), barrier_init(empty + 8 * s, 4 * GROUPS);
        barriers_ready();
    }
#if PUSH
    // Every sixteen rows have a block of the cluster that adds them up; what the others have of them comes to `pieces`.
    const u32 pieces = base + STAGES * STAGE_BYTES, pushed = full + 16 * STAGES;
    const int most = (ROWS / 16 + peers - 1) / peers, owned = max(0, min(most, ROWS / 16 - rank * most));
    if (threadIdx.x == 0 && peers > 1) {
        barrier_init(pushed, 1);
        barriers_ready();
        if (owned) arrive_expect(pushed, owned * peers * TOKENS * 64);
    }
    __syncwarp();
    if (peers > 1) cluster_arrive();
#endif
    __syncthreads();

#if !PUSH
    float* sums = (float*)memory;
#endif
    if (warp >= CONSUMERS / 32) {
#if REGISTERS
        asm volatile("setmaxnreg.dec.sync.aligned.u32 40;");
#endif
        if (threadIdx.x == CONSUMERS) {
            asm volatile("prefetch.tensormap [%0];" :: "l"(&map) : "memory");
            const u64 policy = evict_first();
            const int valid = min(ROWS / 16, tiles - tile0); // rows past the last tile keep whatever lies there: they are not written
            auto copy_weights = [&](int i, int s) {
                const int block = rank + i * peers;
                const u32 to = base + s * STAGE_BYTES, barrier = full + 8 * s;
                arrive_expect(barrier, 2 * X_TILE + valid * (1024 + SUB * (32 + 16 * ZEROS)));
                bulk_copy(to + WORDS_AT, words + ((size_t)block * tiles + tile0) * 64, valid * 1024, barrier, policy);
#pragma unroll
                for (int u = 0; u < SUB; u++) {
                    const size_t at = ((size_t)(SUB == 1 ? block * group_step : block * SUB + u) * tiles + tile0) * 8;
                    bulk_copy(to + SCALES_AT + u * ROWS * 2, scales + at, valid * 32, barrier);
#if ZEROS
                    bulk_copy(to + ZEROS_AT + u * ROWS, zeros + at, valid * 16, barrier);
#endif
                }
            };
            auto copy_tokens = [&](int i, int s) {
                const int k = (rank + i * peers) * 128;
#pragma unroll
                for (int half = 0; half < 2; half++)
                    copy_x(base + s * STAGE_BYTES + half * X_TILE, &map, k + 64 * half, token0, full + 8 * s);
            };
            const int ahead = min(count, STAGES);
#pragma unroll 1
            for (int i = 0; i < ahead; i++) copy_weights(i, i);
            wait_for_previous(); // weights are written by no step; x is, by the kernel before
#pragma unroll 1
            for (int i = 0; i < ahead; i++) copy_tokens(i, i);
            int s = 0, parity = 0;
#pragma unroll 1
            for (int i = STAGES; i < count; i++) {
                wait(empty + 8 * s, parity);
                copy_weights(i, s), copy_tokens(i, s);
                if (++s == STAGES) s = 0, parity ^= 1;
            }
        }
    } else {
#if REGISTERS
        asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" :: "n"(REGISTERS));
#endif
        const int tile = warp / 4 * 4 * TILES + warp % 4; // of 16 rows: this warp's in the first of its warpgroup's TILES of 64
        float acc[TILES][TOKENS / 2] = {};
        u32 a[SLOTS][TILES][8]; // left operands of as many steps of 32 inputs, the last of them being multiplied
        // This lane's words, scales and zero points of a stage.
        u32 magic = MAGIC, words_at = base + WORDS_AT + (tile * 64 + lane) * 16, scales_at = base + SCALES_AT + (tile * 8 + g) * 4;
        u32 zeros_at = base + ZEROS_AT + (tile * 8 + g) * 2, barrier = full;
        asm volatile("" : "+r"(magic), "+r"(words_at), "+r"(scales_at), "+r"(zeros_at), "+r"(barrier)); // in registers once, not at each use
#if PUSH
        auto write = [&](int at, const float (&sum)[TOKENS / 2]) { write_sums(out, bias, M, N, token0, strip * ROWS + at * 16, sum, 1); };
#endif
        auto release = [&](int stage) {
            if (lane == 0) arrive(barrier + 8 * (STAGES + stage));
        };
        int s = 0, parity = 0;
        auto advance = [&] {
            if (++s == STAGES) s = 0, parity ^= 1;
        };
        // A block of 128 inputs: its products to sums[0], or EXACT those of group u to sums[u]. before: the stage that is free once the first step is under way, or -1.
        auto issue = [&](float (*sums)[TILES][TOKENS / 2], int before) {
            wait(barrier + 8 * s, parity);
            uint4 word[TILES][2];
#pragma unroll
            for (int r = 0; r < TILES; r++)
                word[r][0] = load_shared_16(words_at + s * STAGE_BYTES + r * 4096), word[r][1] = load_shared_16(words_at + s * STAGE_BYTES + r * 4096 + 512);
            u32 scale[TILES][2], minus[TILES][2]; // of rows g and g + 8, each twice: the scale, and -(offset + z)
#pragma unroll
            for (int step = 0; step < 4; step++) {
                const int u = step * SUB / 4, to = EXACT ? u : 0; // group, and where its products go
                if (step % STEPS == 0) {
#pragma unroll
                    for (int r = 0; r < TILES; r++) {
#if ZEROS
                        const u32 zero = load_shared_2(zeros_at + s * STAGE_BYTES + u * ROWS + r * 64);
#else
                        const u32 zero = 0x0808;
#endif
                        minus[r][0] = (MAGIC | MINUS_ZERO) + (zero & 0xff) * 0x10001u, minus[r][1] = (MAGIC | MINUS_ZERO) + (zero >> 8) * 0x10001u;
#if !EXACT
                        const u32 both = load_shared_4(scales_at + s * STAGE_BYTES + u * ROWS * 2 + r * 128);
                        scale[r][0] = twice(both & 0xffff), scale[r][1] = twice(both >> 16);
#endif
                    }
                }
                // The left operands of 32 inputs: two of 16, as [row g, g + 8, g, g + 8] with pairs of inputs.
                const int slot = step % SLOTS;
#pragma unroll
                for (int r = 0; r < TILES; r++)
#pragma unroll
                    for (int h = 0; h < 2; h++) {
                        const uint4 four = word[r][h];
                        const u32 w = step == 0 ? four.x : step == 1 ? four.y : step == 2 ? four.z : four.w;
#pragma unroll
                        for (int p = 0; p < 4; p++) {
                            const u32 centred = fma2(spread(w >> 4 * p, magic), ONES, minus[r][h]);
                            a[slot][r][p / 2 * 4 + p % 2 * 2 + h] = EXACT ? centred : fma2(centred, scale[r][h], MINUS_ZERO);
                        }
                    }
                const u32 operand = (base + s * STAGE_BYTES + step / 2 * X_TILE + step % 2 * 64) / 16 | 1 << 16; // lower half of its descriptor
                asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#pragma unroll
                for (int r = 0; r < TILES; r++) {
                    const u32* b = a[slot][r];
                    if (EXACT && step % STEPS == 0)
                        wgmma_new(sums[to][r], b[0], b[1], b[2], b[3], operand);
                    else
                        wgmma(sums[to][r], b[0], b[1], b[2], b[3], operand);
                    wgmma(sums[to][r], b[4], b[5], b[6], b[7], operand + 2);
                }
                asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
                wgmma_wait<SLOTS - 1>(); // what reads the next slot is done
                if (step == SLOTS - 2 && before >= 0) release(before); // and all that reads the block before
            }
        };
#if EXACT
        // As many blocks of inputs, one after the other: sums are scaled while those that follow are multiplied.
        auto round = [&](auto units) {
            constexpr int parts = units.value * SUB;
            float part[parts][TILES][TOKENS / 2];
            int at[units.value];
#pragma unroll
            for (int n = 0; n < units.value; n++) {
                at[n] = s;
                issue(part + n * SUB, -1);
                advance();
            }
#pragma unroll
            for (int q = 0; q < parts; q++) {
                if (q == parts - 1) wgmma_wait<0>();
                if (q == parts - 2) wgmma_wait<STEPS>();
                if (q == parts - 3) wgmma_wait<2 * STEPS>();
                if (q == parts - 4) wgmma_wait<3 * STEPS>();
#pragma unroll
                for (int r = 0; r < TILES; r++) {
                    const u32 both = load_shared_4(scales_at + at[q / SUB] * STAGE_BYTES + q % SUB * ROWS * 2 + r * 128);
                    const float low = widen(both & 0xffff, SCALE_BF16), high = widen(both >> 16, SCALE_BF16);
#pragma unroll
                    for (int e = 0; e < TOKENS / 2; e++) {
                        asm volatile("" : "+f"(part[q][r][e])); // read no earlier than here
                        acc[r][e] += (e % 4 < 2 ? low : high) * part[q][r][e];
                    }
                }
                if (q % SUB == SUB - 1) release(at[q / SUB]);
            }
        };
        constexpr int units = SUB == 1 ? UNITS : 1;
        int i = 0;
        for (; i + units <= count; i += units) round(Number<units>());
        for (; i < count; i++) round(Number<1>());
#else
        for (int i = 0, before = -1; i < count; i++) {
            issue(&acc, before);
            before = s;
            advance();
        }
        wgmma_wait<0>();
#pragma unroll
        for (int r = 0; r < TILES; r++)
#pragma unroll
            for (int e = 0; e < TOKENS / 2; e++) asm volatile("" : "+f"(acc[r][e])); // read no earlier than here
#endif
#if PUSH
        if (peers > 1) {
            cluster_wait(); // all blocks have begun
#pragma unroll
            for (int r = 0; r < TILES; r++) {
                const int at = tile + 4 * r;
                push_sums(pieces + (at % most * peers + rank) * TOKENS * 64, acc[r], pushed, at / most);
            }
            if (warp >= owned) return;
            wait_cluster(pushed, 0);
            float sum[TOKENS / 2] = {};
            add_sums(sum, pieces + warp * peers * TOKENS * 64, peers);
            write(rank * most + warp, sum);
        } else {
#pragma unroll
            for (int r = 0; r < TILES; r++) write(tile + 4 * r, acc[r]);
        }
        return;
#else
        asm volatile("bar.sync 1, %0;" :: "n"(CONSUMERS) : "memory"); // every stage has come and been read: its memory takes the sums
        const int row = tile * 16 + g;
#pragma unroll
        for (int r = 0; r < TILES; r++)
#pragma unroll
            for (int j = 0; j < TOKENS / 8; j++)
#pragma unroll
                for (int e = 0; e < 4; e++) sums[(8 * j + 2 * t + e % 2) * PITCH + 64 * r + row + e / 2 * 8] = acc[r][4 * j + e];
#endif
    }
#if PUSH
    if (peers > 1) __syncwarp(), cluster_wait();
#else
    if (peers > 1)
        cluster_sync();
    else
        __syncthreads();
    const int tokens = min(M - token0, TOKENS);
    for (int e = rank * THREADS + threadIdx.x; e < tokens * (ROWS / 4); e += peers * THREADS) {
        const int token = e / (ROWS / 4), row = e % (ROWS / 4) * 4, n = strip * ROWS + row;
        float4 sum = make_float4(0, 0, 0, 0);
#pragma unroll 4
        for (int peer = 0; peer < peers; peer++) {
            const float4 v = load_peer(base + 4 * (token * PITCH + row), peer);
            sum.x += v.x, sum.y += v.y, sum.z += v.z, sum.w += v.w;
        }
        store_4(out + (size_t)(token0 + token) * N + n, bias, n, N, sum);
    }
    if (peers > 1) cluster_end(); // a block's shared memory must outlive its peers' reads
#endif
}
