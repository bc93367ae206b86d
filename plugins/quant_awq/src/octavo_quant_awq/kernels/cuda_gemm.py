"""W4A16 for few rows on GPUs before Hopper: the launches of w4a16.cu, and which of its shapes serves which product.

Owns compiled variants, one per (token tiles, shape of a block). Compiling happens when a variant is first asked for, which
must be before a graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from octavo.cuda import Function
from torch import Tensor

from octavo_quant_awq.kernels.cuda_driver import Matrix, compile_file, multiply
from octavo_quant_awq.kernels.variant import Variant


@dataclass(frozen=True, slots=True)
class Shape:
    """A block of the kernel: 16 * row_tiles outputs a warp, warps_n warps side by side, warps_k over K, and `cluster`
    blocks that share K; stages blocks of 128 inputs in flight a warp; min_blocks that a multiprocessor must
    hold; sums: zero points are subtracted from products instead of from weights."""

    row_tiles: int
    warps_n: int
    warps_k: int
    cluster: int
    stages: int
    min_blocks: int = 1
    sums: bool = False

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k


def token_tiles(m: int) -> int:
    """Tiles of eight tokens that a block takes for m rows: 1, 2, 4 or 8; more rows are more blocks."""
    return min(8, 1 << max(0, (m - 1).bit_length() - 3))


SMALL_TILES = 2
"""Tiles of eight tokens up to which zero points are subtracted from products."""
PROCESSORS = 132
"""Multiprocessors of the GPU that shapes were measured on; others take the same."""


def choose_shape(tiles: int, rows: int, inputs: int, *, clusters: bool) -> Shape:
    """The block for `tiles` tiles of eight tokens times a matrix [rows, inputs]: as many outputs a warp as leave every
    multiprocessor enough to read, K divided among the warps of a block and, where blocks are few, among blocks."""
    strips, blocks = -(-rows // 32), -(-inputs // 128)
    deep = clusters and strips > PROCESSORS * 7 // 8 and blocks >= 64
    wide = strips > PROCESSORS or deep
    if tiles > 4:
        return Shape(1, 4, 2, 1, 2)
    if strips >= 4 * PROCESSORS:
        return Shape(2, 1, 4, 1, 1 if tiles == 1 else 2, 4 if tiles <= SMALL_TILES else 3, tiles <= SMALL_TILES)
    if tiles > SMALL_TILES:
        return Shape(2, 1, 4, 2, 2, 1 if deep else 3) if wide and clusters else Shape(2, 1, 8, 1, 2)
    cluster, count = 2 if deep else 1, strips if wide else -(-rows // 16)
    while clusters and cluster < 8 and count * cluster < PROCESSORS // 2 and 16 * cluster <= blocks:
        cluster *= 2
    return Shape(2 if wide else 1, 1, 8, cluster, 2, 2 if wide else 1, True)


@cache
def function(variant: Variant, tiles: int, shape: Shape, device: torch.device, dependent: bool) -> Function:
    """The compiled kernel; the first call compiles."""
    defines = variant.defines | {
        "TAIL": int(variant.tail), "TOKEN_TILES": tiles, "ROW_TILES": shape.row_tiles, "WARPS_N": shape.warps_n,
        "WARPS_K": shape.warps_k, "STAGES": shape.stages, "MIN_BLOCKS": shape.min_blocks, "SUMS": int(shape.sums),
    }  # fmt: skip
    module = compile_file("w4a16.cu", defines, device)
    shared = 4 * shape.warps_k * 8 * tiles * (shape.rows + 4)
    return Function(module, "w4a16", threads=shape.threads, cluster=shape.cluster, shared=shared, dependent=dependent)


def launch(
    call: Function, shape: Shape, tiles: int, matrix: Matrix, x: Tensor, bias: Tensor | None, out: Tensor, group_step: int
) -> Tensor:
    """As `multiply`."""
    return multiply(call, -(-out.shape[1] // shape.rows), matrix, x, bias, out, group_step, z=-(-len(x) // (8 * tiles)))
