"""W4A16 for two to sixteen rows of matrices with many inputs and few outputs, on Hopper: the launches of split.cu, and which of its shapes serves
which product.

Owns compiled variants, and what a matrix needs besides: where sums of parts of K meet. Compiling happens when a variant is first asked for, which
must be before a graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from octavo.cuda import Function
from torch import Tensor

from octavo_quant_awq.kernels.cuda_driver import Matrix, compile_file, header, multiply
from octavo_quant_awq.kernels.narrow_gemm import ALONE, MOST, PROCESSORS
from octavo_quant_awq.kernels.variant import Variant

PARTS = 4
"""Blocks that share K. Two were slower at eight rows (12.1 us instead of 11.2), eight no faster."""
PAIR = 2
"""Neighbours that copy x together."""
MANY = 8192
"""Inputs from which on reading all of x costs more than adding up (measured: 14336 gains, 4096 loses)."""
LARGEST = 64 * PARTS * 128
"""Inputs for which a block has barriers."""


@dataclass(frozen=True, slots=True)
class SplitShape:
    """A block of the kernel: tokens rows of x at most (8 or 16); 32 outputs a warp, warps_n warps side by side, warps_k that share K; stages blocks
    of 128 inputs in flight a warp."""

    tokens: int
    warps_n: int
    warps_k: int
    stages: int

    @property
    def rows(self) -> int:
        return 32 * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    def taken(self, variant: Variant, inputs: int) -> int:
        """Bytes of shared memory that a block needs."""
        blocks = -(-inputs // 128 // PARTS)
        weights = self.warps_n * self.warps_k * self.stages * 2048 + blocks * variant.sub * self.rows * (2 + variant.zeros)
        return weights + self.tokens * (blocks * 256 + 16)

    def strips(self, rows: int) -> int:
        """Blocks side by side for that many outputs."""
        return -(-rows // (self.rows * PAIR)) * PAIR


def held(m: int) -> int:
    """Rows of x that a variant for m rows has room for: 8 or 16."""
    return 8 if m <= 8 else 16


def choose_shape(m: int, rows: int, inputs: int, variant: Variant) -> SplitShape | None:
    """The shape for m rows of x, 2 to 16, times a matrix [rows, inputs]: a block for every multiprocessor. None: another kernel is faster, or has to
    serve."""
    warps_n = -(-rows * PARTS // (32 * PROCESSORS))
    if inputs < MANY or inputs > LARGEST or variant.tail or warps_n > 8:
        return None
    shape = SplitShape(held(m), warps_n, 16 // warps_n, 2)
    return shape if shape.taken(variant, inputs) <= MOST else None


@cache
def function(variant: Variant, shape: SplitShape, inputs: int, device: torch.device) -> Function:
    """The compiled kernel; the first call compiles."""
    defines = variant.defines | {
        "TOKENS": shape.tokens, "ROW_TILES": 2, "WARPS_N": shape.warps_n, "WARPS_K": shape.warps_k, "STAGES": shape.stages,
        "PAIR": PAIR, "SPLIT": int(shape.tokens == 8),
    }  # fmt: skip
    module = compile_file("split.cu", defines, device, before=header("few.cuh"))
    shared = max(shape.taken(variant, inputs), ALONE)
    return Function(module, "split", threads=shape.threads, cluster=PAIR, shared=shared, dependent=True)


class Meeting:
    """Where the sums of one matrix's parts of K meet: numbers that are all EMPTY between launches (split.cu). Launches that follow each other on a stream
    share it, also where they overlap and within graphs; two streams must not use it at once."""

    def __init__(self, rows: int, shapes: list[SplitShape], device: torch.device) -> None:
        sums = max(shape.strips(rows) * (PARTS - 1) * shape.tokens * shape.rows for shape in shapes)
        self.partial = torch.full((sums,), -1, dtype=torch.int32, device=device)


def launch(
    call: Function,
    shape: SplitShape,
    meeting: Meeting,
    matrix: Matrix,
    x: Tensor,
    bias: Tensor | None,
    out: Tensor,
    group_step: int,
) -> Tensor:
    """As `multiply`."""
    return multiply(
        call, shape.strips(out.shape[1]) // PAIR, matrix, x, bias, out, group_step, y=PARTS * PAIR, more=(meeting.partial,)
    )
