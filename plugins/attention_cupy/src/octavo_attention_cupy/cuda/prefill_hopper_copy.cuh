// Paged prefill on Hopper: how K, V and queries come to shared memory.
//
// Items are KV heads times tiles of new tokens, a head's longest first, so that K and V of few heads are in use at a time and the second-
// level cache holds them; all warpgroups of a block walk over the same items. One warp copies K
// and V, three copy queries. Of an FP8 cache the bytes are copied beside, and a warpgroup of its own turns them into 16-bit
// tiles. Knows nothing of scores.
#pragma once
#include "layout.cuh"
#include "prefill_args.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 128, TOKENS = 128, STAGES = 2;
constexpr bool FP8 = KV_BYTES == 1;
constexpr bool BF16_PRODUCT = BF16 && !FP8;     // FP8 is multiplied as float16: to widen it so is one instruction for two values
constexpr bool SCALED = BF16 && FP8;            // bfloat16 queries as float16: each row divided by its largest value
constexpr int PANEL = 128;                      // bytes
constexpr int TILE_PANEL = TOKENS * PANEL;      // bytes of a panel of a tile, of queries as of K and V
constexpr int Q_TILE = ROWS * K_DIM * 2, K_TILE = TOKENS * K_DIM * 2, V_TILE = TOKENS * V_DIM * 2;
constexpr int Q_STAGES = FP8 ? 1 : 2;           // FP8 needs the room for its bytes
constexpr int RAW_K = FP8 ? TOKENS * K_DIM : 0, RAW_V = FP8 ? TOKENS * V_DIM : 0;
constexpr int LOADERS = 96, CONVERTERS = 128;   // threads that copy queries, and that convert FP8
constexpr int WARPS = 8;                        // that multiply
static_assert(K_DIM % 64 == 0 && V_DIM % 64 == 0 && ROWS == TOKENS, "rows of 16-bit values are whole panels");

struct Item {
    PrefillTile tile;
    int head;         // KV head
    int low;          // first token that any row sees
    int first, last;  // KV tiles
};

struct Shared {
    u8 q[Q_STAGES][Q_TILE];
    u8 k[STAGES][K_TILE];
    u8 v[STAGES][V_TILE];
    u8 raw_k[STAGES][RAW_K + 16];
    u8 raw_v[STAGES][RAW_V + 16];
    float weighed[256];  // see `multiply`
    Item items[Q_STAGES];
    float scale[Q_STAGES][SCALED ? ROWS : 1];  // of the scores of a row of queries
    u64 q_full[Q_STAGES], q_empty[Q_STAGES];
    u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    u64 raw_k_full[STAGES], raw_k_empty[STAGES], raw_v_full[STAGES], raw_v_empty[STAGES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "tuning.py asks for less shared memory than there is to hold");

// A place in a ring, and the parity with which its barriers are waited for.
template <int stages> struct Turn {
    int place = 0, parity = 0;
    DEVICE void next() {
        if (++place == stages) place = 0, parity ^= 1;
    }
};

DEVICE bool item_at(const PrefillArgs& a, int index, Item& item) {
    item.head = index / a.count;
    if (item.head >= a.kv_heads) return false;
    item.tile = a.tiles[index - item.head * a.count];
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

// Where a chunk of a row of 16-bit values lies in a tile of whole panels, as wgmma's 128-byte swizzle has it.
DEVICE u32 wide_at(int row, int chunk) { return chunk / 8 * TILE_PANEL + row * PANEL + (chunk % 8 ^ row % 8) * 16; }

// The tiles of K and V of all items of a block, in order; lane l looks up the page of the tile's run l. A run is the part of a tile
// that lies in one page for sure.
struct Tiles {
    Item item;
    int index, j, run;
    // Of the tile that was looked up last: rows [first, stop) are copied, which is all that the row has, even past what this item
    // sees; this lane's page, and its own of these rows.
    int first, stop;
    int id, head, slot, begin, rows;

    DEVICE void start(const PrefillArgs& a) {
        run = TOKENS;
        while (a.page % run) run /= 2;
        index = blockIdx.x;
        item.last = 0;
        if (item_at(a, index, item)) j = item.first;
    }
    // Look up the next tile; false at the end. What it loads is not waited for here.
    DEVICE bool look_up(const PrefillArgs& a) {
        while (true) {
            if (item.last == 0) return false;
            if (j < item.last) break;
            index += gridDim.x;
            item.last = 0;
            if (item_at(a, index, item)) j = item.first;
        }
        int token = j * TOKENS, at = threadIdx.x % 32 * run;
        first = max(item.low - token, 0), stop = min(item.tile.end - token, TOKENS);
        begin = max(at, first), rows = min(at + run, stop) - begin;
        int column = (token + begin) / a.page;
        slot = token + begin - column * a.page;
        head = item.head;
        id = rows > 0 ? __ldg(a.table + item.tile.table_row * a.table_row + column) : -1;
        ++j;
        return true;
    }
};

// One lane's copy of K or V of a tile: `rows` rows from `from` on, to row `begin` of the tile.
struct Run {
    const u8* from;
    int begin, rows;
};

// One of K and V of a looked-up tile, to a place of its ring.
template <typename Rows> DEVICE void copy_tile(const PrefillArgs& a, const Run& run, u32 to, u64* full) {
    u32 barrier = shared_address(full), bytes = __reduce_add_sync(~0u, run.rows) * Rows::BYTES;
    if (threadIdx.x % 32 == 0) barrier_expect(barrier, bytes);
    __syncwarp();
    if (run.rows == 0) return;
#pragma unroll
    for (int p = 0; p < Rows::PANELS; ++p)
        bulk_copy(to + (p * TOKENS + run.begin) * Rows::PANEL, run.from + p * a.page * Rows::PANEL, run.rows * Rows::PANEL, barrier);
}

// Rows of V that are not copied must be zero: a weight of zero would not silence a NaN that was there. (Their scores are masked,
// so rows of K need not be.) By the warp that copies the others: no row is written twice.
DEVICE void clear_rows(u32 to, int first, int stop) {
    if (first == 0 && stop == TOKENS) return;
#pragma unroll 1
    for (int i = threadIdx.x % 32; i < TOKENS * V_DIM / 8; i += 32) {
        int row = i / (V_DIM / 8);
        if (row < first || row >= stop) zero_16_bytes(to + wide_at(row, i % (V_DIM / 8)));
    }
    fence_copy_engine();
    __syncwarp();
}

// By one warp, in the order in which they are multiplied: K of a tile before V of the tile in front of it.
DEVICE void copy_keys_and_values(const PrefillArgs& a, Shared& shared) {
    u64 *k_full = FP8 ? shared.raw_k_full : shared.k_full, *k_empty = FP8 ? shared.raw_k_empty : shared.k_empty;
    u64 *v_full = FP8 ? shared.raw_v_full : shared.v_full, *v_empty = FP8 ? shared.raw_v_empty : shared.v_empty;
    Tiles tiles;
    tiles.start(a);
    Turn<STAGES> key, value;
    bool more = tiles.look_up(a), behind = false;
    Run v = {};  // of the tile whose K was copied last
    int first = 0, stop = 0;
    while (more || behind) {
        Run next = {};
        int next_first = tiles.first, next_stop = tiles.stop;
        bool copied = more;
        if (more) {
            const u8* page = a.cache + tiles.id * a.page_bytes;
            next = {page + v_offset(a.page, tiles.head, tiles.slot), tiles.begin, tiles.id < 0 ? 0 : tiles.rows};
            Run k = {page + k_offset(a.page, tiles.head, tiles.slot), next.begin, next.rows};
            barrier_wait(shared_address(k_empty + key.place), key.parity ^ 1);
            copy_tile<KRows>(a, k, shared_address(FP8 ? shared.raw_k[key.place] : shared.k[key.place]), k_full + key.place);
            key.next();
        }
        more = more && tiles.look_up(a);
        if (behind) {
            u32 to = shared_address(FP8 ? shared.raw_v[value.place] : shared.v[value.place]);
            barrier_wait(shared_address(v_empty + value.place), value.parity ^ 1);
            if (!FP8) clear_rows(to, first, stop);
            copy_tile<VRows>(a, v, to, v_full + value.place);
            value.next();
        }
        v = next, first = next_first, stop = next_stop, behind = copied;
    }
}

// Eight bfloat16 values of a row of queries to float16, in place, by one of the lanes that have the row, and what the row's scores are
// then multiplied by: the row is divided by its largest value, so that it cannot overflow.
DEVICE void scale_octet(u32 place, float score_scale, float& scale) {
    u32 x[4];
    load_16_bytes(x, place);
    float size = 0;
#pragma unroll
    for (int i = 0; i < 4; ++i) size = fmaxf(size, fmaxf(fabsf(to_float<true>(x[i])), fabsf(to_float<true>(x[i] >> 16))));
#pragma unroll
    for (int step = 1; step < K_DIM / 8; step *= 2) size = fmaxf(size, __shfl_xor_sync(~0u, size, step));
    size = fmaxf(size, 1e-37f);  // a row of zeros, or of values whose inverse is infinite
    float inverse = 1.0f / size;
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = pack_f16(to_float<true>(x[i]) * inverse, to_float<true>(x[i] >> 16) * inverse);
    store_16_bytes(place, x[0], x[1], x[2], x[3]);
    if (threadIdx.x % (K_DIM / 8) == 0) scale = score_scale * size;
}

// By LOADERS threads: every item, and its queries as rows, token times query head of the group. Rows beyond the tile are zero.
DEVICE void copy_queries(const PrefillArgs& a, Shared& shared) {
    constexpr int CHUNKS = K_DIM / 8;
    Item item;
    Turn<Q_STAGES> turn;
    for (int index = blockIdx.x; item_at(a, index, item); index += gridDim.x, turn.next()) {
        barrier_wait(shared_address(&shared.q_empty[turn.place]), turn.parity ^ 1);
        u32 to = shared_address(shared.q[turn.place]);
        for (int i = threadIdx.x - 32; i < ROWS * CHUNKS; i += LOADERS) {
            int row = i / CHUNKS, chunk = i % CHUNKS, token = row / GROUP, head = row - token * GROUP;
            u32 place = to + wide_at(row, chunk);
            if (token < item.tile.tokens)
                copy_16_bytes(place, a.q + (item.tile.token + token) * a.q_token + (item.head * GROUP + head) * a.q_head + chunk * 8);
            else
                zero_16_bytes(place);
        }
        if (threadIdx.x == 32) shared.items[turn.place] = item;
        copies_commit();
        copies_wait<0>();
        if (SCALED)
            for (int i = threadIdx.x - 32; i < ROWS * CHUNKS; i += LOADERS)  // its own copies: whole warps, in each of them whole rows
                scale_octet(to + wide_at(i / CHUNKS, i % CHUNKS), a.scale, shared.scale[turn.place][i / CHUNKS]);
        fence_copy_engine();
        barrier_arrive(shared_address(&shared.q_full[turn.place]));
    }
}

// One thread a token: its row of FP8 values to a row of 16-bit values, or of zeros if it is not `held`.
template <typename Rows> DEVICE void convert_tile(u32 from, u32 to, bool held) {
    int row = threadIdx.x % CONVERTERS;
    if (!held)
        for (int c = 0; c < 2 * Rows::CHUNKS; ++c) zero_16_bytes(to + wide_at(row, c));
    else
#pragma unroll 2
        for (int first = 0; first < Rows::CHUNKS; first += 2) {
            u32 x[2][4];  // two loads before the first store: the compiler keeps their order
#pragma unroll
            for (int c = 0; c < 2; ++c) load_16_bytes(x[c], from + Rows::at(TOKENS, row, first + c));
#pragma unroll
            for (int c = 0; c < 4; ++c) {
                const u32 *y = x[c / 2] + c % 2 * 2;
                store_16_bytes(to + wide_at(row, 2 * first + c), fp8_to_f16<E5M2>(y[0]), fp8_to_f16<E5M2>(y[0] >> 16), fp8_to_f16<E5M2>(y[1]),
                               fp8_to_f16<E5M2>(y[1] >> 16));
            }
        }
    fence_copy_engine();
}

// By CONVERTERS threads: all tiles of all items, of an FP8 cache. Rows that are not this row's may be NaN: of K their scores are
// masked, of V they become zeros, since a weight of zero would not silence them.
DEVICE void convert_keys_and_values(const PrefillArgs& a, Shared& shared) {
    Item item;
    Turn<STAGES> turn;
    for (int index = blockIdx.x; item_at(a, index, item); index += gridDim.x)
        for (int j = item.first; j < item.last; ++j, turn.next()) {
            int place = turn.place, token = j * TOKENS + threadIdx.x % CONVERTERS;
            barrier_wait(shared_address(&shared.raw_k_full[place]), turn.parity);
            barrier_wait(shared_address(&shared.k_empty[place]), turn.parity ^ 1);
            convert_tile<KRows>(shared_address(shared.raw_k[place]), shared_address(shared.k[place]), true);
            barrier_arrive(shared_address(&shared.raw_k_empty[place]));
            barrier_arrive(shared_address(&shared.k_full[place]));
            barrier_wait(shared_address(&shared.raw_v_full[place]), turn.parity);
            barrier_wait(shared_address(&shared.v_empty[place]), turn.parity ^ 1);
            bool held = token >= item.low && token < item.tile.end;
            convert_tile<VRows>(shared_address(shared.raw_v[place]), shared_address(shared.v[place]), held);
            barrier_arrive(shared_address(&shared.raw_v_empty[place]));
            barrier_arrive(shared_address(&shared.v_full[place]));
        }
}
