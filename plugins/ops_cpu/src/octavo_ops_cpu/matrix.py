"""Weight matrices of linear layers in the packed layout of `octavo_ops_cpu.kernels.linear`.

Owns the packing and the choice of a kernel by the rows of x. A matrix is kept once, and serves one row and
thousands alike.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from octavo.model.matrix import Matrix
from torch import Tensor

from octavo_ops_cpu.jit.emitter import Dtype
from octavo_ops_cpu.kernels.activation import ACTIVATIONS
from octavo_ops_cpu.kernels.dots import BLOCK, UNROLL
from octavo_ops_cpu.kernels.linear import product, tile_for

MAX_INPUTS = 16384
"""16 rows of so many inputs are half a megabyte, which kernels keep on their stack."""


class MatrixPacker:
    """octavo.model.matrix.MatrixMaker."""

    name = "avx512-bf16-packed"

    def __call__(self, weight: Tensor, bias: Tensor | None, *, head: bool) -> Matrix | None:
        outputs, inputs = weight.shape
        if weight.dtype != torch.bfloat16 or outputs % BLOCK or inputs % (2 * UNROLL) or inputs > MAX_INPUTS:
            return None
        return PackedProduct(weight, bias, "float32" if head else "bfloat16")


class PackedProduct:
    """octavo.model.matrix.Matrix: x bfloat16 [T, inputs] -> [T, outputs] of `dtype`."""

    name = MatrixPacker.name

    def __init__(self, weight: Tensor, bias: Tensor | None, dtype: Dtype) -> None:
        self._outputs, self._inputs = weight.shape
        self._weight = pack(weight)
        self._bias = None if bias is None else bias.float().contiguous()
        self._dtype: Dtype = dtype
        self._result: torch.dtype = getattr(torch, dtype)
        self._addresses = self._weight.data_ptr(), 0 if self._bias is None else self._bias.data_ptr()

    def __call__(self, x: Tensor) -> Tensor:
        return self._run("", self._outputs, x)

    def gated(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        """octavo.interfaces.GatedLinear."""
        if activation not in ACTIVATIONS or self._outputs % (2 * BLOCK):
            return None
        return partial(self._run, activation, self._outputs // 2)

    def _run(self, gate: str, width: int, x: Tensor) -> Tensor:
        if not x.is_contiguous():
            x = x.contiguous()
        rows = x.shape[0]
        out = x.new_empty(rows, width, dtype=self._result)
        kernel = product(tile_for(rows), self._dtype, gate, self._bias is not None).pooled
        weight, bias = self._addresses
        kernel(x.data_ptr(), out.data_ptr(), weight, bias, rows, self._outputs, self._inputs)
        return out


def pack(weight: Tensor) -> Tensor:
    """[out, in] -> [out / 16, in / 2, 16, 2], dense."""
    outputs, inputs = weight.shape
    return weight.view(outputs // BLOCK, BLOCK, inputs // 2, 2).transpose(1, 2).contiguous()
