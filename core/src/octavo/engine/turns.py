"""Portion: how much of one kind of work is done in one turn of the event loop.

Owns a number that follows the length of the turns, in processor time: halved after a long one, a quarter more after a short one, for
what is begun now goes on in turns to come. The loop comes back to its timers between two turns, so their length is
what everybody else waits for.
"""

from __future__ import annotations

import time
from collections.abc import Callable

SHORT, LONG = 0.005, 0.01
"""Seconds of processor time of a turn below which there is room for more, and above which there was too much."""


class Portion:
    """`first()` at the beginning of a run of turns, `next()` in each further one: how many items to do in it."""

    def __init__(self, least: int, most: int, clock: Callable[[], float] = time.thread_time) -> None:
        self._least, self._most, self._clock = least, most, clock
        self._size = least
        self._began = 0.0

    def first(self) -> int:
        self._began = self._clock()
        return self._size

    def next(self) -> int:
        now = self._clock()
        spent, self._began = now - self._began, now
        if spent > LONG:
            self._size = max(self._least, self._size // 2)
        elif spent < SHORT:
            self._size = min(self._most, self._size + max(self._size // 4, 1))
        return self._size
