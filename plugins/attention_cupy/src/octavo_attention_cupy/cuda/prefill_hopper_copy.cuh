// Paged prefill on Hopper: how K, V and queries come to shared memory.
//
// An item is a tile of new tokens and a KV head. All warpgroups of a block walk over the same items: one warp copies K and V, three
// copy queries. Knows nothing of scores.
#pragma once
#include "layout.cuh"
#include "prefill_args.cuh"
#include "wgmma.cuh"

constexpr int ROWS = 128, TOKENS = 128, STAGES = 2;  // of a tile: matrix rows, tokens of K and V; stages of every ring
constexpr int PANEL = 128;                           // bytes
constexpr int TILE_PANEL = TOKENS * PANEL;           // bytes of a panel of a tile, of queries as of K and V
constexpr int Q_TILE = ROWS * K_DIM * 2, K_TILE = TOKENS * K_DIM * 2, V_TILE = TOKENS * V_DIM * 2;
constexpr int LOADERS = 96;                          // threads that copy queries
constexpr int WARPS = 8;                             // that multiply
static_assert(KV_BYTES == 2, "FP8 pages are widened first: see widen.cu");
static_assert(K_DIM % 64 == 0 && V_DIM % 64 == 0 && ROWS == TOKENS, "rows are whole panels");

struct Item {
    PrefillTile tile;
    int low;          // first token that any row sees
    int first, last;  // KV tiles
};

struct Shared {
    u8 q[STAGES][Q_TILE];
    u8 k[STAGES][K_TILE];
    u8 v[STAGES][V_TILE];
    float weighed[256];  // see `multiply`
    Item items[STAGES];
    u64 q_full[STAGES], q_empty[STAGES];
    u64 k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

static_assert(sizeof(Shared) <= SHARED_BYTES, "tuning.py asks for less shared memory than there is to hold");

// A place in a ring, and the parity with which its barriers are waited for.
struct Turn {
    int place = 0, parity = 0;
    DEVICE void next() {
        if (++place == STAGES) place = 0, parity ^= 1;
    }
};

DEVICE Item item_at(const PrefillArgs& a, int index) {
    Item item;
    item.tile = a.tiles[index];
    item.low = a.window > 0 ? max(item.tile.position - a.window + 1, 0) : 0;
    item.first = item.low / TOKENS;
    item.last = ceil_div(item.tile.position + item.tile.tokens, TOKENS);
    return item;
}

DEVICE void init_barriers(Shared& shared) {
    for (int i = 0; i < STAGES; ++i) {
        barrier_init(shared_address(&shared.q_full[i]), LOADERS);
        barrier_init(shared_address(&shared.k_full[i]), 1);
        barrier_init(shared_address(&shared.v_full[i]), 1);
        barrier_init(shared_address(&shared.q_empty[i]), WARPS);
        barrier_init(shared_address(&shared.k_empty[i]), WARPS);
        barrier_init(shared_address(&shared.v_empty[i]), WARPS);
    }
    barrier_init_visible();
    fence_copy_engine();
}

// Where a chunk of a row lies in a tile of whole panels, as wgmma's 128-byte swizzle has it.
DEVICE u32 tile_at(int row, int chunk) { return chunk / 8 * TILE_PANEL + row * PANEL + (chunk % 8 ^ row % 8) * 16; }

// The tiles of K and V of all items of a block, in order; lane l looks up the page of the tile's run l. A run is the part of a tile
// that lies in one page for sure.
struct Tiles {
    Item item;
    int index, end, j, run;
    // Of the tile that was looked up last: rows [first, stop) are copied, which is all that the row has, even past what this item
    // sees; this lane's page, and its own of these rows.
    int first, stop;
    int id, slot, begin, rows;

    DEVICE void start(const PrefillArgs& a) {
        run = TOKENS;
        while (a.page % run) run /= 2;
        index = a.starts[blockIdx.x], end = a.starts[blockIdx.x + 1];
        item = item_at(a, index);
        j = item.first;
    }
    // Look up the next tile; false at the end. What it loads is not waited for here.
    DEVICE bool look_up(const PrefillArgs& a) {
        if (j == item.last) {
            if (++index == end) return false;
            item = item_at(a, index);
            j = item.first;
        }
        int token = j * TOKENS, at = threadIdx.x % 32 * run;
        first = max(item.low - token, 0), stop = min(item.tile.end - token, TOKENS);
        begin = max(at, first), rows = min(at + run, stop) - begin;
        int column = (token + begin) / a.page;
        slot = token + begin - column * a.page;
        id = rows > 0 ? a.table[item.tile.table_row * a.table_row + column] : -1;
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
template <typename Rows> DEVICE void copy_tile(const PrefillArgs& a, const Run& run, u32 to, u32 barrier) {
    u32 bytes = __reduce_add_sync(~0u, run.rows) * Rows::BYTES;
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
        if (row < first || row >= stop) zero_16_bytes(to + tile_at(row, i % (V_DIM / 8)));
    }
    fence_copy_engine();
    __syncwarp();
}

// By one warp, in the order in which they are multiplied: K of a tile before V of the tile in front of it.
DEVICE void copy_keys_and_values(const PrefillArgs& a, Shared& shared) {
    Tiles tiles;
    tiles.start(a);
    Turn key, value;
    bool more = tiles.look_up(a), behind = false;
    Run v = {};  // of the tile whose K was copied last
    int first = 0, stop = 0;
    while (more || behind) {
        Run next = {};
        int next_first = tiles.first, next_stop = tiles.stop;
        bool copied = more;
        if (more) {
            const u8* page = a.cache + tiles.id * a.page_bytes;
            next = {page + v_offset(a.page, tiles.item.tile.head, tiles.slot), tiles.begin, tiles.id < 0 ? 0 : tiles.rows};
            Run k = {page + k_offset(a.page, tiles.item.tile.head, tiles.slot), next.begin, next.rows};
            barrier_wait(shared_address(&shared.k_empty[key.place]), key.parity ^ 1);
            copy_tile<KRows>(a, k, shared_address(shared.k[key.place]), shared_address(&shared.k_full[key.place]));
            key.next();
        }
        more = more && tiles.look_up(a);
        if (behind) {
            u32 to = shared_address(shared.v[value.place]);
            barrier_wait(shared_address(&shared.v_empty[value.place]), value.parity ^ 1);
            clear_rows(to, first, stop);
            copy_tile<VRows>(a, v, to, shared_address(&shared.v_full[value.place]));
            value.next();
        }
        v = next, first = next_first, stop = next_stop, behind = copied;
    }
}

// By LOADERS threads: every item, and its queries as rows, token times query head of the group. Rows beyond the tile are zero.
DEVICE void copy_queries(const PrefillArgs& a, Shared& shared) {
    constexpr int CHUNKS = K_DIM / 8;
    Turn turn;
    for (int index = a.starts[blockIdx.x], end = a.starts[blockIdx.x + 1]; index < end; ++index, turn.next()) {
        Item item = item_at(a, index);
        barrier_wait(shared_address(&shared.q_empty[turn.place]), turn.parity ^ 1);
        u32 to = shared_address(shared.q[turn.place]);
        for (int i = threadIdx.x - 32; i < ROWS * CHUNKS; i += LOADERS) {
            int row = i / CHUNKS, chunk = i % CHUNKS, token = row / GROUP, head = row - token * GROUP;
            u32 place = to + tile_at(row, chunk);
            if (token < item.tile.tokens)
                copy_16_bytes(place, a.q + (item.tile.token + token) * a.q_token + (item.tile.head * GROUP + head) * a.q_head + chunk * 8);
            else
                zero_16_bytes(place);
        }
        if (threadIdx.x == 32) shared.items[turn.place] = item;
        copies_commit();
        copies_wait<0>();
        fence_copy_engine();
        barrier_arrive(shared_address(&shared.q_full[turn.place]));
    }
}
