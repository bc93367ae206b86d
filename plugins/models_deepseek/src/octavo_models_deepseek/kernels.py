"""What is V4's alone, in Triton: hyper-connections ("hyper_open", "hyper_close"), and norm and rotation of heads ("pair_turn",
"pair_join"). A step of few tokens is mostly launches, and plain torch needs over two hundred a layer for these.

The formulas, their shapes and the oracles are `hyper.py`'s and `turn.py`'s.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
import triton
import triton.language as tl
from octavo.interfaces import OperatorParts
from torch import Tensor


@triton.jit
def open_kernel(
    lanes_ptr, weights_ptr, base_ptr, scale_ptr, into_ptr, back_ptr, mix_ptr, hidden, eps, norm_eps,
    LANES: tl.constexpr, PADDED: tl.constexpr, TURNS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program t: the input of a block, the shares of its output and the mixing matrix of token t. weights float32 [T, (2 + n) n],
    of lanes that are not normalised yet: the norm is a factor."""
    token = tl.program_id(0).to(tl.int64)
    lanes = lanes_ptr + token * LANES * hidden
    d = tl.arange(0, BLOCK)
    squares = tl.zeros([BLOCK], tl.float32)
    for start in tl.range(0, LANES * hidden, BLOCK):
        x = tl.load(lanes + start + d, mask=start + d < LANES * hidden, other=0.0)
        squares += x * x
    norm = tl.rsqrt(tl.sum(squares, 0) / (LANES * hidden) + norm_eps)

    i = tl.arange(0, PADDED)
    held = i < LANES
    weights = weights_ptr + token * (2 + LANES) * LANES
    into = tl.load(weights + i, mask=held, other=0.0) * norm * tl.load(scale_ptr) + tl.load(base_ptr + i, mask=held, other=0.0)
    into = tl.where(held, tl.sigmoid(into) + eps, 0.0)
    at = LANES + i
    back = tl.load(weights + at, mask=held, other=0.0) * norm * tl.load(scale_ptr + 1) + tl.load(
        base_ptr + at, mask=held, other=0.0
    )
    tl.store(back_ptr + token * LANES + i, 2.0 * tl.sigmoid(back), mask=held)
    both = held[:, None] & held[None, :]
    at = 2 * LANES + i[:, None] * LANES + i[None, :]
    mix = tl.load(weights + at, mask=both, other=0.0) * norm * tl.load(scale_ptr + 2) + tl.load(
        base_ptr + at, mask=both, other=0.0
    )
    mix = tl.where(both, mix, float("-inf"))
    top = tl.max(mix, 1)
    mix = tl.exp(mix - tl.where(top == float("-inf"), 0.0, top)[:, None])
    total = tl.sum(mix, 1)
    mix = tl.where(both, mix / tl.where(total == 0.0, 1.0, total)[:, None] + eps, 0.0)
    mix = mix / (tl.sum(mix, 0) + eps)[None, :]
    for _ in tl.range(TURNS - 1):
        mix = mix / (tl.sum(mix, 1) + eps)[:, None]
        mix = mix / (tl.sum(mix, 0) + eps)[None, :]
    tl.store(mix_ptr + token * LANES * LANES + i[:, None] * LANES + i[None, :], mix, mask=both)

    for start in tl.range(0, hidden, BLOCK):
        mask = held[:, None] & (start + d < hidden)[None, :]
        x = tl.load(lanes + i[:, None] * hidden + start + d[None, :], mask=mask, other=0.0)
        tl.store(into_ptr + token * hidden + start + d, tl.sum(x * into[:, None], 0), mask=start + d < hidden)


@triton.jit
def close_kernel(
    lanes_ptr,
    out_ptr,
    back_ptr,
    mix_ptr,
    new_ptr,
    hidden,
    out_stride,
    LANES: tl.constexpr,
    PADDED: tl.constexpr,
    BLOCK: tl.constexpr,
):
    """Program (t, b): BLOCK channels of the lanes of token t after a block's output."""
    token = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    i = tl.arange(0, PADDED)
    held = i < LANES
    out = tl.load(out_ptr + token * out_stride + d, mask=d < hidden, other=0.0).to(tl.float32)
    new = tl.load(back_ptr + token * LANES + i, mask=held, other=0.0)[:, None] * out[None, :]
    for k in tl.static_range(LANES):
        lane = tl.load(lanes_ptr + (token * LANES + k) * hidden + d, mask=d < hidden, other=0.0)
        new += tl.load(mix_ptr + (token * LANES + k) * LANES + i, mask=held, other=0.0)[:, None] * lane[None, :]
    place = new_ptr + (token * LANES + i[:, None]) * hidden + d[None, :]
    tl.store(place, new, mask=held[:, None] & (d < hidden)[None, :])


@triton.jit
def _rotated(x, other, cos_ptr, sin_ptr, token, d, BACK: tl.constexpr, DIM: tl.constexpr, ROTATED: tl.constexpr):
    """x at channels d, its trailing pairs turned; other is x at d ^ 1."""
    tail = (d >= DIM - ROTATED) & (d < DIM)
    at = token * (ROTATED // 2) + (d - (DIM - ROTATED)) // 2
    cos = tl.load(cos_ptr + at, mask=tail, other=1.0)
    sin = tl.load(sin_ptr + at, mask=tail, other=0.0)
    if BACK:
        sin = -sin
    return x * cos + tl.where(d % 2 == 1, other, -other) * sin


@triton.jit
def turn_kernel(
    x_ptr, cos_ptr, sin_ptr, weight_ptr, out_ptr, x_stride_t, x_stride_h, eps,
    DIM: tl.constexpr, ROTATED: tl.constexpr, NORM: tl.constexpr, WEIGHT: tl.constexpr, BACK: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """Program (t, h): one head of one token, into out [T, heads, DIM]."""
    token = tl.program_id(0).to(tl.int64)
    head = tl.program_id(1)
    d = tl.arange(0, BLOCK)
    x_row = x_ptr + token * x_stride_t + head * x_stride_h
    x = tl.load(x_row + d, mask=d < DIM, other=0.0).to(tl.float32)
    other = tl.load(x_row + (d ^ 1), mask=d < DIM, other=0.0).to(tl.float32)
    if NORM:
        factor = tl.rsqrt(tl.sum(x * x, 0) / DIM + eps)
        x *= factor
        other *= factor
        if WEIGHT:
            x *= tl.load(weight_ptr + d, mask=d < DIM, other=0.0)
            other *= tl.load(weight_ptr + (d ^ 1), mask=d < DIM, other=0.0)
        x = x.to(out_ptr.dtype.element_ty).to(tl.float32)  # as if it had been stored in between
        other = other.to(out_ptr.dtype.element_ty).to(tl.float32)
    y = _rotated(x, other, cos_ptr, sin_ptr, token, d, BACK, DIM, ROTATED)
    place = out_ptr + (token * tl.num_programs(1) + head) * DIM + d
    tl.store(place, y.to(out_ptr.dtype.element_ty), mask=d < DIM)


@triton.jit
def join_kernel(
    a_ptr, a_lse_ptr, b_ptr, b_lse_ptr, cos_ptr, sin_ptr, out_ptr, DIM: tl.constexpr, ROTATED: tl.constexpr, BLOCK: tl.constexpr
):
    """Program (t, h): one head of one token of two dense attentions [T, heads, DIM]."""
    token = tl.program_id(0).to(tl.int64)
    row = token * tl.num_programs(1) + tl.program_id(1)
    d = tl.arange(0, BLOCK)
    a_lse, b_lse = tl.load(a_lse_ptr + row), tl.load(b_lse_ptr + row)
    top = tl.maximum(a_lse, b_lse)
    a_share, b_share = tl.exp(a_lse - top), tl.exp(b_lse - top)
    a_share, b_share = a_share / (a_share + b_share), b_share / (a_share + b_share)
    a_row, b_row = a_ptr + row * DIM, b_ptr + row * DIM
    x = tl.load(a_row + d, mask=d < DIM, other=0.0).to(tl.float32) * a_share
    x += tl.load(b_row + d, mask=d < DIM, other=0.0).to(tl.float32) * b_share
    other = tl.load(a_row + (d ^ 1), mask=d < DIM, other=0.0).to(tl.float32) * a_share
    other += tl.load(b_row + (d ^ 1), mask=d < DIM, other=0.0).to(tl.float32) * b_share
    x = x.to(out_ptr.dtype.element_ty).to(tl.float32)
    other = other.to(out_ptr.dtype.element_ty).to(tl.float32)
    y = _rotated(x, other, cos_ptr, sin_ptr, token, d, True, DIM, ROTATED)
    tl.store(out_ptr + row * DIM + d, y.to(out_ptr.dtype.element_ty), mask=d < DIM)


def hyper_open(
    lanes: Tensor, weights: Tensor, base: Tensor, scale: Tensor, turns: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """`hyper.hyper_open`."""
    tokens, count, hidden = lanes.shape
    into, back, mix = lanes.new_empty(tokens, hidden), lanes.new_empty(tokens, count), lanes.new_empty(tokens, count, count)
    if tokens:
        open_kernel[(tokens,)](
            lanes, weights, base, scale, into, back, mix, hidden, eps, norm_eps, LANES=count, PADDED=triton.next_power_of_2(count),
            TURNS=turns, BLOCK=1024, num_warps=8,
        )  # fmt: skip
    return into, back, mix


def hyper_close(lanes: Tensor, out: Tensor, back: Tensor, mix: Tensor) -> Tensor:
    """`hyper.hyper_close`."""
    tokens, count, hidden = lanes.shape
    new = torch.empty_like(lanes)
    if tokens:
        close_kernel[(tokens, triton.cdiv(hidden, 512))](
            lanes, out, back, mix, new, hidden, out.stride(0), LANES=count, PADDED=triton.next_power_of_2(count), BLOCK=512, num_warps=4,
        )  # fmt: skip
    return new


def pair_turn(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    *,
    eps: float | None = None,
    weight: Tensor | None = None,
    back: bool = False,
) -> Tensor:
    """`turn.pair_turn`."""
    tokens, heads, dim = x.shape
    out = torch.empty(tokens, heads, dim, dtype=dtype, device=x.device)
    if tokens:
        turn_kernel[(tokens, heads)](
            x, cos, sin, cos if weight is None else weight, out, x.stride(0), x.stride(1), eps or 0.0, DIM=dim, ROTATED=2 * cos.shape[1],
            NORM=eps is not None, WEIGHT=weight is not None, BACK=back, BLOCK=triton.next_power_of_2(dim), num_warps=4 if dim > 128 else 1,
        )  # fmt: skip
    return out


def pair_join(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """`turn.pair_join`."""
    tokens, heads, dim = first[0].shape
    out = torch.empty_like(first[0])
    if tokens:
        join_kernel[(tokens, heads)](
            *first, *second, cos, sin, out, DIM=dim, ROTATED=2 * cos.shape[1], BLOCK=triton.next_power_of_2(dim), num_warps=4
        )
    return out


class TritonOperators:
    """interfaces.Operators: V4's."""

    def __init__(self, options: Any, parts: OperatorParts) -> None:
        self.ops: Mapping[tuple[str, str], Callable[..., Any]] = {
            ("hyper_open", "plain"): hyper_open,
            ("hyper_close", "plain"): hyper_close,
            ("pair_turn", "plain"): pair_turn,
            ("pair_join", "plain"): pair_join,
        }
