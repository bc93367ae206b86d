"""The products of few rows, by either kernel: which shape of a kernel serves which matrix and how many rows.

Owns the choice, which follows measurements on an H200 (benchmarks/RESULTS.md, `benchmarks/w4a16.py --sweep`).
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_quant_awq.kernels import cuda_gemm, triton_gemm
from octavo_quant_awq.kernels.cuda_gemm import Variant


class CudaProduct:
    """w4a16.cu on one matrix; everything that it may need is compiled when it is made."""

    name = "cuda"

    def __init__(
        self, words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, dtype: torch.dtype, rows: int,
        inputs: int, sub: int, step: int,
    ) -> None:  # fmt: skip
        self._tensors, self._bias, self._step, self._rows = (words, scales, zeros), bias, step, rows
        variant = Variant(dtype == torch.bfloat16, scales.dtype == torch.bfloat16, zeros is not None, sub, inputs % 128 != 0)
        dependent = torch.cuda.get_device_capability(words.device) >= (9, 0)
        self._calls = {}
        for tiles in (1, 2, 4, 8):
            shape = cuda_gemm.choose_shape(tiles, self._rows, inputs, clusters=dependent)
            self._calls[tiles] = (cuda_gemm.function(variant, tiles, shape, words.device, dependent), shape)

    def takes(self, m: int) -> bool:
        return m <= cuda_gemm.MAX_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N], M as `takes` says."""
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            x = x.contiguous()
        out = x.new_empty(len(x), self._rows)
        if not len(x):
            return out
        tiles = cuda_gemm.token_tiles(len(x))
        call, shape = self._calls[tiles]
        return cuda_gemm.launch(call, shape, tiles, *self._tensors, x, self._bias, out, self._step)


class TritonProduct:
    """triton_gemm.py on one matrix."""

    name = "triton"

    def __init__(
        self, words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, dtype: torch.dtype, rows: int,
        inputs: int, sub: int, step: int,
    ) -> None:  # fmt: skip
        self._tensors, self._bias, self._rows = (words, scales, zeros), bias, rows
        self._groups = {"sub": sub, "group_step": step}
        self._inputs = inputs

    def takes(self, m: int) -> bool:
        return m <= triton_gemm.MAX_ROWS

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N], M as `takes` says."""
        out = x.new_empty(len(x), self._rows)
        if not len(x):
            return out
        tuning = triton_gemm.choose(len(x), self._rows, self._inputs)
        return triton_gemm.multiply(*self._tensors, x, self._bias, out, **tuning, **self._groups)
