"""Supervisor: starts a crashed engine again, later each time, and gives it up in the end.

Owns when and how often. The requests of the engine that crashed have ended with an error before this
begins; a request that arrives meanwhile is told to wait. Must never start an engine that was ended on
purpose, nor one beside a predecessor that still holds the device.
"""

from __future__ import annotations

import asyncio
import logging
import time
from dataclasses import dataclass

from octavo.engine.models import ModelTable
from octavo.engine.served import Served

log = logging.getLogger(__name__)


@dataclass(frozen=True, slots=True)
class Backoff:
    """attempts: starts in a row before a model is given up. The n-th waits first * 2^n seconds, at most
    `longest`. An engine that served for `steady` seconds has earned a new count."""

    attempts: int = 5
    first: float = 1.0
    longest: float = 60.0
    steady: float = 300.0

    def delay(self, failures: int) -> float:
        return min(self.first * 2.0**failures, self.longest)


class Supervisor:
    """Watches every engine of a table from the moment it serves. `close` before the table is closed."""

    def __init__(self, table: ModelTable, backoff: Backoff) -> None:
        self._table, self._backoff = table, backoff
        self._watches: dict[Served, asyncio.Task[None]] = {}
        table.on_engine(self._watch)

    def _watch(self, model: Served) -> None:
        if model not in self._watches:
            task = self._watches[model] = asyncio.create_task(self._keep(model))
            task.add_done_callback(lambda _: self._watches.pop(model, None))

    async def _keep(self, model: Served) -> None:
        failures = 0
        while True:
            began = time.monotonic()
            await model.llm.died.wait()
            if time.monotonic() - began > self._backoff.steady:
                failures = 0
            reason = model.llm.dead_reason or "its process is gone"
            while not await self._restart(model, failures, reason):
                if not self._wanted(model):
                    return
                failures, reason = failures + 1, model.error or reason
            failures += 1

    async def _restart(self, model: Served, failures: int, reason: str) -> bool:
        """Start a successor; whether it serves."""
        model.error = reason
        if not self._wanted(model):
            return False
        if failures >= self._backoff.attempts:
            model.state = "dead"
            log.error("model %r is given up after %d restarts: %s", model.name, failures, reason)
            return False
        model.state = "restarting"
        delay = self._backoff.delay(failures)
        log.warning(
            "model %r crashed (%s): start %d of %d in %.1f s", model.name, reason, failures + 1, self._backoff.attempts, delay
        )
        await asyncio.sleep(delay)
        model.restarts += 1
        try:
            await model.llm.end()  # its process is gone, or goes now; its socket and folder go too
            await self._table.load_again(model)
        except Exception as error:
            model.error = f"{type(error).__name__}: {error}"
            log.error("model %r did not start again: %s", model.name, model.error)
            return False
        return True

    def _wanted(self, model: Served) -> bool:
        """Not removed, replaced or drained meanwhile: those engines are on their way out."""
        return model in self._table.models and model.state in ("serving", "restarting")

    async def close(self) -> None:
        for task in self._watches.values():
            task.cancel()
        await asyncio.gather(*self._watches.values(), return_exceptions=True)
