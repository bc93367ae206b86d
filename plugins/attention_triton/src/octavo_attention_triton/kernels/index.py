"""The index of sparse attention: scores of many small heads against paged keys, and the best of them, without asking the host.

score[t, s] = sum_h w[t, h] * relu(scale * q[t, h] . k[s]), in float32. The choice is a radix select: four passes over a token's
scores find the value of its count-th best, eight bits a pass, and a fifth writes down the positions of all that are better and of
as many equal ones as there is room for, in order. It reads what a token sees and no more, however long the score buffer's lines are.

A histogram is work for more than one multiprocessor. Where tokens are few, each pass is a kernel of several programs a token that add
up their counts in memory (`count_kernel`, `place_kernel`); where there are many, one program does all five (`choose_kernel`).
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_stride", "width"])
def score_kernel(
    q_ptr, weights_ptr, cache_ptr, table_ptr, rows_ptr, positions_ptr, scores_ptr, counts_ptr, scale, q_stride_t, q_stride_h, weights_stride,
    table_stride, page_stride, width,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    EVERY: tl.constexpr, PROGRAMS: tl.constexpr, ZERO: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (t, i): every PROGRAMS-th tile of the keys that token t sees, into scores float32 [T, width].
    PAGE: entries of a page; EVERY: tokens of an entry. scale: times what the cache's values are multiplied by. ZERO: the counts
    int32 [T, 4, 256] of whoever chooses are made zero."""
    token = tl.program_id(0).to(tl.int64)
    if ZERO:  # noqa: SIM102  (a constant: without it there is no test)
        if tl.program_id(1) == 0:
            tl.store(counts_ptr + token * 1024 + tl.arange(0, 1024), tl.zeros([1024], tl.int32))
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
def _counted(scores, begin, end, found, SHIFT: tl.constexpr, BLOCK: tl.constexpr):
    """How many of the scores [begin, end) that begin with the bits of `found` above SHIFT + 8 have which next eight, int32 [256]."""
    n = tl.arange(0, BLOCK)
    counts = tl.zeros([256], tl.int32)
    for start in tl.range(begin, end, BLOCK):
        key = _ordered(scores, start + n, end)
        same = start + n < end
        if SHIFT < 24:
            same = same & ((key >> (SHIFT + 8)) == (found >> (SHIFT + 8)))
        counts += tl.histogram(((key >> SHIFT) & 255).to(tl.int32), 256, mask=same)
    return counts


@triton.jit
def _narrowed(counts, found, wanted, SHIFT: tl.constexpr):
    """Eight bits more of the wanted-th best, and its rank among those that begin so."""
    above = tl.sum(counts, 0) - tl.cumsum(counts, 0)
    digit = tl.sum((above >= wanted).to(tl.int32), 0)  # `above` falls: so many bins lie below the one
    rank = wanted - tl.sum(tl.where(tl.arange(0, 256) == digit, above, 0), 0)
    return found | (digit.to(tl.uint32) << SHIFT), rank


@triton.jit
def _placed(scores, chosen, begin, end, found, wanted, better, equal, COUNT: tl.constexpr, BLOCK: tl.constexpr):
    """Write down which of the scores [begin, end) are among the best: all above `found`, and of those equal to it the first
    `wanted`. better and equal: how many of each lie before `begin`."""
    n = tl.arange(0, BLOCK)
    for start in tl.range(begin, end, BLOCK):
        key = _ordered(scores, start + n, end)
        more = (key > found).to(tl.int32)
        same = ((key == found) & (start + n < end)).to(tl.int32)
        tl.store(chosen + better + tl.cumsum(more, 0) - 1, start + n, mask=more == 1)
        rank = equal + tl.cumsum(same, 0) - 1
        tl.store(chosen + COUNT - wanted + rank, start + n, mask=(same == 1) & (rank < wanted))
        better += tl.sum(more, 0)
        equal += tl.sum(same, 0)


@triton.jit
def _all(chosen, seen, COUNT: tl.constexpr, BLOCK_C: tl.constexpr):
    """Where no more keys are seen than may be chosen: every one."""
    for start in tl.range(0, COUNT, BLOCK_C):
        at = start + tl.arange(0, BLOCK_C)
        tl.store(chosen + at, tl.where(at < seen, at, -1), mask=at < COUNT)


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
        _all(chosen, seen, COUNT, BLOCK_C)
        return
    found = tl.full([], 0, tl.uint32)  # the leading bits of the COUNT-th best
    wanted = tl.full([], COUNT, tl.int32)  # its rank among those with these bits
    found, wanted = _narrowed(_counted(scores, 0, seen, found, 24, BLOCK), found, wanted, 24)
    found, wanted = _narrowed(_counted(scores, 0, seen, found, 16, BLOCK), found, wanted, 16)
    found, wanted = _narrowed(_counted(scores, 0, seen, found, 8, BLOCK), found, wanted, 8)
    found, wanted = _narrowed(_counted(scores, 0, seen, found, 0, BLOCK), found, wanted, 0)
    none = tl.full([], 0, tl.int32)
    _placed(scores, chosen, 0, seen, found, wanted, none, none, COUNT, BLOCK)


@triton.jit
def _so_far(counts, COUNT: tl.constexpr, PASSES: tl.constexpr):
    """What the counts [PASSES, 256] of earlier passes say: the leading bits of the COUNT-th best, and its rank."""
    found = tl.full([], 0, tl.uint32)
    wanted = tl.full([], COUNT, tl.int32)
    for turn in tl.static_range(PASSES):
        found, wanted = _narrowed(tl.load(counts + turn * 256 + tl.arange(0, 256)), found, wanted, 24 - 8 * turn)
    return found, wanted


@triton.jit
def _share(seen, part, PARTS: tl.constexpr, BLOCK: tl.constexpr):
    """The scores of one of PARTS programs: whole blocks but for the last."""
    each = tl.cdiv(tl.cdiv(seen, BLOCK), PARTS) * BLOCK
    return tl.minimum(part * each, seen), tl.minimum((part + 1) * each, seen)


@triton.jit(do_not_specialize=["width"])
def count_kernel(
    scores_ptr, positions_ptr, counts_ptr, width,
    COUNT: tl.constexpr, EVERY: tl.constexpr, PARTS: tl.constexpr, PASSES: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, p): pass number PASSES over a share of token t's scores, into counts int32 [T, 4, 256], which are zero before."""
    token = tl.program_id(0).to(tl.int64)
    seen = (tl.load(positions_ptr + token).to(tl.int32) + 1) // EVERY
    begin, end = _share(seen, tl.program_id(1), PARTS, BLOCK)
    if (seen <= COUNT) | (begin >= end):
        return
    counts = counts_ptr + token * 1024
    found, _ = _so_far(counts, COUNT, PASSES)
    mine = _counted(scores_ptr + token * width, begin, end, found, 24 - 8 * PASSES, BLOCK)
    tl.atomic_add(counts + PASSES * 256 + tl.arange(0, 256), mine, mask=mine > 0, sem="relaxed")


@triton.jit(do_not_specialize=["width"])
def place_kernel(
    scores_ptr, positions_ptr, counts_ptr, chosen_ptr, width,
    COUNT: tl.constexpr, EVERY: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program (t, p): what `choose_kernel` writes, of a share of token t's scores, once four passes have been counted."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    seen = (tl.load(positions_ptr + token).to(tl.int32) + 1) // EVERY
    chosen = chosen_ptr + token * COUNT
    if seen <= COUNT:
        if part == 0:
            _all(chosen, seen, COUNT, BLOCK_C)
        return
    begin, end = _share(seen, part, PARTS, BLOCK)
    if begin >= end:
        return
    scores = scores_ptr + token * width
    found, wanted = _so_far(counts_ptr + token * 1024, COUNT, 4)
    n = tl.arange(0, BLOCK)
    more = tl.zeros([BLOCK], tl.int32)
    same = tl.zeros([BLOCK], tl.int32)
    for start in tl.range(0, begin, BLOCK):  # of earlier shares: the places must not depend on who comes first
        key = _ordered(scores, start + n, begin)
        more += (key > found).to(tl.int32)
        same += (key == found).to(tl.int32)
    _placed(scores, chosen, begin, end, found, wanted, tl.sum(more, 0), tl.sum(same, 0), COUNT, BLOCK)
