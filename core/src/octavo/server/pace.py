"""Pace: how many requests begin in one turn of the event loop.

Owns the queue of requests that have arrived and not begun. A thousand clients that send at the same instant are
a thousand tasks which are all ready at once; the loop would work through every one of them before it looked at a timer or
at the engine's news again. Must never hold a request for anything but its turn.
"""

from __future__ import annotations

import asyncio
import time
from collections import deque
from enum import IntEnum

from octavo.engine.turns import Portion

FEWEST, MOST = 8, 24
"""Requests that begin in one turn of the loop, by how long turns are."""


class Rank(IntEnum):
    """Whose turn it is first: probes and administrators, then requests that are here in full, then those that begin."""

    AHEAD = 0
    COMPLETE = 1
    NEW = 2


class Pace:
    """`await turn(rank)` returns at once while few ask, else by rank and in the order of asking, a portion in each turn of
    the loop. Gives the seconds that it took."""

    def __init__(self, portion: Portion | None = None) -> None:
        self._portion = portion or Portion(FEWEST, MOST)
        self._each = 0  # of the current turn
        self._begun = 0  # in this turn of the loop
        self._turning = False  # whether `_next` is due
        self._lanes: tuple[deque[asyncio.Future[None]], ...] = tuple(deque() for _ in Rank)

    @property
    def waiting(self) -> int:
        return sum(map(len, self._lanes))

    async def turn(self, rank: Rank) -> float:
        loop = asyncio.get_running_loop()
        if not self._turning:
            self._turning = True
            self._each = self._portion.first()
            loop.call_soon(self._next, loop)
        if self._begun < self._each and not any(self._lanes):
            self._begun += 1
            return 0.0
        began = time.perf_counter()
        place: asyncio.Future[None] = loop.create_future()
        self._lanes[rank].append(place)
        await place  # a client that goes away cancels it, and takes nobody's turn
        return time.perf_counter() - began

    def _next(self, loop: asyncio.AbstractEventLoop) -> None:
        """A new turn of the loop."""
        self._begun, self._each = 0, self._portion.next()
        for lane in self._lanes:
            while lane and self._begun < self._each:
                place = lane.popleft()
                if not place.done():
                    place.set_result(None)
                    self._begun += 1
        self._turning = self._begun > 0
        if self._turning:
            loop.call_soon(self._next, loop)
