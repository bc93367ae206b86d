// Paged decode: rows with one new token. A persistent grid over the map that plan.cu makes.
//
// Each warp has a ring of its own in shared memory, fills it and empties it: warps wait for each other only at the end of
// a segment, when they add up what each has summed over its own tokens. Copies for the next segment are under way by then.
//
// Compiled for: BF16, KV_BYTES, E5M2, K_DIM, V_DIM, SOFTCAP, N_TILES, SLICE, WARPS, STAGES, BLOCKS_PER_SM.
#include "decode_heads.cuh"

struct Shared {
    float sums[WARPS][HEADS][2];  // maximum and denominator of each warp
    float total[HEADS][2];        // maximum, and what a sum is multiplied by at the end
    int last;
    u64 full[WARPS][STAGES];
};

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
