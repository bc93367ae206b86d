"""cos and sin of a step's rotary angles.

One program a few tokens. The angle is a float64 product (in float32 it is off by 0.06 radians at position 2^20), reduced to
one turn in float64; only the turn's cosine and sine are float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_ops_triton.launch import Launcher, begin

BLOCK_T = 8
TURN = tl.constexpr(6.283185307179586)


@triton.jit(do_not_specialize=["tokens"])
def angles_kernel(
    positions_ptr, frequencies_ptr, cos_ptr, sin_ptr, tokens, factor,
    FREQUENCY_STRIDE: tl.constexpr, HALF: tl.constexpr, BLOCK_T: tl.constexpr, BLOCK_HALF: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    token = tl.program_id(0) * BLOCK_T + tl.arange(0, BLOCK_T)[:, None]
    j = tl.arange(0, BLOCK_HALF)[None, :]
    mask = (token < tokens) & (j < HALF)
    begin(PDL)
    position = tl.load(positions_ptr + token, mask=token < tokens, other=0).to(tl.float64)
    frequency = tl.load(frequencies_ptr + token * FREQUENCY_STRIDE + j, mask=mask, other=0.0).to(tl.float64)
    turns = position * frequency
    turns -= tl.floor(turns / TURN + 0.5) * TURN
    angle = turns.to(tl.float32)
    cos, sin = (tl.cos(angle) * factor).to(cos_ptr.dtype.element_ty), (tl.sin(angle) * factor).to(sin_ptr.dtype.element_ty)
    at = token.to(tl.int64) * (2 * HALF) + j
    tl.store(cos_ptr + at, cos, mask=mask)
    tl.store(cos_ptr + at + HALF, cos, mask=mask)
    tl.store(sin_ptr + at, -sin, mask=mask)
    tl.store(sin_ptr + at + HALF, sin, mask=mask)


def rope_angles(
    launch: Launcher, positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype
) -> tuple[Tensor, Tensor]:
    """`octavo.model.operators.rope_angles`."""
    tokens, half = len(positions), frequencies.shape[1]
    if not (positions.is_contiguous() and frequencies.is_contiguous()):
        raise ValueError(f"rope_angles: positions {positions.stride()} or frequencies {frequencies.stride()} are not dense")
    cos = torch.empty((tokens, 1, 2 * half), dtype=dtype, device=positions.device)
    sin = torch.empty_like(cos)
    constants = (half if len(frequencies) > 1 else 0, half, BLOCK_T, triton.next_power_of_2(half))
    launch(
        angles_kernel,
        (triton.cdiv(tokens, BLOCK_T), 1),
        (positions, frequencies, cos, sin),
        (tokens, float(factor)),
        constants,
        warps=4,
    )
    return cos, sin
