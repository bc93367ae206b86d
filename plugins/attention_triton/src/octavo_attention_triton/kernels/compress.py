"""Compressed entries: a window of tokens becomes one entry when its last token comes, from the paged cache of what the tokens
left for it.

An element of that cache is [values, gates], WIDTH of each. An entry is, in each channel, the mean of the window's values weighted
by the softmax over its gates plus what each place in the window adds. OVERLAPPING: values are twice as wide as an entry, and it is
made of the first half of the window before and the second half of its own.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_stride"])
def compress_kernel(
    cache_ptr, table_ptr, rows_ptr, positions_ptr, places_ptr, out_ptr, table_stride, page_stride,
    DIM: tl.constexpr, WIDTH: tl.constexpr, RATE: tl.constexpr, OVERLAPPING: tl.constexpr, PAGE: tl.constexpr,
    BLOCK_D: tl.constexpr, BLOCK_T: tl.constexpr,
):  # fmt: skip
    """Program (t, b): channels [b * BLOCK_D, (b + 1) * BLOCK_D) of the entry that token t ends, into out float32 [T, DIM]; nothing
    for a token that ends none. places float32 [RATE, WIDTH]."""
    token = tl.program_id(0).to(tl.int64)
    position = tl.load(positions_ptr + token).to(tl.int32)
    if (position + 1) % RATE != 0:
        return
    table = table_ptr + tl.load(rows_ptr + token) * table_stride
    d = tl.program_id(1) * BLOCK_D + tl.arange(0, BLOCK_D)
    span: tl.constexpr = 2 * RATE if OVERLAPPING else RATE
    m = tl.full([BLOCK_D], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_D], tl.float32)
    acc = tl.zeros([BLOCK_D], tl.float32)
    # From the window's own tokens back to those before it, so that the maximum is finite from the first tile on.
    for back in tl.range(0, span, BLOCK_T):
        i = span - 1 - back - tl.arange(0, BLOCK_T)
        at = position - span + 1 + i
        held = (i >= 0) & (at >= 0)
        page = tl.load(table + at // PAGE, mask=held, other=0).to(tl.int64)
        column = d[None, :] + tl.zeros([BLOCK_T, 1], tl.int32)
        if OVERLAPPING:
            column = column + tl.where(i >= RATE, DIM, 0)[:, None]
        mask = held[:, None] & (d < DIM)[None, :]
        element = cache_ptr + page[:, None] * page_stride + tl.where(held, at % PAGE, 0)[:, None] * (2 * WIDTH) + column
        value = tl.load(element, mask=mask, other=0.0).to(tl.float32)
        gate = tl.load(element + WIDTH, mask=mask, other=0.0).to(tl.float32)
        gate += tl.load(places_ptr + (i % RATE)[:, None] * WIDTH + column, mask=mask, other=0.0)
        gate = tl.where(held[:, None], gate, float("-inf"))
        top = tl.maximum(m, tl.max(gate, 0))
        weight = tl.exp(gate - top[None, :])
        keep = tl.exp(m - top)
        den = den * keep + tl.sum(weight, 0)
        acc = acc * keep + tl.sum(weight * value, 0)
        m = top
    tl.store(out_ptr + token * DIM + d, acc / den, mask=d < DIM)
