"""What the torch backend works out once a step and reuses in every layer of a KV group.

Owns the split of a step's rows into tiles and the cache entries that each tile reads. An *entry* is a
line of the cache seen as [blocks * 2 * kv_heads * block_size, width]: K or V of one head of one token.
Only entries of tokens that the row holds are ever listed, so that whatever lies in free blocks or in
the unused tail of a block is never read, not even to be masked.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.interfaces import KVGroup, Step

SHORT_QUERY = 16
"""Rows with at most this many new tokens are computed together, padded to the longest; longer ones alone."""

ROW_BLOCK = 64
"""Queries of one long row that are computed at a time: its scores are [kv_heads, group * 64, keys]."""


@dataclass(slots=True)
class ShortTile:
    """B rows of at most Q new tokens over at most L keys each, computed as one batch.

    queries: int64 [B * Q] into the step's tokens (a row with fewer repeats its last; None: the whole
    step in order). entries: int64 [2 * B * kv_heads * L], K then V (padding repeats the row's
    last key). hidden: bool
    [B, 1, Q, 1, L - clear], True where the key is not visible; None: everything is. The first `clear`
    keys are visible to all.
    """

    size: int
    queries: Tensor | None
    query_len: int
    entries: Tensor
    keys: int
    hidden: Tensor | None
    clear: int


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
    """writes: int64 [T * 2 * kv_heads], the entries that each token's K heads, then V heads are stored in."""

    writes: Tensor
    short: list[ShortTile]
    long: list[LongTile]


def plan_group(step: Step, group: KVGroup) -> GroupPlan:
    """Plan one group; tensors are on the step's device."""
    heads, size, window = group.spec.heads, group.block_size, group.spec.window
    host = step.host
    queries, lengths = host.query_lens, host.seq_lens
    starts = np.cumsum(queries) - queries
    firsts = np.maximum(0, lengths - queries - window + 1) if window else np.zeros_like(lengths)
    table = step.tables[group.index]

    def entries(rows: np.ndarray, positions: Tensor) -> Tensor:
        """Entries [2 * B * kv_heads * L] of positions [B, L] of state-table rows [B]."""
        blocks = table[torch.from_numpy(rows).to(table.device)].gather(1, positions // size).long()
        plane = torch.arange(2, device=table.device).view(2, 1, 1, 1)
        head = torch.arange(heads, device=table.device).view(1, 1, heads, 1)
        lines = (blocks[:, None] * 2 + plane) * heads + head
        return lines.mul_(size).add_((positions % size)[:, None]).view(-1)

    slots = step.slot_mapping[group.index].unsqueeze(1)
    lines = (slots // size) * (2 * heads) + torch.arange(2 * heads, device=slots.device)
    writes = lines.mul_(size).add_(slots % size).view(-1)

    short = [
        _short_tile(rows, queries, lengths, firsts, starts, window, step, entries) for rows in _buckets(queries, lengths - firsts)
    ]
    long = []
    for i in np.flatnonzero(queries > SHORT_QUERY):
        first, end = int(firsts[i]), int(lengths[i])
        positions = torch.arange(first, end, device=table.device).unsqueeze(0)
        long.append(
            LongTile(
                start=int(starts[i]),
                length=int(queries[i]),
                position=end - int(queries[i]),
                first=first,
                entries=entries(host.rows[i : i + 1], positions),
            )
        )
    return GroupPlan(writes, short, long)


def _buckets(queries: np.ndarray, keys: np.ndarray) -> list[np.ndarray]:
    """Indices of the short rows, in lists whose members have about as many keys and queries, so that
    padding stays below twice the work; ascending within a list."""
    rows = np.flatnonzero(queries <= SHORT_QUERY)
    buckets: list[np.ndarray] = []
    for decode in (True, False):
        chosen = rows[(queries[rows] == 1) == decode]
        chosen = chosen[np.argsort(-keys[chosen], kind="stable")]
        while len(chosen):
            longest = int(keys[chosen[0]])
            # A new batch costs about as much as a few hundred padded keys.
            count = int(np.count_nonzero(2 * keys[chosen] >= longest)) if longest > 256 else len(chosen)
            buckets.append(np.sort(chosen[:count]))
            chosen = chosen[count:]
    return buckets


def _short_tile(
    rows: np.ndarray,
    queries: np.ndarray,
    lengths: np.ndarray,
    firsts: np.ndarray,
    starts: np.ndarray,
    window: int | None,
    step: Step,
    entries: Callable[[np.ndarray, Tensor], Tensor],
) -> ShortTile:
    device = step.positions.device
    new, ends, first = queries[rows], lengths[rows], firsts[rows]
    query_len, keys = int(new.max()), int((ends - first).max())

    offsets = np.minimum(np.arange(query_len), new[:, None] - 1)  # [B, Q], a short row repeats its last query
    whole = len(rows) == step.host.num_tokens
    chosen = None if whole else torch.from_numpy((starts[rows, None] + offsets).reshape(-1)).to(device)

    positions = first[:, None] + np.arange(keys)  # [B, L], past the row's end where it is padded
    held = torch.from_numpy(np.minimum(positions, ends[:, None] - 1)).to(device)
    at = (ends - new)[:, None] + offsets  # [B, Q], position of each query
    hidden = positions[:, None, :] > at[:, :, None]
    if window:
        hidden |= positions[:, None, :] <= at[:, :, None] - window
    columns = hidden.any((0, 1))
    clear = int(columns.argmax()) if columns.any() else keys
    mask = None
    if clear < keys:
        mask = torch.from_numpy(np.ascontiguousarray(hidden[:, None, :, None, clear:])).to(device)
    return ShortTile(
        size=len(rows),
        queries=chosen,
        query_len=query_len,
        entries=entries(step.host.rows[rows], held),
        keys=keys,
        hidden=mask,
        clear=clear,
    )
