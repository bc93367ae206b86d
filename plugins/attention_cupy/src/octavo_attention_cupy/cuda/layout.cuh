// Where a token's K and V lie in a page: the counterpart of geometry.py. Pure integers, so that a host compiler can build
// and test it too. Compiled for: KV_BYTES, K_DIM, V_DIM.
//
// A page is K [kv_head, slot, K_DIM], then V [kv_head, slot, V_DIM]. Rows are cut into chunks of 16 bytes, and chunk c of
// slot s is stored at place c ^ swizzle(s): when a run of slots is copied to shared memory as it is, the eight rows that
// ldmatrix reads at once lie in different banks. Slots and tokens agree modulo 8 (pages are multiples of 8 tokens).
#pragma once
#include "integers.cuh"

INTEGERS constexpr int common_power(int n) { return n % 8 == 0 ? 8 : n % 4 == 0 ? 4 : n % 2 == 0 ? 2 : 1; }

template <int dim> struct Rows {
    static constexpr int BYTES = dim * KV_BYTES;
    static constexpr int CHUNKS = BYTES / 16;
    static constexpr int SPAN = common_power(CHUNKS);  // the swizzle moves a chunk within its aligned SPAN

    INTEGERS_MEMBER int swizzle(int slot) { return (slot % 8) / (8 / SPAN) % SPAN; }
    // Byte offset of a chunk in a run of rows that starts at a slot that is a multiple of 8.
    INTEGERS_MEMBER u32 at(int row, int chunk) { return row * BYTES + (chunk ^ swizzle(row)) * 16; }
};

using KRows = Rows<K_DIM>;
using VRows = Rows<V_DIM>;

// Where a row of K or V starts, in bytes from the start of its page.
INTEGERS i64 k_offset(int page, int head, int slot) { return ((i64)head * page + slot) * KRows::BYTES; }
INTEGERS i64 v_offset(int page, int heads, int head, int slot) {
    return (i64)heads * page * KRows::BYTES + ((i64)head * page + slot) * VRows::BYTES;
}
