"""The operators whose result is FP8, one kernel each, and the launch of the plain quantisation.

Owns launches: arithmetic is in kernels/quantise.py, and for few rows with one scale each on Hopper in kernels/quantise.cu; signatures and the oracle are `octavo_quant_fp8.operators`'s.

For PLAIN_ROWS rows, "fp8_token" leaves the result in the model's dtype, as a tensor: its Linear multiplies so few
without a matrix unit, so that FP8 saves nothing there, and finding the largest value of a row takes one program.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

import torch
import triton
from octavo.interfaces import Activation, OperatorParts
from octavo_ops_triton.kernels import activation, norm
from octavo_ops_triton.launch import Launcher, rows
from torch import Tensor

from octavo_quant_fp8.kernels import few_rows, quantise
from octavo_quant_fp8.kernels.rows import padded_rows
from octavo_quant_fp8.numerics import E4M3
from octavo_quant_fp8.scheme import BLOCK as GROUP

PLAIN_ROWS = 1

LATENCY_ROWS = 384
"""Rows up to which norms run in twice as many threads."""
MAX_ROW = 1 << 16
"""Channels of a row that a program holds at most."""


def launcher(device: Any) -> Launcher:
    """For a Device: programmatic dependent launch from 9.0 on."""
    return Launcher(pdl=device.type == "cuda" and device.capability >= (9, 0))


class TritonOperators:
    """interfaces.Operators. Nothing here waits for the device, and all of it may be captured."""

    def __init__(self, options: Any, parts: OperatorParts) -> None:
        launch = launcher(parts.device)
        self.ops: Mapping[tuple[str, str], Callable[..., Any]] = {
            (name, format): partial(function, launch, by_group)
            for format, by_group in (("fp8_token", False), ("fp8_block", True))
            for name, function in (("rms_norm", rms_norm), ("add_rms_norm", add_rms_norm), ("silu_mul", silu_mul))
        }


def rms_norm(launch: Launcher, by_group: bool, x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Activation | Tensor:
    """x float32 [T, H]; dtype is that of a plain result."""
    if not by_group and x.shape[0] <= PLAIN_ROWS:
        return norm.rms_norm(launch, x, weight, eps, dtype)
    return _norm(launch, by_group, x, x, weight, eps, add=False)


def add_rms_norm(
    launch: Launcher, by_group: bool, x: Tensor, residual: Tensor, weight: Tensor, eps: float
) -> tuple[Activation | Tensor, Tensor]:
    """residual float32 becomes the sum in place and is returned."""
    if not by_group and x.shape[0] <= PLAIN_ROWS:
        return norm.add_rms_norm(launch, x, residual, weight, eps)
    if residual.dtype != torch.float32:
        raise ValueError(f"add_rms_norm: the residual stream must be float32, not {residual.dtype}")
    return _norm(launch, by_group, x, residual, weight, eps, add=True), residual


def _norm(launch: Launcher, by_group: bool, x: Tensor, residual: Tensor, weight: Tensor, eps: float, *, add: bool) -> Activation:
    size = x.shape[1]
    out, block, group = _output(x, size, by_group)
    if add and not by_group and weight.dtype in (torch.float32, x.dtype) and few_rows.serves(x, size, residual, weight):
        return few_rows.quantise(few_rows.NORM, x, out, residual=residual, weight=weight, eps=eps)
    constants = (rows(x, "rms_norm"), rows(residual, "rms_norm"), size, block, group, add)
    # A few hundred rows are one or two programs a multiprocessor: their latency is what counts.
    warps = max(4, min(32, block // 128)) if not by_group and x.shape[0] <= LATENCY_ROWS else _warps(block)
    launch(quantise.norm_kernel, (x.shape[0], 1), (x, residual, weight, out.data, out.scale), (eps,), constants, warps=warps)
    return out


def silu_mul(launch: Launcher, by_group: bool, gate_up: Tensor) -> Activation | Tensor:
    """gate_up [T, 2 I] -> [T, I]."""
    if not by_group and gate_up.shape[0] <= PLAIN_ROWS:
        return activation.silu_mul(launch, gate_up)
    size = gate_up.shape[1] // 2
    out, block, group = _output(gate_up, size, by_group)
    if not by_group and few_rows.serves(gate_up, size):
        return few_rows.quantise(few_rows.SWIGLU, gate_up, out)
    constants = (rows(gate_up, "silu_mul"), size, block, group)
    launch(quantise.silu_mul_kernel, (gate_up.shape[0], 1), (gate_up, out.data, out.scale), (), constants, warps=_warps(block))
    return out


def quantise_input(launch: Launcher, by_group: bool, x: Tensor, bound: float = math.inf) -> Activation:
    """A plain input [T, K], for a Linear whose input nobody could quantise on the way. Values past `bound` saturate."""
    size = x.shape[1]
    out, block, group = _output(x, size, by_group)
    if not by_group and few_rows.serves(x, size):
        return few_rows.quantise(few_rows.PLAIN, x, out, bound=bound)
    constants = (rows(x, "quantise"), size, block, group)
    launch(quantise.rows_kernel, (x.shape[0], 1), (x, out.data, out.scale), (bound,), constants, warps=_warps(block))
    return out


def quantise_static(launch: Launcher, x: Tensor, scale: Tensor) -> Activation:
    """A plain input under one scale that is known (float32, one value on the device)."""
    size = x.shape[1]
    out, block, _ = _output(x, size, False)
    block = min(block, 2048)
    constants = (rows(x, "quantise"), size, block)
    launch(
        quantise.static_kernel, (x.shape[0], triton.cdiv(size, block)), (x, scale, out.data, out.scale), (), constants, warps=4
    )
    return out


def _output(x: Tensor, size: int, by_group: bool) -> tuple[Activation, int, int]:
    """(room for the result, power of two that holds a row, channels a scale)."""
    if size > MAX_ROW:
        raise ValueError(f"a row of {size} channels is longer than the {MAX_ROW} that a program holds")
    block = triton.next_power_of_2(max(size, GROUP))
    group = GROUP if by_group else block
    scales = -(-size // group)
    data = torch.empty(padded_rows(x.shape[0]), size, dtype=E4M3, device=x.device)[: x.shape[0]]
    return Activation(data, torch.empty(x.shape[0], scales, dtype=torch.float32, device=x.device)), block, group


def _warps(block: int) -> int:
    """Eight values a thread where the row is long enough, and never fewer than four warps."""
    return max(4, min(16, block // 256))
