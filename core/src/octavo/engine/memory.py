"""What watches the KV cache while it serves: the alert when it is nearly full, and the pool's moving size.

Owns the rules and the clock. Asks the allocator and orders the executor; moves nothing itself. Called by the
engine's loop between steps, never from another thread.

The rule of the moving size, every --dynamic-memory-interval seconds, by KV use (used and pinned blocks over all):

    below 80%    utilisation up by 0.02, to at most 0.95
    above 92%    utilisation down by 0.03, to at least 0.85
"""

from __future__ import annotations

import logging
import time
from collections.abc import Callable

from octavo.engine.sizing import LEAST_UTILIZATION, MOST_UTILIZATION, PoolRange
from octavo.errors import ConfigError
from octavo.interfaces import Allocator, Executor
from octavo.request import EngineStats

log = logging.getLogger(__name__)

ALERT_AT, ALERT_ENDS = 0.95, 0.90
"""KV use at which the alert begins, and below which it ends."""

QUIET = 60.0
"""Seconds without another alert before the next is logged as a warning: a busy cache crosses the line all the time."""

GROW_BELOW, GROW_BY = 0.80, 0.02
SHRINK_ABOVE, SHRINK_BY = 0.92, 0.03


class CacheAlert:
    """At 95% KV use: says so, and evicts every prefix that is not pinned, once, until use has fallen below 90%."""

    def __init__(self, allocator: Allocator) -> None:
        self._allocator = allocator
        self.raised = False
        self.count = 0
        self._quiet = 0.0  # until then it is not logged again

    def see(self, use: float) -> None:
        if self.raised:
            self.raised = use >= ALERT_ENDS
        elif use >= ALERT_AT:
            self.raised = True
            self.count += 1
            evicted = self._allocator.evict()
            now = time.monotonic()
            level = logging.WARNING if now >= self._quiet else logging.DEBUG
            self._quiet = now + QUIET
            log.log(level, "KV cache use is %.0f%%: %d cached blocks that are not pinned were evicted", use * 100, evicted)


class PoolGovernor:
    """Moves the pool's size. A growth for which the device has no memory is put off, not an error."""

    def __init__(
        self,
        allocator: Allocator,
        executor: Executor,
        range_: PoolRange,
        clock: Callable[[], float],
        interval: float,
    ) -> None:
        self._allocator, self._executor, self._range = allocator, executor, range_
        self._clock, self._interval = clock, interval
        self._next = clock() + interval
        self.utilization = range_.start
        self.growths = self.shrinks = 0
        self._rests = False

    def tick(self, use: float) -> None:
        """Apply the rule if it is time."""
        now = self._clock()
        if now < self._next or self._rests:
            return
        self._next = now + self._interval
        if use < GROW_BELOW and self.utilization < MOST_UTILIZATION:
            self.move(min(self.utilization + GROW_BY, MOST_UTILIZATION))
        elif use > SHRINK_ABOVE and self.utilization > LEAST_UTILIZATION:
            self.move(max(self.utilization - SHRINK_BY, LEAST_UTILIZATION))

    def resize(self, blocks: int | None, *, rest: bool) -> int:
        """Make the pool `blocks` large, or (None) as large as if the device were its alone, within its address
        range, and as far as live blocks and the device allow; returns its size then. rest: the rule changes nothing until the next call."""
        wanted = min(max(self._range.whole, self._range.start_blocks) if blocks is None else blocks, self._range.most)
        self._rests, self._next = rest, self._clock() + self._interval
        self._to(wanted, self._range.utilization(wanted))
        total = self._allocator.usage().total
        self.utilization = self._range.utilization(total)
        return total

    def move(self, utilization: float) -> None:
        """Make the pool as large as it is at this utilisation, as far as live blocks and the device allow."""
        self._to(self._range.blocks(utilization), utilization)

    def _to(self, wanted: int, utilization: float) -> None:
        usage = self._allocator.usage()
        wanted = min(wanted, self._range.most)
        if wanted > usage.total:
            self._grow(wanted, utilization)
        else:
            self._shrink(max(wanted, self._range.least + self._allocator.memory()["pinned_blocks"]), utilization)

    def _grow(self, blocks: int, utilization: float) -> None:
        before = self._allocator.usage().total
        try:
            self._executor.resize(blocks, (), ())  # the memory first: then its blocks may be handed out
        except MemoryError as error:
            log.warning("the KV cache stays at %d blocks: %s", before, error)
            return
        self._allocator.resize(blocks)
        self.utilization = utilization
        self.growths += 1
        log.info("KV cache: %d -> %d blocks (utilisation %.2f)", before, blocks, utilization)

    def _shrink(self, blocks: int, utilization: float) -> None:
        before = self._allocator.usage().total
        if blocks >= before:
            return
        blocks = self._allocator.resize(blocks)
        if blocks >= before:
            return
        tables, copies = self._allocator.drain()
        self._executor.resize(blocks, tables, copies)  # moves what lives in the tail, waits, gives the tail back
        self.utilization = utilization
        self.shrinks += 1
        log.info("KV cache: %d -> %d blocks (utilisation %.2f)", before, blocks, utilization)


class MemoryWatch:
    """Both, and what they tell the engine's stats."""

    def __init__(self, allocator: Allocator, governor: PoolGovernor | None = None) -> None:
        self._allocator, self._alert, self._governor = allocator, CacheAlert(allocator), governor

    def tick(self) -> None:
        """Once per turn of the engine's loop, before it schedules."""
        usage = self._allocator.usage()
        use = (usage.used + usage.pinned) / usage.total
        self._alert.see(use)
        if self._governor is not None:
            self._governor.tick(use)

    def resize(self, blocks: int | None, *, rest: bool) -> int:
        """See PoolGovernor.resize. Raises ConfigError where the size is fixed."""
        if self._governor is None:
            raise ConfigError("the size of the KV cache is fixed: start the model with --dynamic-memory")
        return self._governor.resize(blocks, rest=rest)

    def report(self, stats: EngineStats) -> None:
        stats.kv_alert, stats.kv_alerts = self._alert.raised, self._alert.count
        if self._governor is not None:
            stats.pool_growths, stats.pool_shrinks = self._governor.growths, self._governor.shrinks
            stats.kv_utilization = self._governor.utilization
