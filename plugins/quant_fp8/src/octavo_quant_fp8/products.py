"""The FP8 products on CUDA: which kernel computes a Linear at how many rows.

Owns the choice between the kernels in CUDA and Triton, `torch._scaled_mm` and cuBLAS, the scratch memory of split sums, and what happens
to a plain input. Nothing here waits for the device, and all of it may be captured.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
import triton
from octavo.catalog import Device
from octavo.interfaces import Activation
from octavo_ops_triton.launch import Launcher, rows
from torch import Tensor

from octavo_quant_fp8.fused import PLAIN_ROWS, launcher, quantise_input, quantise_static, silu_mul
from octavo_quant_fp8.kernels.gemv import held_kernel, loop_kernel
from octavo_quant_fp8.kernels.mixed import mixed_kernel
from octavo_quant_fp8.kernels.product import block_kernel, product_kernel
from octavo_quant_fp8.kernels.rows import FewRows, supported
from octavo_quant_fp8.numerics import spread_groups
from octavo_quant_fp8.provider import has_units
from octavo_quant_fp8.reference import Product, input_format
from octavo_quant_fp8.tiles import Tile, block_tile, mixed_tile, product_tile, row_tile
from octavo_quant_fp8.weights import GatheredWeights

FEW = 64
"""Rows up to which Triton's kernels are taken where those in CUDA are not: they read the weight at twice `_scaled_mm`'s speed there."""


class Scratch:
    """Memory that every product of one device and process shares: partial sums, and a counter a tile that is zero
    between launches. Two products never run at once: each waits for the one before it."""

    def __init__(self, device: torch.device) -> None:
        self.sums = torch.empty(1 << 22, dtype=torch.float32, device=device)
        self.counts = torch.zeros(1 << 12, dtype=torch.int32, device=device)

    def fits(self, tiles: int, values: int) -> bool:
        return tiles <= self.counts.numel() and values <= self.sums.numel()


_scratch: dict[torch.device, Scratch] = {}


def scratch(device: torch.device) -> Scratch:
    if device not in _scratch:
        _scratch[device] = Scratch(device)
    return _scratch[device]


def cuda_product(weights: GatheredWeights, device: Device, dtype: torch.dtype, *, head: bool) -> Product:
    """The product of gathered weights on this device. A head's result is float32."""
    dtype = torch.float32 if head else dtype
    launch = launcher(device)
    if weights.scheme.activation == "none":
        return MixedProduct(weights, launch, dtype, bytewise=not has_units(device))
    return (BlockProduct if weights.scheme.weight == "block" else RowProduct)(weights, launch, dtype)


class RowProduct:
    """Weights with a scale a row, inputs that are quantised."""

    def __init__(self, weights: GatheredWeights, launch: Launcher, dtype: torch.dtype) -> None:
        self._scheme, self.format = weights.scheme, input_format(weights.scheme)
        self._data, self._scale, self._bias = weights.data, weights.scale, weights.bias
        self._input_scale, self._launch, self._dtype = weights.input_scale, launch, dtype
        n, k = self._data.shape
        self._library = n % 16 == 0 and k % 16 == 0 and dtype != torch.float32
        device = self._data.device
        self._few = FewRows(self._data, self._scale, self._bias, dtype) if supported(device, n, k) else None
        self._scratch = scratch(self._data.device)

    def __call__(self, x: Tensor | Activation) -> Tensor:
        if isinstance(x, Tensor) and x.shape[0] == PLAIN_ROWS:
            return one_row(self._launch, x, None, self._data, self._scale, self._bias, self._dtype)
        q = x if isinstance(x, Activation) else self._quantised(x)
        if q.data.shape[0] == 1:
            return one_row(self._launch, q.data, q.scale, self._data, self._scale, self._bias, self._dtype)
        if self._few is not None and self._few.serves(q.data.shape[0]):
            return self._few(q)
        if q.data.shape[0] > FEW and self._library:
            return self._scaled_mm(q)
        return self._product(q)

    def gated(self, activation: str) -> Callable[[Any], Tensor | Activation] | None:
        """interfaces.GatedLinear, where the input's format is "fp8_token"."""
        n, k = self._data.shape
        if activation != "silu" or self.format != "fp8_token" or n % 2 or row_tile(n, k).held < k:
            return None
        return self._gated

    def _gated(self, x: Tensor | Activation) -> Tensor | Activation:
        if isinstance(x, Tensor) and x.shape[0] == PLAIN_ROWS:
            return one_row(self._launch, x, None, self._data, self._scale, self._bias, self._dtype, gated=True)
        return silu_mul(self._launch, False, self(x))

    def _quantised(self, x: Tensor) -> Activation:
        if self._scheme.activation == "tensor":
            assert self._input_scale is not None
            return quantise_static(self._launch, x, self._input_scale)
        return quantise_input(self._launch, False, x, math.inf if self._scheme.bound is None else self._scheme.bound)

    def _scaled_mm(self, q: Activation) -> Tensor:
        y = torch._scaled_mm(
            q.data,
            self._data.t(),
            scale_a=q.scale,
            scale_b=self._scale.view(1, -1),
            out_dtype=torch.bfloat16,
            use_fast_accum=True,
        )
        if self._bias is not None:
            y = y + self._bias
        return y.to(self._dtype)

    def _product(self, q: Activation) -> Tensor:
        (m, k), n = q.data.shape, self._data.shape[0]
        out = torch.empty(m, n, dtype=self._dtype, device=q.data.device)
        tile = product_tile(m, n, k)
        tiles = triton.cdiv(n, tile.n) * triton.cdiv(m, tile.m)
        if tile.split > 1 and not self._scratch.fits(tiles, tiles * tile.split * tile.m * tile.n):
            tile = Tile(tile.m, tile.n, tile.k, 1, tile.warps, tile.stages)
        bias = self._scale if self._bias is None else self._bias
        tensors = (q.data, q.scale, self._data, self._scale, bias, out, self._scratch.sums, self._scratch.counts)
        constants = (n, k, rows(q.data, "fp8"), self._bias is not None, tile.m, tile.n, tile.k, tile.split)
        self._launch(product_kernel, (tiles, tile.split), tensors, (m,), constants, warps=tile.warps, stages=tile.stages)
        return out


class BlockProduct:
    """Weights with a scale for every 128 x 128 block; inputs with one a row and 128 channels."""

    def __init__(self, weights: GatheredWeights, launch: Launcher, dtype: torch.dtype) -> None:
        self.format = input_format(weights.scheme)
        self._data, self._scale, self._bias = weights.data, weights.scale, weights.bias
        self._rows = weights.block_rows().int()
        even = torch.arange(self._rows.numel(), device=self._rows.device) // 128
        self._aligned = bool((self._rows == even).all())
        self._launch, self._dtype = launch, dtype

    def __call__(self, x: Tensor | Activation) -> Tensor:
        q = x if isinstance(x, Activation) else quantise_input(self._launch, True, x)
        (m, k), n = q.data.shape, self._data.shape[0]
        out = torch.empty(m, n, dtype=self._dtype, device=q.data.device)
        tile = block_tile(m, n)
        bias = self._scale if self._bias is None else self._bias
        tensors = (q.data, q.scale, self._data, self._scale, self._rows, bias, out)
        aligned = self._aligned and 128 % tile.n == 0
        constants = (n, k, rows(q.data, "fp8"), aligned, self._bias is not None, tile.m, tile.n, 8)
        grid = (triton.cdiv(n, tile.n) * triton.cdiv(m, tile.m), 1)
        self._launch(block_kernel, grid, tensors, (m,), constants, warps=tile.warps, stages=tile.stages)
        return out


class MixedProduct:
    """Weights only: inputs stay in 16 bits. bytewise: the device has no FP8 type, so that kernels see bytes."""

    format = "plain"

    def __init__(self, weights: GatheredWeights, launch: Launcher, dtype: torch.dtype, *, bytewise: bool) -> None:
        self._data, self._scale, self._bias = weights.data, weights.scale, weights.bias
        self._blocks = weights.scheme.weight == "block"
        self._rows = weights.block_rows() if self._blocks else None
        self._row_ids = torch.zeros(1, dtype=torch.int32, device=self._data.device) if self._rows is None else self._rows.int()
        self._seen = self._data.view(torch.uint8) if bytewise else self._data
        self._launch, self._dtype = launch, dtype

    def __call__(self, x: Tensor | Activation) -> Tensor:
        assert isinstance(x, Tensor)
        if x.shape[0] == 1 and not self._blocks:
            return one_row(self._launch, x, None, self._seen, self._scale, self._bias, self._dtype)
        return self._mixed(x) if x.shape[0] <= FEW else self._library(x)

    def _mixed(self, x: Tensor) -> Tensor:
        (m, k), n = x.shape, self._data.shape[0]
        out = torch.empty(m, n, dtype=self._dtype, device=x.device)
        tile = mixed_tile(m, blocks=self._blocks)
        bias = self._scale if self._bias is None else self._bias
        constants = (n, k, rows(x, "fp8"), self._blocks, self._bias is not None, tile.m, tile.n, tile.k)
        grid = (triton.cdiv(n, tile.n) * triton.cdiv(m, tile.m), 1)
        tensors = (x, self._seen, self._scale, self._row_ids, bias, out)
        self._launch(mixed_kernel, grid, tensors, (m,), constants, warps=tile.warps, stages=tile.stages)
        return out

    def _library(self, x: Tensor) -> Tensor:
        """Many rows: the weight is widened once, which costs little beside the product."""
        weight = self._data.to(x.dtype)
        if self._rows is not None:
            weight.mul_(spread_groups(self._scale[self._rows], weight.shape[1]))
        y = torch.mm(x, weight.t(), out_dtype=torch.float32)
        if self._rows is None:
            y.mul_(self._scale)
        if self._bias is not None:
            y += self._bias
        return y.to(self._dtype)


def one_row(
    launch: Launcher, x: Tensor, x_scale: Tensor | None, data: Tensor, scale: Tensor, bias: Tensor | None, dtype: torch.dtype,
    *, gated: bool = False,
) -> Tensor:  # fmt: skip
    """x [1, K], in 16 bits or (with x_scale) FP8, times data [N, K] with a scale a row: [1, N] of dtype; gated: [1, N / 2], silu of the
    first half of them times the second (only where `row_tile` holds whole rows)."""
    n, k = data.shape
    tile = row_tile(n, k)
    out = torch.empty(1, n // 2 if gated else n, dtype=dtype, device=x.device)
    tensors = (x, scale if x_scale is None else x_scale, data, scale, scale if bias is None else bias, out)
    plain, biased, whole = x_scale is None, bias is not None, tile.held >= k
    constants = (n, k, plain, gated, biased, tile.n, tile.held) if whole else (n, k, plain, biased, tile.held, tile.n, tile.k)
    kernel = held_kernel if whole else loop_kernel
    launch(kernel, (triton.cdiv(n, tile.n), 1), tensors, (), constants, warps=tile.warps, stages=tile.stages)
    return out
