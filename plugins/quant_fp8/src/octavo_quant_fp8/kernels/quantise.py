"""Rows to FP8: after a norm, after SwiGLU, or as they are. One program a row, arithmetic float32.

GROUP is the number of neighbouring channels that share a scale: 128, or the power of two that holds the row, for one
scale a row. A NaN or an infinity makes its scale, and with it all that shares it, not finite: it is never hidden.
"""

from __future__ import annotations

import triton
import triton.language as tl
from octavo_ops_triton.launch import begin


@triton.jit
def largest(a, b):
    return tl.maximum(a, b, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def saturated(x):
    return tl.clamp(x, -448.0, 448.0, propagate_nan=tl.PropagateNan.ALL)


@triton.jit
def scale_of(peak, bound):
    """The scale under which peak, at most bound, is 448."""
    peak = tl.minimum(peak, bound, propagate_nan=tl.PropagateNan.ALL)
    return largest(peak, 1e-12) * (1.0 / 448.0)


@triton.jit
def store_e4m3(values, bound, row, data_ptr, scale_ptr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr):
    """Quantise values [BLOCK] of one row and store them with their scales. What is past SIZE must be 0. Values past `bound`
    saturate. A row with one scale keeps its layout: a reshape would take it through shared memory twice."""
    d = tl.arange(0, BLOCK)
    if GROUP == BLOCK:
        scale = scale_of(tl.reduce(tl.abs(values), 0, largest), bound)
        quantised = saturated(values * (1.0 / scale)).to(data_ptr.dtype.element_ty)
        tl.store(scale_ptr + row, scale)
    else:
        parts = tl.reshape(values, (BLOCK // GROUP, GROUP))
        scales = scale_of(tl.reduce(tl.abs(parts), 1, largest), bound)
        parts = saturated(parts * (1.0 / scales)[:, None])
        quantised = tl.reshape(parts, (BLOCK,)).to(data_ptr.dtype.element_ty)
        groups: tl.constexpr = (SIZE + GROUP - 1) // GROUP
        g = tl.arange(0, BLOCK // GROUP)
        tl.store(scale_ptr + row * groups + g, scales, mask=g < groups)
    tl.store(data_ptr + row * SIZE + d, quantised, mask=d < SIZE)


@triton.jit
def rows_kernel(
    x_ptr, data_ptr, scale_ptr, bound,
    X_STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """x as it is."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    begin(PDL)
    x = tl.load(x_ptr + row * X_STRIDE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    store_e4m3(x, bound, row, data_ptr, scale_ptr, SIZE, BLOCK, GROUP)


@triton.jit
def static_kernel(
    x_ptr, known_ptr, data_ptr, scale_ptr,
    X_STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK values of a row of x under a scale that is known, which is written beside them for every row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    scale = tl.load(known_ptr)
    x = tl.load(x_ptr + row * X_STRIDE + d, mask=d < SIZE, other=0.0).to(tl.float32)
    x = saturated(x * (1.0 / scale))
    tl.store(data_ptr + row * SIZE + d, x.to(data_ptr.dtype.element_ty), mask=d < SIZE)
    if tl.program_id(1) == 0:
        tl.store(scale_ptr + row, scale)


@triton.jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, data_ptr, scale_ptr, eps,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr,
    ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The RMS norm of x, or where ADD of x + residual, which is stored to residual."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < SIZE
    begin(PDL)
    x = tl.load(x_ptr + row * X_STRIDE + d, mask=mask, other=0.0).to(tl.float32)
    weight = tl.load(weight_ptr + d, mask=mask, other=0.0).to(tl.float32)
    if ADD:
        at = residual_ptr + row * RESIDUAL_STRIDE + d
        x += tl.load(at, mask=mask, other=0.0)
        tl.store(at, x, mask=mask)
    norm = 1.0 / tl.sqrt_rn(tl.sum(x * x) / SIZE + eps)
    store_e4m3(x * norm * weight, float("inf"), row, data_ptr, scale_ptr, SIZE, BLOCK, GROUP)


@triton.jit
def silu_mul_kernel(
    x_ptr, data_ptr, scale_ptr,
    X_STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """silu(gate) * up of gate [SIZE] beside up [SIZE]."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.arange(0, BLOCK)
    mask = d < SIZE
    begin(PDL)
    gate = tl.load(x_ptr + row * X_STRIDE + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * X_STRIDE + SIZE + d, mask=mask, other=0.0).to(tl.float32)
    store_e4m3(gate / (1.0 + tl.exp(-gate)) * up, float("inf"), row, data_ptr, scale_ptr, SIZE, BLOCK, GROUP)
