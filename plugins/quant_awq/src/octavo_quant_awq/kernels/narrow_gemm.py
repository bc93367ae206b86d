"""W4A16 for one to eight rows on Hopper: the launches of narrow.cu, and which of its shapes serves which product.

Owns compiled variants, one per (rows of x that are held, shape of a block). Compiling happens when a variant is first asked for, which must be before a
graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from octavo.cuda import Function
from torch import Tensor

from octavo_quant_awq.kernels.cuda_driver import Matrix, compile_file, header, multiply
from octavo_quant_awq.kernels.variant import Variant

PROCESSORS = 132
"""Multiprocessors of the GPU that shapes were measured on; others take the same."""
MOST = 226 << 10
"""Bytes of shared memory that a block may have."""
ALONE = 117 << 10
"""Bytes of shared memory that leave a multiprocessor no room for a second block. With room, blocks of the kernel that follows gather on the first
multiprocessors that are free, and all wait for those: the products of a layer in a row took 52.6 us instead of 35.9."""


@dataclass(frozen=True, slots=True)
class NarrowShape:
    """A block of the kernel: 16 * row_tiles outputs a warp, warps_n warps side by side, warps_k that share K; stages blocks of 128 inputs in flight a
    warp."""

    row_tiles: int
    warps_n: int
    warps_k: int
    stages: int

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    @property
    def split(self) -> bool:
        """Whether there are registers for two chains of sums."""
        return self.row_tiles < 4 and self.threads <= 512

    def taken(self, variant: Variant, tokens: int, inputs: int) -> int:
        """Bytes of shared memory that a block needs for `tokens` rows of x of that many inputs."""
        blocks, warps, pad = _blocks(inputs), self.warps_n * self.warps_k, 16 if tokens > 1 else 0
        weights = warps * self.stages * self.row_tiles * 1024 + blocks * variant.sub * self.rows * (2 + variant.zeros)
        if self.warps_n == 1:
            return weights + warps * self.stages * tokens * (256 + pad)
        return weights + tokens * (blocks * 256 + pad) + -(-blocks * variant.sub * tokens * 4 // 16) * 16


def _blocks(inputs: int) -> int:
    return -(-inputs // 128)


def held(m: int) -> int:
    """Rows of x that a variant for m rows has room for: 1, 4 or 8."""
    return 1 if m == 1 else 4 if m <= 4 else 8


def choose_shape(m: int, rows: int, inputs: int, variant: Variant) -> NarrowShape | None:
    """The shape for m rows of x times a matrix [rows, inputs]: one block for every multiprocessor, and all with as many outputs. None: x and scales
    have no room."""
    tiles, blocks = -(-rows // 16), _blocks(inputs)
    each = -(-tiles // (PROCESSORS * -(-tiles // (28 * PROCESSORS))))  # tiles a block, in as few waves of blocks as there can be
    if each <= 4:
        shapes = [NarrowShape(each, 1, min(8 if m == 1 and blocks < 64 else 16, blocks), 2)]
    else:
        warps_n = -(-each // 2)
        warps_k = max(1, min(4, 28 // warps_n, blocks))
        shapes = [NarrowShape(2, warps_n, warps_k, stages) for stages in ((2, 1) if m <= 4 else (1,))]
    return next((shape for shape in shapes if shape.taken(variant, held(m), inputs) <= MOST), None)


@cache
def function(variant: Variant, tokens: int, shape: NarrowShape, inputs: int, device: torch.device) -> Function:
    """The compiled kernel for up to `tokens` rows of x (1: for one); the first call compiles."""
    defines = variant.defines | {
        "TAIL": int(variant.tail), "TOKENS": tokens, "ROW_TILES": shape.row_tiles, "WARPS_N": shape.warps_n, "WARPS_K": shape.warps_k,
        "STAGES": shape.stages, "SPLIT": int(shape.split),
    }  # fmt: skip
    shared = max(shape.taken(variant, tokens, inputs), ALONE)
    module = compile_file("narrow.cu", defines, device, before=header("few.cuh"))
    return Function(module, "narrow", threads=shape.threads, cluster=1, shared=shared, dependent=True)


def launch(
    call: Function, shape: NarrowShape, matrix: Matrix, x: Tensor, bias: Tensor | None, out: Tensor, group_step: int
) -> Tensor:
    """As `multiply`."""
    return multiply(call, -(-out.shape[1] // shape.rows), matrix, x, bias, out, group_step)
