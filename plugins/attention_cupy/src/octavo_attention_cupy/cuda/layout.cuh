// Where a token's K and V lie in a page: the counterpart of geometry.py. Pure integers, so that a host compiler can build
// and test it too. Compiled for: KV_BYTES, K_DIM, V_DIM.
//
// A page is, head after head, K and then V. Rows of 128 bytes or a multiple are cut into panels of 128 bytes, and K of a head is
// [panel, slot, panel bytes]; other rows are one panel. Panels are cut into chunks of 16 bytes, and chunk c of slot s is stored at place
// c ^ swizzle(s): when a run of slots is copied to shared memory as it is, the eight rows that ldmatrix reads at once lie in
// different banks, and panels of 128 bytes lie as wgmma's 128-byte swizzle wants them. Slots and tokens agree modulo 8 (pages
// are multiples of 8 tokens).
#pragma once
#include "integers.cuh"

INTEGERS constexpr int common_power(int n) { return n % 8 == 0 ? 8 : n % 4 == 0 ? 4 : n % 2 == 0 ? 2 : 1; }

// Rows of K or V with `dim` elements of `element` bytes.
template <int dim, int element = KV_BYTES> struct Rows {
    static constexpr int BYTES = dim * element;
    static constexpr int CHUNKS = BYTES / 16;
    static constexpr int PANEL = BYTES % 128 == 0 ? 128 : BYTES;
    static constexpr int PANELS = BYTES / PANEL;
    static constexpr int PANEL_CHUNKS = PANEL / 16;
    static constexpr int SPAN = common_power(PANEL_CHUNKS);  // the swizzle moves a chunk within its aligned SPAN

    INTEGERS_MEMBER int swizzle(int slot) { return (slot % 8) / (8 / SPAN) % SPAN; }
    // Byte offset of a chunk of a row in panels of `rows` rows, the first of which is a slot that is a multiple of 8.
    INTEGERS_MEMBER u32 at(int rows, int row, int chunk) {
        return chunk / PANEL_CHUNKS * rows * PANEL + row * PANEL + (chunk % PANEL_CHUNKS ^ swizzle(row)) * 16;
    }
};

using KRows = Rows<K_DIM>;
using VRows = Rows<V_DIM>;

// Where a row of K or V starts in its first panel, in bytes from the start of its page; the next panel is page * PANEL bytes on.
INTEGERS i64 k_offset(int page, int head, int slot) {
    return (i64)head * page * (KRows::BYTES + VRows::BYTES) + slot * KRows::PANEL;
}
INTEGERS i64 v_offset(int page, int head, int slot) {
    return (i64)head * page * (KRows::BYTES + VRows::BYTES) + page * KRows::BYTES + slot * VRows::PANEL;
}
