"""LoopWatch: how late the event loop is, and how long it works without a break.

Owns one timer that goes off every few milliseconds and two numbers of each time: how late it came
(what a client feels; other processes add to it) and how much processor time the loop's thread used
meanwhile (what this server's own code did in one go). Must cost next to nothing.
"""

from __future__ import annotations

import asyncio
import logging
import time

from octavo.server.counts import Histogram

log = logging.getLogger("octavo.server")

INTERVAL = 0.01
WARN_SECONDS = 0.25  # of the loop's own work in one go
LATE_SECONDS = 0.1  # from which on it is worth a line at level debug
_QUIET_SECONDS = 60.0  # between two warnings
BOUNDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.04, 0.05, 0.075, 0.1, 0.15, 0.2, 0.5, 1, 5)


class LoopWatch:
    """lag, busy: histograms in seconds, one entry a tick. Runs until its task is cancelled."""

    def __init__(self) -> None:
        self.lag, self.busy = Histogram(BOUNDS), Histogram(BOUNDS)
        self._warned = -_QUIET_SECONDS

    async def run(self) -> None:
        loop = asyncio.get_running_loop()
        while True:
            due, used = loop.time() + INTERVAL, time.thread_time()
            await asyncio.sleep(INTERVAL)
            self._note(max(loop.time() - due, 0.0), time.thread_time() - used, loop.time())

    def _note(self, lag: float, used: float, now: float) -> None:
        busy = min(used, lag)  # work done before the timer was due held nobody up
        self.lag.observe(lag)
        self.busy.observe(busy)
        if lag > LATE_SECONDS:
            log.debug("the event loop came back %.0f ms late, %.0f ms of them its own work", 1000 * lag, 1000 * busy)
        if busy > WARN_SECONDS and now - self._warned > _QUIET_SECONDS:
            self._warned = now
            log.warning("the event loop worked for %.0f ms in one go: everybody waited (said once a minute at most)", 1000 * busy)
