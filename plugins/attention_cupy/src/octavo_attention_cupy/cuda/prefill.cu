// Paged prefill: rows with several new tokens. Online softmax over tiles of 64 tokens (FlashAttention-2).
//
// A block attends ROWS matrix rows, which are new tokens times the query heads of one KV head, so that a short chunk fills
// the product. A warp has M_TILES times 16 of them, which share what it reads and converts of K and V. Tiles of K and V arrive by
// asynchronous copies. Rows are masked only in tiles that the diagonal, the end of the row or a window's edge crosses.
//
// Compiled for: BF16, KV_BYTES, E5M2, K_DIM, V_DIM, SOFTCAP, WARPS, M_TILES, STAGES (2: tiles arrive one
// ahead; 1: where shared memory holds no more).
#include "layout.cuh"
#include "prefill_args.cuh"

constexpr int ROWS = WARPS * M_TILES * 16;
constexpr int TOKENS = 64;
constexpr int K_STEPS = K_DIM / 16;
constexpr int V_TILES = V_DIM / 8;
constexpr int TILE_BYTES = TOKENS * (KRows::BYTES + VRows::BYTES);
constexpr int Q_BYTES = K_DIM * 2;
constexpr bool FP8 = KV_BYTES == 1;
constexpr bool BF16_PRODUCT = BF16 && !FP8;
constexpr bool Q_STAYS = K_DIM <= 128 && M_TILES == 1;  // queries in registers; else they are read again for every tile

struct Barriers {
    u64 full[STAGES];
    float scale[ROWS];
};

// Rows of queries in shared memory have the layout of 16-bit K of the same width.
constexpr int Q_SPAN = common_power(Q_BYTES / 16);
DEVICE u32 query_at(int row, int chunk) { return row * Q_BYTES + (chunk ^ (row % 8 / (8 / Q_SPAN) % Q_SPAN)) * 16; }

// Queries of one matrix row, by one warp; rows beyond the tile are zero.
DEVICE void load_query(const PrefillArgs& a, const PrefillTile& tile, int row, u32 to, float* scale) {
    int lane = threadIdx.x % 32;
    int token = row / a.group, head = row - token * a.group;
    bool held = token < tile.tokens;
    const u16* q = a.q + (tile.token + token) * a.q_token + (blockIdx.y * a.group + head) * a.q_head;
    float size = 0;
    constexpr int CHUNKS = Q_BYTES / 16;  // at most 32: one a lane
    u32 x[4] = {};
    if (lane < CHUNKS && held)
        for (int i = 0; i < 4; ++i) x[i] = *(const u32*)(q + lane * 8 + 2 * i);
    float factor = a.scale;
    if (BF16 && FP8) {
        // A bfloat16 query as float16: divided by its largest value, so that it cannot overflow.
        for (int i = 0; i < 4; ++i) size = fmaxf(size, fmaxf(fabsf(to_float<true>(x[i])), fabsf(to_float<true>(x[i] >> 16))));
        for (int step = 1; step < 32; step *= 2) size = fmaxf(size, __shfl_xor_sync(~0u, size, step));
        size = size > 0 ? size : 1.0f;
        for (int i = 0; i < 4; ++i) x[i] = pack_f16(to_float<true>(x[i]) / size, to_float<true>(x[i] >> 16) / size);
        factor *= size;
    }
    if (lane == 0) *scale = factor;
    if (lane >= CHUNKS) return;
    for (int i = 0; i < 4; ++i) {
        // FP8 K gives dims 4t to 4t + 3 of a step to lane t, where a product takes columns 2t, 2t + 1, 2t + 8, 2t + 9.
        int pair = lane * 4 + i;  // dims 2 * pair and the next
        int in = pair % 8;
        int place = FP8 ? pair - in + in / 2 + in % 2 * 4 : pair;
        store_4_bytes(to + query_at(row, place / 4) + place % 4 * 4, x[i]);
    }
}

// Tokens [token, token + TOKENS) of the row, as far as they are in [low, high), to shared memory.
DEVICE void copy_tile(const PrefillArgs& a, const PrefillTile& tile, int token, int low, int high, u32 to, u32 barrier) {
    int run = TOKENS;
    while (a.page % run) run /= 2;
#if HOPPER
    if (threadIdx.x >= 32) return;
    int lane = threadIdx.x;
#else
    int lane = threadIdx.x % 32;
#endif
    int at = token + lane * run, column = at / a.page, slot = at - column * a.page;
    bool held = lane * run < TOKENS && at < high && at + run > low;
    int id = held ? a.table[tile.table_row * a.table_row + column] : -1;
    held = id >= 0;
    const u8* from = a.cache + id * a.page_bytes;
    const u8* k = from + k_offset(a.page, blockIdx.y, slot);
    const u8* v = from + v_offset(a.page, blockIdx.y, slot);
#if HOPPER
    u32 bytes = __popc(__ballot_sync(~0u, held)) * run * (KRows::BYTES + VRows::BYTES);
    if (lane == 0) barrier_expect(barrier, bytes);
    __syncwarp();
    if (held) {
        for (int p = 0; p < KRows::PANELS; ++p)
            bulk_copy(to + (p * TOKENS + lane * run) * KRows::PANEL, k + p * a.page * KRows::PANEL, run * KRows::PANEL, barrier);
        for (int p = 0; p < VRows::PANELS; ++p)
            bulk_copy(to + TOKENS * KRows::BYTES + (p * TOKENS + lane * run) * VRows::PANEL, v + p * a.page * VRows::PANEL,
                      run * VRows::PANEL, barrier);
    }
#else
    for (int r = 0; r * run < TOKENS; ++r) {
        if (!__shfl_sync(~0u, (int)held, r)) continue;
        const u8* source_k = (const u8*)__shfl_sync(~0u, (u64)k, r);
        const u8* source_v = (const u8*)__shfl_sync(~0u, (u64)v, r);
        for (int p = 0; p < KRows::PANELS; ++p)
            for (int i = threadIdx.x * 16; i < run * KRows::PANEL; i += WARPS * 512)
                copy_16_bytes(to + (p * TOKENS + r * run) * KRows::PANEL + i, source_k + p * a.page * KRows::PANEL + i);
        for (int p = 0; p < VRows::PANELS; ++p)
            for (int i = threadIdx.x * 16; i < run * VRows::PANEL; i += WARPS * 512)
                copy_16_bytes(to + TOKENS * KRows::BYTES + (p * TOKENS + r * run) * VRows::PANEL + i,
                              source_v + p * a.page * VRows::PANEL + i);
    }
    copies_commit();
#endif
}

// Queries as a product's first operand: step k of the warp's rows number `m` times 16 and following.
DEVICE void query_step(u32 (&r)[4], u32 queries, int m, int k) {
    int lane = threadIdx.x % 32, row = (threadIdx.x / 32 * M_TILES + m) * 16 + lane % 16;
    load_matrices(r, queries + query_at(row, 2 * k + lane / 16));
}

DEVICE void scores(float (&s)[M_TILES][TOKENS / 8][4], const u32 (&kept)[Q_STAYS ? K_STEPS : 1][4], u32 queries, u32 keys) {
    int lane = threadIdx.x % 32;
#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int n = 0; n < TOKENS / 8; ++n) s[m][n][0] = s[m][n][1] = s[m][n][2] = s[m][n][3] = 0;
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
        u32 q[M_TILES][4];
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
            if (Q_STAYS)
                for (int i = 0; i < 4; ++i) q[m][i] = kept[Q_STAYS ? k : 0][i];
            else
                query_step(q[m], queries, m, k);
        if (!FP8) {
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n += 2) {
                u32 r[4];
                load_matrices(r, keys + KRows::at(TOKENS, n * 8 + lane % 8 + lane / 16 * 8, 2 * k + lane / 8 % 2));
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    mma<BF16_PRODUCT>(s[m][n], q[m][0], q[m][1], q[m][2], q[m][3], r[0], r[1]);
                    mma<BF16_PRODUCT>(s[m][n + 1], q[m][0], q[m][1], q[m][2], q[m][3], r[2], r[3]);
                }
            }
        } else {
#pragma unroll
            for (int n = 0; n < TOKENS / 8; n += 4) {
                u32 r[4];
                load_matrices(r, keys + KRows::at(TOKENS, n * 8 + lane, k));
#pragma unroll
                for (int j = 0; j < 4; ++j) {
                    u32 b0 = fp8_to_f16<E5M2>(r[j]), b1 = fp8_to_f16<E5M2>(r[j] >> 16);
#pragma unroll
                    for (int m = 0; m < M_TILES; ++m) mma<false>(s[m][n + j], q[m][0], q[m][1], q[m][2], q[m][3], b0, b1);
                }
            }
        }
    }
}

// acc += p V over 16 tokens. A product of FP8 has the even dims of 16 in one tile and the odd ones in the next.
DEVICE void add_values(float (&acc)[M_TILES][V_TILES][4], const u32 (&p)[M_TILES][4], u32 values, int step) {
    int lane = threadIdx.x % 32, row = step * 16 + lane % 16, half = lane / 16;
    if (!FP8) {
#pragma unroll
        for (int v = 0; v < V_TILES; v += 2) {
            u32 r[4];
            load_matrices_transposed(r, values + VRows::at(TOKENS, row, v + half));
#pragma unroll
            for (int m = 0; m < M_TILES; ++m) {
                mma<BF16_PRODUCT>(acc[m][v], p[m][0], p[m][1], p[m][2], p[m][3], r[0], r[1]);
                mma<BF16_PRODUCT>(acc[m][v + 1], p[m][0], p[m][1], p[m][2], p[m][3], r[2], r[3]);
            }
        }
    } else {
#pragma unroll
        for (int c = 0; c < V_TILES / 2; c += 2) {
            u32 r[4];
            load_matrices_transposed(r, values + VRows::at(TOKENS, row, min(c + half, V_TILES / 2 - 1)));
#pragma unroll
            for (int j = 0; j < 2 && c + j < V_TILES / 2; ++j) {
                u32 x = __byte_perm(r[2 * j], 0, 0x3120), y = __byte_perm(r[2 * j + 1], 0, 0x3120);
                u32 b0 = fp8_to_f16<E5M2>(x), b1 = fp8_to_f16<E5M2>(y), c0 = fp8_to_f16<E5M2>(x >> 16), c1 = fp8_to_f16<E5M2>(y >> 16);
#pragma unroll
                for (int m = 0; m < M_TILES; ++m) {
                    mma<false>(acc[m][2 * (c + j)], p[m][0], p[m][1], p[m][2], p[m][3], b0, b1);
                    mma<false>(acc[m][2 * (c + j) + 1], p[m][0], p[m][1], p[m][2], p[m][3], c0, c1);
                }
            }
        }
    }
}

// What a lane keeps of a matrix row; rows g and g + 8 of every 16, 4 lanes a row.
struct RowState {
    int position;
    float scale, top, sum;
};

// Scores of a row to weights, in place; sums shrink to the new maximum. `half` 0 is row g, 1 is row g + 8.
DEVICE void softmax(const PrefillArgs& a, float (&s)[TOKENS / 8][4], float (&acc)[V_TILES][4], RowState& row, int half, int token, bool masked) {
    int t = threadIdx.x % 4;
    float top = row.top;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float x = s[n][2 * half + c] * row.scale;
            if (SOFTCAP) x = a.softcap * tanh_exact(x);
            int at = token + n * 8 + 2 * t + c;
            if (masked && (at > row.position || (a.window > 0 && at <= row.position - a.window))) x = NEGATIVE_INFINITY;
            s[n][2 * half + c] = x;
            top = fmaxf(top, x);
        }
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
    top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
    float base = top == NEGATIVE_INFINITY ? 0.0f : top, keep = exp2_fast(row.top - base), sum = 0;
#pragma unroll
    for (int n = 0; n < TOKENS / 8; ++n)
#pragma unroll
        for (int c = 0; c < 2; ++c) {
            float e = exp2_fast(s[n][2 * half + c] - base);
            s[n][2 * half + c] = e;
            sum += e;
        }
    row.top = top;
    row.sum = row.sum * keep + sum;
#pragma unroll
    for (int v = 0; v < V_TILES; ++v) acc[v][2 * half] *= keep, acc[v][2 * half + 1] *= keep;
}

DEVICE void write_row(const PrefillArgs& a, const PrefillTile& tile, const RowState& row, const float (&acc)[V_TILES][4], int half, int r) {
    int t = threadIdx.x % 4, token = r / a.group, head = blockIdx.y * a.group + r - token * a.group;
    float sum = row.sum;
    sum += __shfl_xor_sync(~0u, sum, 1);
    sum += __shfl_xor_sync(~0u, sum, 2);
    if (token >= tile.tokens) return;
    float base = row.top == NEGATIVE_INFINITY ? 0.0f : row.top, keep = 1.0f;
    if (a.sinks) {
        float sink = a.sinks[head] * LOG2E, higher = fmaxf(row.top, sink);
        keep = exp2_fast(row.top - higher);
        sum = sum * keep + exp2_fast(sink - higher);
        base = higher;
    }
    float factor = keep * a.v_scale / (sum == 0.0f ? 1.0f : sum);
    u16* out = a.out + (tile.token + token) * a.out_token + head * a.out_head;
#pragma unroll
    for (int v = 0; v < V_TILES; v += FP8 ? 2 : 1) {
        u32 x = pack<BF16>(acc[v][2 * half] * factor, acc[FP8 ? v + 1 : v][FP8 ? 2 * half : 2 * half + 1] * factor);
        if (FP8) {
            u32 y = pack<BF16>(acc[v][2 * half + 1] * factor, acc[v + 1][2 * half + 1] * factor);
            *(uint2*)(out + v * 8 + 4 * t) = {x, y};
        } else {
            *(u32*)(out + v * 8 + 2 * t) = x;
        }
    }
    if (t == 0 && a.lse) a.lse[(tile.token + token) * a.lse_token + head] = (base + log2f(sum)) * LN2;
}

extern "C" __global__ void __launch_bounds__(WARPS * 32) prefill(const __grid_constant__ PrefillArgs a) {
    extern __shared__ __align__(128) u8 memory[];
    Barriers& barriers = *(Barriers*)(memory + STAGES * TILE_BYTES + ROWS * Q_BYTES);
    u32 ring = shared_address(memory), queries = ring + STAGES * TILE_BYTES, full = shared_address(barriers.full);
    int warp = threadIdx.x / 32, g = threadIdx.x % 32 / 4;
    PrefillTile tile = a.tiles[blockIdx.x];
#if HOPPER
    if (threadIdx.x == 0) {
        for (int s = 0; s < STAGES; ++s) barrier_init(full + s * 8, 1);
        barrier_init_visible();
        fence_copy_engine();
    }
#endif
    __syncthreads();
    wait_for_predecessor();
    release_successor();

    // Tokens that any row of this block sees: [low, high).
    int high = tile.position + tile.tokens;
    int low = a.window > 0 ? max(tile.position - a.window + 1, 0) : 0;
    int first = low / TOKENS, last = ceil_div(high, TOKENS);
    copy_tile(a, tile, first * TOKENS, low, high, ring, full);
    for (int r = warp; r < ROWS; r += WARPS) load_query(a, tile, r, queries, barriers.scale + r);
    __syncthreads();
    u32 kept[Q_STAYS ? K_STEPS : 1][4];
    if (Q_STAYS)
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) query_step(kept[Q_STAYS ? k : 0], queries, 0, k);

    RowState rows[M_TILES][2];
    float acc[M_TILES][V_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int row = (warp * M_TILES + m) * 16 + g + i * 8;
            rows[m][i] = {tile.position + row / a.group, barriers.scale[row], NEGATIVE_INFINITY, 0};
        }
#pragma unroll
        for (int v = 0; v < V_TILES; ++v) acc[m][v][0] = acc[m][v][1] = acc[m][v][2] = acc[m][v][3] = 0;
    }

    for (int j = first; j < last; ++j) {
        int stage = (j - first) % STAGES, token = j * TOKENS;
        u32 keys = ring + stage * TILE_BYTES, values = keys + TOKENS * KRows::BYTES;
        bool more = j + 1 < last;
        if (STAGES == 2 && more) copy_tile(a, tile, token + TOKENS, low, high, ring + (stage ^ 1) * TILE_BYTES, full + (stage ^ 1) * 8);
#if HOPPER
        barrier_wait(full + stage * 8, (j - first) / STAGES % 2);
#else
        if (STAGES == 2 && more) copies_wait<1>(); else copies_wait<0>();
        __syncthreads();
#endif
        bool edge = token < low || token + TOKENS > high;
        if (edge) {
            // Whatever lies outside is not ours and may be NaN, which a weight of zero would not silence.
            for (int i = threadIdx.x; i < TOKENS * VRows::CHUNKS; i += WARPS * 32) {
                int at = token + i / VRows::CHUNKS;
                if (at < low || at >= high) zero_16_bytes(values + VRows::at(TOKENS, i / VRows::CHUNKS, i % VRows::CHUNKS));
            }
            __syncthreads();
        }
        float s[M_TILES][TOKENS / 8][4];
        scores(s, kept, queries, keys);
        bool masked = edge || token + TOKENS - 1 > tile.position || (a.window > 0 && token <= high - 1 - a.window);
#pragma unroll
        for (int m = 0; m < M_TILES; ++m)
#pragma unroll
            for (int i = 0; i < 2; ++i) softmax(a, s[m], acc[m], rows[m][i], i, token, masked);
#pragma unroll
        for (int k = 0; k < TOKENS / 16; ++k) {
            u32 p[M_TILES][4];
#pragma unroll
            for (int m = 0; m < M_TILES; ++m)
#pragma unroll
                for (int i = 0; i < 4; ++i) p[m][i] = pack<BF16_PRODUCT>(s[m][2 * k + i / 2][i % 2 * 2], s[m][2 * k + i / 2][i % 2 * 2 + 1]);
            add_values(acc, p, values, k);
        }
#if HOPPER
        if (edge) fence_copy_engine();
#endif
        __syncthreads();
        if (STAGES == 1 && more) copy_tile(a, tile, token + TOKENS, low, high, ring, full);
    }

#pragma unroll
    for (int m = 0; m < M_TILES; ++m)
#pragma unroll
        for (int i = 0; i < 2; ++i) write_row(a, tile, rows[m][i], acc[m], i, (warp * M_TILES + m) * 16 + g + i * 8);
}
