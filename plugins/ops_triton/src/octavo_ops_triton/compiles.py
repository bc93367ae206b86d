"""A line of the log for every kernel that Triton compiles or fetches from its cache once an engine is built.

Everybody in a step waits for such a kernel, so whoever wonders about a slow step finds its name. Covers the kernels of every
plugin in the process. A listener that somebody else has set is called too.
"""

from __future__ import annotations

import logging
from typing import Any

log = logging.getLogger(__name__)


def tell() -> None:
    """From now on. Imports triton."""
    from triton import knobs

    before = knobs.compilation.listener

    def listener(*, src: Any, times: Any, cache_hit: bool, **rest: Any) -> None:
        log.debug("%s the kernel %s in %.0f ms", "fetched" if cache_hit else "compiled", src.name, times.total / 1000)
        if before is not None:
            before(src=src, times=times, cache_hit=cache_hit, **rest)

    knobs.compilation.listener = listener
