"""A bar for long loads: on a terminal it moves, elsewhere one line is logged.

Owns how progress looks. What is loaded reports through a plain callable (done, total), so that
nothing below imports rich.
"""

from __future__ import annotations

import logging
import sys
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager

Progress = Callable[[int, int], None]
"""Called with the units (bytes) done so far and in total; done never falls."""

log = logging.getLogger(__name__)


def silent(done: int, total: int) -> None:
    """The progress that shows nothing."""


@contextmanager
def bar(title: str) -> Iterator[Progress]:
    """Show a load of bytes called `title` on stderr while the block runs; log its size and seconds at the end."""
    begun, last = time.monotonic(), 0

    if not sys.stderr.isatty():

        def note(done: int, total: int) -> None:
            nonlocal last
            last = done

        yield note
    else:
        from rich.console import Console
        from rich.progress import BarColumn, DownloadColumn, TextColumn, TimeElapsedColumn, TransferSpeedColumn
        from rich.progress import Progress as Live

        columns = (TextColumn("{task.description}"), BarColumn(), DownloadColumn(), TransferSpeedColumn(), TimeElapsedColumn())
        with Live(*columns, console=Console(stderr=True), transient=True) as view:
            task = view.add_task(title, total=None)

            def move(done: int, total: int) -> None:
                nonlocal last
                last = done
                view.update(task, completed=done, total=total)

            yield move
    log.info("%s: %.1f MiB in %.1f s", title, last / 2**20, time.monotonic() - begun)
