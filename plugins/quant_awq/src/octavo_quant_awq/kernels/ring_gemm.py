"""W4A16 for tens of rows on Hopper: the launches of ring.cu, and which division of work serves which product.

Owns compiled variants. Compiling happens when a variant is first asked for, which must be before a graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache

import torch
from octavo.cuda import Function
from torch import Tensor

from octavo_quant_awq.kernels.cuda_driver import Matrix, compile_file, header, multiply
from octavo_quant_awq.kernels.variant import Variant, stage_bytes

PROCESSORS = 132
"""Multiprocessors of the GPU that shapes were measured on; others take the same."""
SHARED = 227 << 10
"""Bytes of shared memory that blocks of a multiprocessor may take together."""
BLOCKS = 2
"""Blocks that a multiprocessor holds: one of this kernel, one of the next."""
CLUSTER = 2
"""Neighbours that share K. Multiprocessors come in pairs, so that every one of them has a block."""


@dataclass(frozen=True, slots=True)
class RingShape:
    """tokens: rows of x that a block holds (8, 16 or 32); warps: side by side, of 16 outputs each; parts: sets of them that share K; stages: blocks of
    128 inputs in flight, a multiple of parts."""

    tokens: int
    warps: int
    parts: int
    stages: int

    @property
    def rows(self) -> int:
        return 16 * self.warps

    @property
    def threads(self) -> int:
        return 32 * self.warps * self.parts + 64

    @property
    def compiled(self) -> dict[str, int]:
        """The macros."""
        return {
            "TOKENS": self.tokens, "TILES": 1, "WARPS": self.warps, "PARTS": self.parts, "STAGES": self.stages, "MIN_BLOCKS": BLOCKS,
        }  # fmt: skip

    def shared(self, variant: Variant) -> int:
        """Bytes: the ring, then what all have of the sums of the tiles that a block adds up; no less than keeps a multiprocessor from holding more
        than `BLOCKS`, which would gather on some while others are free."""
        ring = self.stages * stage_bytes(self.rows, self.tokens, variant, align=1024)
        pieces = 64 * self.tokens * -(-self.warps // CLUSTER) * CLUSTER * self.parts
        return max(ring + pieces, SHARED // (BLOCKS + 1))

    def grid(self, rows: int) -> int:
        """Blocks along x for that many outputs: all multiprocessors have as many blocks of the kernel."""
        blocks = -(-rows // self.rows) * CLUSTER
        return -(-blocks // PROCESSORS) * PROCESSORS // CLUSTER


def tokens_of(m: int) -> int:
    """Rows of x that a block holds for m of them."""
    return max(8, 1 << (m - 1).bit_length())


@cache
def choose_shape(m: int, rows: int, inputs: int, variant: Variant) -> RingShape:
    """The shape for m rows of x, up to 32, times a matrix [rows, inputs]: a block for each multiprocessor, and as deep a ring as leaves room
    for a block of the next kernel."""
    tiles, each = -(-rows // 16), -(-inputs // 128 // CLUSTER)
    waves = -(-tiles * CLUSTER // (16 * PROCESSORS))
    warps = -(-tiles * CLUSTER // (waves * PROCESSORS))
    parts = max(1, min(12 // warps, each // 6))
    shape = RingShape(tokens_of(m), warps, parts, parts)
    for stages in range(parts, 13, parts):
        deeper = RingShape(tokens_of(m), warps, parts, stages)
        if BLOCKS * (deeper.shared(variant) + 2048) <= SHARED:
            shape = deeper
    return shape


@cache
def function(variant: Variant, shape: RingShape, device: torch.device) -> Function:
    """The compiled kernel; the first call compiles."""
    module = compile_file("ring.cu", variant.defines | shape.compiled, device, before=header("cluster.cuh"))
    return Function(module, "ring", threads=shape.threads, cluster=CLUSTER, shared=shape.shared(variant), dependent=True)


def launch(
    call: Function, shape: RingShape, matrix: Matrix, x: Tensor, bias: Tensor | None, out: Tensor, group_step: int
) -> Tensor:
    """As `multiply`."""
    return multiply(call, shape.grid(out.shape[1]), matrix, x, bias, out, group_step, box=shape.tokens)
