"""Spill: what leaves the pool for host memory, and what comes back from there.

Owns the rules of the second tier: an evicted prefix is kept, a hit in host memory becomes a hit in the
pool, a preempted row becomes a parcel and back. Writes down every copy in the allocator's log, in the
order in which it must be done; moves no byte itself. Knows the allocator's tables and blocks, not its
bounds.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.cache.blocks import Blocks
from octavo.cache.geometry import blocks_for
from octavo.cache.prefix import PrefixIndex
from octavo.cache.table import GroupTable
from octavo.cache.tier import HostTier, Parcel
from octavo.request import FROM_HOST, TO_HOST

Log = list[tuple[int, np.ndarray, np.ndarray]]


class Spill:
    """tier and index are the two sides, log the allocator's list of copies to come (it is appended to)."""

    def __init__(self, tier: HostTier, index: PrefixIndex, log: Log) -> None:
        self.tier, self._index, self._log = tier, index, log

    def evicted(self, blocks: list[int]) -> None:
        """These cached blocks are about to be handed out: keep their content below, forget them here."""
        contents = [self._index.content(block) for block in blocks]
        kept, slots = self.tier.keep([content for content in contents if content is not None])
        self._index.remove(blocks)
        if kept:
            self._log.append((TO_HOST, np.array(blocks, np.intp)[kept], slots))

    def promote(self, found: Sequence[list[int]], blocks: Blocks, rank: int) -> bool:
        """Replace the host slots among found blocks (ids from the capacity on) by blocks of the pool, in place.
        False, with nothing changed, where the pool has no room for them."""
        offset = blocks.capacity
        ids = np.array([block for group in found for block in group], np.intp)
        below = ids >= offset
        here, slots = ids[~below], ids[below] - offset
        idle = int(np.count_nonzero(blocks.references[here] == 0))
        if slots.size > blocks.available - idle:
            return False
        blocks.hold(here)  # what is found must not be evicted to make room for the rest of it
        contents = self.tier.hold(slots)
        fresh = blocks.take(slots.size)
        self._log.append((FROM_HOST, slots, fresh))
        self.tier.drop(slots)
        for block, content in zip(fresh.tolist(), contents, strict=True):
            self._index.adopt(block, content)
        blocks.publish(fresh.tolist(), rank)
        blocks.drop(np.concatenate((fresh, here))[::-1], distinct=True)
        places = iter(fresh.tolist())
        for group in found:
            group[:] = [next(places) if block >= offset else block for block in group]
        return True

    def pack(self, row: int, computed: int, tables: Sequence[GroupTable]) -> Parcel | None:
        """Write down copies of all that the row has computed. The row keeps its blocks. None if the host
        slots do not suffice."""
        spans = []
        for table in tables:
            first = int(table.first[row])
            end = max(first, min(int(table.held[row]), blocks_for(computed, table.block_size)))
            spans.append((first, table.blocks(np.arange(first, end) + row * table.columns)))
        blocks = np.concatenate([held for _, held in spans])
        claimed = self.tier.claim([self._index.content(block) for block in blocks.tolist()])
        if claimed is None:
            return None
        slots, new = claimed
        if new.any():
            self._log.append((TO_HOST, blocks[new], slots[new]))
        ends = np.cumsum([held.size for _, held in spans])
        parts = [(first, part) for (first, _), part in zip(spans, np.split(slots, ends[:-1]), strict=True)]
        return self.tier.wrap(computed, parts)

    def unpack(self, row: int, hit: int, parcel: Parcel, tables: Sequence[GroupTable], blocks: Blocks) -> bool:
        """Fill the row up from a parcel that reaches further than its hit, which it keeps in full groups. In
        window groups everything comes from the parcel: the hit's window lies before the parcel's. False,
        with nothing changed, where the pool has no room for that and one more block of each group."""
        wanted = []
        for table, (first, slots) in zip(tables, parcel.parts, strict=True):
            low = max(first, hit // table.block_size) if table.window is None else first
            wanted.append((table, low, slots[low - first :]))
        total = sum(slots.size for _, _, slots in wanted)
        if total + len(tables) > blocks.available:
            return False
        for table, _, _ in wanted:
            if table.window is not None:
                held = np.arange(table.first[row], table.held[row]) + row * table.columns
                blocks.drop(table.clear(held)[::-1], distinct=True)
        fresh = blocks.take(total)
        self._log.append((FROM_HOST, np.concatenate([slots for _, _, slots in wanted]), fresh))
        used = 0
        for table, low, slots in wanted:
            end = low + slots.size
            table.assign(np.arange(low, end) + row * table.columns, fresh[used : used + slots.size])
            if table.window is not None:
                table.first[row] = low
            table.held[row] = end
            used += slots.size
        return True
