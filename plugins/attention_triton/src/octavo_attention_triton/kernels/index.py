"""The index of sparse attention: scores of many small heads against paged keys, and the best of them, without asking the host.

score[t, s] = sum_h w[t, h] * relu(scale * q[t, h] . k[s]), in float32. The choice is a radix select: four passes over a token's
scores find the value of its count-th best, eight bits a pass, and a fifth writes down the positions of all that are better and of
as many equal ones as there is room for. It reads what a token sees and no more, however long the score buffer's lines are.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_stride", "width"])
def score_kernel(
    q_ptr, weights_ptr, cache_ptr, table_ptr, rows_ptr, positions_ptr, scores_ptr, scale, q_stride_t, q_stride_h, weights_stride,
    table_stride, page_stride, width,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    EVERY: tl.constexpr, PROGRAMS: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (t, i): every PROGRAMS-th tile of the keys that token t sees, into scores float32 [T, width].
    PAGE: entries of a page; EVERY: tokens of an entry. scale: times what the cache's values are multiplied by."""
    token = tl.program_id(0).to(tl.int64)
    seen = (tl.load(positions_ptr + token).to(tl.int32) + 1) // EVERY
    table = table_ptr + tl.load(rows_ptr + token) * table_stride
    h = tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_D)
    n = tl.arange(0, BLOCK_N)
    q = tl.load(
        q_ptr + token * q_stride_t + h[:, None] * q_stride_h + d[None, :],
        mask=(h < HEADS)[:, None] & (d < DIM)[None, :],
        other=0.0,
    )
    w = tl.load(weights_ptr + token * weights_stride + h, mask=h < HEADS, other=0.0).to(tl.float32)
    for tile in tl.range(tl.program_id(1), tl.cdiv(seen, BLOCK_N), PROGRAMS, num_stages=STAGES):
        at = tile * BLOCK_N + n
        page = tl.load(table + at // PAGE, mask=at < seen, other=0).to(tl.int64)
        k = tl.load(
            cache_ptr + page[:, None] * page_stride + (at % PAGE)[:, None] * DIM + d[None, :], mask=(d < DIM)[None, :], other=0.0
        )
        s = tl.dot(k.to(q.dtype), tl.trans(q), input_precision=PRECISION) * scale
        total = tl.sum(tl.maximum(s, 0.0) * w[None, :], 1)
        tl.store(scores_ptr + token * width + at, total, mask=at < seen)


@triton.jit
def _ordered(scores, at, seen):
    """Scores as unsigned integers of the same order. What is not seen is 0, which no number becomes."""
    bits = tl.load(scores + at, mask=at < seen, other=0.0).to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(at < seen, key, 0)


@triton.jit
def _narrowed(scores, seen, found, wanted, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """Eight bits more: those at SHIFT of the wanted-th best among the scores that begin with `found`, and its rank among those that
    begin so."""
    n = tl.arange(0, BLOCK)
    counts = tl.zeros([256], tl.int32)
    for start in tl.range(0, seen, BLOCK):
        key = _ordered(scores, start + n, seen)
        same = start + n < seen
        if SHIFT < 24:
            same = same & ((key >> (SHIFT + 8)) == (found >> (SHIFT + 8)))
        counts += tl.histogram(((key >> SHIFT) & 255).to(tl.int32), 256, mask=same)
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    digit = tl.sum((above >= wanted).to(tl.int32), 0)  # `above` falls: so many bins lie below the one
    rank = wanted - tl.sum(tl.where(tl.arange(0, 256) == digit, above, 0), 0)
    return found | (digit.to(tl.uint32) << SHIFT), rank


@triton.jit(do_not_specialize=["width"])
def choose_kernel(
    scores_ptr,
    positions_ptr,
    chosen_ptr,
    width,
    COUNT: tl.constexpr,
    EVERY: tl.constexpr,
    BLOCK: tl.constexpr,
    BLOCK_C: tl.constexpr,
):
    """Program t: the positions of the COUNT highest of scores [t, :seen] into chosen int32 [T, COUNT], -1 where fewer are seen."""
    token = tl.program_id(0).to(tl.int64)
    seen = (tl.load(positions_ptr + token).to(tl.int32) + 1) // EVERY
    scores = scores_ptr + token * width
    chosen = chosen_ptr + token * COUNT
    if seen <= COUNT:
        for start in tl.range(0, COUNT, BLOCK_C):
            at = start + tl.arange(0, BLOCK_C)
            tl.store(chosen + at, tl.where(at < seen, at, -1), mask=at < COUNT)
        return
    found = tl.full([], 0, tl.uint32)  # the leading bits of the COUNT-th best
    wanted = tl.full([], COUNT, tl.int32)  # its rank among those with these bits
    found, wanted = _narrowed(scores, seen, found, wanted, 24, BLOCK)
    found, wanted = _narrowed(scores, seen, found, wanted, 16, BLOCK)
    found, wanted = _narrowed(scores, seen, found, wanted, 8, BLOCK)
    found, wanted = _narrowed(scores, seen, found, wanted, 0, BLOCK)

    n = tl.arange(0, BLOCK)
    better = tl.full([], 0, tl.int32)
    equal = tl.full([], 0, tl.int32)
    for start in tl.range(0, seen, BLOCK):
        key = _ordered(scores, start + n, seen)
        more = (key > found).to(tl.int32)
        same = ((key == found) & (start + n < seen)).to(tl.int32)
        tl.store(chosen + better + tl.cumsum(more, 0) - 1, start + n, mask=more == 1)
        rank = equal + tl.cumsum(same, 0) - 1
        tl.store(chosen + COUNT - wanted + rank, start + n, mask=(same == 1) & (rank < wanted))
        better += tl.sum(more, 0)
        equal += tl.sum(same, 0)
