"""The Linear of 4-bit weights: one or more checkpoint modules side by side, re-arranged once as they are read.

Owns the declaring and filling; layouts of the checkpoint are `formats`, of the memory `gpu` and `cpu`. Every tensor is read in
slices of rows into its final place, so that loading holds no more than a slice besides.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Protocol

import torch
from octavo.interfaces import Weights
from torch import Tensor

from octavo_quant_awq.formats import Format, check_shape
from octavo_quant_awq.settings import Scheme

SLICE = 1 << 20
"""Weights that are unpacked at a time."""


Taker = Callable[[str, int, int, Tensor], None]
"""(tensor's name, first row of its module in the matrix, the module's rows, tensor)"""


class Matrix(Protocol):
    """A matrix in memory and its product; what `gpu.GpuMatrix` and `cpu.CpuMatrix` are."""

    name: str

    def put_q(self, at: int, q: Tensor) -> None: ...
    def put_scales(self, at: int, scales: Tensor) -> None: ...
    def put_zeros(self, at: int, zeros: Tensor) -> None: ...
    def put_bias(self, at: int, bias: Tensor) -> None: ...
    def finish(self) -> None: ...
    def weights(self, start: int, stop: int) -> Tensor: ...
    def __call__(self, x: Tensor) -> Tensor: ...


class FourBitLinear:
    """interfaces.Linear of 4-bit modules that share one input. `make(rows, group)` gives the empty matrix."""

    activation = "plain"

    def __init__(
        self,
        parts: Mapping[str, int],
        inputs: int,
        *,
        bias: bool,
        scheme: Scheme,
        form: Format,
        weights: Weights,
        device: torch.device,
        make: Callable[[int, int], Matrix],
    ) -> None:
        """parts: checkpoint module names and their output features. LoadError if a module's shape does not fit the scheme."""
        self.out_features, self._inputs, self._device, self._format = sum(parts.values()), inputs, device, form
        groups = {check_shape(name, scheme, rows, inputs) for name, rows in parts.items()}
        (self._group,) = groups
        self._make = lambda: make(self.out_features, self._group)
        self._matrix: Matrix | None = None
        self._waiting: set[str] = set()
        takers: Mapping[str, Taker] = {
            "q": self._take_q, "zeros": self._take_zeros, "scales": self._take_scales, "check": self._check,
        }  # fmt: skip
        offset = 0
        for module, rows in parts.items():
            for end, stored in form.tensors(rows, inputs, self._group).items():
                name = f"{module}.{end}"
                if not stored.optional:
                    self._waiting.add(name)
                fill = partial(self._fill, takers[stored.part], name, offset, rows)
                weights.declare(name, stored.shape, fill, optional=stored.optional, dtypes=stored.dtypes)
            if bias:
                name = f"{module}.bias"
                self._waiting.add(name)
                weights.declare(name, (rows,), partial(self._fill, self._take_bias, name, offset, rows))
            offset += rows

    def _fill(self, take: Taker, name: str, offset: int, rows: int, tensor: Tensor) -> None:
        take(name, offset, rows, tensor.to(self._device))
        if name in self._waiting:  # a tensor that only confirms may come when the matrix is finished
            self._waiting.remove(name)
            if not self._waiting:
                self.matrix.finish()

    @property
    def matrix(self) -> Matrix:
        """Its memory is taken when the first tensor comes."""
        if self._matrix is None:
            self._matrix = self._make()
        return self._matrix

    def _take_q(self, name: str, offset: int, rows: int, tensor: Tensor) -> None:
        step = max(8, SLICE // self._inputs // 8 * 8)
        for start in range(0, rows, step):
            stop = min(start + step, rows)
            self.matrix.put_q(offset + start, self._format.q(tensor, start, stop)[:, : self._inputs])

    def _take_zeros(self, name: str, offset: int, rows: int, tensor: Tensor) -> None:
        self.matrix.put_zeros(offset, self._format.zeros(tensor, rows, self._inputs // self._group))

    def _take_scales(self, name: str, offset: int, rows: int, tensor: Tensor) -> None:
        self.matrix.put_scales(offset, self._format.scales(tensor, rows, self._inputs // self._group))

    def _take_bias(self, name: str, offset: int, rows: int, tensor: Tensor) -> None:
        self.matrix.put_bias(offset, tensor)

    def _check(self, name: str, offset: int, rows: int, tensor: Tensor) -> None:
        self._format.check(name, tensor, rows, self._inputs, self._group)

    def finish(self) -> None:
        if self._waiting:
            raise RuntimeError(f"a Linear is used before it is filled; missing: {', '.join(sorted(self._waiting))}")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        return self._matrix(x)  # type: ignore[misc]

    def dequantised(self) -> Tensor:
        """w [out, in] in the model's dtype, from what lies in memory: for tests and tools."""
        return self.matrix.weights(0, self.out_features)
