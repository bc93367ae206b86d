"""SwiGLU and GeGLU: silu(gate) * up and gelu(gate) * up. Arithmetic is float32 and is rounded once."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_ops_triton.launch import Launcher, begin, rows

BLOCK = 1024


@triton.jit
def gated_kernel(
    x_ptr, out_ptr, X_STRIDE: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, GELU: tl.constexpr, PDL: tl.constexpr
):
    """BLOCK values of one row. The tanh form of GELU is gate * sigmoid(2 sqrt(2 / pi) (gate + 0.044715 gate^3))."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    mask = d < SIZE
    begin(PDL)
    gate = tl.load(x_ptr + row * X_STRIDE + d, mask=mask, other=0.0).to(tl.float32)
    up = tl.load(x_ptr + row * X_STRIDE + SIZE + d, mask=mask, other=0.0).to(tl.float32)
    slope = gate
    if GELU:
        slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
    tl.store(out_ptr + row * SIZE + d, (gate / (1.0 + tl.exp(-slope)) * up).to(out_ptr.dtype.element_ty), mask=mask)


def silu_mul(launch: Launcher, gate_up: Tensor) -> Tensor:
    """`octavo.model.operators.silu_mul`."""
    return _gated(launch, gate_up, gelu=False)


def gelu_tanh_mul(launch: Launcher, gate_up: Tensor) -> Tensor:
    """`octavo.model.operators.gelu_tanh_mul`."""
    return _gated(launch, gate_up, gelu=True)


def _gated(launch: Launcher, gate_up: Tensor, *, gelu: bool) -> Tensor:
    tokens, size = gate_up.shape[0], gate_up.shape[1] // 2
    out = torch.empty((tokens, size), dtype=gate_up.dtype, device=gate_up.device)
    constants = (rows(gate_up, "silu_mul"), size, BLOCK, gelu)
    launch(gated_kernel, (tokens, triton.cdiv(size, BLOCK)), (gate_up, out), (), constants, warps=4)
    return out
