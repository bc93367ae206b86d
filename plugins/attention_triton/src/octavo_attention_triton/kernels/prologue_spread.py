"""What prologue.py does, with q and k heads spread over their channels behind RoPE (`octavo_ops_triton.kernels.spread`).

A program takes BLOCK_R heads, BLOCK_H of each of several tokens: q and k heads, which go through the matrix units, or a few V heads, which are stored
as they came. q heads are turned in place: a head is one program's, and all of it is read before any is written. Stores nothing for a negative
slot. Never reads the cache.
"""

from __future__ import annotations

import triton
import triton.language as tl
from octavo_ops_triton.kernels.spread import small_matrices, spread_chunks, turned_chunks


@triton.jit
def _quantised(x, scale, inverse, limit, QUANTISE: tl.constexpr):
    """As write.py's `quantised`, in fewer instructions (octavo_ops_triton.kernels.spread.FEW says why): inverse is 1 / scale, correctly rounded,
    and so is the quotient that two fused steps make of it. What is past the range is cut off first, as an infinity would make a NaN."""
    if QUANTISE:
        most = limit * scale
        x = tl.clamp(x.to(tl.float32), -most, most, propagate_nan=tl.PropagateNan.ALL)
        y = x * inverse
        x = tl.fma(tl.fma(-y, scale + tl.zeros_like(x), x), inverse + tl.zeros_like(x), y)
    return x


@triton.jit
def _keep_values(
    v_ptr, slots_ptr, cache_ptr, scale, inverse, limit, tokens, first, page_stride,
    STRIDE: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, V_ROW: tl.constexpr,
    V_TRANSPOSED: tl.constexpr, QUANTISE: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
):  # fmt: skip
    """V heads `first` and on, BLOCK_V of them, of BLOCK_T tokens into their pages."""
    row = tl.arange(0, BLOCK_T * BLOCK_V)[:, None]
    token = tl.program_id(0).to(tl.int64) * BLOCK_T + row // BLOCK_V
    head = first + row % BLOCK_V
    d = tl.arange(0, BLOCK_D)[None, :]
    slot = tl.load(slots_ptr + token, mask=token < tokens, other=-1)
    held = (slot >= 0) & (head < KV_HEADS) & (d < DIM)
    x = tl.load(v_ptr + token * STRIDE + head * DIM + d, mask=held, other=0.0)
    at = cache_ptr + (slot // PAGE) * page_stride
    if V_TRANSPOSED:
        at += (head * DIM + d) * PAGE + slot % PAGE
    else:
        at += (head * PAGE + slot % PAGE) * V_ROW + d
    tl.store(at, _quantised(x, scale, inverse, limit, QUANTISE).to(cache_ptr.dtype.element_ty), mask=held)


@triton.jit(do_not_specialize=["tokens"])
def prologue_spread_kernel(
    qkv_ptr, weight_ptr, cos_ptr, sin_ptr, slots_ptr, cache_ptr,
    eps, k_scale, k_inverse, v_scale, v_inverse, limit, factor, tokens,
    page_stride, HEADS: tl.constexpr, KV_HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr,
    PAGE: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_BASE: tl.constexpr, V_TRANSPOSED: tl.constexpr, QUANTISE: tl.constexpr,
    CHUNKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_D: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """qkv [tokens, HEADS + 2 KV_HEADS, DIM], dense. The first programs of grid axis 1 take BLOCK_H q and k heads each, the rest, if there are any,
    BLOCK_V V heads, BLOCK_D >= DIM wide; else write.py's `values_kernel` stores V."""
    BLOCK_T: tl.constexpr = BLOCK_R // BLOCK_H
    TURNS: tl.constexpr = HEADS + KV_HEADS
    GROUPS: tl.constexpr = (TURNS + BLOCK_H - 1) // BLOCK_H
    STRIDE: tl.constexpr = (HEADS + 2 * KV_HEADS) * DIM
    group = tl.program_id(1)
    if group < GROUPS:
        even, odd = small_matrices(DIM, CHUNKS, BLOCK, qkv_ptr.dtype.element_ty)
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        row = tl.arange(0, BLOCK_R)[:, None]
        token = tl.program_id(0).to(tl.int64) * BLOCK_T + row // BLOCK_H
        head = group * BLOCK_H + row % BLOCK_H
        here = (token < tokens) & (head < TURNS)
        start = qkv_ptr + token * STRIDE + head * DIM
        xs = turned_chunks(
            start, weight_ptr + head * DIM, cos_ptr + token * ROTARY, sin_ptr + token * ROTARY, here, eps,
            DIM, ROTARY, NORM, True, CHUNKS, BLOCK,
        )  # fmt: skip
        xs = spread_chunks(xs, even, odd, factor, CHUNKS)
        WIDTH: tl.constexpr = DIM // CHUNKS
        j = tl.arange(0, BLOCK)[None, :]
        if group * BLOCK_H < HEADS:
            query = here & (head < HEADS) & (j < WIDTH)
            to = start + j
            for i in tl.static_range(CHUNKS):
                tl.store(to + i * WIDTH, xs[i], mask=query)
        if (group + 1) * BLOCK_H > HEADS:
            key = here & (head >= HEADS)
            slot = tl.load(slots_ptr + token, mask=key, other=-1)
            key = key & (slot >= 0) & (j < WIDTH)
            at = cache_ptr + (slot // PAGE) * page_stride + ((head - HEADS) * PAGE + slot % PAGE) * K_ROW + j
            for i in tl.static_range(CHUNKS):
                x = _quantised(xs[i], k_scale, k_inverse, limit, QUANTISE).to(cache_ptr.dtype.element_ty)
                tl.store(at + i * WIDTH, x, mask=key)
    else:
        if PDL:
            tl.extra.cuda.gdc_launch_dependents()
            tl.extra.cuda.gdc_wait()
        _keep_values(
            qkv_ptr + TURNS * DIM, slots_ptr, cache_ptr + V_BASE, v_scale, v_inverse, limit, tokens, (group - GROUPS) * BLOCK_V,
            page_stride, STRIDE, KV_HEADS, DIM, PAGE, V_ROW, V_TRANSPOSED, QUANTISE, BLOCK_T, BLOCK_V, BLOCK_D,
        )  # fmt: skip
