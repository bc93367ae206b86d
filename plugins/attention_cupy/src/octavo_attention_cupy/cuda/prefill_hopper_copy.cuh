// Paged prefill on Hopper: how K, V and queries come to shared memory.
//
// Items are tiles of new tokens times KV heads, longest first; all warpgroups of a block walk over the same ones. One warp copies K
// and V, three copy queries. Of an FP8 cache the bytes are copied beside, and a warpgroup of its own turns them into 16-bit
// tiles. Knows nothing of scores.
#pragma once
#include "layout.cuh"
#include "prefill_args.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 128, TOKENS = 128, STAGES = 2;
constexpr bool FP8 = KV_BYTES == 1;
constexpr int PANEL = 128;                      // bytes
constexpr int TILE_PANEL = TOKENS * PANEL;      // bytes of a panel of a tile, of queries as of K and V
constexpr int Q_TILE = ROWS * K_DIM * 2, K_TILE = TOKENS * K_DIM * 2, V_TILE = TOKENS * V_DIM * 2;
constexpr int Q_STAGES = FP8 ? 1 : 2;           // FP8 needs the room for its bytes
constexpr int RAW_K = FP8 ? TOKENS * K_DIM : 0, RAW_V = FP8 ? TOKENS * V_DIM : 0;
constexpr int LOADERS = 96, CONVERTERS = 128;   // threads that copy queries, and that convert FP8
constexpr int WARPS = 8;                        // that multiply
static_assert(K_DIM % 64 == 0 && V_DIM % 64 == 0 && ROWS == TOKENS, "rows of 16-bit values are whole panels");

struct Shared {
    u8 q[Q_STAGES][Q_TILE];
    u8 k[STAGES][K_TILE];
    u8 v[STAGES][V_TILE];
    u8 raw_k[STAGES][RAW_K + 16];
    u8 raw_v[STAGES][RAW_V + 16];
    u64 q_full[Q_STAGES], q_empty[Q_STAGES];
    u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u64 raw_k_full[STAGES], raw_k_empty[STAGES], raw_v_full[STAGES], raw_v_empty[STAGES];
};

// A place in a ring, and the parity with which its barriers are waited for.
template <int stages> struct Turn {
    int place = 0, parity = 0;
    DEVICE void next() {
        if (++place == stages) place = 0, parity ^= 1;
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

DEVICE void init_barriers(Shared& shared) {
    for (int i = 0; i < Q_STAGES; ++i) {
        barrier_init(shared_address(&shared.q_full[i]), LOADERS);
        barrier_init(shared_address(&shared.q_empty[i]), WARPS);
    }
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(shared_address(&shared.k_full[i]), FP8 ? CONVERTERS : 1);
        barrier_init(shared_address(&shared.v_full[i]), FP8 ? CONVERTERS : 1);
        barrier_init(shared_address(&shared.k_empty[i]), WARPS);
        barrier_init(shared_address(&shared.v_empty[i]), WARPS);
        barrier_init(shared_address(&shared.raw_k_full[i]), 1);
        barrier_init(shared_address(&shared.raw_v_full[i]), 1);
        barrier_init(shared_address(&shared.raw_k_empty[i]), CONVERTERS);
        barrier_init(shared_address(&shared.raw_v_empty[i]), CONVERTERS);
    }
    barrier_init_visible();
    fence_copy_engine();
}

// One lane's run of rows, panel by panel; `run` 0: nothing of the tile is this lane's.
template <typename Rows> DEVICE void copy_run(const PrefillArgs& a, u32 to, const u8* from, int first_row, int run, u32 barrier) {
    if (run == 0) return;
#pragma unroll
    for (int p = 0; p < Rows::PANELS; ++p)
        bulk_copy(to + (p * TOKENS + first_row) * Rows::PANEL, from + p * a.page * Rows::PANEL, run * Rows::PANEL, barrier);
}

// By one warp: all tiles of all items.
DEVICE void copy_keys_and_values(const PrefillArgs& a, Shared& shared) {
    u64 *k_full = FP8 ? shared.raw_k_full : shared.k_full, *k_empty = FP8 ? shared.raw_k_empty : shared.k_empty;
    u64 *v_full = FP8 ? shared.raw_v_full : shared.v_full, *v_empty = FP8 ? shared.raw_v_empty : shared.v_empty;
    int lane = threadIdx.x % 32, run = TOKENS;
    while (a.page % run) run /= 2;
    Item item;
    Turn<STAGES> turn;
    for (int index = blockIdx.x; item_at(a, index, item); index += gridDim.x) {
        int high = item.tile.position + item.tile.tokens;
        for (int j = item.first; j < item.last; ++j, turn.next()) {
            int token = j * TOKENS + lane * run, column = token / a.page, slot = token - column * a.page;
            bool held = lane * run < TOKENS && token < high && token + run > item.low;
            int id = held ? __ldg(a.table + item.tile.table_row * a.table_row + column) : -1;
            int mine = id >= 0 ? run : 0, tokens = __popc(__ballot_sync(~0u, id >= 0)) * run;
            const u8* from = a.cache + id * a.page_bytes;
            u32 full = shared_address(k_full + turn.place);
            barrier_wait(shared_address(k_empty + turn.place), turn.parity ^ 1);
            if (lane == 0) barrier_expect(full, tokens * KRows::BYTES);
            __syncwarp();
            u32 to = shared_address(FP8 ? shared.raw_k[turn.place] : shared.k[turn.place]);
            copy_run<KRows>(a, to, from + k_offset(a.page, item.head, slot), lane * run, mine, full);
            full = shared_address(v_full + turn.place);
            barrier_wait(shared_address(v_empty + turn.place), turn.parity ^ 1);
            if (lane == 0) barrier_expect(full, tokens * VRows::BYTES);
            __syncwarp();
            to = shared_address(FP8 ? shared.raw_v[turn.place] : shared.v[turn.place]);
            copy_run<VRows>(a, to, from + v_offset(a.page, item.head, slot), lane * run, mine, full);
        }
    }
}

// Where a chunk of a row of 16-bit values lies in a tile of whole panels, as wgmma's 128-byte swizzle has it.
DEVICE u32 wide_at(int row, int chunk) { return chunk / 8 * TILE_PANEL + row * PANEL + (chunk % 8 ^ row % 8) * 16; }

// By LOADERS threads: queries of every item as rows, token times query head of the group. Rows beyond the tile are zero.
DEVICE void copy_queries(const PrefillArgs& a, Shared& shared) {
    constexpr int CHUNKS = K_DIM / 8;
    Item item;
    Turn<Q_STAGES> turn;
    for (int index = blockIdx.x; item_at(a, index, item); index += gridDim.x, turn.next()) {
        barrier_wait(shared_address(&shared.q_empty[turn.place]), turn.parity ^ 1);
        u32 to = shared_address(shared.q[turn.place]);
        for (int i = threadIdx.x - 32; i < ROWS * CHUNKS; i += LOADERS) {
            int row = i / CHUNKS, chunk = i % CHUNKS, token = row / a.group, head = row - token * a.group;
            u32 place = to + wide_at(row, chunk);
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

// Two FP8 values to two of the product's 16-bit type, exactly.
DEVICE u32 widen(u32 x) {
    u32 y = fp8_to_f16<E5M2>(x);
    return BF16 ? pack_bf16(f16_to_float(y), f16_to_float(y >> 16)) : y;
}

// One thread a token: its row of FP8 values to a row of 16-bit values.
template <typename Rows> DEVICE void convert_tile(u32 from, u32 to) {
    int row = threadIdx.x % CONVERTERS;
#pragma unroll 4
    for (int c = 0; c < Rows::CHUNKS; ++c) {
        u32 x[4];
        load_16_bytes(x, from + Rows::at(TOKENS, row, c));
        store_16_bytes(to + wide_at(row, 2 * c), widen(x[0]), widen(x[0] >> 16), widen(x[1]), widen(x[1] >> 16));
        store_16_bytes(to + wide_at(row, 2 * c + 1), widen(x[2]), widen(x[2] >> 16), widen(x[3]), widen(x[3] >> 16));
    }
    fence_copy_engine();
}

// By CONVERTERS threads: all tiles of all items, of an FP8 cache.
DEVICE void convert_keys_and_values(const PrefillArgs& a, Shared& shared) {
    Item item;
    Turn<STAGES> turn;
    for (int index = blockIdx.x; item_at(a, index, item); index += gridDim.x)
        for (int j = item.first; j < item.last; ++j, turn.next()) {
            int place = turn.place;
            barrier_wait(shared_address(&shared.raw_k_full[place]), turn.parity);
            barrier_wait(shared_address(&shared.k_empty[place]), turn.parity ^ 1);
            convert_tile<KRows>(shared_address(shared.raw_k[place]), shared_address(shared.k[place]));
            barrier_arrive(shared_address(&shared.raw_k_empty[place]));
            barrier_arrive(shared_address(&shared.k_full[place]));
            barrier_wait(shared_address(&shared.raw_v_full[place]), turn.parity);
            barrier_wait(shared_address(&shared.v_empty[place]), turn.parity ^ 1);
            convert_tile<VRows>(shared_address(shared.raw_v[place]), shared_address(shared.v[place]));
            barrier_arrive(shared_address(&shared.raw_v_empty[place]));
            barrier_arrive(shared_address(&shared.v_full[place]));
        }
}
