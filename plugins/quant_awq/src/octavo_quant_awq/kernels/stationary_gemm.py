"""W4A16 for up to 16 rows of matrices whose inputs a block can hold in registers, on Hopper: the launches of stationary.cu, and its shapes.

Owns compiled variants. Compiling happens when a variant is first asked for, which must be before a graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from octavo.cuda import Function
from torch import Tensor

from octavo_quant_awq.kernels.cuda_driver import Matrix, compile_file, multiply
from octavo_quant_awq.kernels.narrow_gemm import ALONE, MOST, PROCESSORS
from octavo_quant_awq.kernels.variant import Variant

STAGES = 2
"""Tiles in flight a warp; more delay x (at 8 rows and 28672 outputs, 16.5 us with four, 15.6 with two)."""
MOST_TURNS = 4
"""Blocks of 128 inputs whose x a warp has registers for: 255 a lane with eight warps and 16 rows, 128 with sixteen warps and 8 rows."""
FEWEST_TILES = 2
"""Tiles of 16 outputs a block from which on x is worth its way into registers. At 9 to 16 rows with two tiles ring.cu takes no longer alone, but blocks gather
around its kernels: the products of a layer in a row took 51 us with it and 46 without."""


@dataclass(frozen=True, slots=True)
class StationaryShape:
    """tokens: rows of x that a block holds (8 or 16); tiles: of 16 outputs, a block; warps: they share K; turns: blocks of 128 inputs of a warp, at
    most; uneven: some warps have fewer."""

    tokens: int
    tiles: int
    warps: int
    turns: int
    uneven: bool

    @property
    def rows(self) -> int:
        return 16 * self.tiles

    @property
    def threads(self) -> int:
        return 32 * self.warps

    @property
    def compiled(self) -> dict[str, int]:
        """The macros."""
        return {
            "TOKENS": self.tokens, "TILES": self.tiles, "WARPS": self.warps, "TURNS": self.turns, "STAGES": STAGES, "UNEVEN": int(self.uneven),
        }  # fmt: skip

    def taken(self, variant: Variant) -> int:
        """Bytes of shared memory that a block needs, besides some hundreds for barriers."""
        notes = variant.sub * self.tiles * (32 + 16 * variant.zeros)
        return self.warps * self.turns * (256 * self.tokens + 1024 * STAGES + notes)


def held(m: int) -> int:
    """Rows of x that a variant for m rows has room for."""
    return 8 if m <= 8 else 16


@cache
def choose_shape(m: int, rows: int, inputs: int, variant: Variant) -> StationaryShape | None:
    """The shape for m rows of x times a matrix [rows, inputs]: one block for every multiprocessor, and all with as many outputs, in as few waves of
    blocks as have room for scales. None: x has no room in registers, or is not worth its way there."""
    tokens, blocks, tiles = held(m), -(-inputs // 128), -(-rows // 16)
    warps = 16 if tokens == 8 and blocks >= 16 else 8
    turns = -(-blocks // warps)
    if blocks < warps or turns > MOST_TURNS:
        return None
    for waves in range(1, 9):
        each = -(-tiles // (PROCESSORS * waves))
        shape = StationaryShape(tokens, each, warps, turns, blocks % warps != 0)
        if each < FEWEST_TILES:
            return None
        if shape.taken(variant) + 1024 <= MOST:
            return shape
    return None


@cache
def function(variant: Variant, shape: StationaryShape, device: torch.device) -> Function:
    """The compiled kernel; the first call compiles."""
    module = compile_file("stationary.cu", variant.defines | {"TAIL": int(variant.tail)} | shape.compiled, device)
    shared = max(shape.taken(variant), ALONE)
    return Function(module, "stationary", threads=shape.threads, cluster=1, shared=shared, dependent=True)


def launch(
    call: Function, shape: StationaryShape, matrix: Matrix, x: Tensor, bias: Tensor | None, out: Tensor, group_step: int
) -> Tensor:
    """As `multiply`."""
    return multiply(call, -(-out.shape[1] // shape.rows), matrix, x, bias, out, group_step)
