// Paged prefill on Hopper: caches of dim 64 or 128, 16-bit or FP8.
//
// A block is one warpgroup that copies, one more that converts if the cache is FP8, and two that multiply, 64 matrix rows each: the
// scores of the next tile are under way while the softmax of this one is computed, and products with V take their weights from
// registers. Blocks stay and walk over a list of items.
//
// Compiled for: BF16, KV_BYTES, E5M2, K_DIM, V_DIM, SOFTCAP, GROUP (query heads a KV head), SHARED_BYTES.
#include "prefill_hopper_copy.cuh"

constexpr int K_STEPS = K_DIM / 16;
constexpr int THREADS = FP8 ? 512 : 384;

// What a thread keeps of its two matrix rows, 4 lanes a row: rows g and g + 8 of its warp's 16.
struct RowState {
    int position[2];
    float top[2], sum[2], keep[2];
};

DEVICE void issue_scores(float (&s)[64], u32 queries, u32 keys) {
    pin(s);
    products_begin();
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
        u32 at = k / 4 * TILE_PANEL + k % 4 * 32;
        product_shared<BF16>(s, matrix_descriptor(queries + at, 1024, 16), matrix_descriptor(keys + at, 1024, 16), k > 0);
    }
    products_commit();
}

DEVICE void issue_values(float (&acc)[V_DIM / 2], u32 (&p)[32], u32 values) {
    pin(acc);
    pin(p);
    products_begin();
#pragma unroll
    for (int k = 0; k < TOKENS / 16; ++k)
        product_registers<BF16>(acc, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3],
                                matrix_descriptor(values + k * 16 * PANEL, 1024, TILE_PANEL));
    products_commit();
}

// Scores as they count: capped, and hidden ones -infinity where a tile has any. Masking is a pass of its own, so that the tiles
// without hidden scores, which are nearly all, do not pay for the question.
DEVICE void cap_and_mask(const PrefillArgs& a, float (&s)[64], const RowState& row, int token, bool masked) {
    if (SOFTCAP)
#pragma unroll
        for (int n = 0; n < 64; ++n) s[n] = a.softcap * tanh_exact(s[n] * a.scale);
    if (!masked) return;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        // Of this lane's columns n * 8 + c, those in (before, last] are visible.
        int last = row.position[i] - token - 2 * (threadIdx.x % 4), before = a.window > 0 ? last - a.window : -1;
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if (n * 8 + c > last || n * 8 + c <= before) s[4 * n + 2 * i + c] = NEGATIVE_INFINITY;
    }
}

// Scores to weights, in place, and the factors by which earlier sums shrink.
DEVICE void softmax(const PrefillArgs& a, float (&s)[64], RowState& row) {
    float scale = SOFTCAP ? 1.0f : a.scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float top = row.top[i];
#pragma unroll
        for (int n = 0; n < 16; ++n) top = fmaxf(top, fmaxf(s[4 * n + 2 * i], s[4 * n + 2 * i + 1]));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 1));
        top = fmaxf(top, __shfl_xor_sync(~0u, top, 2));
        float base = top == NEGATIVE_INFINITY ? 0.0f : top * scale;
        row.keep[i] = exp2_fast(row.top[i] * scale - base);
        row.top[i] = top;
        float sum = 0;
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float e = exp2_fast(s[4 * n + 2 * i + c] * scale - base);
                s[4 * n + 2 * i + c] = e;
                sum += e;
            }
        row.sum[i] = row.sum[i] * row.keep[i] + sum;
    }
}

DEVICE void pack_weights(u32 (&p)[32], const float (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) p[i] = pack<BF16>(s[2 * i], s[2 * i + 1]);
}

// The two warpgroups issue products in turn, so that one multiplies while the other computes weights.
DEVICE void take_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(2 + group) : "memory"); }
DEVICE void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(3 - group) : "memory"); }

// Sums shrink to the new maximum; after the first tiles it seldom moves.
DEVICE void rescale(float (&acc)[V_DIM / 2], const RowState& row) {
    if (__all_sync(~0u, row.keep[0] == 1.0f && row.keep[1] == 1.0f)) return;
#pragma unroll
    for (int v = 0; v < V_DIM / 8; ++v)
#pragma unroll
        for (int i = 0; i < 2; ++i) acc[4 * v + 2 * i] *= row.keep[i], acc[4 * v + 2 * i + 1] *= row.keep[i];
}

// Values of four lanes that are neighbours, four each: value j of lane t becomes value t of lane j.
DEVICE void transpose_quad(u32 (&x)[4]) {
#pragma unroll
    for (int bit = 1; bit < 4; bit *= 2) {
        bool high = threadIdx.x & bit;
#pragma unroll
        for (int j = 0; j < 4; ++j) {
            if (j & bit) continue;
            u32 mine = __shfl_xor_sync(~0u, high ? x[j] : x[j + bit], bit);
            (high ? x[j] : x[j + bit]) = mine;
        }
    }
}

DEVICE void write_rows(const PrefillArgs& a, const Item& item, RowState& row, const float (&acc)[V_DIM / 2], int first_row) {
    int t = threadIdx.x % 4;
    float scale = SOFTCAP ? 1.0f : a.scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = row.sum[i];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        int r = first_row + 8 * i, token = r / GROUP, head = item.head * GROUP + r - token * GROUP;
        bool held = token < item.tile.tokens;
        float base = row.top[i] == NEGATIVE_INFINITY ? 0.0f : row.top[i] * scale, keep = 1.0f;
        if (a.sinks && held) {
            float sink = a.sinks[head] * LOG2E, higher = fmaxf(base, sink);
            keep = exp2_fast(base - higher);
            sum = sum * keep + exp2_fast(sink - higher);
            base = higher;
        }
        float factor = keep * a.v_scale / (sum == 0.0f ? 1.0f : sum);
        u16* out = a.out + (item.tile.token + token) * a.out_token + head * a.out_head;
#pragma unroll
        for (int v = 0; v < V_DIM / 8; v += 4) {
            u32 x[4];
#pragma unroll
            for (int j = 0; j < 4; ++j) x[j] = pack<BF16>(acc[4 * (v + j) + 2 * i] * factor, acc[4 * (v + j) + 2 * i + 1] * factor);
            transpose_quad(x);
            if (held) store_16_bytes(out + (v + t) * 8, x);
        }
        if (t == 0 && held && a.lse) a.lse[(item.tile.token + token) * a.lse_token + head] = (base + log2f(sum)) * LN2;
    }
}

DEVICE void arrive_once_a_warp(u64& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&barrier));
}

DEVICE void multiply(const PrefillArgs& a, Shared& shared) {
    int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    int first_row = group * 64 + warp * 16 + g;
    Turn<Q_STAGES> query;
    Turn<STAGES> key, value;
    float acc[V_DIM / 2], s[64];
    u32 p[32];
    if (group == 1) give_turn(group);  // warpgroup 0 begins
    for (int index = blockIdx.x; index < a.count * a.kv_heads; index += gridDim.x, query.next()) {
        barrier_wait(shared_address(&shared.q_full[query.place]), query.parity);
        Item item = shared.items[query.place];
        RowState row;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            row.position[i] = item.tile.position + (first_row + 8 * i) / GROUP;
            row.top[i] = NEGATIVE_INFINITY, row.sum[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < V_DIM / 2; ++i) acc[i] = 0;
        int least = item.tile.position + group * 64 / GROUP, most = item.tile.position + (group * 64 + 63) / GROUP;
        auto masked = [&](int token) { return token + TOKENS - 1 > least || (a.window > 0 && token <= most - a.window); };
        u32 queries = shared_address(shared.q[query.place]) + group * 64 * PANEL;

        barrier_wait(shared_address(&shared.k_full[key.place]), key.parity);
        issue_scores(s, queries, shared_address(shared.k[key.place]));
        products_wait<0>();
        pin(s);
        arrive_once_a_warp(shared.k_empty[key.place]);
        key.next();
        cap_and_mask(a, s, row, item.first * TOKENS, masked(item.first * TOKENS));
        softmax(a, s, row);
        pack_weights(p, s);
        int j = item.first;
        for (; j + 1 < item.last; ++j, value.next()) {
            barrier_wait(shared_address(&shared.k_full[key.place]), key.parity);
            take_turn(group);
            issue_scores(s, queries, shared_address(shared.k[key.place]));
            barrier_wait(shared_address(&shared.v_full[value.place]), value.parity);
            issue_values(acc, p, shared_address(shared.v[value.place]));
            give_turn(group);
            products_wait<1>();
            pin(s);
            arrive_once_a_warp(shared.k_empty[key.place]);
            key.next();
            cap_and_mask(a, s, row, (j + 1) * TOKENS, masked((j + 1) * TOKENS));
            softmax(a, s, row);
            // Nobody reads it. Without a store that needs all weights, the assembler moves them behind the wait for V's product,
            // which they are there to hide.
            store_4_bytes(shared_address(shared.weighed + threadIdx.x - 128), __float_as_uint(row.sum[0] + row.sum[1]));
            products_wait<0>();
            pin(acc);
            pin(p);
            arrive_once_a_warp(shared.v_empty[value.place]);
            rescale(acc, row);
            pack_weights(p, s);
        }
        barrier_wait(shared_address(&shared.v_full[value.place]), value.parity);
        issue_values(acc, p, shared_address(shared.v[value.place]));
        products_wait<0>();
        pin(acc);
        arrive_once_a_warp(shared.v_empty[value.place]);
        value.next();
        arrive_once_a_warp(shared.q_empty[query.place]);
        write_rows(a, item, row, acc, first_row);
    }
    if (group == 0) take_turn(group);  // the turn that was given first and is still open
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) prefill_hopper(const __grid_constant__ PrefillArgs a) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *(Shared*)memory;
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    if (threadIdx.x < 128) {
        give_registers<FP8 ? 48 : 56>();
        if (threadIdx.x < 32)
            copy_keys_and_values(a, shared);
        else
            copy_queries(a, shared);
    } else if (threadIdx.x < 384) {
        take_registers<FP8 ? 208 : 224>();
        multiply(a, shared);
    } else {
        give_registers<48>();
        convert_keys_and_values(a, shared);
    }
}
