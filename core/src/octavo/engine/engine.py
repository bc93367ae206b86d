"""Engine: schedule, submit, commit. One loop, one batch ahead of an asynchronous device.

Owns the scheduler, the executor and the steps in flight. Single-threaded: whoever calls `step`
calls everything. Knows neither HTTP nor text; never calls a hook.
"""

from __future__ import annotations

import logging
import time
from collections import deque
from collections.abc import Callable
from typing import Any

from octavo.engine.grammars import Grammars, invalid
from octavo.engine.memory import MemoryWatch
from octavo.engine.prefixes import PrefixCache
from octavo.errors import EngineDead
from octavo.interfaces import Allocator, Executor, Handle, Scheduler
from octavo.request import Batch, EngineStats, Event, Events, ModelInfo, Request

log = logging.getLogger(__name__)

FAILURES_IN_A_ROW = 3
"""Steps that may fail one after the other before the engine gives up: one bad batch costs its own
requests, a broken device must not burn through the whole queue."""


class Engine:
    """explain is the plan's own account of every choice (octavo.engine.plan). watch is asked before each step
    how the cache is (None: one that raises the alert and leaves the pool's size alone). salt: as the scheduler's, for prefixes that are pinned.
    grammars: who compiles them (None: requests with a grammar are refused)."""

    def __init__(
        self,
        info: ModelInfo,
        scheduler: Scheduler,
        allocator: Allocator,
        executor: Executor,
        explain: dict[str, Any],
        watch: MemoryWatch | None = None,
        salt: Callable[[int], str] = lambda bound: "",
        grammars: Grammars | None = None,
    ) -> None:
        self.info, self.explain = info, explain
        self.allocator, self.grammars = allocator, grammars
        self._scheduler, self._executor = scheduler, executor
        self._watch = watch or MemoryWatch(allocator)
        self.prefixes = PrefixCache(allocator, salt, info.max_model_len)
        self._in_flight: deque[tuple[Batch, Handle]] = deque()
        self._failures = 0
        self._step_seconds = 0.0
        self.waited = 0.0  # seconds of the last step that went into waiting for the device

    def add(self, request: Request) -> None:
        """Queue a checked request. Raises AdmissionRefused. A grammar is compiled first, and waited for, unless
        `grammars.prepare` has done it."""
        if request.params.grammar is not None:
            if self.grammars is None:
                raise invalid("this engine takes no grammars")
            self.grammars.require(request.params.grammar)
        self._scheduler.add(request)

    def abort(self, request_id: str, sample: int | None = None) -> None:
        """End a request (or one sample) in any state; unknown ids are ignored, no event follows."""
        self._scheduler.abort(request_id, sample)

    def step(self) -> Events:
        """One turn of the loop. Blocks for the oldest result only when the device is far enough ahead
        or nothing else can be scheduled. Raises EngineDead when steps keep failing."""
        began, self.waited = time.perf_counter(), 0.0
        self._watch.tick()
        if self.prefixes.pins.returning:
            self.prefixes.pins.order(self._scheduler.add, idle=not self._scheduler.unfinished)
        batch = self._scheduler.schedule()
        events = self._scheduler.events()
        if batch is not None:
            events += self._submit(batch)
        if self._in_flight and (batch is None or len(self._in_flight) > self._executor.depth):
            events += self._collect()
        events = self.prefixes.pins.take(events)
        self._step_seconds = time.perf_counter() - began
        return Events(events, self.stats())

    @property
    def busy(self) -> bool:
        """Whether `step` has anything to do: requests that are not finished, results on their way, or pins that
        are to come back."""
        return self._scheduler.unfinished or bool(self._in_flight) or self.prefixes.pins.returning > 0

    def stats(self) -> EngineStats:
        stats = self._scheduler.stats()
        stats.step_seconds = self._step_seconds
        self._watch.report(stats)
        return stats

    def resize_cache(self, blocks: int | None, *, rest: bool) -> int:
        """Order a size of the KV cache; see MemoryWatch.resize."""
        return self._watch.resize(blocks, rest=rest)

    def close(self) -> None:
        self._executor.close()
        if self.grammars is not None:
            self.grammars.close()

    def _submit(self, batch: Batch) -> list[Event]:
        try:
            self._in_flight.append((batch, self._executor.submit(batch)))
        except Exception as error:
            return self._fail(batch, error)
        return []

    def _collect(self) -> list[Event]:
        batch, handle = self._in_flight.popleft()
        began = time.perf_counter()
        try:
            result = handle.wait()
        except Exception as error:
            return self._fail(batch, error)
        self.waited += time.perf_counter() - began
        self._failures = 0
        return self._scheduler.commit(batch, result)

    def _fail(self, batch: Batch, error: Exception) -> list[Event]:
        """A step raised: its requests end with an error. Steps submitted before it are collected in order;
        those after it computed from tokens that do not exist, and go with it."""
        log.error("step %d (%d rows, %d tokens) failed", batch.step, len(batch.slots), batch.num_tokens, exc_info=error)
        self._failures += 1
        message = f"step {batch.step} failed: {type(error).__name__}: {error}"
        events: list[Event] = []
        while self._in_flight and self._in_flight[0][0].step < batch.step:
            events += self._collect()
        events += self._scheduler.fail(batch, message)
        while self._in_flight:
            later, handle = self._in_flight.popleft()
            try:
                handle.wait()
            except Exception as again:
                log.error("step %d failed too", later.step, exc_info=again)
            events += self._scheduler.fail(later, message)
        self.prefixes.pins.forgotten()
        if self._failures >= FAILURES_IN_A_ROW:
            raise EngineDead(f"{self._failures} steps failed in a row; the last error was {type(error).__name__}: {error}")
        return events
