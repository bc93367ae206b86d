"""Heads spread over their channels (`octavo.model.spread`), alone or behind QK-norm and RoPE, in one kernel.

A program takes BLOCK_R heads, of one token or several, and multiplies them by the matrix on the matrix units. That is
exact: the matrix is held as whole numbers, the heads are rounded to the model's dtype first, as RoPE leaves them, and sums
are float32 (a float32 head is three parts in TF32). The two halves that RoPE mixes, and what it leaves alone, are left operands of their own, so no value
moves between them. Never in place: what a fast warp stores, a slow one may still have to read.
"""

from __future__ import annotations

from functools import cache

import torch
import triton
import triton.language as tl
from octavo.model.spread import whole_matrix
from torch import Tensor

from octavo_ops_triton.launch import Launcher, begin

TILES = ((1024, 16, 32), (4096, 16, 64), (1 << 62, 64, 128))
"""(heads of a step up to which, heads of a program, columns of a program): a few are shared out thinly, so that little is done in a row;
many are not turned once for every part of the columns."""


@triton.jit(do_not_specialize=["rows"])
def spread_kernel(
    x_ptr, out_ptr, matrix_ptr, weight_ptr, cos_ptr, sin_ptr, eps, factor, rows,
    TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    ROPE: tl.constexpr, NORM: tl.constexpr, BLOCK_R: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr,
    BLOCK_N: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, DIM] dense, BLOCK_N of its columns. Of each head the halves of its first ROTARY channels are turned (ROPE), the rest, BLOCK_REST
    wide (0: there is none), not."""
    HALF: tl.constexpr = ROTARY // 2
    dtype: tl.constexpr = x_ptr.dtype.element_ty
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)
    here = row < rows
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    j = tl.arange(0, BLOCK_HALF)
    inside = j < HALF
    mask = here[:, None] & inside[None, :]
    n = tl.program_id(1) * BLOCK_N + tl.arange(0, BLOCK_N)
    column = (n < DIM)[None, :]
    m = matrix_ptr + j[:, None] * DIM + n[None, :]
    m_a = tl.load(m, mask=inside[:, None] & column, other=0.0)
    m_b = tl.load(m + HALF * DIM, mask=inside[:, None] & column, other=0.0)
    if BLOCK_REST:
        r = tl.arange(0, BLOCK_REST)
        m_c = tl.load(matrix_ptr + (ROTARY + r)[:, None] * DIM + n[None, :], mask=(r < DIM - ROTARY)[:, None] & column, other=0.0)
    begin(PDL)  # no step writes the matrix
    start = x_ptr + token * TOKEN_STRIDE + head * HEAD_STRIDE
    a = tl.load(start[:, None] + j[None, :], mask=mask, other=0.0)
    b = tl.load(start[:, None] + HALF + j[None, :], mask=mask, other=0.0)
    if BLOCK_REST:
        rest = here[:, None] & (r < DIM - ROTARY)[None, :]
        c = tl.load(start[:, None] + ROTARY + r[None, :], mask=rest, other=0.0)
    if ROPE:
        a = a.to(tl.float32)
        b = b.to(tl.float32)
        if NORM:
            squares = tl.sum(a * a + b * b, axis=1)
            if BLOCK_REST:
                c = c.to(tl.float32)
                squares += tl.sum(c * c, axis=1)
            scale = (1.0 / tl.sqrt_rn(squares / DIM + eps))[:, None]
            w = weight_ptr + (head * DIM)[:, None]
            a = a * scale * tl.load(w + j[None, :], mask=mask, other=0.0).to(tl.float32)
            b = b * scale * tl.load(w + HALF + j[None, :], mask=mask, other=0.0).to(tl.float32)
            if BLOCK_REST:
                c = (c * scale * tl.load(w + ROTARY + r[None, :], mask=rest, other=0.0).to(tl.float32)).to(dtype)
        angle = (token * ROTARY)[:, None] + j[None, :]
        cos_a = tl.load(cos_ptr + angle, mask=mask, other=0.0).to(tl.float32)
        cos_b = tl.load(cos_ptr + angle + HALF, mask=mask, other=0.0).to(tl.float32)
        sin_a = tl.load(sin_ptr + angle, mask=mask, other=0.0).to(tl.float32)
        sin_b = tl.load(sin_ptr + angle + HALF, mask=mask, other=0.0).to(tl.float32)
        turned = (a * cos_a + b * sin_a).to(dtype)
        b = (b * cos_b + a * sin_b).to(dtype)
        a = turned
    total = tl.dot(a, m_a, input_precision="tf32x3")
    total = tl.dot(b, m_b, total, input_precision="tf32x3")
    if BLOCK_REST:
        total = tl.dot(c, m_c, total, input_precision="tf32x3")
    out = out_ptr + row.to(tl.int64)[:, None] * DIM + n[None, :]
    tl.store(out, (total * factor).to(dtype), mask=here[:, None] & column)


@cache
def _matrix(dim: int, dtype: torch.dtype, device: torch.device) -> tuple[Tensor, float]:
    """M as whole numbers in `dtype`, and its factor. A step that is captured has been run before, so it is made outside of it."""
    whole, factor = whole_matrix(dim)
    return whole.to(device, dtype), factor


def spread(launch: Launcher, x: Tensor) -> Tensor:
    """`octavo.model.operators.spread`: x [T, heads, D] may be a part of a wider tensor."""
    return _spread(launch, x, None, 0.0, None, None, x.shape[2] // 2 * 2)


def qk_norm_rope_spread(launch: Launcher, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """`octavo.model.operators.qk_norm_rope_spread`, a new tensor: x [T, heads, D] may be a part of a wider one."""
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("qk_norm_rope_spread: cos or sin is not contiguous")
    return _spread(launch, x, weight, eps, cos, sin, cos.shape[-1])


def _spread(
    launch: Launcher, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor | None, sin: Tensor | None, rotary: int
) -> Tensor:
    tokens, heads, dim = x.shape
    if x.stride(2) != 1:
        raise ValueError(f"spread: heads with strides {x.stride()} are not dense")
    matrix, factor = _matrix(dim, x.dtype, x.device)
    out = x.new_empty(tokens, heads, dim)
    rows, rest = tokens * heads, dim - rotary
    _, block_r, block_n = next(tile for tile in TILES if rows <= tile[0])
    if x.dtype == torch.float32:
        block_r, block_n = 16, 32  # more does not fit the registers
    # Of a wide head's matrix 128 columns would take more shared memory than capability 8.6 and 8.9 have.
    block_n = min(block_n, 64 if dim > 128 else max(16, triton.next_power_of_2(dim)))
    constants = (
        *(x.stride(0), x.stride(1), heads, dim, rotary, cos is not None, weight is not None, block_r),
        *(max(16, triton.next_power_of_2(rotary // 2)), max(16, triton.next_power_of_2(rest)) if rest else 0),
        block_n,
    )
    tensors = (x, out, matrix, x if weight is None else weight, x if cos is None else cos, x if sin is None else sin)
    launch(
        spread_kernel, (triton.cdiv(rows, block_r), triton.cdiv(dim, block_n)), tensors, (eps, factor, rows), constants, warps=4
    )
    return out
