"""What decode and prefill share: addressing a tile of pages, and one online-softmax step over it.

Scores live in base 2: callers fold log2(e) into the scale, so that every exponential is an exp2.
In a masked tile neither an unassigned block (-1 in the table) nor what a free block or slot holds (NaN
included) reaches a sum: scores are replaced, values zeroed, before anything is added.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def tanh(x):
    # From exp2 only: one instruction, exact limits at both ends.
    e = tl.exp2(-2.8853900817779268 * tl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return tl.where(x < 0, -t, t)


@triton.jit
def load_tile(
    cache_ptr, table_ptr, start, first, last, head, page_stride,
    ROW: tl.constexpr, DIM: tl.constexpr, BLOCK_D: tl.constexpr, BLOCK_N: tl.constexpr, PAGE: tl.constexpr,
    BASE: tl.constexpr, TRANSPOSED: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """Tokens [start, start + BLOCK_N) of one head: [BLOCK_N, BLOCK_D], or [BLOCK_D, BLOCK_N] where TRANSPOSED.

    The page holds [head, slot, ROW] at BASE (TRANSPOSED: [head, dim, slot]). start is a multiple of BLOCK_N.
    Where a page holds whole tiles, one scalar load finds it; else every token looks up its own page. A MASKED
    tile looks up no page outside [first, last) (block 0 is read in its place) and its other tokens hold
    anything, NaN included: the caller masks the scores and zeroes V. What lies outside is not read where tokens are whole
    rows (of rows of a few hundred tokens, half a tile is 8% of all bytes); TRANSPOSED it is, so that loads stay wide.
    """
    start = tl.multiple_of(start, BLOCK_N)
    n = tl.arange(0, BLOCK_N)
    d = tl.arange(0, BLOCK_D)
    if PAGE % BLOCK_N == 0:
        page = tl.load(table_ptr + start // PAGE).to(tl.int64)
        base = cache_ptr + page * page_stride + BASE
        slot = tl.multiple_of(start % PAGE, BLOCK_N) + n
        if TRANSPOSED:
            pointers = base + (head * DIM + d[:, None]) * PAGE + slot[None, :]
        else:
            pointers = base + (head * PAGE + slot[:, None]) * ROW + d[None, :]
    else:
        token = start + n
        if MASKED:
            page = tl.load(table_ptr + token // PAGE, mask=(token >= first) & (token < last), other=0).to(tl.int64)
        else:
            page = tl.load(table_ptr + token // PAGE).to(tl.int64)
        base = page * page_stride + BASE
        slot = token % PAGE
        if TRANSPOSED:
            pointers = cache_ptr + base[None, :] + (head * DIM + d[:, None]) * PAGE + slot[None, :]
        else:
            pointers = cache_ptr + base[:, None] + (head * PAGE + slot[:, None]) * ROW + d[None, :]
    if MASKED and not TRANSPOSED:
        inside = (start + n >= first) & (start + n < last)
        tile = tl.load(pointers, mask=inside[:, None] & (d < DIM)[None, :], other=0.0)
    elif BLOCK_D == DIM:
        tile = tl.load(pointers)
    elif TRANSPOSED:
        tile = tl.load(pointers, mask=(d < DIM)[:, None], other=0.0)
    else:
        tile = tl.load(pointers, mask=(d < DIM)[None, :], other=0.0)
    return tile


@triton.jit
def finite16(v):
    """v, FP8, as float16, and what is not finite as the largest value: times a weight of zero it is zero then, whatever a free slot holds.

    It takes no second operand, such as which tokens are visible: to meet one, values would go through shared memory once more."""
    if v.dtype == tl.float8e4nv:
        v = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high; .reg .b32 top; mov.b32 top, 0x5f005f00; mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e4m3x2 $0, low; cvt.rn.f16x2.e4m3x2 $1, high; min.f16x2 $0, $0, top; min.f16x2 $1, $1, top; }""",
            "=r,=r,r", [v], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    else:
        v = tl.inline_asm_elementwise(
            """{ .reg .b16 low, high; .reg .b32 top, bottom; mov.b32 top, 0x7b007b00; mov.b32 bottom, 0xfb00fb00; mov.b32 {low, high}, $2;
            cvt.rn.f16x2.e5m2x2 $0, low; cvt.rn.f16x2.e5m2x2 $1, high; min.f16x2 $0, $0, top; min.f16x2 $1, $1, top;
            max.f16x2 $0, $0, bottom; max.f16x2 $1, $1, bottom; }""",
            "=r,=r,r", [v], dtype=tl.float16, is_pure=True, pack=4,
        )  # fmt: skip
    return v


@triton.jit
def scores(q, k, scale_log2, softcap, SOFTCAP: tl.constexpr, PRECISION: tl.constexpr):
    """Base-2 logits of q [M, D] against k [N, D]. scale_log2: [M, 1] or scalar, softmax scale * log2(e)."""
    s = tl.dot(q, tl.trans(k.to(q.dtype)), input_precision=PRECISION) * scale_log2
    if SOFTCAP:
        # softcap arrives multiplied by log2(e), as the scores are.
        s = softcap * tanh(s / softcap)
    return s


@triton.jit
def accumulate(
    s, v, visible, m, den, acc,
    DOT: tl.constexpr, V_TRANSPOSED: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr, FINITE: tl.constexpr = False,
):  # fmt: skip
    """One online-softmax step: s [M, N] base-2 logits, v [N, D] (or [D, N]), running max m, sum den, accumulator.

    visible [N]: the tokens of a MASKED tile that hold values at all; s is -inf for every other. FINITE: all of v is finite.
    """
    top = tl.maximum(m, tl.max(s, 1))
    shift = top
    if MASKED:
        # A row that has seen nothing keeps -inf; subtracting it from itself would be NaN.
        shift = tl.where(top == float("-inf"), 0.0, top)
    p = tl.exp2(s - shift[:, None])
    alpha = tl.exp2(m - shift)
    den = den * alpha + tl.sum(p, 1)
    acc = acc * alpha[:, None]
    v = v.to(DOT)
    if V_TRANSPOSED:
        v = tl.trans(v)
    if MASKED and V_TRANSPOSED and not FINITE:  # else its load has zeroed it
        v = tl.where(visible[:, None], v, 0.0)
    acc = tl.dot(p.to(DOT), v, acc, input_precision=PRECISION)
    return top, den, acc
