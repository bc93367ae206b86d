"""The products of a matrix by either kind of kernel: which shape of which kernel serves how many rows.

Owns the choice, which follows measurements on an H200 (benchmarks/RESULTS.md, `benchmarks/w4a16.py`).
"""

from __future__ import annotations

from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import torch
from octavo.cuda import Function
from torch import Tensor

from octavo_quant_awq.kernels import (
    cuda_gemm,
    library,
    narrow_gemm,
    ring_gemm,
    split_gemm,
    stationary_gemm,
    triton_gemm,
    warpgroup_gemm,
)
from octavo_quant_awq.kernels.limits import NARROW_ROWS, OTHER_ROWS, RING_ROWS, SPLIT_ROWS, STATIONARY_ROWS, WARPGROUP_ROWS
from octavo_quant_awq.kernels.variant import Variant


def is_hopper(device: torch.device) -> bool:
    """Whether this GPU has what narrow.cu, stationary.cu, split.cu, ring.cu and warpgroup.cu need."""
    return torch.cuda.get_device_capability(device)[0] == 9


class CudaProduct:
    """The CUDA kernels on one matrix: w4a16.cu, or on Hopper narrow.cu, stationary.cu and split.cu for few rows, ring.cu for tens and warpgroup.cu for more.
    Everything that it may need is compiled when it is made."""

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
        self._hopper = is_hopper(words.device)
        self.limit = WARPGROUP_ROWS if self._hopper else OTHER_ROWS
        jobs: list[Callable[[], Any]] = []
        if not self._hopper:
            jobs += [lambda m=m: self._other(m) for m in (8, 16, 32, 64)]
        else:
            split = {m: shape for m in (8, 16) if (shape := split_gemm.choose_shape(m, rows, inputs, self._variant))}
            self._split_shapes = split  # by the rows that variants have room for
            self._meeting = split_gemm.Meeting(rows, list(split.values()), self._device) if split else None
            jobs += [lambda m=m: self._split(m) for m in split]
            standing = {m: shape for m in (8, 16) if (shape := stationary_gemm.choose_shape(m, rows, inputs, self._variant))}
            self._standing = standing  # shapes of stationary.cu, by the rows that they have room for
            jobs += [
                lambda shape=shape: stationary_gemm.function(self._variant, shape, self._device) for shape in standing.values()
            ]
            self._held = {m for m in (1, 4, 8) if self._narrow_shape(m)}  # rows that variants of narrow.cu have room for
            several = min(SPLIT_ROWS[0], STATIONARY_ROWS[0])
            jobs += [lambda m=m: self._narrow(m) for m in self._held if m < several or (8 not in split and 8 not in standing)]
            first = NARROW_ROWS + 1 if 8 in self._held else 1  # of the rows that none of these serves
            if first > NARROW_ROWS and 16 in split | standing:
                first = 17
            self._ring_rows = 0 if warpgroup_gemm.fills(rows) else RING_ROWS
            jobs += [lambda m=m: self._ring(m) for m in (8, 16, 32) if first <= m <= self._ring_rows]
            shapes = warpgroup_gemm.shapes(rows, inputs, max(first, self._ring_rows + 1), WARPGROUP_ROWS)
            jobs += [lambda shape=shape: warpgroup_gemm.function(self._variant, shape, self._device) for shape in shapes]
        jobs.append(lambda: library.function(self._variant, self._device))
        with ThreadPoolExecutor(len(jobs)) as pool:  # compiling leaves the interpreter to others
            list(pool.map(self._on_device, jobs))

    def _on_device(self, job: Callable[[], Any]) -> Any:
        with torch.cuda.device(self._device):  # a thread starts on the first GPU
            return job()

    def _split(self, m: int) -> tuple[Function, split_gemm.SplitShape]:
        shape = self._split_shapes[split_gemm.held(m)]
        return split_gemm.function(self._variant, shape, self._inputs, self._device), shape

    def _stationary(self, m: int) -> tuple[Function, stationary_gemm.StationaryShape]:
        shape = self._standing[stationary_gemm.held(m)]
        return stationary_gemm.function(self._variant, shape, self._device), shape

    def _narrow_shape(self, m: int) -> narrow_gemm.NarrowShape | None:
        return narrow_gemm.choose_shape(m, self._rows, self._inputs, self._variant)

    def _narrow(self, m: int) -> tuple[Function, narrow_gemm.NarrowShape]:
        shape, tokens = self._narrow_shape(m), narrow_gemm.held(m)
        assert shape is not None
        return narrow_gemm.function(self._variant, tokens, shape, self._inputs, self._device), shape

    def _ring(self, m: int) -> tuple[Function, ring_gemm.RingShape]:
        shape = ring_gemm.choose_shape(ring_gemm.tokens_of(m), self._rows, self._inputs, self._variant)
        return ring_gemm.function(self._variant, shape, self._device), shape

    def _other(self, m: int) -> Any:
        tiles = cuda_gemm.token_tiles(m)
        shape = cuda_gemm.choose_shape(tiles, self._rows, self._inputs, clusters=False)
        return cuda_gemm.function(self._variant, tiles, shape, self._device, False), shape, tiles

    def _warpgroup(self, m: int) -> Any:
        shape = warpgroup_gemm.choose_shape(m, self._rows, self._inputs)
        return warpgroup_gemm.function(self._variant, shape, self._device), shape

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] -> [M, N], M up to `limit`."""
        if x.stride(1) != 1 or x.stride(0) % 8 or x.data_ptr() % 16:
            x = x.contiguous()
        out = x.new_empty(len(x), self._rows)
        if not len(x):
            return out
        if not self._hopper:
            return cuda_gemm.launch(*self._other(len(x)), self._tensors, x, self._bias, out, self._step)
        if SPLIT_ROWS[0] <= len(x) <= SPLIT_ROWS[1] and split_gemm.held(len(x)) in self._split_shapes:
            assert self._meeting is not None
            return split_gemm.launch(*self._split(len(x)), self._meeting, self._tensors, x, self._bias, out, self._step)
        if STATIONARY_ROWS[0] <= len(x) <= STATIONARY_ROWS[1] and stationary_gemm.held(len(x)) in self._standing:
            return stationary_gemm.launch(*self._stationary(len(x)), self._tensors, x, self._bias, out, self._step)
        if len(x) <= NARROW_ROWS and narrow_gemm.held(len(x)) in self._held:
            return narrow_gemm.launch(*self._narrow(len(x)), self._tensors, x, self._bias, out, self._step)
        if len(x) <= self._ring_rows:
            return ring_gemm.launch(*self._ring(len(x)), self._tensors, x, self._bias, out, self._step)
        return warpgroup_gemm.launch(*self._warpgroup(len(x)), self._tensors, x, self._bias, out, self._step)

    def dequantise(self, out: Tensor, first: int) -> Tensor:
        """out [count, K]: that many rows of the weights from `first` on."""
        call = library.function(self._variant, self._device)
        return library.dequantise(call, *self._tensors, out, first=first, rows=self._rows, group_step=self._step)


class TritonProduct:
    """triton_gemm.py on one matrix."""

    name = "triton"
    limit = OTHER_ROWS

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
