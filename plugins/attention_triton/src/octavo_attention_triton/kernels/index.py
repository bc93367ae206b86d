"""The index of sparse attention: scores of many small heads against paged keys, and the best of them, without asking the host.

score[t, s] = sum_h w[t, h] * relu(scale * q[t, h] . k[s]), in float32.

A choice holds a block of scores in registers, as integers of the same order, and finds the count-th highest two bits at a time: how
many are at least each of three thresholds, sixteen times. Then it writes down the positions of all that are higher, and of as many
equal ones as there is room for, in order. Rows longer than a block are chosen from block by block, and then from what was chosen.
What is not seen is not read, however long the score buffer's lines are.
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
def _ordered(scores, at, held):
    """The scores at positions `at` as unsigned integers of the same order. Where none is held, 0, which no number becomes."""
    bits = tl.load(scores + at, mask=held, other=0.0).to(tl.uint32, bitcast=True)
    key = tl.where((bits >> 31) == 1, bits ^ 0xFFFFFFFF, bits | 0x80000000)
    return tl.where(held, key, 0)


@triton.jit
def _choose(key, at, target, COUNT: tl.constexpr):
    """The positions `at` of the COUNT highest keys, of more than COUNT, into target, in the order of the block."""
    found = tl.full([], 0, tl.uint32)  # as far as it is known: the COUNT-th highest key
    for turn in tl.range(0, 16):
        bit = tl.full([], 1, tl.uint32) << (30 - 2 * turn)
        low, middle, high = found + bit, found + 2 * bit, found + 3 * bit
        packed = (key >= low).to(tl.int64) + ((key >= middle).to(tl.int64) << 20) + ((key >= high).to(tl.int64) << 40)
        counts = tl.sum(packed, 0)
        enough = ((counts & 0xFFFFF) >= COUNT).to(tl.uint32) + (((counts >> 20) & 0xFFFFF) >= COUNT).to(tl.uint32)
        found += (enough + ((counts >> 40) >= COUNT).to(tl.uint32)) * bit
    more, same = (key > found).to(tl.int64), (key == found).to(tl.int64)
    before = tl.cumsum(more + (same << 32), 0)
    higher, equal = before & 0xFFFFFFFF, before >> 32
    room = COUNT - tl.sum(more, 0)
    tl.store(target + higher + tl.minimum(equal, room) - 1, at, mask=(more == 1) | ((same == 1) & (equal <= room)))


@triton.jit(do_not_specialize=["width"])
def choose_kernel(
    scores_ptr, positions_ptr, chosen_ptr, parts_ptr, width,
    COUNT: tl.constexpr, EVERY: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Program (t, p): the positions of the COUNT highest of block p of scores [t, :seen], -1 where there are fewer: into chosen int32
    [T, COUNT] if the row is no longer than a block, else into parts int32 [T, PARTS, COUNT]."""
    token = tl.program_id(0).to(tl.int64)
    part = tl.program_id(1)
    seen = (tl.load(positions_ptr + token).to(tl.int32) + 1) // EVERY
    if (part > 0) & (part * BLOCK >= seen):
        return
    target = chosen_ptr + token * COUNT
    if seen > BLOCK:
        target = parts_ptr + (token * PARTS + part) * COUNT
    held = tl.minimum(seen - part * BLOCK, BLOCK)
    if held <= COUNT:
        for start in tl.range(0, COUNT, BLOCK_C):
            n = start + tl.arange(0, BLOCK_C)
            tl.store(target + n, tl.where(n < held, part * BLOCK + n, -1), mask=n < COUNT)
        return
    at = part * BLOCK + tl.arange(0, BLOCK)
    _choose(_ordered(scores_ptr + token * width, at, at < seen), at, target, COUNT)


@triton.jit(do_not_specialize=["width"])
def choose_again_kernel(
    scores_ptr, positions_ptr, chosen_ptr, parts_ptr, width,
    COUNT: tl.constexpr, EVERY: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr, WIDE: tl.constexpr,
):  # fmt: skip
    """Program t: of rows longer than BLOCK, the COUNT highest of what was chosen from their blocks. WIDE >= PARTS * COUNT."""
    token = tl.program_id(0).to(tl.int64)
    seen = (tl.load(positions_ptr + token).to(tl.int32) + 1) // EVERY
    if seen <= BLOCK:
        return
    n = tl.arange(0, WIDE)
    at = tl.load(parts_ptr + token * PARTS * COUNT + n, mask=n < tl.cdiv(seen, BLOCK) * COUNT, other=-1)
    _choose(_ordered(scores_ptr + token * width, at, at >= 0), at, chosen_ptr + token * COUNT, COUNT)
