"""What the torch backend works out once a step and reuses in every layer of a KV group.

Owns the split of a step's rows into tiles and the cache entries that each tile reads. An *entry* is a
line of the cache seen as [blocks * planes * block_size, width]: K or V of one head of one token (planes are
K heads, then V heads; a latent cache has one, whose entries are both).
Only entries of tokens that the row holds are ever listed, so that whatever lies in free blocks or in
the unused tail of a block is never read, not even to be masked.
"""

from __future__ import annotations

import math
import sys
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.interfaces import KVGroup, Step

SHORT_QUERY, MEDIUM_QUERY, MEDIUM_KEYS = 16, 128, 512
"""Rows of at most SHORT_QUERY new tokens, or of MEDIUM_QUERY with MEDIUM_KEYS keys, are computed together, padded
to the largest of their tile: many small products cost more than a padded one. Others are computed alone."""

TILE_SCORES, TILE_BYTES = 1 << 19, 64 << 20
"""Bounds of a tile of several rows: scores of one head, padding included, and gathered keys and values."""

KEY_STEP = 16
"""Keys of several rows are padded to a multiple of this: a matrix library that generates code for each
shape (oneDNN takes up to half a millisecond) then meets a new one every 16th step, not every step."""

ROW_BLOCK = 128
"""Queries of one long row that are computed at a time: its scores are [kv_heads, group * 128, keys]. Blocks
end at positions that are multiples of it, so that their shapes recur."""


@dataclass(slots=True)
class ShortTile:
    """B rows of at most Q new tokens over at most L keys each, computed as one batch.

    queries: int64 [B * Q] into the step's tokens (a row with fewer repeats its last; None: the whole
    step in order). entries: int64 [2 * B * kv_heads * L], K then V (padding repeats the row's last
    key). hidden: bool [B, 1, Q, 1, L - clear], True where the key is not visible; None: everything is.
    The first `clear` keys are visible to all.
    """

    size: int
    queries: Tensor | None
    query_len: int
    entries: Tensor
    keys: int
    hidden: Tensor | None
    clear: int
    _bias: Tensor | None = None

    def bias(self, dtype: torch.dtype) -> Tensor | None:
        """For tiles of one new token a row: what to add to scores, [B, 1, 1, L], 0 or -inf. Made once."""
        if self.hidden is not None and self._bias is None:
            self._bias = torch.zeros(self.size, 1, 1, self.keys, dtype=dtype, device=self.hidden.device)
            self._bias[..., self.clear :].masked_fill_(self.hidden[:, :, :, 0], -math.inf)
        return self._bias


@dataclass(slots=True)
class LongTile:
    """One row: its new tokens are step tokens [start, start + length) at positions from `position`; its
    keys are positions [first, position + length). entries: int64 [2 * kv_heads * keys], K then V."""

    start: int
    length: int
    position: int
    first: int
    entries: Tensor


@dataclass(slots=True)
class GroupPlan:
    """writes: int64 [T * planes], the entries that each token's K heads, then V heads are stored in. stores: int64, the
    tokens that `writes` speaks of where they are not all."""

    writes: Tensor
    short: list[ShortTile]
    long: list[LongTile]
    stores: Tensor | None = None


@dataclass(slots=True)
class _Rows:
    """Columns over attention rows, int64 on the host: new tokens, tokens after the step, first step token,
    first key that any new token sees, and the state-table row."""

    new: np.ndarray
    ends: np.ndarray
    starts: np.ndarray
    firsts: np.ndarray
    slots: np.ndarray

    def pick(self, chosen: np.ndarray) -> _Rows:
        return _Rows(*(getattr(self, name)[chosen] for name in self.__slots__))


class GroupPlanner:
    """Plans steps of one KV group, whose cache is on `device`. expands: rows with at least so many new tokens are left
    out (AttentionLayer.expands; 0: none), and so are those with less than `least`."""

    def __init__(self, group: KVGroup, device: torch.device, expands: int = 0, least: int = 1) -> None:
        self._expands, self._least = expands or sys.maxsize, least
        self._index, self._size, self._window = group.index, group.block_size, group.spec.window
        self._device = device
        self._kinds = 1 if group.spec.kind == "latent" else 2  # a latent entry is K and V at once
        self._planes = torch.arange(self._kinds * group.spec.heads, device=device)  # K heads, then V heads
        width = 4 * max(group.spec.k_dim, group.spec.v_dim)  # bytes, at the widest dtype
        self._tile_keys = TILE_BYTES // (len(self._planes) * width)

    def plan(self, step: Step) -> GroupPlan:
        host = step.host
        new, ends = host.query_lens, host.seq_lens
        firsts = np.maximum(0, ends - new - self._window + 1) if self._window else np.zeros_like(ends)
        rows = _Rows(new, ends, np.cumsum(new) - new, firsts, host.rows)
        table = step.tables[self._index]
        slots = step.slot_mapping[self._index].unsqueeze(1)
        return GroupPlan(
            writes=(slots // self._size * len(self._planes) + self._planes).mul_(self._size).add_(slots % self._size).view(-1),
            short=[self._short(rows.pick(chosen), table, host.num_tokens) for chosen in self._tiles(new, ends - firsts)],
            long=[self._long(rows, int(i), table) for i in np.flatnonzero(_alone(new, ends - firsts) & (new < self._expands))],
        )

    def _tiles(self, new: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
        """Indices of the rows that are not computed alone, in lists that each become a tile: at most twice
        the work that their members need, and some, which is what another tile costs."""
        together, decoding = ~_alone(new, keys) & (new < self._expands) & (new >= self._least), new == 1
        tiles: list[np.ndarray] = []
        for chosen in (np.flatnonzero(together & decoding), np.flatnonzero(together & ~decoding)):
            tile: list[int] = []
            queries = longest = useful = 0
            for i in chosen[np.lexsort((-keys[chosen], -new[chosen]))].tolist():
                grown = max(longest, int(keys[i]))
                work, need = (len(tile) + 1) * queries * grown, useful + int(new[i] * keys[i])
                full = work > TILE_SCORES or (len(tile) + 1) * grown > self._tile_keys
                if tile and (full or work > 2 * need + 4096):
                    tiles.append(np.array(sorted(tile)))
                    tile, grown, need = [], int(keys[i]), int(new[i] * keys[i])
                if not tile:
                    queries = int(new[i])
                tile.append(i)
                longest, useful = grown, need
            if tile:
                tiles.append(np.array(sorted(tile)))
        return tiles

    def entries(self, blocks: Tensor, positions: Tensor) -> Tensor:
        """Entries [2, B, kv_heads, L] (latent: [1, B, 1, L]), flat, of positions [B, L] that lie in blocks int32 [B, L]."""
        lines = blocks.long()[None, :, None] * len(self._planes) + self._planes.view(self._kinds, 1, -1, 1)
        return lines.mul_(self._size).add_((positions % self._size).unsqueeze(1)).view(-1)

    def _long(self, rows: _Rows, i: int, table: Tensor) -> LongTile:
        first, end, new = int(rows.firsts[i]), int(rows.ends[i]), int(rows.new[i])
        positions = torch.arange(first, end, device=self._device)
        blocks = table[int(rows.slots[i])].index_select(0, positions // self._size)
        entries = self.entries(blocks.unsqueeze(0), positions.unsqueeze(0))
        return LongTile(int(rows.starts[i]), new, end - new, first, entries)

    def _short(self, rows: _Rows, table: Tensor, num_tokens: int) -> ShortTile:
        new, ends = rows.new, rows.ends[:, None]
        size, query_len = len(new), int(new.max())
        keys = int((rows.ends - rows.firsts).max())
        if size > 1:
            keys = -(-keys // KEY_STEP) * KEY_STEP
        offsets = np.minimum(np.arange(query_len), new[:, None] - 1)  # [B, Q], a short row repeats its last
        at = ends - new[:, None] + offsets  # position of each query
        whole = int(new.sum()) == num_tokens == size * query_len
        queries = None if whole else self._send((rows.starts[:, None] + offsets).reshape(-1))
        positions = rows.firsts[:, None] + np.arange(keys)  # [B, L], past the row's end where it is padded
        held = self._send(np.minimum(positions, ends - 1))
        blocks = table[self._send(rows.slots)].gather(1, held // self._size)
        hidden = positions[:, None] > at[:, :, None]
        if self._window and query_len > 1:
            hidden |= positions[:, None] <= at[:, :, None] - self._window
        columns = hidden.any((0, 1))
        clear = int(columns.argmax()) if columns.any() else keys
        mask = self._send(np.ascontiguousarray(hidden[:, None, :, None, clear:])) if clear < keys else None
        return ShortTile(size, queries, query_len, self.entries(blocks, held), keys, mask, clear)

    def _send(self, array: np.ndarray) -> Tensor:
        return torch.from_numpy(array).to(self._device)


class EntryPlanner(GroupPlanner):
    """Plans steps of a latent group that keeps one entry for `tokens_per_entry` tokens, written with the last of them. An
    entry's *position* is its number in the sequence; `entries` takes those."""

    def __init__(self, group: KVGroup, device: torch.device, expands: int = 0, least: int = 1) -> None:
        super().__init__(group, device, least=least)
        self._every = group.spec.tokens_per_entry
        self._size = group.block_size // self._every

    def plan(self, step: Step) -> GroupPlan:
        last = ((step.positions + 1) % self._every == 0).nonzero()[:, 0]
        return GroupPlan(writes=step.slot_mapping[self._index][last] // self._every, short=[], long=[], stores=last)


def _alone(new: np.ndarray, keys: np.ndarray) -> np.ndarray:
    return (new > SHORT_QUERY) & ((new > MEDIUM_QUERY) | (keys > MEDIUM_KEYS))
