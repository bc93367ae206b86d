"""The FP8 Linear in plain torch: any device and shape. The oracle of the kernels, and what a CPU runs.

Quantised values are multiplied exactly (e4m3 fits into bfloat16 and float32) and scaled afterwards in float32, but for
block scales, which are folded into the weights: in bfloat16 that rounds once more, 16 times finer than e4m3 does.
"""

from __future__ import annotations

from typing import Protocol

import torch
from octavo.interfaces import Activation
from octavo.model.matrix import Matrix, head_matrix, layer_matrix
from torch import Tensor

from octavo_quant_fp8.numerics import (
    quantise_groups,
    quantise_rows,
    quantise_static,
    spread_groups,
)
from octavo_quant_fp8.scheme import Scheme
from octavo_quant_fp8.weights import GatheredWeights


class Product(Protocol):
    """y = x W^T + b of one Linear; x a Tensor, or an Activation of `format`."""

    format: str

    def __call__(self, x: Tensor | Activation) -> Tensor: ...


def input_format(scheme: Scheme) -> str:
    """The activation format of a scheme's Linears. A static scale, or one with a bound, is applied by the Linear itself."""
    if scheme.activation == "token" and scheme.bound is None:
        return "fp8_token"
    return "fp8_block" if scheme.activation == "block" else "plain"


class ReferenceProduct:
    """The product of gathered weights, which it takes over. A head's result is float32."""

    def __init__(self, weights: GatheredWeights, dtype: torch.dtype, *, head: bool = False) -> None:
        self._scheme, self.format = weights.scheme, input_format(weights.scheme)
        self._input_scale, self._bias = weights.input_scale, weights.bias
        self._dtype = torch.float32 if head else dtype
        # In float16 a sum of products of values up to 448 would overflow.
        self._compute = torch.float32 if dtype == torch.float16 else dtype
        values = weights.data.to(torch.float32)
        self._row_scale: Tensor | None = None
        if self._scheme.weight == "block":
            for at, rows in enumerate(weights.block_rows().split(128)):  # no float32 scale for every weight at once
                part = values[at * 128 : at * 128 + len(rows)]
                part.mul_(spread_groups(weights.scale[rows], weights.columns))
        else:
            self._row_scale = weights.scale
        make = head_matrix if head else layer_matrix
        self._matrix: Matrix = make(values.to(self._compute), None)

    def __call__(self, x: Tensor | Activation) -> Tensor:
        data, scale = self._quantised(x)
        y = self._matrix(data.to(self._compute)).float()
        if scale is not None:
            y = y * scale
        if self._row_scale is not None:
            y = y * self._row_scale
        if self._bias is not None:
            y = y + self._bias.float()
        return y.to(self._dtype)

    def _quantised(self, x: Tensor | Activation) -> tuple[Tensor, Tensor | None]:
        """(values, what multiplies the product: a scale a row, one for all, or None)."""
        kind = self._scheme.activation
        if isinstance(x, Activation):
            data, scale = x.data, x.scale
        elif kind == "none":
            return x, None
        elif kind == "tensor":
            assert self._input_scale is not None
            return quantise_static(x, self._input_scale), self._input_scale
        elif kind == "token":
            data, scale = quantise_rows(x, self._scheme.bound)
        else:
            data, scale = quantise_groups(x)
        if kind == "block":
            return data.float() * spread_groups(scale, data.shape[-1]), None
        return data, scale
