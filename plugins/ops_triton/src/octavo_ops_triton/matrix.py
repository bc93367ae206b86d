"""The operator "matrix" on Hopper: a 16-bit weight as it is, and the product that fits the rows of a step.

Owns the choice: `small_linear` for few rows, where it was measured to win, cuBLAS for more, and for the prompts of a gated MLP one
kernel that leaves the product of gate and value out of memory. `octavo.model.matrix.MatrixMaker` and `interfaces.GatedLinear` say
what is offered.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from octavo.model.matrix import Matrix, PlainMatrix, SmallMatrix
from torch import Tensor

from octavo_ops_triton.kernels import activation
from octavo_ops_triton.kernels.linear import SmallLinear
from octavo_ops_triton.launch import Launcher

GATED_ROWS = 2048
"""Rows of a step from which the fused product was measured to be faster than cuBLAS and the activation after it: benchmarks/gated.py."""
ACTIVATIONS = {"silu": activation.silu_mul, "gelu_tanh": activation.gelu_tanh_mul}


class HopperMatrix:
    """octavo.model.matrix.Matrix of weight [out, in], which it keeps as it is."""

    name = "small_linear or torch, gated prompts in one product"

    def __init__(self, weight: Tensor, small: SmallLinear, launch: Launcher) -> None:
        self._weight, self._launch = weight, launch
        self._plain = SmallMatrix(weight, small, PlainMatrix(weight, None), weight.dtype)

    def __call__(self, x: Tensor) -> Tensor:
        return self._plain(x)

    def gated(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        """interfaces.GatedLinear."""
        from octavo_ops_triton.kernels.hopper_product import GatedProduct

        if activation not in ACTIVATIONS:
            return None
        act, fused = partial(ACTIVATIONS[activation], self._launch), GatedProduct(self._launch, self._weight, activation)
        return lambda x: fused(x) if x.shape[0] >= GATED_ROWS else act(self._plain(x))


class HopperMatrices:
    """octavo.model.matrix.MatrixMaker."""

    name = HopperMatrix.name

    def __init__(self, small: SmallLinear, launch: Launcher) -> None:
        self._small, self._launch = small, launch

    def __call__(self, weight: Tensor, bias: Tensor | None, *, head: bool) -> Matrix | None:
        """None for a head, a bias, float32, and rows that the copy engine cannot address: all that core serves as well."""
        fits = weight.dtype in (torch.bfloat16, torch.float16) and weight.shape[1] % 8 == 0 and weight.shape[0] % 16 == 0
        return None if head or bias is not None or not fits else HopperMatrix(weight, self._small, self._launch)
