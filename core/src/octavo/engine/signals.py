"""Signals of the engine's process: its parent decides what they mean, from the child's first moment on.

Ctrl-C reaches the whole process group, and service managers signal every process of a service: if the engine went at
once, the parent would have nothing to drain. While the child still imports, Python would end it with a traceback, so it
inherits a mask that holds signals back until it ignores them.
"""

from __future__ import annotations

import signal
from collections.abc import Iterator
from contextlib import contextmanager

_PARENTS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@contextmanager
def held_signals() -> Iterator[None]:
    """A process that this thread starts meanwhile is born with the signals held back; those sent to this one arrive at the end."""
    before = signal.pthread_sigmask(signal.SIG_BLOCK, _PARENTS)
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def leave_signals_to_parent() -> None:
    """Ignore them from now on, those that came meanwhile too."""
    for number in _PARENTS:
        signal.signal(number, signal.SIG_IGN)
    signal.pthread_sigmask(signal.SIG_UNBLOCK, _PARENTS)
