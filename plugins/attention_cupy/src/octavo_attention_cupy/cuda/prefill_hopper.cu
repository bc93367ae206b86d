// Paged prefill on Hopper: 16-bit pages of dim 64 or 128.
//
// A block is one warpgroup that copies, and two that multiply, 64 matrix rows each: the scores of the next tile are under way while
// the softmax of this one is computed; queries and weights are multiplied from registers. Blocks stay and walk over their items.
//
// Compiled for: BF16, KV_BYTES (2), K_DIM, V_DIM, SOFTCAP, GROUP (query heads a KV head), SHARED_BYTES.
#include "prefill_hopper_copy.cuh"
#include "prefill_hopper_softmax.cuh"

constexpr int K_STEPS = K_DIM / 16;
constexpr int THREADS = 384;

DEVICE void issue_scores(float (&s)[64], u32 (&q)[4 * K_STEPS], u64 keys) {
    pin(s);
    pin(q);
    products_begin();
#pragma unroll
    for (int k = 0; k < K_STEPS; ++k)
        product<BF16, false>(s, q[4 * k], q[4 * k + 1], q[4 * k + 2], q[4 * k + 3], advance(keys, k / 4 * TILE_PANEL + k % 4 * 32), k > 0);
    products_commit();
}

// The two warpgroups issue products in turn, so that one multiplies while the other computes weights.
DEVICE void take_turn(int group) { asm volatile("bar.sync %0, 256;" ::"r"(2 + group) : "memory"); }
DEVICE void give_turn(int group) { asm volatile("bar.arrive %0, 256;" ::"r"(3 - group) : "memory"); }

// The turn of `group` is given, if it `gives`, when all products but one are on their way.
DEVICE void issue_values(float (&acc)[V_DIM / 2], u32 (&p)[32], u64 values, bool add, int group, bool gives) {
    constexpr int STEPS = TOKENS / 16;
    pin(acc);
    pin(p);
    products_begin();
#pragma unroll
    for (int k = 0; k < STEPS; ++k) {
        if (k == STEPS - 1 && gives) give_turn(group);
        product<BF16, true>(acc, p[4 * k], p[4 * k + 1], p[4 * k + 2], p[4 * k + 3], advance(values, k * 16 * PANEL), add || k > 0);
    }
    products_commit();
}

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
        row.base[i] = NEGATIVE_INFINITY, row.sum[i] = 0, row.limit[i] = LEAST;
    }
}

// Whether one of a warpgroup's rows does not see all of tile j.
DEVICE bool hides(const PrefillArgs& a, const Item& item, int group, int j) {
    int least = item.tile.position + group * 64 / GROUP, most = item.tile.position + (group * 64 + 63) / GROUP;
    return (j + 1) * TOKENS - 1 > least || (a.window > 0 && j * TOKENS <= most - a.window);
}

DEVICE void multiply(const PrefillArgs& a, Shared& shared) {
    // From one lane, so that the compiler knows it to be the same in all.
    int group = __shfl_sync(~0u, (int)threadIdx.x / 128, 0) - 1, warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    int first_row = group * 64 + warp * 16 + g, left = a.starts[blockIdx.x + 1] - a.starts[blockIdx.x];
    // Of `shared`, in a register: the compiler would compute it again for every use.
    u32 base = shared_address(&shared);
    asm volatile("" : "+r"(base));
#define AT(member) (base + (u32)((const u8*)&shared.member - (const u8*)&shared))
    u64 keys = matrix_descriptor(AT(k), 1024, 16), values = matrix_descriptor(AT(v), 1024, TILE_PANEL);
    Turn query, key, value;
    float acc[V_DIM / 2], s[64];
    u32 p[32], q[4 * K_STEPS] = {};
    RowState row;
    auto load_queries = [&] {
        barrier_wait(AT(q_full) + query.place * 8, query.parity);
        int at = group * 64 + warp * 16 + threadIdx.x % 16, half = threadIdx.x / 16 % 2;
#pragma unroll
        for (int k = 0; k < K_STEPS; ++k) {
            u32 r[4];
            load_matrices(r, AT(q) + query.place * Q_TILE + tile_at(at, 2 * k + half));
#pragma unroll
            for (int i = 0; i < 4; ++i) q[4 * k + i] = r[i];
        }
    };
    auto issue_next_scores = [&](bool more) {
        if (more) barrier_wait(AT(k_full) + key.place * 8, key.parity);
        issue_scores(s, q, advance(keys, key.place * K_TILE));
    };
    auto take_scores = [&] {
        pin(s);
        arrive_once_a_warp(AT(k_empty) + key.place * 8);
        key.next();
    };
    auto issue_next_values = [&](bool add, bool gives) {
        barrier_wait(AT(v_full) + value.place * 8, value.parity);
        issue_values(acc, p, advance(values, value.place * V_TILE), add, group, gives);
    };
    auto take_values = [&] {
        pin(acc);
        pin(p);
        arrive_once_a_warp(AT(v_empty) + value.place * 8);
        value.next();
    };

    // `behind`: weights of the tile before are being multiplied.
    auto weigh_scores = [&](const Item& item, int j, bool behind) {
        cap_and_mask(a, s, row, j * TOKENS, hides(a, item, group, j));
        return weigh(a, s, p, row, AT(weighed) + (threadIdx.x - 128) * 4, [&] {
            if (!behind) return;
            products_wait<0>();
            take_values();
        });
    };

    if (group == 1) give_turn(group);  // warpgroup 0 begins
    load_queries();
    issue_next_scores(true);
    while (true) {
        Item item = shared.items[query.place];
        arrive_once_a_warp(AT(q_empty) + query.place * 8);
        query.next();
        begin_item(item, row, first_row);
        int j = item.first;
        products_wait<0>();
        take_scores();
        weigh_scores(item, j, false);
        while (++j < item.last) {
            take_turn(group);
            issue_next_scores(true);
            issue_next_values(j - 1 > item.first, true);
            products_wait<1>();
            take_scores();
            if (weigh_scores(item, j, true)) rescale(acc, row);
        }
        // The first scores of the next item are under way while this one's rows are written. After the last item they are those of
        // whatever lies there, and nobody's: a branch around products would serialise all of them.
        bool more = --left > 0;
        take_turn(group);
        issue_next_values(j - 1 > item.first, false);
        if (more) load_queries();
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
