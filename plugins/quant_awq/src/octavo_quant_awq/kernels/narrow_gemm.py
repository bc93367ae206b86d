"""W4A16 for one to eight rows on Hopper: the launches of narrow.cu, and which of its shapes serves which product.

Owns compiled variants, one per (rows of x that are held, shape of a block). Compiling happens when a variant is first asked for, which must be before a
graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from typing import Literal

import torch
from torch import Tensor

from octavo_quant_awq.kernels.cuda_driver import CudaFunction, compile_file
from octavo_quant_awq.kernels.variant import Variant

Gate = Literal["", "silu", "gelu_tanh"]
"""What becomes of the halves of a product: nothing, or act(first) * second."""
GATES: tuple[Gate, ...] = ("", "silu", "gelu_tanh")
ROWS = 8
"""The most rows of x."""
PROCESSORS = 132
"""Multiprocessors of the GPU that shapes were measured on; others take the same."""
MOST = 226 << 10
"""Bytes of shared memory that a block may have."""
ALONE = 117 << 10
"""Bytes of shared memory that leave no room for a second block."""
PAIR = 112 << 10
"""Bytes of shared memory that leave room for one."""
THIRD = 78 << 10
"""Bytes of shared memory that leave no room for two more."""


@dataclass(frozen=True, slots=True)
class NarrowShape:
    """A block of the kernel: 16 * row_tiles outputs a warp, warps_n warps side by side, warps_k over K, and `cluster` blocks that share
    K; stages blocks of 128 inputs in flight a warp; scaled: operands in float16, x scaled by powers of two; pair: a multiprocessor holds two blocks, of two
    kernels."""

    row_tiles: int
    warps_n: int
    warps_k: int
    stages: int
    cluster: int
    scaled: bool
    pair: bool

    @property
    def rows(self) -> int:
        return 16 * self.row_tiles * self.warps_n

    @property
    def threads(self) -> int:
        return 32 * self.warps_n * self.warps_k

    @property
    def private(self) -> bool:
        """Whether every warp reads x for itself."""
        return self.pair and self.warps_n <= 2

    @property
    def split(self) -> bool:
        """Whether there are registers for two chains of sums."""
        return self.row_tiles < 4 and 65536 // self.threads // (2 if self.pair else 1) >= 88

    def taken(self, variant: Variant, tokens: int, inputs: int) -> int:
        """Bytes of shared memory that a block uses for `tokens` rows of x of that many inputs."""
        blocks, warps = (_blocks(inputs) + self.cluster - 1) // self.cluster, self.warps_n * self.warps_k
        weights = warps * self.stages * self.row_tiles * 1024 + blocks * variant.sub * self.rows * (2 + variant.zeros)
        pad = 16 if tokens > 1 else 0
        if self.private and not self.scaled:
            return weights + warps * self.stages * tokens * (256 + pad)
        return weights + tokens * (blocks * 256 + pad + (blocks * variant.sub * 16 if self.scaled else 0))

    def shared(self, variant: Variant, tokens: int, inputs: int) -> int:
        """Bytes of shared memory that a block asks for, with what keeps others out."""
        return max(self.taken(variant, tokens, inputs), THIRD if self.pair else ALONE)

    def fits(self, variant: Variant, tokens: int, inputs: int) -> bool:
        return self.taken(variant, tokens, inputs) <= (PAIR if self.pair else MOST)


def _blocks(inputs: int) -> int:
    return -(-inputs // 128)


def held(m: int) -> int:
    """Rows of x that a variant for m rows has room for: 1, 4 or 8."""
    return 1 if m == 1 else 4 if m <= 4 else 8


def choose_shape(m: int, rows: int, inputs: int, variant: Variant) -> NarrowShape | None:
    """The shape for m rows of x times a matrix [rows, inputs]: as many outputs for each multiprocessor. None: another kernel is faster, or no block has
    room for x."""
    tokens, tiles = held(m), -(-rows // 16)
    each = -(-tiles // (PROCESSORS * -(-tiles // (28 * PROCESSORS))))  # tiles a block, in as few waves of blocks as there can be
    if each > 3:
        warps_n = -(-each // 2)
        shape = NarrowShape(2, warps_n, max(1, min(4, 28 // warps_n, _blocks(inputs))), 2 if m == 1 else 1, 1, m == 1, False)
    elif m == 1:
        shape = NarrowShape(each, 1, min(16, _blocks(inputs)), 2, 1, each == 3, False)
    else:
        return None
    return shape if shape.fits(variant, tokens, inputs) else None


@cache
def function(variant: Variant, tokens: int, shape: NarrowShape, inputs: int, gate: Gate, device: torch.device) -> CudaFunction:
    """The compiled kernel for up to `tokens` rows of x (1: for one); the first call compiles."""
    defines = variant.defines | {
        "TAIL": int(variant.tail), "TOKENS": tokens, "ROW_TILES": shape.row_tiles, "WARPS_N": shape.warps_n, "WARPS_K": shape.warps_k,
        "STAGES": shape.stages, "SCALED": int(shape.scaled), "PRIVATE": int(shape.private), "SPLIT": int(shape.split),
        "MIN_BLOCKS": 2 if shape.pair else 1, "GATED": GATES.index(gate),
    }  # fmt: skip
    module = compile_file("narrow.cu", defines, device)
    shared = shape.shared(variant, tokens, inputs)
    return CudaFunction(module, "narrow", threads=shape.threads, cluster=shape.cluster, shared=shared, dependent=True)


def launch(
    call: CudaFunction, shape: NarrowShape, words: Tensor, scales: Tensor, zeros: Tensor | None, x: Tensor, bias: Tensor | None,
    rows: int, out: Tensor, group_step: int,
) -> Tensor:  # fmt: skip
    """out [M, N] = x [M, K] W^T + bias, or of a gated function [M, N / 2], for W of N `rows`. x's rows must be dense and start at multiples of 16 bytes."""
    m, k = x.shape
    pointers = (words.data_ptr(), scales.data_ptr(), zeros.data_ptr() if zeros is not None else 0, x.data_ptr(),
                bias.data_ptr() if bias is not None else 0, out.data_ptr())  # fmt: skip
    strips = -(-rows // shape.rows)
    if shape.pair and strips * shape.cluster > PROCESSORS // 2:
        strips = max(strips, PROCESSORS // shape.cluster)  # none for a second block of this grid beside another
    call(strips, 1, pointers, (m, rows, k, x.stride(0), group_step))
    return out
