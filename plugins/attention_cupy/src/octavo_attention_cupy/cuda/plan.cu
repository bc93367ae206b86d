// The work map of a decode step: one block, once a step, for all layers of a kind. See work.cuh.
//
// Reads lengths through pointers and writes a map of fixed size, so a captured graph serves any lengths.
#include "ptx.cuh"
#include "work.cuh"

struct PlanArgs {
    const int* query_start;  // [rows + 1]
    const int* seq_lens;     // [rows]
    const i64* table_rows;   // [rows]
    RowWork* row_work;       // [rows]
    BlockWork* block_work;   // [blocks]
    int rows, blocks;
    int heads;   // segments of a row
    int unit;    // tokens of a unit
    int least;   // units that a block takes at least
    int window;  // 0: none
};

static_assert(sizeof(PlanArgs) == ARGS_BYTES, "PlanArgs of launch.py is another one");

constexpr int THREADS = 1024;
constexpr int NONE = 0x7fffffff;
constexpr int SEQUENCES = 2048;  // that are told apart; more of them share a value, which is then too small, and safe

// Inclusive sum over the block of a value a thread; `scratch` holds 32 values.
DEVICE u64 block_sum(u64 x, u64* scratch) {
    int lane = threadIdx.x % 32, warp = threadIdx.x / 32;
    for (int step = 1; step < 32; step *= 2) {
        u64 y = __shfl_up_sync(~0u, x, step);
        if (lane >= step) x += y;
    }
    if (lane == 31) scratch[warp] = x;
    __syncthreads();
    if (warp == 0) {
        u64 sum = scratch[lane];
        for (int step = 1; step < 32; step *= 2) {
            u64 y = __shfl_up_sync(~0u, sum, step);
            if (lane >= step) sum += y;
        }
        scratch[lane] = sum;
    }
    __syncthreads();
    if (warp > 0) x += scratch[warp - 1];
    return x;
}

extern "C" __global__ void __launch_bounds__(THREADS) plan(const __grid_constant__ PlanArgs a) {
    __shared__ u64 scratch[32];
    __shared__ u64 carried;
    __shared__ int fresh[SEQUENCES];  // by sequence: its first token that this step writes
    if (threadIdx.x == 0) carried = 0;
    for (int i = threadIdx.x; i < SEQUENCES; i += THREADS) fresh[i] = NONE;
    __syncthreads();
    for (int r = threadIdx.x; r < a.rows; r += THREADS)
        atomicMin(fresh + a.table_rows[r] % SEQUENCES, max(a.seq_lens[r] - (a.query_start[r + 1] - a.query_start[r]), 0));
    __syncthreads();
    // Decoding rows in the upper half of the sum, units in the lower.
    for (int base = 0; base < a.rows; base += THREADS) {
        int r = base + threadIdx.x;
        RowWork row = {};
        bool decodes = false;
        if (r < a.rows) {
            row.token = a.query_start[r];
            decodes = a.query_start[r + 1] - row.token == 1;
            row.last = max(a.seq_lens[r], 0);
            row.first = a.window > 0 ? max(row.last - a.window, 0) : 0;
            row.table_row = (int)a.table_rows[r];
            row.fresh = fresh[row.table_row % SEQUENCES];
            row.tiles = row_tiles(row.first, row.last, a.unit);
        }
        u64 mine = decodes ? (1ull << 32) + (u64)(row.tiles * a.heads) : 0;
        u64 before = carried;
        u64 sum = before + block_sum(mine, scratch);
        if (decodes) {
            row.before = (int)(u32)(sum - mine);
            row.index = (int)((sum - mine) >> 32);
            a.row_work[row.index] = row;
        }
        __syncthreads();
        if (threadIdx.x == THREADS - 1) carried = sum;
        __syncthreads();
    }
    int units = (int)(u32)carried, rows = (int)(carried >> 32);
    int share = units > 0 ? block_share(units, a.blocks, a.least) : 0;
    for (int c = threadIdx.x; c < a.blocks; c += THREADS) {
        BlockWork work = {};
        i64 at = (i64)c * share;
        if (share > 0 && at < units) {
            int low = 0, high = rows - 1;  // the last row with before <= at
            while (low < high) {
                int middle = (low + high + 1) / 2;
                if (a.row_work[middle].before <= at)
                    low = middle;
                else
                    high = middle - 1;
            }
            work.share = share;
            work.units = units;
            work.rows = rows;
            work.row = a.row_work[low];
        }
        a.block_work[c] = work;
    }
}
