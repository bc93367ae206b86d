// Paged decode: rows with one new token. A persistent grid over the map that plan.cu makes.
//
// Scores are computed transposed: 16 tokens are the rows of a matrix product and 8 query heads its columns, so that a
// small group of query heads fills the product, and K and V of the cache are the operand that goes through registers
// once. Each warp has a ring of its own in shared memory, fills it and empties it: warps wait for each other only at
// the end of a segment, when they add up what each has summed over its own tokens. Copies for the next segment are under way
// by then. FP8 is converted to float16 in registers.
//
// Compiled for: BF16, KV_BYTES, E5M2, K_DIM, V_DIM, SOFTCAP, N_TILES, SLICE, WARPS, STAGES, BLOCKS_PER_SM.
#include "layout.cuh"
#include "work.cuh"

struct DecodeArgs {
    const u16* q;                // [tokens, heads, K_DIM]
    u16* out;                    // [tokens, heads, V_DIM]
    float* lse;                  // [tokens, heads], or null
    const u8* cache;             // [blocks, page_bytes]
    const int* table;            // [table rows, columns]
    const RowWork* row_work;     // see plan.cu
    const BlockWork* block_work;
    float* part;                 // [places, HEADS, V_DIM], sums of split segments
    float* part_sums;            // [places, HEADS, 2], their maxima and denominators
    u32* arrived;                // [rows, segments of a row], zero between launches
    const float* sinks;          // [heads], or null
    i64 q_token, q_head, out_token, out_head, lse_token, table_row, page_bytes;  // strides, in elements but the last
    int page, kv_heads, group;
    int pieces;                  // a group of more than HEADS query heads is attended to piece by piece
    float scale;                 // scores times log2(e); with a soft-cap, scores over the cap
    float softcap;               // the cap times log2(e)
    float v_scale;
};

constexpr int HEADS = 8 * N_TILES;             // query heads of a segment
constexpr int UNIT = WARPS * SLICE;            // tokens of a unit of the work map
constexpr int M_TILES = SLICE / 16;            // products of 16 tokens in a slice
constexpr int K_STEPS = K_DIM / 16;
constexpr int V_TILES = V_DIM / 16;
constexpr int SLICE_BYTES = SLICE * (KRows::BYTES + VRows::BYTES);
constexpr int RING_BYTES = WARPS * STAGES * SLICE_BYTES;
constexpr int MERGE_ROW = V_DIM + 4;           // floats; the 4 keep the lanes of a store in different banks
constexpr bool FP8 = KV_BYTES == 1;
constexpr bool BF16_PRODUCT = BF16 && !FP8;    // FP8 is multiplied as float16

struct Shared {
    float sums[WARPS][HEADS][2];  // maximum and denominator of each warp
    float total[HEADS][2];        // maximum, and what a sum is multiplied by at the end
    int last;
    u64 full[WARPS][STAGES];
};

// A block's way along its segments.
struct Walk {
    int at, end, share;
    RowWork row;
    Segment segment;
    int begin, stop;  // tokens: the segment's first tile starts at `begin`, its last token is before `stop`

    DEVICE void start(const BlockWork& work) {
        share = work.share;
        at = blockIdx.x * share;
        end = min(at + share, work.units);
        row = work.row;
    }
    DEVICE bool done() const { return at >= end; }
    DEVICE void look() {
        segment = segment_at(at, end, row.before, row.tiles, share);
        begin = (row.first / UNIT + segment.tile) * UNIT;
        stop = min(begin + segment.tiles * UNIT, row.last);
    }
    DEVICE void next(const DecodeArgs& a) {
        at += segment.tiles;
        if (done()) return;
        if (at >= row.before + row.tiles * a.kv_heads * a.pieces) row = a.row_work[row.index + 1];
        look();
    }
    // Slices [first_slice, slices) of the segment are this warp's: number i starts at token slice(i).
    DEVICE int slice(int i) const { return begin + (i * WARPS + (int)threadIdx.x / 32) * SLICE; }
    DEVICE int first_slice() const { return slice(0) + SLICE <= row.first ? 1 : 0; }
    DEVICE int slices() const { return stop > slice(0) ? ceil_div(stop - slice(0), UNIT) : 0; }
};

// What a warp copies, ahead of what it reads. Page ids are looked up a batch of slices early: lane l keeps the page of
// the batch's run l. A run is the part of a slice that lies in one page for sure.
struct Feed {
    Walk walk;
    int run, runs;               // tokens of a run, runs of a slice
    int slice, slices;           // of the segment, not yet looked up
    int id, slot, head, ready;   // looked up: this lane's page (-1: none) and the number of slices
    const u8 *k, *v;             // the current batch: this lane's run (null: none)
    int left, turn;              // slices of the batch not yet copied; the first of them

    DEVICE void start(const DecodeArgs& a, const BlockWork& work) {
        run = SLICE;
        while (a.page % run) run /= 2;
        runs = SLICE / run;
        walk.start(work);
        walk.look();
        slice = walk.first_slice();
        slices = walk.slices();
        left = 0;
        look_up(a);
    }
    DEVICE void look_up(const DecodeArgs& a) {
        ready = 0;
        while (slice >= slices) {
            if (walk.done()) return;
            walk.next(a);
            if (walk.done()) return;
            slice = walk.first_slice();
            slices = walk.slices();
        }
        int lane = threadIdx.x % 32;
        ready = min(slices - slice, 32 / runs);
        int token = walk.slice(slice + lane / runs) + lane % runs * run;
        bool held = lane / runs < ready && token < walk.stop && token + run > walk.row.first;
        int column = token / a.page;
        slot = token - column * a.page;
        head = walk.segment.head / a.pieces;
        id = held ? __ldg(a.table + walk.row.table_row * a.table_row + column) : -1;
        slice += ready;
    }
    // Copy the next slice, if there is one, to `stage`.
    DEVICE void copy(const DecodeArgs& a, u32 stage, u32 barrier, u64 policy) {
        if (left == 0) {
            left = ready;
            turn = 0;
            const u8* from = a.cache + id * a.page_bytes;
            k = id < 0 ? nullptr : from + k_offset(a.page, head, slot);
            v = from + v_offset(a.page, a.kv_heads, head, slot);
            if (left > 0) look_up(a);
        }
        if (left == 0) return;
        int lane = threadIdx.x % 32, mine = lane - turn * runs;
        bool held = mine >= 0 && mine < runs && k != nullptr;
        u32 to_k = stage + mine * run * KRows::BYTES, to_v = stage + SLICE * KRows::BYTES + mine * run * VRows::BYTES;
#if HOPPER
        u32 bytes = __popc(__ballot_sync(~0u, held)) * run * (KRows::BYTES + VRows::BYTES);
        if (lane == 0) barrier_expect(barrier, bytes);
        __syncwarp();
        if (held) {
            bulk_copy(to_k, k, run * KRows::BYTES, barrier, policy);
            bulk_copy(to_v, v, run * VRows::BYTES, barrier, policy);
        }
#else
        for (int r = 0; r < runs; ++r) {
            int from = turn * runs + r;
            if (!__shfl_sync(~0u, (int)held, from)) continue;
            const u8* source_k = (const u8*)__shfl_sync(~0u, (u64)k, from);
            const u8* source_v = (const u8*)__shfl_sync(~0u, (u64)v, from);
            u32 k_base = __shfl_sync(~0u, to_k, from), v_base = __shfl_sync(~0u, to_v, from);
            for (int i = lane * 16; i < run * KRows::BYTES; i += 512) copy_16_bytes(k_base + i, source_k + i);
            for (int i = lane * 16; i < run * VRows::BYTES; i += 512) copy_16_bytes(v_base + i, source_v + i);
        }
#endif
        ++turn;
        --left;
    }
};

// The queries of a segment as the product's second operand, and what a warp has summed so far. Lane 4g + t: query head g of
// a tile in `q`, heads 2t and 2t + 1 in all else.
struct Heads {
    u32 q[K_STEPS][N_TILES][2];
    float scale[N_TILES][2];
    float top[N_TILES][2];       // largest score so far, in powers of two
    float sum[N_TILES][2];       // of this lane's tokens only
    float acc[V_TILES][N_TILES][4];
};

DEVICE void load_queries(const DecodeArgs& a, const Walk& walk, Heads& h) {
    int lane = threadIdx.x % 32, g = lane / 4, t = lane % 4;
    int first = walk.segment.head % a.pieces * HEADS;
    int kv_head = walk.segment.head / a.pieces;
    for (int n = 0; n < N_TILES; ++n) {
        int head = first + n * 8 + g;
        const u16* q = a.q + walk.row.token * a.q_token + (kv_head * a.group + head) * a.q_head;
        bool held = head < a.group;
#pragma unroll
        for (int s = 0; s < K_STEPS; ++s) {
            // The order of the summed dims is free, as long as K has the same: FP8 K gives dims 4t to 4t + 3 to lane t.
            u32 low = 0, high = 0;
            if (held && FP8) {
                uint2 x = *(const uint2*)(q + 16 * s + 4 * t);
                low = x.x, high = x.y;
            } else if (held) {
                low = *(const u32*)(q + 16 * s + 2 * t);
                high = *(const u32*)(q + 16 * s + 2 * t + 8);
            }
            h.q[s][n][0] = low;
            h.q[s][n][1] = high;
        }
        h.scale[n][0] = h.scale[n][1] = a.scale;
        if (BF16 && FP8) {
            // A bfloat16 query as float16: divided by its largest value, so that it cannot overflow.
            float size = 0;
#pragma unroll
            for (int s = 0; s < K_STEPS; ++s)
                for (int i = 0; i < 2; ++i)
                    size = fmaxf(size, fmaxf(fabsf(to_float<true>(h.q[s][n][i])), fabsf(to_float<true>(h.q[s][n][i] >> 16))));
            size = fmaxf(size, __shfl_xor_sync(~0u, size, 1));
            size = fmaxf(size, __shfl_xor_sync(~0u, size, 2));
            size = size > 0 ? size : 1.0f;
            float inverse = 1.0f / size;
#pragma unroll
            for (int s = 0; s < K_STEPS; ++s)
                for (int i = 0; i < 2; ++i) {
                    u32 x = h.q[s][n][i];
                    h.q[s][n][i] = pack_f16(to_float<true>(x) * inverse, to_float<true>(x >> 16) * inverse);
                }
            h.scale[n][0] *= __shfl_sync(~0u, size, 8 * t);
            h.scale[n][1] *= __shfl_sync(~0u, size, 8 * t + 4);
        }
        for (int i = 0; i < 2; ++i) h.top[n][i] = NEGATIVE_INFINITY, h.sum[n][i] = 0;
        for (int v = 0; v < V_TILES; ++v)
            for (int i = 0; i < 4; ++i) h.acc[v][n][i] = 0;
    }
}

// Scores of 16 tokens: lane 4g + t gets tokens g and g + 8 of heads 2t, 2t + 1.
DEVICE void scores(float (&s)[N_TILES][4], const Heads& h, u32 keys, int tile) {
    int lane = threadIdx.x % 32;
    int row = tile * 16 + lane % 16, half = lane / 16;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) s[n][0] = s[n][1] = s[n][2] = s[n][3] = 0;
    if (!FP8) {
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) {
            u32 r[4];
            load_matrices(r, keys + KRows::at(row, 2 * k + half));
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) mma<BF16_PRODUCT>(s[n], r[0], r[1], r[2], r[3], h.q[k][n][0], h.q[k][n][1]);
        }
    } else {
#pragma unroll
        for (int k = 0; k < K_STEPS; k += 2) {
            u32 r[4];
            load_matrices(r, keys + KRows::at(row, min(k + half, K_STEPS - 1)));
#pragma unroll
            for (int j = 0; j < 2 && k + j < K_STEPS; ++j) {
                u32 x = r[2 * j], y = r[2 * j + 1];
                u32 a0 = fp8_to_f16<E5M2>(x), a1 = fp8_to_f16<E5M2>(y), a2 = fp8_to_f16<E5M2>(x >> 16), a3 = fp8_to_f16<E5M2>(y >> 16);
#pragma unroll
                for (int n = 0; n < N_TILES; ++n) mma<false>(s[n], a0, a1, a2, a3, h.q[k + j][n][0], h.q[k + j][n][1]);
            }
        }
    }
}

// acc += V^T p over 16 tokens. Rows of a product are dims: g and g + 8 of a tile, or, of FP8, 2g and 2g + 1.
DEVICE void add_values(Heads& h, const u32 (&p)[N_TILES][2], u32 values, int tile) {
    int lane = threadIdx.x % 32;
    if (!FP8) {
        int row = tile * 16 + lane % 8 + lane / 16 * 8, half = lane / 8 % 2;
#pragma unroll
        for (int v = 0; v < V_TILES; ++v) {
            u32 r[4];
            load_matrices_transposed(r, values + VRows::at(row, 2 * v + half));
#pragma unroll
            for (int n = 0; n < N_TILES; ++n) mma<BF16_PRODUCT>(h.acc[v][n], r[0], r[1], r[2], r[3], p[n][0], p[n][1]);
        }
    } else {
        int row = tile * 16 + lane % 16, half = lane / 16;
#pragma unroll
        for (int v = 0; v < V_TILES; v += 2) {
            u32 r[4];
            load_matrices_transposed(r, values + VRows::at(row, min(v + half, V_TILES - 1)));
#pragma unroll
            for (int j = 0; j < 2 && v + j < V_TILES; ++j) {
                // Bytes (token, dim): (2t, 2g), (2t, 2g + 1), (2t + 1, 2g), (2t + 1, 2g + 1). Pair up the tokens.
                u32 x = __byte_perm(r[2 * j], 0, 0x3120), y = __byte_perm(r[2 * j + 1], 0, 0x3120);
                u32 a0 = fp8_to_f16<E5M2>(x), a1 = fp8_to_f16<E5M2>(x >> 16), a2 = fp8_to_f16<E5M2>(y), a3 = fp8_to_f16<E5M2>(y >> 16);
#pragma unroll
                for (int n = 0; n < N_TILES; ++n) mma<false>(h.acc[v + j][n], a0, a1, a2, a3, p[n][0], p[n][1]);
            }
        }
    }
}

// One slice in shared memory, whose first token is `token`; only tokens in [first, stop) count.
DEVICE void attend(const DecodeArgs& a, Heads& h, u32 stage, int token, int first, int stop) {
    int lane = threadIdx.x % 32, g = lane / 4;
    u32 values = stage + SLICE * KRows::BYTES;
    bool masked = token < first || token + SLICE > stop;
    if (masked) {
        // Whatever lies there is not ours and may be NaN, which a weight of zero would not silence.
        for (int r = 0; r < SLICE; ++r)
            if (token + r < first || token + r >= stop)
                for (int i = lane * 16; i < VRows::BYTES; i += 512) zero_16_bytes(values + r * VRows::BYTES + i);
        __syncwarp();
    }
    float s[M_TILES][N_TILES][4];
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        scores(s[m], h, stage, m);
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float x = s[m][n][i] * h.scale[n][i % 2];
                if (SOFTCAP) x = a.softcap * tanh_exact(x);
                int at = token + m * 16 + g + i / 2 * 8;
                if (masked && (at < first || at >= stop)) x = NEGATIVE_INFINITY;
                s[m][n][i] = x;
            }
    }
    // The maximum seldom moves after the first slices: only when it does, lanes compare and the sums are rescaled.
    float top[N_TILES][2];
    bool higher = false;
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            top[n][i] = fmaxf(s[0][n][i], s[0][n][i + 2]);
#pragma unroll
            for (int m = 1; m < M_TILES; ++m) top[n][i] = fmaxf(top[n][i], fmaxf(s[m][n][i], s[m][n][i + 2]));
            higher |= top[n][i] > h.top[n][i];
        }
    if (__any_sync(~0u, higher)) {
#pragma unroll
        for (int n = 0; n < N_TILES; ++n)
#pragma unroll
            for (int i = 0; i < 2; ++i) {
                float x = top[n][i];
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 4));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 8));
                x = fmaxf(x, __shfl_xor_sync(~0u, x, 16));
                x = fmaxf(x, h.top[n][i]);
                float keep = x == h.top[n][i] ? 1.0f : exp2_fast(h.top[n][i] - x);
                h.top[n][i] = x;
                h.sum[n][i] *= keep;
#pragma unroll
                for (int v = 0; v < V_TILES; ++v) h.acc[v][n][i] *= keep, h.acc[v][n][i + 2] *= keep;
            }
    }
#pragma unroll
    for (int m = 0; m < M_TILES; ++m) {
        u32 p[N_TILES][2];
#pragma unroll
        for (int n = 0; n < N_TILES; ++n) {
            float e[4];
#pragma unroll
            for (int i = 0; i < 4; ++i) {
                float base = h.top[n][i % 2];
                e[i] = exp2_fast(s[m][n][i] - (base == NEGATIVE_INFINITY ? 0.0f : base));
                h.sum[n][i % 2] += e[i];
            }
            p[n][0] = transpose_matrix(pack<BF16_PRODUCT>(e[0], e[1]));
            p[n][1] = transpose_matrix(pack<BF16_PRODUCT>(e[2], e[3]));
        }
        add_values(h, p, values, m);
    }
#if HOPPER
    if (masked) fence_copy_engine();
#endif
}

// Add up the parts of a split segment: this block was the last to arrive. Parts are taken in their order, so that
// the result does not depend on who that was.
DEVICE void add_parts(const DecodeArgs& a, const Walk& walk, int first, int heads, float* merge) {
    const Segment& segment = walk.segment;
    int kv_head = segment.head / a.pieces;
    for (int i = threadIdx.x; i < heads * (V_DIM / 4); i += WARPS * 32) {
        int head = i / (V_DIM / 4), d = i % (V_DIM / 4) * 4;
        int absolute = kv_head * a.group + first + head;
        float top = a.sinks ? a.sinks[absolute] * LOG2E : NEGATIVE_INFINITY;
        float sink = top;
#pragma unroll 8
        for (int part = 0; part < segment.parts; ++part) {
            int place = part_place(part, segment.first_block, segment.starts_in_middle);
            top = fmaxf(top, load_pair_l2(a.part_sums + ((i64)place * HEADS + head) * 2).x);
        }
        float base = top == NEGATIVE_INFINITY ? 0.0f : top;
        float sum = exp2_fast(sink - base);
        float4 acc = {0, 0, 0, 0};
#pragma unroll 8
        for (int part = 0; part < segment.parts; ++part) {
            int place = part_place(part, segment.first_block, segment.starts_in_middle);
            float2 pair = load_pair_l2(a.part_sums + ((i64)place * HEADS + head) * 2);
            float4 x = load_quad_l2(a.part + ((i64)place * HEADS + head) * V_DIM + d);
            float weight = exp2_fast(pair.x - base);
            sum += weight * pair.y;
            acc.x += weight * x.x, acc.y += weight * x.y, acc.z += weight * x.z, acc.w += weight * x.w;
        }
        float factor = a.v_scale / (sum == 0.0f ? 1.0f : sum);
        uint2 packed = {pack<BF16>(acc.x * factor, acc.y * factor), pack<BF16>(acc.z * factor, acc.w * factor)};
        *(uint2*)(a.out + walk.row.token * a.out_token + absolute * a.out_head + d) = packed;
        if (d == 0 && a.lse) a.lse[walk.row.token * a.lse_token + absolute] = (top + log2f(sum)) * LN2;
    }
}

// The end of a segment: the warps add up their sums, and write the output, or a part of it.
DEVICE void finish(const DecodeArgs& a, const Walk& walk, Heads& h, Shared& shared, float* merge) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32, g = lane / 4, t = lane % 4;
    const Segment& segment = walk.segment;
    int kv_head = segment.head / a.pieces, first = segment.head % a.pieces * HEADS;
    int heads = min(a.group - first, HEADS);
    bool whole = segment.parts == 1;
    int part = blockIdx.x - segment.first_block;
    i64 place = part_place(part, segment.first_block, segment.starts_in_middle);
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float x = h.sum[n][i];
            x += __shfl_xor_sync(~0u, x, 4);
            x += __shfl_xor_sync(~0u, x, 8);
            x += __shfl_xor_sync(~0u, x, 16);
            if (g == 0) {
                shared.sums[warp][n * 8 + 2 * t + i][0] = h.top[n][i];
                shared.sums[warp][n * 8 + 2 * t + i][1] = x;
            }
        }
    __syncthreads();
    if (threadIdx.x < heads) {
        int head = threadIdx.x, absolute = kv_head * a.group + first + head;
        float top = NEGATIVE_INFINITY, sum = 0;
        for (int w = 0; w < WARPS; ++w) top = fmaxf(top, shared.sums[w][head][0]);
        float sink = whole && a.sinks ? a.sinks[absolute] * LOG2E : NEGATIVE_INFINITY;
        top = fmaxf(top, sink);
        float base = top == NEGATIVE_INFINITY ? 0.0f : top;
        for (int w = 0; w < WARPS; ++w) sum += exp2_fast(shared.sums[w][head][0] - base) * shared.sums[w][head][1];
        sum += exp2_fast(sink - base);
        shared.total[head][0] = base;
        shared.total[head][1] = whole ? a.v_scale / (sum == 0.0f ? 1.0f : sum) : 1.0f;
        if (!whole)
            *(float2*)(a.part_sums + (place * HEADS + head) * 2) = {top, sum};
        else if (a.lse)
            a.lse[walk.row.token * a.lse_token + absolute] = (top + log2f(sum)) * LN2;
    }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        if (n * 8 >= heads) break;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int head = 2 * t + i;
            if (n * 8 + head >= heads) continue;
            float weight = exp2_fast(h.top[n][i] - shared.total[n * 8 + head][0]);
            float* to = merge + (warp * 8 + head) * MERGE_ROW;
#pragma unroll
            for (int v = 0; v < V_TILES; ++v) {
                to[v * 16 + (FP8 ? 2 * g : g)] = h.acc[v][n][i] * weight;
                to[v * 16 + (FP8 ? 2 * g + 1 : g + 8)] = h.acc[v][n][i + 2] * weight;
            }
        }
        __syncthreads();
        int here = min(heads - n * 8, 8);
        for (int i = threadIdx.x; i < here * (V_DIM / 2); i += WARPS * 32) {
            int head = i / (V_DIM / 2), d = i % (V_DIM / 2) * 2;
            float2 acc = {0, 0};
#pragma unroll
            for (int w = 0; w < WARPS; ++w) {
                float2 x = *(const float2*)(merge + (w * 8 + head) * MERGE_ROW + d);
                acc.x += x.x, acc.y += x.y;
            }
            float factor = shared.total[n * 8 + head][1];
            int absolute = kv_head * a.group + first + n * 8 + head;
            if (whole)
                *(u32*)(a.out + walk.row.token * a.out_token + absolute * a.out_head + d) = pack<BF16>(acc.x * factor, acc.y * factor);
            else
                *(float2*)(a.part + (place * HEADS + n * 8 + head) * V_DIM + d) = acc;
        }
        __syncthreads();
    }
    if (whole) return;
    // Every thread's stores come before the one arrival; the last to arrive sees all of them.
    __threadfence();
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = a.arrived + walk.row.index * a.kv_heads * a.pieces + segment.head;
        shared.last = atomicAdd(counter, 1) == segment.parts - 1;
        if (shared.last) *counter = 0;  // ready for the next launch
        __threadfence();
    }
    __syncthreads();
    if (shared.last) add_parts(a, walk, first, heads, merge);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) decode(const __grid_constant__ DecodeArgs a) {
    extern __shared__ __align__(128) u8 memory[];
    float* merge = (float*)(memory + RING_BYTES);
    Shared& shared = *(Shared*)(memory + RING_BYTES + WARPS * 8 * MERGE_ROW * 4);
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32;
    BlockWork work = a.block_work[blockIdx.x];
    u32 ring = shared_address(memory) + warp * STAGES * SLICE_BYTES;
    u32 full = shared_address(shared.full[warp]);
    u64 policy = 0;
#if HOPPER
    if (lane < STAGES) barrier_init(full + lane * 8, 1);
    barrier_init_visible();
    fence_copy_engine();
    __syncwarp();
    policy = evict_first_policy();
#endif
    wait_for_predecessor();
    release_successor();
    if (work.share == 0) return;

    Feed feed;
    feed.start(a, work);
    for (int s = 0; s < STAGES; ++s) {
        feed.copy(a, ring + s * SLICE_BYTES, full + s * 8, policy);
#if !HOPPER
        copies_commit();
#endif
    }
    Walk walk;
    walk.start(work);
    walk.look();
    int stage = 0, parity = 0;
    while (true) {
        Heads h;
        load_queries(a, walk, h);
        int slices = walk.slices();
        for (int i = walk.first_slice(); i < slices; ++i) {
#if HOPPER
            barrier_wait(full + stage * 8, parity);
#else
            copies_wait<STAGES - 1>();
#endif
            __syncwarp();
            attend(a, h, ring + stage * SLICE_BYTES, walk.slice(i), max(walk.row.first, walk.begin), walk.stop);
            __syncwarp();
            feed.copy(a, ring + stage * SLICE_BYTES, full + stage * 8, policy);
#if !HOPPER
            copies_commit();
#endif
            if (++stage == STAGES) stage = 0, parity ^= 1;
        }
        finish(a, walk, h, shared, merge);
        walk.next(a);
        if (walk.done()) return;
    }
}
