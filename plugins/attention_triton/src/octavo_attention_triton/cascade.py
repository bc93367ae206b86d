"""Shared prefixes of a decode step, from the host's list of rows to what the kernels read.

Owns the choice whether a step is worth it, the cutting into tiles, and the static device buffers that a captured
graph reads. Rows are attention rows of the step, which in a decode step are its tokens.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np
import torch
from octavo.interfaces import SharedPrefix, StepHost

from octavo_attention_triton.kernels.shared import BLOCK_M, BLOCK_N, FEW_ROWS, FEW_ROWS_PARTS, INFO, MAX_PARTS

SHORTEST_PART = 256
"""Tokens of a prefix below which it is not read in more parts."""

SPARE_TILES = 8
"""A set of rows may end with a tile that is not full; there are at most that many sets."""


def worth(shared: tuple[SharedPrefix, ...], token_bytes: int, least: int) -> tuple[SharedPrefix, ...]:
    """The prefixes, whole tiles long, if reading them once saves `least` bytes a layer; else none."""
    cut = tuple(SharedPrefix(s.rows, s.tokens // BLOCK_N * BLOCK_N, s.group) for s in shared if s.tokens >= BLOCK_N)
    saved = sum((len(s.rows) - 1) * s.tokens for s in cut) * token_bytes
    return cut if cut and saved >= least else ()


def most_parts(rows: int) -> int:
    """In how many parts a prefix may be read in a step of so many rows (padding included)."""
    return FEW_ROWS_PARTS if rows <= FEW_ROWS else MAX_PARTS


def partial_rows(max_rows: int) -> int:
    """Rows of partial results that any step of up to max_rows rows needs: of every part, and of what a row has of its own."""
    return max(rows * (most_parts(rows) + 1) for rows in (min(max_rows, FEW_ROWS), max_rows))


@dataclass(slots=True)
class Cascade:
    """Static buffers for layers of one head group. skip int32 [max_rows]: tokens that a row leaves to the prefix; parts
    int32 [max_rows]: in how many parts its prefix is read (0: it has none); tiles int32 [tiles, INFO], members int32
    [tiles, rows of a tile] (-1: nobody)."""

    group: int
    max_rows: int
    buffer: torch.Tensor
    last: np.ndarray
    key: tuple[object, ...] = ()
    """What the buffers were made of: steps that decode have the same prefixes for many steps."""

    @classmethod
    def make(cls, group: int, max_rows: int, device: torch.device) -> Cascade:
        rows = BLOCK_M // group
        size = 2 * max_rows + (-(-max_rows // rows) + SPARE_TILES) * (INFO + rows)
        return cls(group, max_rows, torch.zeros(size, dtype=torch.int32, device=device), np.zeros(size, np.int32))

    @property
    def most_tiles(self) -> int:
        return -(-self.max_rows // (BLOCK_M // self.group)) + SPARE_TILES

    def tiles_for(self, rows: int) -> int:
        """Tiles that a step of so many rows may need: what a captured grid has."""
        return min(self.most_tiles, -(-rows // (BLOCK_M // self.group)) + SPARE_TILES)

    @property
    def skip(self) -> torch.Tensor:
        return self.buffer[: self.max_rows]

    @property
    def parts(self) -> torch.Tensor:
        return self.buffer[self.max_rows : 2 * self.max_rows]

    @property
    def tiles(self) -> torch.Tensor:
        return self.buffer[2 * self.max_rows :][: self.most_tiles * INFO]

    @property
    def members(self) -> torch.Tensor:
        return self.buffer[2 * self.max_rows + self.most_tiles * INFO :]

    def update(self, shared: tuple[SharedPrefix, ...], host: StepHost, kv_heads: int, sms: int) -> None:
        """Bring the buffers to this step's prefixes; nothing is done where they are what they were."""
        prefixes = tuple((s.rows.tobytes(), s.tokens, int(host.rows[s.rows[0]])) for s in shared)
        key = (kv_heads, sms, len(host.rows), prefixes)
        if key == self.key:
            return
        self.key = key
        rows, most = BLOCK_M // self.group, self.most_tiles
        fresh = np.zeros_like(self.last)
        skip, parts = fresh[: self.max_rows], fresh[self.max_rows : 2 * self.max_rows]
        tiles = fresh[2 * self.max_rows :][: most * INFO].reshape(most, INFO)
        members = fresh[2 * self.max_rows + most * INFO :].reshape(most, rows)
        members[:] = -1
        counts = [-(-len(s.rows) // rows) for s in shared]
        at = 0
        for prefix, count in zip(shared, counts, strict=True):
            room = 2 * sms // max(1, sum(counts) * kv_heads)
            pieces = max(1, min(most_parts(len(host.rows)), room, prefix.tokens // SHORTEST_PART))
            skip[prefix.rows], parts[prefix.rows] = prefix.tokens, pieces
            tiles[at : at + count, :3] = int(host.rows[prefix.rows[0]]), prefix.tokens, pieces
            members[at : at + count].reshape(-1)[: len(prefix.rows)] = prefix.rows
            at += count
        if not np.array_equal(fresh, self.last):
            self.last = fresh
            sent = torch.from_numpy(fresh)
            self.buffer.copy_(sent.pin_memory() if self.buffer.is_cuda else sent, non_blocking=True)
