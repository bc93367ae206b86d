// What a decode block reads, and in which order: its arguments, its way along the work map, and the copies ahead of it.
//
// Knows nothing of scores: decode_heads.cuh does the arithmetic on what arrives here.
#pragma once
#include "layout.cuh"
#include "ptx.cuh"
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

static_assert(sizeof(DecodeArgs) == ARGS_BYTES, "DecodeArgs of launch.py is another one");

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
    bool newest;                 // looked up: whether this lane's run holds tokens that this step writes
    const u8 *k, *v;             // the current batch: this lane's run (null: none)
    bool fresh;                  // of the current batch, what `newest` is of the one looked up
    int left, turn;              // slices of the batch not yet copied; the first of them
    bool settled;                // whether the kernel before this one has ended

    DEVICE void start(const DecodeArgs& a, const BlockWork& work) {
        run = SLICE;
        while (a.page % run) run /= 2;
        runs = SLICE / run;
        walk.start(work);
        walk.look();
        slice = walk.first_slice();
        slices = walk.slices();
        left = 0;
        settled = false;
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
        newest = held && token + run > walk.row.fresh;
        head = walk.segment.head / a.pieces;
        id = held ? a.table[walk.row.table_row * a.table_row + column] : -1;
        slice += ready;
    }
    DEVICE void settle() {
        wait_for_predecessor();
        settled = true;
    }
    // Copy the next slice, if there is one, to `stage`.
    DEVICE void copy(const DecodeArgs& a, u32 stage, u32 barrier, u64 policy) {
        if (left == 0) {
            left = ready;
            turn = 0;
            const u8* from = a.cache + id * a.page_bytes;
            k = id < 0 ? nullptr : from + k_offset(a.page, head, slot);
            v = from + v_offset(a.page, head, slot);
            fresh = newest;
            if (left > 0) look_up(a);
        }
        if (left == 0) return;
        int lane = threadIdx.x % 32, mine = lane - turn * runs;
        bool held = mine >= 0 && mine < runs && k != nullptr;
        // Fresh tokens are written by the kernel before this one. All others, and the block table, are older than the work map.
        if (!settled && __any_sync(~0u, held && fresh)) settle();
        u32 to_k = stage + mine * run * KRows::PANEL, to_v = stage + SLICE * KRows::BYTES + mine * run * VRows::PANEL;
#if HOPPER
        u32 bytes = __popc(__ballot_sync(~0u, held)) * run * (KRows::BYTES + VRows::BYTES);
        if (lane == 0) barrier_expect(barrier, bytes);
        __syncwarp();
        if (held) {
#pragma unroll
            for (int p = 0; p < KRows::PANELS; ++p)
                bulk_copy(to_k + p * SLICE * KRows::PANEL, k + p * a.page * KRows::PANEL, run * KRows::PANEL, barrier, policy);
#pragma unroll
            for (int p = 0; p < VRows::PANELS; ++p)
                bulk_copy(to_v + p * SLICE * VRows::PANEL, v + p * a.page * VRows::PANEL, run * VRows::PANEL, barrier, policy);
        }
#else
        for (int r = 0; r < runs; ++r) {
            int from = turn * runs + r;
            if (!__shfl_sync(~0u, (int)held, from)) continue;
            const u8* source_k = (const u8*)__shfl_sync(~0u, (u64)k, from);
            const u8* source_v = (const u8*)__shfl_sync(~0u, (u64)v, from);
            u32 k_base = __shfl_sync(~0u, to_k, from), v_base = __shfl_sync(~0u, to_v, from);
            for (int p = 0; p < KRows::PANELS; ++p)
                for (int i = lane * 16; i < run * KRows::PANEL; i += 512)
                    copy_16_bytes(k_base + p * SLICE * KRows::PANEL + i, source_k + p * a.page * KRows::PANEL + i);
            for (int p = 0; p < VRows::PANELS; ++p)
                for (int i = lane * 16; i < run * VRows::PANEL; i += 512)
                    copy_16_bytes(v_base + p * SLICE * VRows::PANEL + i, source_v + p * a.page * VRows::PANEL + i);
        }
#endif
        ++turn;
        --left;
    }
};
