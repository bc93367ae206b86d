// Paged prefill on Hopper: 16-bit pages of dim 64 or 128.
//
// A block is one warpgroup that copies, and two that multiply, 64 matrix rows each: the scores of the next tile are under way while
// the softmax of this one is computed, and products with V take their weights from registers. Blocks stay and walk over their items.
//
// Compiled for: BF16, KV_BYTES (2), K_DIM, V_DIM, SOFTCAP, GROUP (query heads a KV head), SHARED_BYTES.
#include "prefill_hopper_copy.cuh"

constexpr int K_STEPS = K_DIM / 16;
constexpr int THREADS = 384;

constexpr float SLACK = 8;  // powers of two by which a row's largest score may exceed its base

// What a thread keeps of its two matrix rows, 4 lanes a row: rows g and g + 8 of its warp's 16.
struct RowState {
    int position[2];
    float base[2];   // what exponents are relative to, in powers of two; -infinity while the row has seen nothing
    float sum[2];    // of this lane's columns only
    float keep[2];   // by how much earlier sums shrink when the base moves
};

// What scores are multiplied by in the exponent: with a soft-cap they were before the cap.
DEVICE float exponent_scale(const PrefillArgs& a) { return SOFTCAP ? 1.0f : a.scale; }

DEVICE void issue_scores(float (&s)[64], u64 queries, u64 keys) {
    pin(s);
    products_begin();
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k) {
        u32 at = k / 4 * TILE_PANEL + k % 4 * 32;
        product_shared<BF16>(s, advance(queries, at), advance(keys, at), k > 0);
    }
    products_commit();
}

DEVICE void issue_values(float (&acc)[V_DIM / 2], u32 (&p)[32], u64 values, bool add) {
    pin(acc);
    pin(p);
    products_begin();
#pragma unroll
    for (int k = 0; k < TOKENS / 16; ++k)
        product_registers<BF16>(acc, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], advance(values, k * 16 * PANEL),
                                        add || k > 0);
    products_commit();
}

// Of a lane's 32 columns of a row, n * 8 + c with c 0 or 1, those up to `last`, as bits 2n + c. A test of a bit costs a seventh of a
// comparison: predicates are loaded from bits seven at a time.
DEVICE u32 columns_to(int last) {
    int count = 2 * (last >> 3) + min((last & 7) + 1, 2);
    return (u32)(0xffffffffull >> (32 - min(max(count, 0), 32)));
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
        int last = row.position[i] - token - 2 * (threadIdx.x % 4);
        u32 visible = columns_to(last);
        if (a.window > 0) visible &= ~columns_to(last - a.window);
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c)
                if (!(visible & 1u << (2 * n + c))) s[4 * n + 2 * i + c] = NEGATIVE_INFINITY;
    }
}

// Scores of a tile to weights, in place. The base that exponents are relative to follows the largest score only when that has come
// SLACK ahead of it, which is rare after an item's first tiles; until then lanes need not compare. Returns whether it moved in a row of
// this warp.
DEVICE bool softmax(const PrefillArgs& a, float (&s)[64], RowState& row) {
    float top[2][2] = {{s[0], s[1]}, {s[2], s[3]}}, sum[2][2] = {};
#pragma unroll
    for (int n = 1; n < 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) top[i / 2][i % 2] = fmaxf(top[i / 2][i % 2], s[4 * n + i]);
    bool ahead = false;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        top[i][0] = fmaxf(top[i][0], top[i][1]) * exponent_scale(a);
        ahead |= top[i][0] > row.base[i] + SLACK;
    }
    bool moved = __any_sync(~0u, ahead);
    if (moved) {
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float base = fmaxf(row.base[i], top[i][0]);
            base = fmaxf(base, __shfl_xor_sync(~0u, base, 1));
            base = fmaxf(base, __shfl_xor_sync(~0u, base, 2));
            row.keep[i] = base == NEGATIVE_INFINITY ? 1.0f : exp2_fast(row.base[i] - base);
            row.base[i] = base;
            row.sum[i] *= row.keep[i];
        }
    }
    float base[2];
#pragma unroll
    for (int i = 0; i < 2; ++i) base[i] = row.base[i] == NEGATIVE_INFINITY ? 0.0f : row.base[i];
#pragma unroll
    for (int n = 0; n < 16; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            float e = exp2_fast(s[4 * n + i] * exponent_scale(a) - base[i / 2]);
            s[4 * n + i] = e;
            sum[i / 2][i % 2] += e;
        }
#pragma unroll
    for (int i = 0; i < 2; ++i) row.sum[i] += sum[i][0] + sum[i][1];
    return moved;
}

DEVICE void pack_weights(u32 (&p)[32], const float (&s)[64]) {
#pragma unroll
    for (int i = 0; i < 32; ++i) p[i] = pack<BF16>(s[2 * i], s[2 * i + 1]);
}

// The two warpgroups issue products in turn, so that one multiplies while the other computes weights.
DEVICE void take_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(2 + group) : "memory"); }
DEVICE void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(3 - group) : "memory"); }

DEVICE void rescale(float (&acc)[V_DIM / 2], const RowState& row) {
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
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = row.sum[i];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        int r = first_row + 8 * i, token = r / GROUP, head = item.tile.head * GROUP + r - token * GROUP;
        bool held = token < item.tile.tokens;
        float base = row.base[i] == NEGATIVE_INFINITY ? 0.0f : row.base[i], keep = 1.0f;
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

DEVICE void arrive_once_a_warp(u32 barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(barrier);
}

// What a warpgroup does with an item whose queries have come, before its first tile.
DEVICE void begin_item(const Item& item, RowState& row, int first_row) {
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        row.position[i] = item.tile.position + (first_row + 8 * i) / GROUP;
        row.base[i] = NEGATIVE_INFINITY, row.sum[i] = 0;
    }
}

// Scores of a tile that have been computed to the weights of its product with V; returns whether earlier sums shrink.
DEVICE bool weigh(const PrefillArgs& a, const Item& item, float (&s)[64], RowState& row, int group, int j) {
    int token = j * TOKENS, least = item.tile.position + group * 64 / GROUP, most = item.tile.position + (group * 64 + 63) / GROUP;
    cap_and_mask(a, s, row, token, token + TOKENS - 1 > least || (a.window > 0 && token <= most - a.window));
    return softmax(a, s, row);
}

DEVICE void multiply(const PrefillArgs& a, Shared& shared) {
    int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    int first_row = group * 64 + warp * 16 + g, left = a.starts[blockIdx.x + 1] - a.starts[blockIdx.x];
    // Of `shared`, in a register: the compiler would compute it again for every use.
    u32 base = shared_address(&shared);
    asm volatile("" : "+r"(base));
#define AT(member) (base + (u32)((const u8*)&shared.member - (const u8*)&shared))
    u64 queries = matrix_descriptor(AT(q) + group * 64 * PANEL, 1024, 16), keys = matrix_descriptor(AT(k), 1024, 16);
    u64 values = matrix_descriptor(AT(v), 1024, TILE_PANEL);
    Turn query, key, value;
    float acc[V_DIM / 2], s[64];
    u32 p[32];
    RowState row;
    // Scores of the next tile are products with the queries of its item, which is the next one at the end of an item.
    auto issue_next_scores = [&](bool more) {
        if (more) barrier_wait(AT(k_full) + key.place * 8, key.parity);
        issue_scores(s, advance(queries, query.place * Q_TILE), advance(keys, key.place * K_TILE));
    };
    auto take_scores = [&](bool last) {
        pin(s);
        arrive_once_a_warp(AT(k_empty) + key.place * 8);
        if (last) arrive_once_a_warp(AT(q_empty) + query.place * 8);
        key.next();
    };
    auto issue_next_values = [&](bool add) {
        barrier_wait(AT(v_full) + value.place * 8, value.parity);
        issue_values(acc, p, advance(values, value.place * V_TILE), add);
    };
    auto take_values = [&] {
        pin(acc);
        pin(p);
        arrive_once_a_warp(AT(v_empty) + value.place * 8);
        value.next();
    };

    if (group == 1) give_turn(group);  // warpgroup 0 begins
    barrier_wait(AT(q_full), query.parity);
    issue_next_scores(true);
    while (true) {
        Item item = shared.items[query.place];
        begin_item(item, row, first_row);
        int j = item.first;
        products_wait<0>();
        take_scores(j + 1 == item.last);
        weigh(a, item, s, row, group, j);
        pack_weights(p, s);
        while (++j < item.last) {
            take_turn(group);
            issue_next_scores(true);
            issue_next_values(j - 1 > item.first);
            give_turn(group);
            products_wait<1>();
            take_scores(j + 1 == item.last);
            bool moved = weigh(a, item, s, row, group, j);
            // Nobody reads it. Without a store that needs all weights, the assembler moves them behind the wait for V's product,
            // which they are there to hide.
            store_4_bytes(AT(weighed) + (threadIdx.x - 128) * 4, __float_as_uint(row.sum[0] + row.sum[1]));
            products_wait<0>();
            take_values();
            if (moved) rescale(acc, row);
            pack_weights(p, s);
        }
        // The first scores of the next item are under way while this one's rows are written. After the last item they are those of
        // whatever lies there, and nobody's: a branch around products would serialise all of them.
        query.next();
        bool more = --left > 0;
        take_turn(group);
        issue_next_values(j - 1 > item.first);
        if (more) barrier_wait(AT(q_full) + query.place * 8, query.parity);
        issue_next_scores(more);
        give_turn(group);
        products_wait<1>();
        take_values();
        write_rows(a, item, row, acc, first_row);
        if (!more) break;
    }
    products_wait<0>();
    pin(s);
    if (group == 0) take_turn(group);  // the turn that was given first and is still open
#undef AT
}

extern "C" __global__ void __launch_bounds__(THREADS, 1) prefill_hopper(const __grid_constant__ PrefillArgs a) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *(Shared*)memory;
    if (threadIdx.x == 0) init_barriers(shared);
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    if (threadIdx.x < 128) {
        give_registers<56>();
        if (threadIdx.x < 32)
            copy_keys_and_values(a, shared);
        else
            copy_queries(a, shared);
    } else {
        take_registers<224>();
        multiply(a, shared);
    }
}
