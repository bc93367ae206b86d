"""Liveness: whether an engine's process still answers, as opposed to whether it still exists.

Owns the one question and the patience for its answer. An engine answers between two steps, so a step that takes long (a
kernel is compiled in it, a CPU computes a large model) is silence too: the patience is longer than any step. Only
time in which this process itself was awake counts.
"""

from __future__ import annotations

import asyncio
import signal
import time
from collections.abc import Callable

PATIENCE = 300.0
"""Seconds without an answer after which an engine counts as hung, where nothing else is said."""

STACKS = signal.SIGUSR1
"""Makes an engine's process write the stacks of its threads to its stderr, whatever it is doing."""

_LOOKS = 20  # in the time of one patience; nothing heard for one look's time: ask


class Liveness:
    """`heard()` for every message of the engine; `run` returns once the engine has left a question unanswered for
    `patience` seconds. `ask` sends the question."""

    def __init__(self, patience: float, ask: Callable[[], None], clock: Callable[[], float] = time.monotonic) -> None:
        self._patience, self._ask, self._clock = patience, ask, clock
        self._interval = patience / _LOOKS
        self._heard = False
        self._silence: float | None = None  # seconds since the question, None while none is open

    def heard(self) -> None:
        self._heard = True

    async def run(self) -> None:
        before = self._clock()
        while True:
            await asyncio.sleep(self._interval)
            now = self._clock()
            if self.look(now - before):
                return
            before = now

    def look(self, passed: float) -> bool:
        """Whether the engine is given up, `passed` seconds after the last look: a much longer time than a look's means that
        this process slept, and the engine may have as well."""
        heard, self._heard = self._heard, False
        if heard:
            self._silence = None
        elif self._silence is None:
            self._silence = 0.0
            self._ask()
        else:
            self._silence += min(passed, 2 * self._interval)
        return self._silence is not None and self._silence >= self._patience
