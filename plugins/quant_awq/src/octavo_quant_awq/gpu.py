"""4-bit matrices on a GPU: kernels that read the 4 bits; for very many rows, 16-bit weights made once a call, and cuBLAS.

Owns which of the two takes a step, and the tensors that kernels read. The border was measured (benchmarks/RESULTS.md).
"""

from __future__ import annotations

from importlib.util import find_spec
from typing import Literal

import torch
import torch.nn.functional as F
from octavo.errors import PluginError
from torch import Tensor

from octavo_quant_awq.packing import BLOCK, TILE, blocked, paired

Kernel = Literal["auto", "cuda", "triton"]
SCRATCH = 128 << 20
"""Weights that are dequantised at a time, in elements: a bound on the memory that a step takes besides."""


def choose_kernel(asked: Kernel) -> Literal["cuda", "triton"]:
    """The kernel for few rows: the one named, or CUDA where CuPy is there to compile it. PluginError without either."""
    there = {"cuda": find_spec("cupy") is not None, "triton": find_spec("triton") is not None}
    if asked != "auto" and not there[asked]:
        raise PluginError(f"quantizer option kernel={asked!r}: {'cupy' if asked == 'cuda' else 'triton'} is not installed")
    if not there["triton"]:
        raise PluginError("4-bit weights on a GPU need triton, which is not installed")
    if asked == "auto":
        return "cuda" if there["cuda"] else "triton"
    return asked


class GpuMatrix:
    """interfaces.Linear's product of one matrix [rows, inputs], filled by rows with the `put` methods, then `finish`ed.

    words int32 [blocks, rows, 4, 4] as `packing.blocked` lays them; scales [groups, rows] float16 or bfloat16 and zeros uint8
    [groups, rows] or None, `paired` once it is finished. Rows are padded to whole tiles; groups, where they are smaller than a
    block of inputs, to whole blocks, with scales of 0."""

    def __init__(
        self,
        rows: int,
        inputs: int,
        group: int,
        *,
        zeros: bool,
        bias: bool,
        dtype: torch.dtype,
        device: torch.device,
        kernel: Kernel,
    ) -> None:
        self._rows, self._inputs, self._dtype, self._device = rows, inputs, dtype, device
        blocks, self._groups = -(-inputs // BLOCK), inputs // group
        self.sub = BLOCK // group if group < BLOCK and self._groups > 1 else 1
        self.step = 0 if self._groups == 1 else 1
        self._padded = (blocks * self.sub if self.sub > 1 else self._groups, -(-rows // TILE) * TILE)
        self.words = torch.empty(blocks, self._padded[1], 4, 4, dtype=torch.int32, device=device)
        self.words[:, rows:] = 0
        self.scales: Tensor | None = None
        self.zeros = torch.zeros(self._padded, dtype=torch.uint8, device=device) if zeros else None
        self.bias = torch.empty(rows, dtype=dtype, device=device) if bias else None
        self._kernel = choose_kernel(kernel)
        self.name = ""

    def put_q(self, at: int, q: Tensor) -> None:
        """q uint8 [rows, inputs], for rows from `at` on."""
        self.words[:, at : at + len(q)] = blocked(q)

    def put_scales(self, at: int, scales: Tensor) -> None:
        if self.scales is None:
            self.scales = torch.zeros(self._padded, dtype=scales.dtype, device=self._device)
        self.scales[: self._groups, at : at + len(scales)] = scales.T

    def put_zeros(self, at: int, zeros: Tensor) -> None:
        assert self.zeros is not None
        self.zeros[: self._groups, at : at + len(zeros)] = zeros.T

    def put_bias(self, at: int, bias: Tensor) -> None:
        assert self.bias is not None
        self.bias[at : at + len(bias)] = bias

    def finish(self) -> None:
        """Make the products. Compiles kernels, so it must come before any graph is captured."""
        from octavo_quant_awq.kernels.products import CudaProduct, TritonProduct

        if self.scales is None:
            raise RuntimeError("a 4-bit matrix is used before its scales are filled")
        self.scales = paired(self.scales)
        self.zeros = None if self.zeros is None else paired(self.zeros)
        make = CudaProduct if self._kernel == "cuda" and self._inputs % 8 == 0 else TritonProduct
        self._few = make(
            self.words, self.scales, self.zeros, self.bias, self._dtype, self._rows, self._inputs, self.sub, self.step
        )
        self.name = f"w4a16 {self._few.name}"

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, inputs] -> [T, rows]. Waits for nothing; may be captured."""
        if len(x) <= self._few.limit:
            return self._few(x)
        step = max(1, SCRATCH // self._inputs)
        if step >= self._rows:
            return F.linear(x, self.weights(0, self._rows), self.bias)
        out = x.new_empty(len(x), self._rows)
        for start in range(0, self._rows, step):
            stop = min(start + step, self._rows)
            out[:, start:stop] = F.linear(x, self.weights(start, stop), None if self.bias is None else self.bias[start:stop])
        return out

    def weights(self, start: int, stop: int) -> Tensor:
        """w [stop - start, inputs] in the model's dtype."""
        out = torch.empty(stop - start, self._inputs, dtype=self._dtype, device=self._device)
        return self._few.dequantise(out, start)
