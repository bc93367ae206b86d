"""Storing a step's K and V into paged caches, quantised on the way where the cache is FP8.

Page layout (elements): K [kv_head, slot, K_ROW], then V [kv_head, slot, V_ROW] at V_BASE, or, where
V_TRANSPOSED, V [kv_head, v_dim, slot]. Writes nothing for a negative slot. Never reads the cache.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

FP8_MAX = {torch.float8_e4m3fn: 448.0, torch.float8_e5m2: 57344.0}


@triton.jit
def quantised(x, scale, limit, QUANTISE: tl.constexpr):
    """x as an FP8 cache takes it (float32, divided by the scale and saturated); x where it is no FP8 cache."""
    if QUANTISE:
        x = tl.div_rn(x.to(tl.float32), scale + tl.zeros_like(x).to(tl.float32))
        # Saturate, so that a value past the range never turns into NaN; a NaN stays visible as NaN.
        x = tl.clamp(x, -limit, limit, propagate_nan=tl.PropagateNan.ALL)
    return x


@triton.jit
def _store(x, scale, limit, target, mask, QUANTISE: tl.constexpr):
    tl.store(target, quantised(x, scale, limit, QUANTISE).to(target.dtype.element_ty), mask=mask)


@triton.jit
def write_kernel(
    k_ptr, v_ptr, cache_ptr, slots_ptr,
    k_scale, v_scale, limit,
    k_stride_t, k_stride_h, v_stride_t, v_stride_h, page_stride,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    PAGE: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_BASE: tl.constexpr,
    V_TRANSPOSED: tl.constexpr, QUANTISE: tl.constexpr, VALUES: tl.constexpr,
    BLOCK_H: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
):  # fmt: skip
    """One program stores one token's K, and unless `values_kernel` does it V, of BLOCK_H heads."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    page = (slot // PAGE).to(tl.int64) * page_stride
    offset = slot % PAGE
    heads = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]

    d = tl.arange(0, BLOCK_K)[None, :]
    mask = (heads < HEADS) & (d < K_DIM)
    k = tl.load(k_ptr + token * k_stride_t + heads * k_stride_h + d, mask=mask)
    _store(k, k_scale, limit, cache_ptr + page + (heads * PAGE + offset) * K_ROW + d, mask, QUANTISE)

    if VALUES:
        d = tl.arange(0, BLOCK_V)[None, :]
        mask = (heads < HEADS) & (d < V_DIM)
        v = tl.load(v_ptr + token * v_stride_t + heads * v_stride_h + d, mask=mask)
        if V_TRANSPOSED:
            target = cache_ptr + page + V_BASE + (heads * V_DIM + d) * PAGE + offset
        else:
            target = cache_ptr + page + V_BASE + (heads * PAGE + offset) * V_ROW + d
        _store(v, v_scale, limit, target, mask, QUANTISE)


@triton.jit(do_not_specialize=["T"])
def values_kernel(
    v_ptr, cache_ptr, slots_ptr, v_scale, limit, T, v_stride_t, v_stride_h, page_stride,
    V_DIM: tl.constexpr, PAGE: tl.constexpr, V_BASE: tl.constexpr, QUANTISE: tl.constexpr,
    BLOCK_T: tl.constexpr, BLOCK_V: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """V of BLOCK_T tokens of one head, where it is V_TRANSPOSED: neighbours of a chunk lie side by side there, and by a program a
    token each byte would be a write of its own (three times as long for a chunk of 8,192)."""
    t = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK_V)
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
    slot = tl.load(slots_ptr + t, mask=t < T, other=-1)
    inside = (slot >= 0)[:, None] & (d < V_DIM)[None, :]
    v = tl.load(v_ptr + t.to(tl.int64)[:, None] * v_stride_t + head * v_stride_h + d[None, :], mask=inside, other=0.0)
    v = quantised(v, v_scale, limit, QUANTISE).to(cache_ptr.dtype.element_ty)
    page = (slot // PAGE).to(tl.int64) * page_stride + V_BASE
    # Neither dimension of these addresses is contiguous for sure, so Triton lays the first one, tokens, across the lanes of a warp.
    target = cache_ptr + page[:, None] + (head * V_DIM + d[None, :]) * PAGE + (slot % PAGE)[:, None]
    tl.store(target, v, mask=inside)
