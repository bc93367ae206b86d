"""RMS norm of the residual stream, with or without adding a block's output to it first.

One program a row, the row in registers: the sum of squares and the scaling read it once. Arithmetic is float32.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_ops_triton.launch import Launcher, begin, rows


@triton.jit
def norm_kernel(
    x_ptr, residual_ptr, weight_ptr, out_ptr, eps,
    X_STRIDE: tl.constexpr, RESIDUAL_STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, ADD: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One row. ADD: x + residual is normalised and stored to residual; else residual is not touched."""
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
    scale = 1.0 / tl.sqrt_rn(tl.sum(x * x) / SIZE + eps)
    tl.store(out_ptr + row * SIZE + d, (x * scale * weight).to(out_ptr.dtype.element_ty), mask=mask)


def rms_norm(launch: Launcher, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """`octavo.model.operators.rms_norm`."""
    out = torch.empty(x.shape, dtype=dtype, device=x.device)
    _launch(launch, x, x, weight, out, eps, add=False)
    return out


def add_rms_norm(launch: Launcher, x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """`octavo.model.operators.add_rms_norm`; residual float32 becomes the sum in place and is returned."""
    if residual.dtype != torch.float32:
        raise ValueError(f"add_rms_norm: the residual stream must be float32, not {residual.dtype}")
    out = torch.empty(x.shape, dtype=x.dtype, device=x.device)
    _launch(launch, x, residual, weight, out, eps, add=True)
    return out, residual


def _launch(launch: Launcher, x: Tensor, residual: Tensor, weight: Tensor, out: Tensor, eps: float, *, add: bool) -> None:
    size = x.shape[1]
    block = triton.next_power_of_2(size)
    constants = (rows(x, "rms_norm"), rows(residual, "rms_norm"), size, block, add)
    launch(norm_kernel, (x.shape[0], 1), (x, residual, weight, out), (eps,), constants, warps=_warps(block))


def _warps(block: int) -> int:
    """Eight values a thread where the row is long enough, and never fewer than four warps."""
    return max(4, min(32, block // 256))
