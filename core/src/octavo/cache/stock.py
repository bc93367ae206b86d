"""The pool's side of the allocator: what belongs to no row.

`Stock` owns the physical blocks, the index of prefixes, the pins, the second tier and the log of copies, and does with
them what needs no row: sizes, pins, eviction, a change of the pool's size. `BlockAllocator` is a Stock
with rows. Never a tensor.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.cache.blocks import Blocks
from octavo.cache.geometry import sequence_blocks
from octavo.cache.hit import longest_hit
from octavo.cache.pins import Pin, Pins, pin_id
from octavo.cache.prefix import Lineage, PrefixIndex
from octavo.cache.spill import Log, Spill
from octavo.cache.table import GroupTable
from octavo.cache.tier import HostTier
from octavo.errors import ConfigError
from octavo.interfaces import AllocatorParts, Usage
from octavo.request import MOVE, TableUpdate

Copies = tuple[tuple[int, np.ndarray, np.ndarray], ...]


class Stock:
    """Half of `octavo.interfaces.Allocator`; the docstrings there are the contract.

    prefix_queries and prefix_hits count the tokens that admissions looked up and found.
    """

    _tables: tuple[GroupTable, ...]  # the rows' side makes them

    def __init__(self, parts: AllocatorParts) -> None:
        _check_parts(parts)
        self.prefix_queries = 0
        self.prefix_hits = 0
        self._groups = parts.groups
        self._sizes = tuple(sorted({group.block_size for group in parts.groups}))
        self._limit = parts.max_model_len
        self._max_step_tokens = parts.max_step_tokens
        self._prefix_caching = parts.prefix_caching
        self._copies: Log = []
        capacity = max(parts.num_blocks, parts.max_blocks)
        tier = HostTier(parts.host_slots) if parts.host_slots else None
        self._index = PrefixIndex(capacity, None if tier is None else tier.index)
        self._spill = None if tier is None else Spill(tier, self._index, self._copies)
        self._blocks = Blocks(parts.num_blocks, self._index.remove if self._spill is None else self._spill.evicted, capacity)
        self._pins = Pins(self._blocks)

    def blocks(self, tokens: int) -> int:
        return sequence_blocks(self._groups, tokens, self._max_step_tokens)

    def fits(self, tokens: int) -> bool:
        return tokens <= self._limit and self.blocks(tokens) <= self._blocks.total - self._pins.blocks().size

    def drain(self) -> tuple[tuple[TableUpdate, ...], Copies]:
        updates = tuple(update for table in self._tables if (update := table.changes()) is not None)
        copies = tuple(self._copies)
        self._copies.clear()
        return updates, copies

    def usage(self) -> Usage:
        blocks, pinned = self._blocks, self._pins.alone()
        return Usage(blocks.total, blocks.free, blocks.cached, blocks.total - blocks.free - blocks.cached - pinned, pinned)

    def evict(self) -> int:
        count = self._blocks.cached
        self._blocks.evict(count)
        return count

    def pin(self, tokens: np.ndarray, domain: str, salt: str = "", *, leave: int = 0) -> int:
        if not self._prefix_caching:
            return 0
        hit, found = self._look_up(Lineage(tokens, domain, salt, self._sizes), len(tokens) + 1, 0)
        blocks = np.array([block for group in found for block in group], np.intp)
        if not hit or np.union1d(self._pins.blocks(), blocks).size > self._blocks.total - leave:
            return 0
        self._pins.add(pin_id(tokens, domain, salt), Pin(hit, blocks))
        return hit

    def unpin(self, tokens: np.ndarray, domain: str, salt: str = "") -> int:
        return self._pins.remove(pin_id(tokens, domain, salt))

    def resize(self, num_blocks: int) -> int:
        if num_blocks >= self._blocks.total:
            self._blocks.grow(min(num_blocks, self._blocks.capacity))
            return self._blocks.total
        idle = self._blocks.free + self._blocks.cached
        num_blocks = max(num_blocks, self._blocks.total - idle, 1)
        blocks, targets = self._blocks.shrink(num_blocks)
        if blocks.size:
            self._index.move(blocks.tolist(), targets.tolist())
            self._pins.move(blocks, targets)
            for table in self._tables:
                table.move(blocks, targets)
            self._copies.append((MOVE, blocks, targets))
        return num_blocks

    def memory(self) -> dict[str, Any]:
        """Numbers for people: what the prefix cache, its pins and the host tier hold, and have done."""
        tier = None if self._spill is None else self._spill.tier
        usage = self.usage()
        return {
            "blocks": usage.total,
            "used_blocks": usage.used,
            "cached_blocks": usage.cached,
            "pinned_blocks": int(self._pins.blocks().size),
            "pins": self._pins.sizes(),
            "evicted_blocks": self._blocks.evictions,
            "prefix_queries": self.prefix_queries,
            "prefix_hits": self.prefix_hits,
            "host_slots": tier.total if tier else 0,
            "host_cached_slots": tier.cached if tier else 0,
            "host_parcel_slots": tier.used if tier else 0,
            "host_hits": tier.hits if tier else 0,
            "host_stores": tier.stores if tier else 0,
        }

    def _look_up(self, lineage: Lineage, known: int, rank: int) -> tuple[int, list[list[int]]]:
        """The longest hit and its blocks, all of them in the pool: what lies in host memory is brought back,
        or passed over if there is no room for it."""
        hit, found = longest_hit(self._index, self._tables, lineage, known)
        if self._spill is not None and any(block >= self._blocks.capacity for group in found for block in group):
            if self._spill.promote(found, self._blocks, rank):
                return hit, found
            hit, found = longest_hit(self._index.alone(), self._tables, lineage, known)
        return hit, found


def _check_parts(parts: AllocatorParts) -> None:
    if not parts.groups or parts.num_blocks < 1 or parts.max_rows < 1 or parts.max_model_len < 1:
        raise ConfigError(
            f"the allocator needs at least one KV group, block, row and token; got {len(parts.groups)} groups, "
            f"{parts.num_blocks} blocks, {parts.max_rows} rows, max_model_len {parts.max_model_len}"
        )
    for at, group in enumerate(parts.groups):
        if group.index != at:
            raise ConfigError(f"KV group {at} has index {group.index}: groups are given in the order of their indices")
        if group.spec.kind == "state":
            raise ConfigError(f"KV group {at}: this allocator keeps blocks of tokens, not per-sequence state; choose another")
        windowed = {"window": (True,), "latent": (False, True)}.get(group.spec.kind, (False,))
        if group.block_size < 1 or (group.spec.window is not None) not in windowed:
            raise ConfigError(f"KV group {at}: block size {group.block_size}, kind {group.spec.kind}, window {group.spec.window}")
        if group.spec.window is not None and group.spec.window < 1:
            raise ConfigError(f"KV group {at}: a window of {group.spec.window} tokens; it must hold at least the current one")
