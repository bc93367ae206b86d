"""When the search for garbage in cycles goes through everything: while few wait for the event loop.

Owns the collector's thresholds and its full collections. Young objects are looked through as they come, which takes
a few milliseconds; everything that a thousand streams hold takes a hundred. Almost nothing here is in a cycle, so
the full look can wait for a quiet moment, but not for ever.
"""

from __future__ import annotations

import asyncio
import gc
import time
from collections.abc import Callable

_YOUNG, _MIDDLE, _NEVER = 2_000, 5, 1 << 30
_INTERVAL = 1.0  # seconds between two looks whether the moment is quiet
_DUE = 100  # middle collections after which a full one is due
_FEW = 32  # requests: what they hold is searched in a few milliseconds
_LONGEST = 600.0  # seconds that a due one waits at most


class Collector:
    """requests: how many are being answered now. Runs until its task is cancelled."""

    def __init__(self, requests: Callable[[], int]) -> None:
        self._requests = requests
        self._last = time.monotonic()

    async def run(self) -> None:
        gc.collect()
        gc.freeze()  # what was imported is garbage for nobody: never look at it again
        gc.set_threshold(_YOUNG, _MIDDLE, _NEVER)
        while True:
            await asyncio.sleep(_INTERVAL)
            self.look()

    def look(self) -> bool:
        """Whether it was time to collect everything."""
        late = time.monotonic() - self._last > _LONGEST
        if gc.get_count()[2] < _DUE or (self._requests() > _FEW and not late):
            return False
        gc.collect()
        self._last = time.monotonic()
        return True
