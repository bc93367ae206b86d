"""One Linear's FP8 weights, gathered from the checkpoint's matrices as they come.

Owns which tensors are declared, the checks of their scales, and quantising plain weights on their way in: one matrix
at a time, so that no second copy of a model ever exists. Knows no kernel.

A layer made of several matrices (q, k, v) keeps each one's scales: a matrix with one scale has it spread over its rows,
so that nothing is requantised and no row is left without.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from octavo.errors import LoadError
from octavo.interfaces import Weights
from torch import Tensor

from octavo_quant_fp8.numerics import E4M3, as_scale, quantise_rows
from octavo_quant_fp8.scheme import BLOCK, Scheme

Fill = Callable[[Tensor], None]
SCALE_DTYPES = ("float32", "bfloat16", "float16")
BLOCK_SCALE_DTYPES = (*SCALE_DTYPES, "uint8", "float8_e8m0fnu")


def grid(size: int) -> int:
    """Blocks that cover `size` rows or columns; the last may be partly empty."""
    return -(-size // BLOCK)


class GatheredWeights:
    """data: e4m3 [N, K], the matrices side by side. scale: float32 [N] (one a row), or for blocks
    [sum of each matrix's ceil(rows / 128), ceil(K / 128)], in the matrices' order. input_scale: float32 [1] where the
    checkpoint has them, the largest of the matrices'. bias: [N] or None. Complete once `missing` is empty."""

    def __init__(
        self,
        names: dict[str, int],
        in_features: int,
        scheme: Scheme,
        *,
        bias: bool,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
    ) -> None:
        self.names, self.columns, self.scheme = names, in_features, scheme
        self.rows = sum(names.values())
        self.missing: set[str] = set()
        self._device, self._dtype, self._weights = device, dtype, weights
        self._data: Tensor | None = None
        self._scale: Tensor | None = None
        self.input_scale: Tensor | None = None
        self.bias: Tensor | None = None
        start = block = 0
        for name, rows in names.items():
            self._declare(name, start, rows, block)
            if bias:
                self._ask(f"{name}.bias", (rows,), self._bias_filler(start, rows))
            start, block = start + rows, block + grid(rows)
        self._block_rows = block

    @property
    def data(self) -> Tensor:
        if self._data is None:
            self._data = torch.empty(self.rows, self.columns, dtype=E4M3, device=self._device)
        return self._data

    @property
    def scale(self) -> Tensor:
        if self._scale is None:
            shape = (self._block_rows, grid(self.columns)) if self.scheme.weight == "block" else (self.rows,)
            self._scale = torch.empty(shape, dtype=torch.float32, device=self._device)
        return self._scale

    def block_rows(self) -> Tensor:
        """int64 [N]: the row of `scale` that holds the scales of each output row, for block scales."""
        found, block = [], 0
        for rows in self.names.values():
            found.append(torch.arange(rows, device=self._device) // BLOCK + block)
            block += grid(rows)
        return torch.cat(found)

    def check(self) -> None:
        """LoadError if a weight is not a number: e4m3 has two bytes for that, and kernels that read bytes do not know them."""
        wrong = int(((self.data.view(torch.uint8) & 0x7F) == 0x7F).sum())
        if wrong:
            raise LoadError(f"{' and '.join(self.names)}: {wrong} weights are NaN")

    # ------------------------------------------------------------ what is declared

    def _declare(self, name: str, start: int, rows: int, block: int) -> None:
        shape = (rows, self.columns)
        if not self.scheme.stored:
            self._ask(f"{name}.weight", shape, lambda t: self._quantise(f"{name}.weight", t, start, rows))
            return
        self._ask(f"{name}.weight", shape, lambda t: self._keep(t, start, rows), ("float8_e4m3fn",))
        scale_name = f"{name}.{self.scheme.scale_name}"
        if self.scheme.weight == "block":
            blocks = (grid(rows), grid(self.columns))
            self._ask(scale_name, blocks, lambda t: self._scale_blocks(scale_name, t, block), BLOCK_SCALE_DTYPES)
        elif self.scheme.weight == "channel":
            self._ask(scale_name, (rows, 1), lambda t: self._scale_rows(scale_name, t, start, rows), SCALE_DTYPES)
        else:
            self._ask(scale_name, None, lambda t: self._scale_matrix(scale_name, t, start, rows), SCALE_DTYPES)
        if self.scheme.input_scales:
            given = f"{name}.{self.scheme.input_scale_name}"
            self._ask(given, None, lambda t: self._input(given, t), SCALE_DTYPES)

    def _ask(self, name: str, shape: tuple[int, ...] | None, fill: Fill, dtypes: tuple[str, ...] = ()) -> None:
        self.missing.add(name)

        def take(tensor: Tensor) -> None:
            fill(tensor)
            self.missing.discard(name)

        self._weights.declare(name, shape, take, dtypes=dtypes)

    # ------------------------------------------------------------ what comes

    def _keep(self, tensor: Tensor, start: int, rows: int) -> None:
        self.data[start : start + rows].copy_(tensor)

    def _quantise(self, name: str, tensor: Tensor, start: int, rows: int) -> None:
        data, scale = quantise_rows(tensor.to(self._device))
        if not bool(scale.isfinite().all()):
            raise LoadError(f"{name} has a value that is not finite: it cannot be quantised")
        self.data[start : start + rows].copy_(data)
        self.scale[start : start + rows].copy_(scale.view(-1))

    def _scale_matrix(self, name: str, tensor: Tensor, start: int, rows: int) -> None:
        if tensor.numel() != 1:
            raise LoadError(f"{name} has the shape {list(tensor.shape)}; one scale for the matrix is expected")
        self.scale[start : start + rows].fill_(float(checked(name, tensor)))

    def _scale_rows(self, name: str, tensor: Tensor, start: int, rows: int) -> None:
        self.scale[start : start + rows].copy_(checked(name, tensor).view(-1))

    def _scale_blocks(self, name: str, tensor: Tensor, block: int) -> None:
        self.scale[block : block + tensor.shape[0]].copy_(checked(name, tensor))

    def _input(self, name: str, tensor: Tensor) -> None:
        if tensor.numel() != 1:
            raise LoadError(f"{name} has the shape {list(tensor.shape)}; one scale for the input is expected")
        scale = checked(name, tensor).view(1).to(self._device)
        self.input_scale = scale if self.input_scale is None else torch.maximum(self.input_scale, scale)

    def _bias_filler(self, start: int, rows: int) -> Fill:
        def fill(tensor: Tensor) -> None:
            if self.bias is None:
                self.bias = torch.empty(self.rows, dtype=self._dtype, device=self._device)
            self.bias[start : start + rows].copy_(tensor)

        return fill


def checked(name: str, tensor: Tensor) -> Tensor:
    """The scale in float32. LoadError, with the first wrong value, unless all are positive and finite."""
    scale = as_scale(tensor)
    wrong = ~(scale.isfinite() & (scale > 0))
    if bool(wrong.any()):
        raise LoadError(
            f"{name} has the value {float(scale[wrong][0])!r} ({int(wrong.sum())} of {scale.numel()}); scales are positive and finite"
        )
    return scale
