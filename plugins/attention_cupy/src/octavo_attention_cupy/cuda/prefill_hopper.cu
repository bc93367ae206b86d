// Paged prefill on Hopper: 16-bit caches whose rows are one or two panels of 128 bytes (dim 64 or 128).
//
// A block is three warpgroups. The first copies: one warp K and V, tile after tile, through bulk copies; the others queries, one
// item ahead. The other two multiply, 64 matrix rows each: the scores of the next tile are under way while the softmax of this
// one is computed, and products with V take their weights from registers. Blocks stay and walk over a list of items (a tile of
// new tokens times a KV head), longest first.
//
// Compiled for: BF16, KV_BYTES (2), E5M2 (0), K_DIM, V_DIM, SOFTCAP.
#include "layout.cuh"
#include "prefill_args.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 128, TOKENS = 128, STAGES = 2;
constexpr int K_STEPS = K_DIM / 16;
constexpr int PANEL = 128;                    // bytes
constexpr int K_PANEL = TOKENS * PANEL;       // bytes of a panel of a tile; of queries too, which have as many rows
constexpr int Q_BYTES = ROWS * K_DIM * 2;
constexpr int K_BYTES = TOKENS * KRows::BYTES, V_BYTES = TOKENS * VRows::BYTES;
constexpr int LOADERS = 96;                   // threads that copy queries
constexpr int WARPS = 8;                      // that multiply
static_assert(KRows::PANEL == PANEL && VRows::PANEL == PANEL && ROWS == TOKENS, "rows are whole panels of 128 bytes");

struct Shared {
    u8 q[2][Q_BYTES];
    u8 k[STAGES][K_BYTES];
    u8 v[STAGES][V_BYTES];
    u64 q_full[2], q_empty[2], k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

// A place in a ring of two, and the parity with which its barriers are waited for.
struct Turn {
    int place = 0, parity = 0;
    DEVICE void next() {
        place ^= 1;
        if (place == 0) parity ^= 1;
    }
};

struct Item {
    PrefillTile tile;
    int head;         // KV head
    int low;          // first token that any row sees
    int first, last;  // KV tiles
};

DEVICE bool item_at(const PrefillArgs& a, int index, Item& item) {
    int tile = index / a.kv_heads;
    if (tile >= a.count) return false;
    item.tile = a.tiles[tile];
    item.head = index - tile * a.kv_heads;
    item.low = a.window > 0 ? max(item.tile.position - a.window + 1, 0) : 0;
    item.first = item.low / TOKENS;
    item.last = ceil_div(item.tile.position + item.tile.tokens, TOKENS);
    return true;
}

// ---------------------------------------------------------------- copying

DEVICE void copy_keys_and_values(const PrefillArgs& a, Shared& shared) {
    int lane = threadIdx.x % 32, run = TOKENS;
    while (a.page % run) run /= 2;
    Item item;
    Turn turn;
    for (int index = blockIdx.x; item_at(a, index, item); index += gridDim.x) {
        int high = item.tile.position + item.tile.tokens;
        for (int j = item.first; j < item.last; ++j, turn.next()) {
            int token = j * TOKENS + lane * run, column = token / a.page, slot = token - column * a.page;
            bool held = lane * run < TOKENS && token < high && token + run > item.low;
            int id = held ? __ldg(a.table + item.tile.table_row * a.table_row + column) : -1;
            held = id >= 0;
            int runs = __popc(__ballot_sync(~0u, held));
            const u8* from = a.cache + id * a.page_bytes;
            const u8* k = from + k_offset(a.page, item.head, slot);
            const u8* v = from + v_offset(a.page, item.head, slot);
            u32 to = lane * run * PANEL, full = shared_address(&shared.k_full[turn.place]);
            barrier_wait(shared_address(&shared.k_empty[turn.place]), turn.parity ^ 1);
            if (lane == 0) barrier_expect(full, runs * run * KRows::BYTES);
            __syncwarp();
            if (held)
                for (int p = 0; p < KRows::PANELS; ++p)
                    bulk_copy(shared_address(shared.k[turn.place]) + p * K_PANEL + to, k + p * a.page * PANEL, run * PANEL, full);
            full = shared_address(&shared.v_full[turn.place]);
            barrier_wait(shared_address(&shared.v_empty[turn.place]), turn.parity ^ 1);
            if (lane == 0) barrier_expect(full, runs * run * VRows::BYTES);
            __syncwarp();
            if (held)
                for (int p = 0; p < VRows::PANELS; ++p)
                    bulk_copy(shared_address(shared.v[turn.place]) + p * K_PANEL + to, v + p * a.page * PANEL, run * PANEL, full);
        }
    }
}

// Queries of an item as rows: token times query head of the group. Rows beyond the tile are zero.
DEVICE void copy_queries(const PrefillArgs& a, Shared& shared) {
    constexpr int CHUNKS = K_DIM / 8;
    Item item;
    Turn turn;
    for (int index = blockIdx.x; item_at(a, index, item); index += gridDim.x, turn.next()) {
        barrier_wait(shared_address(&shared.q_empty[turn.place]), turn.parity ^ 1);
        u32 to = shared_address(shared.q[turn.place]);
        for (int i = threadIdx.x - 32; i < ROWS * CHUNKS; i += LOADERS) {
            int row = i / CHUNKS, chunk = i % CHUNKS, token = row / a.group, head = row - token * a.group;
            u32 place = to + KRows::at(ROWS, row, chunk);
            if (token < item.tile.tokens)
                copy_16_bytes(place, a.q + (item.tile.token + token) * a.q_token + (item.head * a.group + head) * a.q_head + chunk * 8);
            else
                zero_16_bytes(place);
        }
        copies_commit();
        copies_wait<0>();
        fence_copy_engine();
        barrier_arrive(shared_address(&shared.q_full[turn.place]));
    }
}

// ---------------------------------------------------------------- multiplying

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
        u32 at = k / 4 * K_PANEL + k % 4 * 32;
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
                                matrix_descriptor(values + k * 16 * PANEL, 1024, K_PANEL));
    products_commit();
}

// Scores to weights, in place, and the factors by which earlier sums shrink.
DEVICE void softmax(const PrefillArgs& a, float (&s)[64], RowState& row, int token, bool masked) {
    int t = threadIdx.x % 4;
    float scale = SOFTCAP ? 1.0f : a.scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float top = row.top[i];
#pragma unroll
        for (int n = 0; n < 16; ++n)
#pragma unroll
            for (int c = 0; c < 2; ++c) {
                float x = s[4 * n + 2 * i + c];
                if (SOFTCAP) x = a.softcap * tanh_exact(x * a.scale);
                if (masked) {
                    int at = token + n * 8 + 2 * t + c;
                    if (at > row.position[i] || (a.window > 0 && at <= row.position[i] - a.window)) x = NEGATIVE_INFINITY;
                }
                s[4 * n + 2 * i + c] = x;
                top = fmaxf(top, x);
            }
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

// Rows of V that are not this row's may be NaN, which a weight of zero would not silence. Both warpgroups clear them together.
DEVICE void clear_values(Shared& shared, int place, int token, int low, int end) {
    for (int i = threadIdx.x - 128; i < TOKENS * VRows::CHUNKS; i += 256) {
        int row = i / VRows::CHUNKS, at = token + row;
        if (at < low || at >= end) zero_16_bytes(shared_address(shared.v[place]) + VRows::at(TOKENS, row, i % VRows::CHUNKS));
    }
    fence_copy_engine();
    asm volatile("bar.sync 1, 256;" ::: "memory");
}

DEVICE void wait_for_values(Shared& shared, const Item& item, const Turn& value, int token) {
    barrier_wait(shared_address(&shared.v_full[value.place]), value.parity);
    if (token < item.low || token + TOKENS > item.tile.end) clear_values(shared, value.place, token, item.low, item.tile.end);
}

DEVICE void write_rows(const PrefillArgs& a, const Item& item, RowState& row, const float (&acc)[V_DIM / 2], int first_row) {
    int t = threadIdx.x % 4;
    float scale = SOFTCAP ? 1.0f : a.scale;
#pragma unroll
    for (int i = 0; i < 2; ++i) {
        float sum = row.sum[i];
        sum += __shfl_xor_sync(~0u, sum, 1);
        sum += __shfl_xor_sync(~0u, sum, 2);
        int r = first_row + 8 * i, token = r / a.group, head = item.head * a.group + r - token * a.group;
        if (token >= item.tile.tokens) continue;
        float base = row.top[i] == NEGATIVE_INFINITY ? 0.0f : row.top[i] * scale, keep = 1.0f;
        if (a.sinks) {
            float sink = a.sinks[head] * LOG2E, higher = fmaxf(base, sink);
            keep = exp2_fast(base - higher);
            sum = sum * keep + exp2_fast(sink - higher);
            base = higher;
        }
        float factor = keep * a.v_scale / (sum == 0.0f ? 1.0f : sum);
        u16* out = a.out + (item.tile.token + token) * a.out_token + head * a.out_head;
#pragma unroll
        for (int v = 0; v < V_DIM / 8; ++v)
            *(u32*)(out + v * 8 + 2 * t) = pack<BF16>(acc[4 * v + 2 * i] * factor, acc[4 * v + 2 * i + 1] * factor);
        if (t == 0 && a.lse) a.lse[(item.tile.token + token) * a.lse_token + head] = (base + log2f(sum)) * LN2;
    }
}

DEVICE void arrive_once_a_warp(u64& barrier) {
    __syncwarp();
    if (threadIdx.x % 32 == 0) barrier_arrive(shared_address(&barrier));
}

DEVICE void multiply(const PrefillArgs& a, Shared& shared) {
    int group = threadIdx.x / 128 - 1, warp = threadIdx.x / 32 % 4, g = threadIdx.x % 32 / 4;
    int first_row = group * 64 + warp * 16 + g;
    Item item;
    Turn query, key, value;
    float acc[V_DIM / 2], s[64];
    u32 p[32];
    for (int index = blockIdx.x; item_at(a, index, item); index += gridDim.x, query.next()) {
        RowState row;
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            row.position[i] = item.tile.position + (first_row + 8 * i) / a.group;
            row.top[i] = NEGATIVE_INFINITY, row.sum[i] = 0;
        }
#pragma unroll
        for (int i = 0; i < V_DIM / 2; ++i) acc[i] = 0;
        int least = item.tile.position + group * 64 / a.group, most = item.tile.position + (group * 64 + 63) / a.group;
        auto masked = [&](int token) { return token + TOKENS - 1 > least || (a.window > 0 && token <= most - a.window); };
        u32 queries = shared_address(shared.q[query.place]) + group * 64 * PANEL;

        barrier_wait(shared_address(&shared.q_full[query.place]), query.parity);
        barrier_wait(shared_address(&shared.k_full[key.place]), key.parity);
        issue_scores(s, queries, shared_address(shared.k[key.place]));
        products_wait<0>();
        pin(s);
        arrive_once_a_warp(shared.k_empty[key.place]);
        key.next();
        softmax(a, s, row, item.first * TOKENS, masked(item.first * TOKENS));
        pack_weights(p, s);
        int j = item.first;
        for (; j + 1 < item.last; ++j, value.next()) {
            barrier_wait(shared_address(&shared.k_full[key.place]), key.parity);
            issue_scores(s, queries, shared_address(shared.k[key.place]));
            wait_for_values(shared, item, value, j * TOKENS);
            issue_values(acc, p, shared_address(shared.v[value.place]));
            products_wait<1>();
            pin(s);
            arrive_once_a_warp(shared.k_empty[key.place]);
            key.next();
            softmax(a, s, row, (j + 1) * TOKENS, masked((j + 1) * TOKENS));
            pin(s);
            products_wait<0>();
            pin(acc);
            pin(p);
            arrive_once_a_warp(shared.v_empty[value.place]);
#pragma unroll
            for (int v = 0; v < V_DIM / 8; ++v)
#pragma unroll
                for (int i = 0; i < 2; ++i) acc[4 * v + 2 * i] *= row.keep[i], acc[4 * v + 2 * i + 1] *= row.keep[i];
            pack_weights(p, s);
        }
        wait_for_values(shared, item, value, j * TOKENS);
        issue_values(acc, p, shared_address(shared.v[value.place]));
        products_wait<0>();
        pin(acc);
        arrive_once_a_warp(shared.v_empty[value.place]);
        value.next();
        arrive_once_a_warp(shared.q_empty[query.place]);
        write_rows(a, item, row, acc, first_row);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1) prefill_hopper(const __grid_constant__ PrefillArgs a) {
    extern __shared__ __align__(1024) u8 memory[];
    Shared& shared = *(Shared*)memory;
    if (threadIdx.x == 0) {
        for (int i = 0; i < 2; ++i) {
            barrier_init(shared_address(&shared.q_full[i]), LOADERS);
            barrier_init(shared_address(&shared.q_empty[i]), WARPS);
        }
        for (int i = 0; i < STAGES; ++i) {
            barrier_init(shared_address(&shared.k_full[i]), 1);
            barrier_init(shared_address(&shared.v_full[i]), 1);
            barrier_init(shared_address(&shared.k_empty[i]), WARPS);
            barrier_init(shared_address(&shared.v_empty[i]), WARPS);
        }
        barrier_init_visible();
        fence_copy_engine();
    }
    __syncthreads();
    wait_for_predecessor();
    release_successor();
    if (threadIdx.x < 128) {
        give_registers<72>();
        if (threadIdx.x < 32)
            copy_keys_and_values(a, shared);
        else
            copy_queries(a, shared);
    } else {
        take_registers<216>();
        multiply(a, shared);
    }
}
