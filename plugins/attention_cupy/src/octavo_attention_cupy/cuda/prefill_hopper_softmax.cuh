// Paged prefill on Hopper: from scores to weights, of 64 matrix rows by a warpgroup.
//
// Lane 4g + t of a warp has two of the warp's 16 rows, g and g + 8, and of each the columns n * 8 + 2t + c with c 0 or 1: value 4n + 2i + c
// of `s` is row i's. Knows nothing of products.
#pragma once
#include "prefill_args.cuh"

constexpr float SLACK = 8;  // powers of two by which a row's largest score may exceed its base

struct RowState {
    int position[2];
    float base[2];   // what exponents are relative to, in powers of two; -infinity while the row has seen nothing
    float sum[2];    // of this lane's columns only
    float keep[2];   // by how much earlier sums shrink when the base moves
    int limit[2];    // bits of the score that is SLACK ahead of the base; the least int if that is negative
};

// What scores are multiplied by in the exponent: with a soft-cap they were before the cap.
DEVICE float exponent_scale(const PrefillArgs& a) { return SOFTCAP ? 1.0f : a.scale; }

// Of a lane's 32 columns of a row those up to `last`, as bits 2n + c. A test of a bit costs a seventh of a comparison: predicates are
// loaded from bits seven at a time.
DEVICE u32 columns_to(int last) {
    int count = 2 * (last >> 3) + min((last & 7) + 1, 2);
    return (u32)(0xffffffffull >> (32 - min(max(count, 0), 32)));
}

// Scores of a tile that begins at `token` as they count: capped, and hidden ones -infinity where a tile has any. Masking is a pass of
// its own, so that the tiles without hidden scores, which are nearly all, do not pay for the question.
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

constexpr int LEAST = (int)0x80000000;

// Whether one of this lane's scores in half of a tile's columns may be SLACK ahead of its row's base. Numbers that are not negative are
// in the order of their bits, and above all others, and of such integers one instruction compares three.
template <int half> DEVICE bool may_be_ahead(const float (&s)[64], const RowState& row) {
    int x[2] = {LEAST, LEAST};
#pragma unroll
    for (int n = 8 * half; n < 8 * half + 8; ++n)
#pragma unroll
        for (int i = 0; i < 2; ++i)
            x[i] = __vimax3_s32(x[i], __float_as_int(s[4 * n + 2 * i]), __float_as_int(s[4 * n + 2 * i + 1]));
    return x[0] >= row.limit[0] || x[1] >= row.limit[1];
}

// The largest of this lane's scores in half of a tile's columns, by row.
template <int half> DEVICE void find_tops(const PrefillArgs& a, float (&top)[2], const float (&s)[64]) {
    float x[4];
#pragma unroll
    for (int i = 0; i < 4; ++i) x[i] = s[32 * half + i];
#pragma unroll
    for (int n = 1; n < 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) x[i] = fmaxf(x[i], s[32 * half + 4 * n + i]);
#pragma unroll
    for (int i = 0; i < 2; ++i) top[i] = fmaxf(x[2 * i], x[2 * i + 1]) * exponent_scale(a);
}

// The base follows the largest score only when that has come SLACK ahead of it, which is rare after an item's first tile; until then
// lanes need not compare. Returns whether it moved in a row of this warp; sums before shrink by `keep`.
template <int half> DEVICE bool move_base(const PrefillArgs& a, const float (&s)[64], RowState& row, bool may, float (&keep)[2]) {
    keep[0] = keep[1] = 1;
    if (!__any_sync(~0u, may)) return false;
    float top[2];
    find_tops<half>(a, top, s);
    bool moved = __any_sync(~0u, top[0] > row.base[0] + SLACK || top[1] > row.base[1] + SLACK);
    if (moved)
#pragma unroll
        for (int i = 0; i < 2; ++i) {
            float base = fmaxf(row.base[i], top[i]);
            base = fmaxf(base, __shfl_xor_sync(~0u, base, 1));
            base = fmaxf(base, __shfl_xor_sync(~0u, base, 2));
            keep[i] = base == NEGATIVE_INFINITY ? 1.0f : exp2_fast(row.base[i] - base);
            row.base[i] = base;
            row.limit[i] = base + SLACK >= 0 ? __float_as_int((base + SLACK) / exponent_scale(a)) : LEAST;
            row.sum[i] *= keep[i];
        }
    return moved;
}

// Scores of half of a tile to weights, in place.
template <int half> DEVICE void weigh_half(const PrefillArgs& a, float (&s)[64], RowState& row) {
    float base[2], sum[4] = {};
#pragma unroll
    for (int i = 0; i < 2; ++i) base[i] = row.base[i] == NEGATIVE_INFINITY ? 0.0f : row.base[i];
#pragma unroll
    for (int n = 8 * half; n < 8 * half + 8; ++n)
#pragma unroll
        for (int i = 0; i < 4; ++i) {
            s[4 * n + i] = exp2_fast(s[4 * n + i] * exponent_scale(a) - base[i / 2]);
            sum[i] += s[4 * n + i];
        }
#pragma unroll
    for (int i = 0; i < 2; ++i) row.sum[i] += sum[2 * i] + sum[2 * i + 1];
}

template <int half> DEVICE void pack_half(u32 (&p)[32], const float (&s)[64]) {
#pragma unroll
    for (int i = 16 * half; i < 16 * half + 16; ++i) p[i] = pack<BF16>(s[2 * i], s[2 * i + 1]);
}

// Scores of a tile to weights `p` of a product. `between` is called when half of the exponentials are done, and frees p; so the other half hides
// the packing of the first, and the first the search for the largest score of the other. Returns whether earlier sums shrink, by
// row.keep. `unread` is an address in shared memory that nobody reads: without a store that needs the first half's weights, the assembler moves
// them behind the wait in `between`, which they are there to hide.
template <typename Between>
DEVICE bool weigh(const PrefillArgs& a, float (&s)[64], u32 (&p)[32], RowState& row, u32 unread, const Between& between) {
    float keep[2], later_keep[2];
    bool moved = move_base<0>(a, s, row, may_be_ahead<0>(s, row), keep), may_move = may_be_ahead<1>(s, row);
    weigh_half<0>(a, s, row);
    store_4_bytes(unread, __float_as_uint(row.sum[0] + row.sum[1]));
    between();
    if (move_base<1>(a, s, row, may_move, later_keep)) {
        moved = true;
#pragma unroll
        for (int n = 0; n < 32; ++n) s[n] *= later_keep[n / 2 % 2];
    }
    pack_half<0>(p, s);
    weigh_half<1>(a, s, row);
    pack_half<1>(p, s);
#pragma unroll
    for (int i = 0; i < 2; ++i) row.keep[i] = keep[i] * later_keep[i];
    return moved;
}
