"""The products of few rows, by either kernel: which shape of which kernel serves how many rows of which matrix.

Owns the choice, which follows measurements on an H200 (benchmarks/RESULTS.md, `benchmarks/w4a16.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from torch import Tensor

from octavo_quant_awq.kernels import cuda_gemm, triton_gemm, wide_gemm
from octavo_quant_awq.kernels.cuda_gemm import Variant

NARROW_ROWS = 32
"""Rows up to which w4a16.cu is faster than wide.cu."""


class CudaProduct:
    """The CUDA kernels on one matrix: w4a16.cu for few rows, and on Hopper wide.cu for more. Everything that it may need is
    compiled when it is made."""

    name = "cuda"

    def __init__(
        self, words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, dtype: torch.dtype, rows: int,
        inputs: int, sub: int, step: int,
    ) -> None:  # fmt: skip
        self._tensors, self._bias, self._step = (words, scales, zeros), bias, step
        self._rows, self._inputs, self._device = rows, inputs, words.device
        self._variant = Variant(
            dtype == torch.bfloat16, scales.dtype == torch.bfloat16, zeros is not None, sub, inputs % 128 != 0
        )
        self._hopper = wide_gemm.supported(words.device)
        self.limit = wide_gemm.MAX_ROWS if self._hopper else cuda_gemm.MAX_ROWS
        self._narrow = dict.fromkeys((1, 2, 4) if self._hopper else (1, 2, 4, 8))
        jobs: list[Callable[[], Any]] = [lambda t=tiles: self._narrow_call(t) for tiles in self._narrow]
        if self._hopper:
            jobs += [lambda m=m: self._wide_call(m) for m in wide_gemm.TOKENS]
        with ThreadPoolExecutor(len(jobs)) as pool:  # compiling leaves the interpreter to others
            list(pool.map(self._on_device, jobs))

    def _on_device(self, job: Callable[[], Any]) -> Any:
        with torch.cuda.device(self._device):  # a thread starts on the first GPU
            return job()

    def _narrow_call(self, tiles: int) -> Any:
        shape = cuda_gemm.choose_shape(tiles, self._rows, self._inputs, clusters=self._hopper)
        return cuda_gemm.function(self._variant, tiles, shape, self._device, self._hopper), shape

    def _wide_call(self, m: int) -> Any:
        shape = wide_gemm.choose_shape(m, self._rows, self._inputs)
        return wide_gemm.functions(self._variant, shape, self._device), shape

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N], M up to `limit`."""
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            x = x.contiguous()
        out = x.new_empty(len(x), self._rows)
        if not len(x):
            return out
        if self._hopper and len(x) > NARROW_ROWS:
            made, wide = self._wide_call(len(x))
            return wide_gemm.launch(made, wide, *self._tensors, x, self._bias, out, self._step)
        tiles = cuda_gemm.token_tiles(len(x))
        call, shape = self._narrow_call(tiles)
        return cuda_gemm.launch(call, shape, tiles, *self._tensors, x, self._bias, out, self._step)

    def dequantise(self, out: Tensor, first: int) -> Tensor:
        """out [count, K]: that many rows of the weights from `first` on."""
        if not self._hopper:
            return triton_gemm.dequantise(*self._tensors, out, first=first, sub=self._variant.sub, group_step=self._step)
        made, _ = self._wide_call(self.limit)
        return wide_gemm.dequantise(made, *self._tensors, out, first=first, rows=self._rows, group_step=self._step)


class TritonProduct:
    """triton_gemm.py on one matrix."""

    name = "triton"
    limit = triton_gemm.MAX_ROWS

    def __init__(
        self, words: Tensor, scales: Tensor, zeros: Tensor | None, bias: Tensor | None, dtype: torch.dtype, rows: int,
        inputs: int, sub: int, step: int,
    ) -> None:  # fmt: skip
        self._tensors, self._bias, self._rows, self._inputs = (words, scales, zeros), bias, rows, inputs
        self._groups = {"sub": sub, "group_step": step}

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N], M up to `limit`."""
        out = x.new_empty(len(x), self._rows)
        if not len(x):
            return out
        tuning = triton_gemm.choose(len(x), self._rows, self._inputs)
        x = x if x.stride(1) == 1 else x.contiguous()
        return triton_gemm.multiply(*self._tensors, x, self._bias, out, **tuning, **self._groups)

    def dequantise(self, out: Tensor, first: int) -> Tensor:
        """out [count, K]: that many rows of the weights from `first` on."""
        return triton_gemm.dequantise(*self._tensors, out, first=first, **self._groups)
