"""ThreadGovernor: as many compute threads as the machine can spare, while it serves.

Owns the count of torch's threads on a CPU when the configuration does not fix it. A parallel region
ends with its slowest thread: two threads on two cores, one of them a neighbour's, were measured at a
third to a tenth of the speed of one. Never runs while a step computes.
"""

from __future__ import annotations

import logging
import os
import time
from collections.abc import Callable

import psutil

log = logging.getLogger(__name__)

INTERVAL = 0.5
"""Seconds between looks at the processors' counters (a look costs some 100 us)."""

QUIET_LOOKS = 4
"""Looks in a row that must agree before a thread is taken back: giving one up late costs more than
getting one back late."""


class CpuMeter:
    """Cores that other processes kept busy between one `read` and the next."""

    def __init__(self) -> None:
        self._used, self._own, self._at = _used(), _own(), time.monotonic()

    def read(self) -> tuple[float, float]:
        """(cores kept busy by others, seconds since the last read)."""
        used, own, now = _used(), _own(), time.monotonic()
        seconds = max(now - self._at, 1e-6)
        busy = max(0.0, (used - self._used) - (own - self._own)) / seconds
        self._used, self._own, self._at = used, own, now
        return busy, seconds


def _used() -> float:
    times = psutil.cpu_times()
    idle = {"idle", "iowait", "guest", "guest_nice"}  # guest time is in user time already
    return float(sum(getattr(times, field) for field in times._fields if field not in idle))


def _own() -> float:
    return sum(os.times()[:2])


class ThreadGovernor:
    """`tick` before every step. cores: what may be used at most; count: the number in force at the start.

    read and clock are the meter's and the monotonic clock's, injected for tests.
    """

    def __init__(
        self,
        cores: int,
        count: int,
        set_threads: Callable[[int], None],
        *,
        read: Callable[[], tuple[float, float]] | None = None,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._cores, self._count, self._set = cores, count, set_threads
        self._read, self._clock = read or CpuMeter().read, clock
        self._next = clock() + INTERVAL
        self._quiet = 0

    def tick(self) -> None:
        """Look at the machine if it is time, and change the number of threads if others need or left a core."""
        now = self._clock()
        if now < self._next:
            return
        self._next = now + INTERVAL
        busy, seconds = self._read()
        if seconds > 4 * INTERVAL:
            return  # the engine was idle: the average says little about now
        spare = max(1, self._cores - round(busy))
        self._quiet = self._quiet + 1 if spare > self._count else 0
        if spare < self._count or self._quiet >= QUIET_LOOKS:
            log.info(
                "%d instead of %d threads: other processes keep %.1f of %d cores busy", spare, self._count, busy, self._cores
            )
            self._count, self._quiet = spare, 0
            self._set(spare)
