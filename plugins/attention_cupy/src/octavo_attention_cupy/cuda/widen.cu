// FP8 pages to 16-bit pages: what the Hopper prefill kernel reads in place of an FP8 cache. Exact: every FP8 value is a 16-bit one.
//
// One thread makes two chunks of 16 bytes of one. Pages keep their layout (layout.cuh), for elements of two bytes; scales stay out
// of it. A page that is not assigned (-1) is left as it is: nothing in it counts.
//
// Compiled for: BF16, KV_BYTES (1), E5M2, K_DIM, V_DIM.
#include "layout.cuh"
#include "ptx.cuh"

struct WidenArgs {
    const u8* cache;   // [blocks, page_bytes]
    const int* table;  // [table rows, columns]
    const int2* pages; // [pages of wide], row and column of the table
    u8* wide;          // [pages, 2 page_bytes]
    i64 table_row, page_bytes;
    int page, kv_heads;
};

static_assert(sizeof(WidenArgs) == ARGS_BYTES, "WidenArgs of launch.py is another one");
static_assert(KV_BYTES == 1, "only FP8 pages are widened");

constexpr int THREADS = 256;

// By way of float32: the machine has one instruction for float16 to bfloat16, at an eighth of the rate.
DEVICE u32 widen_pair(u32 x) {
    u32 y = fp8_to_f16<E5M2>(x);
    return BF16 ? pack_bf16(f16_to_float(y), f16_to_float(y >> 16)) : y;
}

template <int dim> DEVICE void widen_chunk(const u8* from, u8* to, int page, int i) {
    using Narrow = Rows<dim, 1>;
    using Wide = Rows<dim, 2>;
    int slot = i / Narrow::CHUNKS, chunk = i % Narrow::CHUNKS;
    uint4 x = *(const uint4*)(from + Narrow::at(page, slot, chunk));
    u32 words[4] = {x.x, x.y, x.z, x.w};
#pragma unroll
    for (int half = 0; half < 2; ++half) {
        u32 a = words[2 * half], b = words[2 * half + 1];
        *(uint4*)(to + Wide::at(page, slot, 2 * chunk + half)) = {widen_pair(a), widen_pair(a >> 16), widen_pair(b), widen_pair(b >> 16)};
    }
}

extern "C" __global__ void __launch_bounds__(THREADS) widen(const __grid_constant__ WidenArgs a) {
    wait_for_predecessor();
    release_successor();
    int head = blockIdx.y, keys = a.page * KRows::CHUNKS, values = a.page * VRows::CHUNKS;
    int2 place = a.pages[blockIdx.x];
    i64 id = a.table[place.x * a.table_row + place.y];
    if (id < 0) return;
    const u8* from = a.cache + id * a.page_bytes;
    u8* to = a.wide + blockIdx.x * 2 * a.page_bytes;
    i64 k = k_offset(a.page, head, 0), v = v_offset(a.page, head, 0);
    for (int i = threadIdx.x; i < keys + values; i += THREADS)
        if (i < keys)
            widen_chunk<K_DIM>(from + k, to + 2 * k, a.page, i);
        else
            widen_chunk<V_DIM>(from + v, to + 2 * v, a.page, i - keys);
}
