"""How 4-bit weights lie in checkpoints, and how they lie in memory: one integer per weight in between.

Owns every nibble order. The values in between are q, z uint8 in 0..15 and s, with w = (q - z) * s and no off-by-one on
z in any of them: `Grouped` holds a matrix [out, in] of q with z and s of every group of inputs. Must never know about
files, layers or kernels; everything runs where its tensors are.

The layout in memory, which `blocked` makes, is that of the kernels. Inputs are taken in blocks of 128. Word (block, row,
lane, step) of int32 [blocks, out, 4, 4] holds eight inputs of an output row: of the pairs of neighbours 128 * block + 32 * step + 8 * p +
2 * lane, those of p = 0..3, the even input of each in nibble p and the odd one in nibble 4 + p. These are the inputs that lane `lane` of four
needs for two tensor-core instructions, so that activations stay in their order; what it needs of 128 inputs are 16 bytes that lie together, and a shift
by four bits gives a pair. Scales and zero points lie as `paired` says: those of the two rows that a lane needs are one load.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
"""Nibble i of an AWQ word holds element ORDER[i]."""
INVERSE = (0, 4, 1, 5, 2, 6, 3, 7)
"""Element i of an AWQ word is in nibble INVERSE[i]."""
SEQUENTIAL = tuple(range(8))
BLOCK = 128
"""Inputs of one block of the layout in memory."""
TILE = 16
"""Rows are padded to a multiple of this."""


@dataclass(slots=True)
class Grouped:
    """Some output rows of a matrix. q uint8 [rows, in]; scales [rows, groups], float16, bfloat16 or float32; zeros uint8
    [rows, groups], or None where z is 8 everywhere. Group g covers inputs g * group to (g + 1) * group."""

    q: Tensor
    scales: Tensor
    zeros: Tensor | None
    group: int

    def dequantised(self, dtype: torch.dtype = torch.float32) -> Tensor:
        """w [rows, in], computed in float32 (float64 where that is asked for) and rounded once."""
        wide = torch.float64 if dtype == torch.float64 else torch.float32
        zeros: Tensor | int = 8 if self.zeros is None else spread(self.zeros.to(wide), self.group, self.q.shape[1])
        return ((self.q.to(wide) - zeros) * spread(self.scales.to(wide), self.group, self.q.shape[1])).to(dtype)


def spread(values: Tensor, group: int, inputs: int) -> Tensor:
    """[rows, groups] -> [rows, inputs]: each group's value for each of its inputs."""
    return values.repeat_interleave(group, 1)[:, :inputs]


def unpack(words: Tensor, order: tuple[int, ...] = SEQUENTIAL) -> Tensor:
    """int32 [..., n] -> uint8 [..., 8 n]: element i of a word is its nibble order[i]. Masked after the shift, because
    the shift of a negative word brings ones."""
    shifts = torch.tensor([4 * nibble for nibble in order], dtype=torch.int32, device=words.device)
    return ((words.unsqueeze(-1) >> shifts) & 15).to(torch.uint8).flatten(-2)


def pack(values: Tensor, order: tuple[int, ...] = SEQUENTIAL) -> Tensor:
    """uint8 [..., 8 n] of 0..15 -> int32 [..., n]: the inverse of `unpack` of the same order."""
    nibbles = values.unflatten(-1, (-1, 8))
    words = torch.zeros(nibbles.shape[:-1], dtype=torch.int32, device=values.device)
    for element, nibble in enumerate(order):
        words |= nibbles[..., element].to(torch.int32) << (4 * nibble)
    return words


def blocked(q: Tensor) -> Tensor:
    """uint8 [rows, in] -> int32 [blocks, rows, 4, 4], the layout of the module's docstring. Inputs past the last are
    nibbles of 0, which kernels must meet with activations of 0."""
    rows, inputs = q.shape
    blocks = -(-inputs // BLOCK)
    if blocks * BLOCK != inputs:
        q = torch.nn.functional.pad(q, (0, blocks * BLOCK - inputs))
    by_lane = q.view(rows, blocks, 4, 4, 4, 2).transpose(3, 4)  # step, lane, pair, which of it
    words = pack(by_lane.reshape(rows, blocks * BLOCK), INVERSE)  # [rows, blocks * 16], word 4 * step + lane of a block
    return words.view(rows, blocks, 4, 4).permute(1, 0, 3, 2).contiguous()


def unblocked(words: Tensor, inputs: int) -> Tensor:
    """The inverse of `blocked`: uint8 [rows, inputs]."""
    blocks, rows = words.shape[:2]
    by_lane = unpack(words.permute(1, 0, 3, 2).reshape(rows, blocks * 16), INVERSE)
    return by_lane.view(rows, blocks, 4, 4, 4, 2).transpose(3, 4).reshape(rows, blocks * BLOCK)[:, :inputs]


def paired(values: Tensor) -> Tensor:
    """[groups, rows] -> [groups, rows], rows a multiple of 16: of every 16 rows, row i comes next to row i + 8."""
    groups, rows = values.shape
    return values.view(groups, rows // 16, 2, 8).transpose(2, 3).reshape(groups, rows)


def unpaired(values: Tensor) -> Tensor:
    """The inverse of `paired`."""
    groups, rows = values.shape
    return values.view(groups, rows // 16, 8, 2).transpose(2, 3).reshape(groups, rows)
