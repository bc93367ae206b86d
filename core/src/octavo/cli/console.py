"""What long work shows while it lasts: a bar on a terminal, plain lines elsewhere. Always on stderr.

Owns the look of progress; stdout belongs to results. rich is imported only for a terminal.
"""

from __future__ import annotations

import os
import sys
import time
from types import TracebackType
from typing import TYPE_CHECKING, Any, Self, TextIO

if TYPE_CHECKING:
    from rich.console import Console

    from octavo.engine.messages import Progress

LINE_SECONDS = 5.0
"""Without a terminal, a stage that lasts says how far it is this often."""


def is_utf8(stream: TextIO) -> bool:
    return (stream.encoding or "").lower().replace("-", "") == "utf8"


def wide_console() -> Console:
    """Where tables go: a pipe has no width of its own, so it gets one in which a line of a table stays a line."""
    from rich.console import Console

    return Console(width=None if sys.stdout.isatty() or "COLUMNS" in os.environ else 200)


class Stages:
    """Shows the stages of a start. `update` takes the engine's Progress messages; `tell` takes text.

    Used as a context manager; what it drew on a terminal is gone afterwards.
    """

    def __init__(self, *, quiet: bool = False) -> None:
        self._live = sys.stderr.isatty()
        self._quiet = quiet
        self._bar: Any = None
        self._task: Any = None
        self._stage, self._said = "", 0.0

    def __enter__(self) -> Self:
        if self._live and not self._quiet:
            from rich.console import Console
            from rich.progress import BarColumn, SpinnerColumn, TextColumn, TimeElapsedColumn
            from rich.progress import Progress as Bars

            columns = (SpinnerColumn(), TextColumn("{task.description}"), BarColumn(), TimeElapsedColumn())
            self._bar = Bars(*columns, console=Console(stderr=True), transient=True)
            self._bar.start()
            self._task = self._bar.add_task("starting", total=None)
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None) -> None:
        self.stop()

    def stop(self) -> None:
        """Take the bar off the terminal; later updates show nothing."""
        if self._bar is not None:
            self._bar.stop()
        self._bar, self._quiet = None, True

    def update(self, progress: Progress) -> None:
        self.tell(progress.stage, progress.done, progress.total)

    def tell(self, stage: str, done: int = 0, total: int = 0) -> None:
        """total 0: how far it is is not known."""
        if self._quiet:
            return
        if self._bar is not None:
            self._bar.update(self._task, description=stage, completed=done, total=total or None)
            return
        now = time.monotonic()
        if stage != self._stage or (total and now - self._said >= LINE_SECONDS):
            share = f" {100 * done // total}%" if total and done else ""
            print(f"octavo: {stage}{share}", file=sys.stderr, flush=True)
            self._stage, self._said = stage, now
