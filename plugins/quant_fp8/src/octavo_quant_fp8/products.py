"""The FP8 products on CUDA: which kernel computes a Linear at how many rows.

Owns the choice between Triton's kernels and `torch._scaled_mm`, the scratch memory of split sums, and what happens to a
plain input. Nothing here waits for the device, and all of it may be captured.
"""

from __future__ import annotations

import math

import torch
import triton
from octavo.catalog import Device
from octavo.interfaces import Activation
from octavo_ops_triton.launch import Launcher, rows
from torch import Tensor

from octavo_quant_fp8.fused import PLAIN_ROWS, launcher, quantise_input, quantise_static
from octavo_quant_fp8.kernels.gemv import held_kernel, loop_kernel
from octavo_quant_fp8.kernels.product import block_kernel, product_kernel
from octavo_quant_fp8.reference import Product, input_format
from octavo_quant_fp8.tiles import Tile, block_tile, product_tile, row_tile
from octavo_quant_fp8.weights import GatheredWeights

FEW = 64
"""Rows up to which the Triton kernel is taken: it reads the weight at twice `_scaled_mm`'s speed there."""


AHEAD = 1
"""Kilobytes of each weight row that a product asks for before its input is there, where rows are long enough."""


class Scratch:
    """Memory that every product of one device and process shares: partial sums, and a counter a tile that is zero
    between launches. Two products never run at once: each waits for the one before it."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self.sums = torch.empty(1 << 22, dtype=torch.float32, device=device)
        self.counts = torch.zeros(1 << 14, dtype=torch.int32, device=device)

    def fits(self, tiles: int, values: int) -> bool:
        return tiles <= self.counts.numel() and values <= self.sums.numel()


_scratch: dict[torch.device, Scratch] = {}


def scratch(device: torch.device) -> Scratch:
    if device not in _scratch:
        _scratch[device] = Scratch(device)
    return _scratch[device]


def cuda_product(weights: GatheredWeights, device: Device, dtype: torch.dtype, *, head: bool) -> Product:
    """The product of gathered weights on this device. A head's result is float32."""
    kind = BlockProduct if weights.scheme.weight == "block" else RowProduct
    return kind(weights, launcher(device), torch.float32 if head else dtype)


class RowProduct:
    """Weights with a scale a row."""

    def __init__(self, weights: GatheredWeights, launch: Launcher, dtype: torch.dtype) -> None:
        self._scheme, self.format = weights.scheme, input_format(weights.scheme)
        self._data, self._scale, self._bias = weights.data, weights.scale, weights.bias
        self._input_scale, self._launch, self._dtype = weights.input_scale, launch, dtype
        n, k = self._data.shape
        self._library = n % 16 == 0 and k % 16 == 0 and dtype != torch.float32
        self._scratch = scratch(self._data.device)
        self._ahead = AHEAD if k % 16 == 0 and k >= 4096 else 0

    def __call__(self, x: Tensor | Activation) -> Tensor:
        if self._scheme.activation == "none":
            assert isinstance(x, Tensor)
            return self._weights_only(x)
        if isinstance(x, Tensor) and x.shape[0] <= PLAIN_ROWS:
            return self._small(x, None)  # one row is not worth quantising
        q = x if isinstance(x, Activation) else self._quantised(x)
        if q.data.shape[0] > FEW and self._library:
            return self._scaled_mm(q)
        return self._small(q.data, q.scale)

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

    def _weights_only(self, x: Tensor) -> Tensor:
        if x.shape[0] <= FEW:
            return self._small(x, None)
        y = torch.mm(x, self._data.to(x.dtype).t(), out_dtype=torch.float32).mul_(self._scale)
        if self._bias is not None:
            y += self._bias
        return y.to(self._dtype)

    def _small(self, x: Tensor, x_scale: Tensor | None) -> Tensor:
        (m, k), n = x.shape, self._data.shape[0]
        if m == 1:
            return self._one(x, x_scale)
        out = torch.empty(m, n, dtype=self._dtype, device=x.device)
        tile = product_tile(m, n, k, plain=x_scale is None)
        tiles = triton.cdiv(n, tile.n) * triton.cdiv(m, tile.m)
        if tile.split > 1 and not self._scratch.fits(tiles, tiles * tile.split * tile.m * tile.n):
            tile = Tile(tile.m, tile.n, tile.k, 1, tile.warps, tile.stages)
        bias = self._bias
        tensors = (
            x, self._scale if x_scale is None else x_scale, self._data, self._scale, self._scale if bias is None else bias, out,
            self._scratch.sums, self._scratch.counts,
        )  # fmt: skip
        constants = (n, k, rows(x, "fp8"), x_scale is None, bias is not None, tile.m, tile.n, tile.k, tile.split, self._ahead)
        self._launch(product_kernel, (tiles, tile.split), tensors, (m,), constants, warps=tile.warps, stages=tile.stages)
        return out

    def _one(self, x: Tensor, x_scale: Tensor | None) -> Tensor:
        n, k = self._data.shape
        out = torch.empty(1, n, dtype=self._dtype, device=x.device)
        scale, bias = self._scale if x_scale is None else x_scale, self._scale if self._bias is None else self._bias
        tile = row_tile(k)
        kernel = held_kernel if tile.held else loop_kernel
        constants = (n, k, x_scale is None, self._bias is not None, tile.n, tile.k)
        tensors = (x, scale, self._data, self._scale, bias, out)
        self._launch(kernel, (triton.cdiv(n, tile.n), 1), tensors, (), constants, warps=tile.warps, stages=tile.stages)
        return out


class BlockProduct:
    """Weights with a scale for every 128 x 128 block; inputs with one a row and 128 channels, or plain."""

    def __init__(self, weights: GatheredWeights, launch: Launcher, dtype: torch.dtype) -> None:
        self._plain, self.format = weights.scheme.activation == "none", input_format(weights.scheme)
        self._data, self._scale, self._bias = weights.data, weights.scale, weights.bias
        self._rows = weights.block_rows().int()
        count = self._rows.numel()
        even = torch.arange(count, device=self._rows.device) // 128
        self._aligned = bool((self._rows == even).all())
        self._launch, self._dtype = launch, dtype

    def __call__(self, x: Tensor | Activation) -> Tensor:
        if self._plain:
            assert isinstance(x, Tensor)
            data, scale = x, self._scale
        else:
            q = x if isinstance(x, Activation) else quantise_input(self._launch, True, x)
            data, scale = q.data, q.scale
        (m, k), n = data.shape, self._data.shape[0]
        out = torch.empty(m, n, dtype=self._dtype, device=data.device)
        tile = block_tile(m, n)
        tensors = (data, scale, self._data, self._scale, self._rows, self._scale if self._bias is None else self._bias, out)
        constants = (
            n, k, rows(data, "fp8"), self._aligned and 128 % tile.n == 0, self._plain, self._bias is not None, tile.m, tile.n, 8,
        )  # fmt: skip
        grid = (triton.cdiv(n, tile.n) * triton.cdiv(m, tile.m), 1)
        self._launch(block_kernel, grid, tensors, (m,), constants, warps=tile.warps, stages=tile.stages)
        return out
