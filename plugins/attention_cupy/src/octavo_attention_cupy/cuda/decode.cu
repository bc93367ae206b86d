// Paged decode: rows with one new token. A persistent grid over the map that plan.cu makes.
//
// Each warp has a ring of its own in shared memory, fills it and empties it: warps wait for each other only at the end of
// a segment, when they add up what each has summed over its own tokens. Copies for the next segment are under way by then.
//
// Compiled for: BF16, KV_BYTES, E5M2, K_DIM, V_DIM, SOFTCAP, N_TILES, SLICE, WARPS, STAGES, BLOCKS_PER_SM.
#include "decode_heads.cuh"

struct Shared {
    float2 sums[WARPS][HEADS];  // maximum and denominator of each warp
    float factor[HEADS];        // what the sum over warps is multiplied by
    int last;
    u64 full[WARPS][STAGES];
};

constexpr int PARTS = 8;  // parts of a split segment that a thread loads at once

// Add up the parts of a split segment: this block was the last to arrive. Parts are taken in their order, so that
// the result does not depend on who that was.
DEVICE void add_parts(const DecodeArgs& a, const Walk& walk, int first, int heads) {
    const Segment& segment = walk.segment;
    int kv_head = segment.head / a.pieces;
    for (int i = threadIdx.x; i < heads * (V_DIM / 4); i += WARPS * 32) {
        int head = i / (V_DIM / 4), d = i % (V_DIM / 4) * 4;
        int absolute = kv_head * a.group + first + head;
        float top = a.sinks ? a.sinks[absolute] * LOG2E : NEGATIVE_INFINITY;
        float sum = top == NEGATIVE_INFINITY ? 0.0f : 1.0f;
        float4 acc = {0, 0, 0, 0};
        for (int part = 0; part < segment.parts; part += PARTS) {
            float2 pair[PARTS];
            float4 x[PARTS];
            float higher = top;
#pragma unroll
            for (int j = 0; j < PARTS; ++j) {
                pair[j] = {NEGATIVE_INFINITY, 0};
                x[j] = {0, 0, 0, 0};
                if (part + j >= segment.parts) continue;
                i64 at = part_place(part + j, segment.first_block, segment.starts_in_middle) * HEADS + head;
                pair[j] = load_pair_l2(a.part_sums + at * 2);
                x[j] = load_quad_l2(a.part + at * V_DIM + d);
            }
#pragma unroll
            for (int j = 0; j < PARTS; ++j) higher = fmaxf(higher, pair[j].x);
            float base = higher == NEGATIVE_INFINITY ? 0.0f : higher, keep = exp2_fast(top - base);
            sum *= keep, acc.x *= keep, acc.y *= keep, acc.z *= keep, acc.w *= keep;
            top = higher;
#pragma unroll
            for (int j = 0; j < PARTS; ++j) {
                float weight = exp2_fast(pair[j].x - base);
                sum += weight * pair[j].y;
                acc.x += weight * x[j].x, acc.y += weight * x[j].y, acc.z += weight * x[j].z, acc.w += weight * x[j].w;
            }
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
    i64 place = part_place(blockIdx.x - segment.first_block, segment.first_block, segment.starts_in_middle);
#pragma unroll
    for (int n = 0; n < N_TILES; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float x = h.sum[n][i];
            x += __shfl_xor_sync(~0u, x, 4);
            x += __shfl_xor_sync(~0u, x, 8);
            x += __shfl_xor_sync(~0u, x, 16);
            if (g == 0) shared.sums[warp][n * 8 + 2 * t + i] = {h.top[n][i], x};
        }
    __syncthreads();
#pragma unroll
    for (int n = 0; n < N_TILES; ++n) {
        if (n * 8 >= heads) break;
        if (n > 0) __syncthreads();  // the tile before has been added up
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            int head = n * 8 + 2 * t + i, absolute = kv_head * a.group + first + head;
            if (head >= heads) continue;
            float sink = whole && a.sinks ? a.sinks[absolute] * LOG2E : NEGATIVE_INFINITY;
            float top = sink, sum = 0;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) top = fmaxf(top, shared.sums[w][head].x);
            float base = top == NEGATIVE_INFINITY ? 0.0f : top;
#pragma unroll
            for (int w = 0; w < WARPS; ++w) sum += exp2_fast(shared.sums[w][head].x - base) * shared.sums[w][head].y;
            sum += exp2_fast(sink - base);
            if (warp == 0 && g == 0) {
                shared.factor[head] = whole ? a.v_scale / (sum == 0.0f ? 1.0f : sum) : 1.0f;
                if (!whole)
                    *(float2*)(a.part_sums + (place * HEADS + head) * 2) = {top, sum};
                else if (a.lse)
                    a.lse[walk.row.token * a.lse_token + absolute] = (top + log2f(sum)) * LN2;
            }
            float weight = exp2_fast(h.top[n][i] - base);
            float* to = merge + (warp * 8 + 2 * t + i) * MERGE_ROW;
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
            float factor = shared.factor[n * 8 + head];
            int absolute = kv_head * a.group + first + n * 8 + head;
            if (whole)
                *(u32*)(a.out + walk.row.token * a.out_token + absolute * a.out_head + d) = pack<BF16>(acc.x * factor, acc.y * factor);
            else
                *(float2*)(a.part + (place * HEADS + n * 8 + head) * V_DIM + d) = acc;
        }
    }
    if (whole) return;
    // Every thread's stores come before the one arrival; the last to arrive sees all of them.
    __syncthreads();
    if (threadIdx.x == 0) {
        u32* counter = a.arrived + walk.row.index * a.kv_heads * a.pieces + segment.head;
        shared.last = arrive_at(counter) == segment.parts - 1;
        if (shared.last) *counter = 0;  // ready for the next launch
    }
    __syncthreads();
    if (shared.last) add_parts(a, walk, first, heads);
}

extern "C" __global__ void __launch_bounds__(WARPS * 32, BLOCKS_PER_SM) decode(const __grid_constant__ DecodeArgs a) {
    extern __shared__ __align__(128) u8 memory[];
    float* merge = (float*)(memory + RING_BYTES);
    Shared& shared = *(Shared*)(memory + RING_BYTES + WARPS * 8 * MERGE_ROW * 4);
    int warp = threadIdx.x / 32;
    BlockWork work = a.block_work[blockIdx.x];
    u32 ring = shared_address(memory) + warp * STAGES * SLICE_BYTES;
    u32 full = shared_address(shared.full[warp]);
    u64 policy = 0;
#if HOPPER
    if (threadIdx.x % 32 < STAGES) barrier_init(full + threadIdx.x % 32 * 8, 1);
    barrier_init_visible();
    fence_copy_engine();
    __syncwarp();
    policy = evict_first_policy();
#endif
    release_successor();
    if (work.share == 0) {
        wait_for_predecessor();  // so that whoever waits for this kernel has waited for that one too
        return;
    }

    Feed feed;
    feed.start(a, work);
    for (int s = 0; s < STAGES; ++s) {
        feed.copy(a, ring + s * SLICE_BYTES, full + s * 8, policy);
#if !HOPPER
        copies_commit();
#endif
    }
    feed.settle();
    Walk walk;
    walk.start(work);
    walk.look();
    Heads h;
    load_queries(a, walk, h);
    int stage = 0, parity = 0;
    while (true) {
        start_segment(a, h);
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
        Walk next = walk;
        next.next(a);
        if (!next.done()) load_queries(a, next, h);  // on their way while this segment is finished
        finish(a, walk, h, shared, merge);
        if (next.done()) return;
        walk = next;
    }
}
