"""QK-norm and RoPE of every q and k head in one kernel, in place.

A program takes BLOCK_H heads of one token: their two halves, which the rotation mixes, lie in two tiles of equal
shape, so no value crosses threads but in the sum of squares. Arithmetic is float32 and is rounded once.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from octavo_ops_triton.launch import Launcher, begin

BLOCK_H = 8


@triton.jit
def rope_kernel(
    x_ptr, weight_ptr, cos_ptr, sin_ptr, eps,
    TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    NORM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_HALF: tl.constexpr, BLOCK_REST: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """The first ROTARY of DIM dimensions turn; the rest, BLOCK_REST wide (0: there is none), are only normalised."""
    HALF: tl.constexpr = ROTARY // 2
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)[:, None]
    j = tl.arange(0, BLOCK_HALF)
    inside = j < HALF
    mask = (head < HEADS) & inside[None, :]
    begin(PDL)
    first = x_ptr + token * TOKEN_STRIDE + head * HEAD_STRIDE + j[None, :]
    a = tl.load(first, mask=mask, other=0.0).to(tl.float32)
    b = tl.load(first + HALF, mask=mask, other=0.0).to(tl.float32)
    angle = token * ROTARY + j
    cos_a = tl.load(cos_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    cos_b = tl.load(cos_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_a = tl.load(sin_ptr + angle, mask=inside, other=0.0).to(tl.float32)[None, :]
    sin_b = tl.load(sin_ptr + angle + HALF, mask=inside, other=0.0).to(tl.float32)[None, :]
    if NORM:
        squares = tl.sum(a * a + b * b, axis=1)
        w = weight_ptr + head * DIM + j[None, :]
        if BLOCK_REST:
            r = tl.arange(0, BLOCK_REST)[None, :]
            rest = (head < HEADS) & (r < DIM - ROTARY)
            tail = x_ptr + token * TOKEN_STRIDE + head * HEAD_STRIDE + ROTARY + r
            c = tl.load(tail, mask=rest, other=0.0).to(tl.float32)
            squares += tl.sum(c * c, axis=1)
        scale = (1.0 / tl.sqrt_rn(squares / DIM + eps))[:, None]
        a = a * scale * tl.load(w, mask=mask, other=0.0).to(tl.float32)
        b = b * scale * tl.load(w + HALF, mask=mask, other=0.0).to(tl.float32)
        if BLOCK_REST:
            c = c * scale * tl.load(weight_ptr + head * DIM + ROTARY + r, mask=rest, other=0.0).to(tl.float32)
            tl.store(tail, c.to(x_ptr.dtype.element_ty), mask=rest)
    tl.store(first, (a * cos_a + b * sin_a).to(x_ptr.dtype.element_ty), mask=mask)
    tl.store(first + HALF, (b * cos_b + a * sin_b).to(x_ptr.dtype.element_ty), mask=mask)


def qk_norm_rope(launch: Launcher, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """`octavo.model.operators.qk_norm_rope`, in place: x [T, heads, D] may be a part of a wider tensor."""
    tokens, heads, dim = x.shape
    rotary = cos.shape[-1]
    if x.stride(2) != 1 or not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError(f"qk_norm_rope: heads with strides {x.stride()} are not dense, or cos or sin is not contiguous")
    rest = dim - rotary
    constants = (
        *(x.stride(0), x.stride(1), heads, dim, rotary, weight is not None, BLOCK_H),
        *(triton.next_power_of_2(rotary // 2), triton.next_power_of_2(rest) if rest else 0),
    )
    tensors = (x, x if weight is None else weight, cos, sin)
    launch(rope_kernel, (tokens, triton.cdiv(heads, BLOCK_H)), tensors, (eps,), constants, warps=4)
    return x
