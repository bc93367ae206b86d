"""Operators whose result is an FP8 `Activation`, in plain torch: the oracle of the fused ones, and what a CPU runs.

Formats: "fp8_token", one scale a row; "fp8_block", one a row and 128 channels. Each is core's operator followed by
the quantisation of its result, which is rounded to the model's dtype first only where core's operator returns that.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import torch
from octavo.interfaces import Activation, OperatorParts
from octavo.model import operators as core
from torch import Tensor

from octavo_quant_fp8.experts import experts_fp8
from octavo_quant_fp8.numerics import quantise_groups, quantise_rows

FORMATS: Mapping[str, Callable[[Tensor], tuple[Tensor, Tensor]]] = {"fp8_token": quantise_rows, "fp8_block": quantise_groups}


def _rms_norm(quantise: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[..., Activation]:
    def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Activation:
        """`octavo.model.operators.rms_norm`, quantised from float32: dtype does not matter."""
        return Activation(*quantise(core.rms_norm(x, weight, eps, torch.float32)))

    return rms_norm


def _add_rms_norm(quantise: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[..., tuple[Activation, Tensor]]:
    def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Activation, Tensor]:
        """`octavo.model.operators.add_rms_norm`, the norm quantised from float32."""
        norm, residual = core.add_rms_norm(x.float(), residual, weight, eps)
        return Activation(*quantise(norm)), residual

    return add_rms_norm


def _silu_mul(quantise: Callable[[Tensor], tuple[Tensor, Tensor]]) -> Callable[[Tensor], Activation]:
    def silu_mul(gate_up: Tensor) -> Activation:
        """`octavo.model.operators.silu_mul`, quantised from float32."""
        return Activation(*quantise(core.silu_mul(gate_up.float())))

    return silu_mul


class TorchOperators:
    """interfaces.Operators: on any device, in any dtype."""

    def __init__(self, options: Any, parts: OperatorParts) -> None:
        self.ops: Mapping[tuple[str, str], Callable[..., Any]] = {
            (name, format): make(quantise)
            for format, quantise in FORMATS.items()
            for name, make in (("rms_norm", _rms_norm), ("add_rms_norm", _add_rms_norm), ("silu_mul", _silu_mul))
        } | {("experts_fp8", "plain"): experts_fp8}
