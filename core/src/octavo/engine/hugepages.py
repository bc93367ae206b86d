"""Huge pages for what a CPU engine streams every step: its weights.

Owns the requests to the kernel, made once after the weights are loaded, by a thread of its own that yields to whoever
computes: they take about two seconds per GB, and nobody need wait for them. With pages of 4 KiB a step over 200 MB walks
fifty thousand page-table entries, and the hardware prefetcher stops at every page. Must never fail a start: where the
kernel refuses, nothing changes.
"""

from __future__ import annotations

import contextlib
import ctypes
import logging
import os
import threading
from collections.abc import Sequence
from pathlib import Path

log = logging.getLogger(__name__)

HUGE = 2 << 20
_SLICE = 4 * HUGE
"""Bytes of one request: a process that ends waits for the one under way."""

_NICE = 10
_MADV_HUGEPAGE, _MADV_COLLAPSE = 14, 25  # linux/mman.h; collapse is there since Linux 6.1

Region = tuple[int, int]
"""Addresses, the second past the end."""


def collapse_in_background() -> threading.Thread | None:
    """Move the memory that this process holds now into huge pages, while it goes on. None where the system has or allows none."""
    regions = worth_moving()
    if not regions:
        return None
    thread = threading.Thread(target=_collapse_politely, args=(regions,), name="huge-pages", daemon=True)
    thread.start()
    return thread


def worth_moving(smallest: int = 2 * HUGE) -> list[Region]:
    """This process's anonymous memory, mappings of at least `smallest` bytes, in whole huge pages; none where the system has or
    allows no huge pages."""
    try:
        allowed = "[never]" not in Path("/sys/kernel/mm/transparent_hugepage/enabled").read_text()
        regions = _regions(Path("/proc/self/maps").read_text())
    except OSError:
        return []  # not Linux
    return [(start, end) for start, end in regions if end - start >= smallest] if allowed else []


def collapse(regions: Sequence[Region]) -> int:
    """Ask Linux to move these regions into huge pages now. Returns the bytes that were moved. Memory that was reserved but never
    touched becomes resident."""
    try:
        madvise = ctypes.CDLL(None, use_errno=True).madvise
    except (OSError, AttributeError):
        return 0
    madvise.argtypes = (ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int)
    moved = 0
    for start, end in regions:
        if madvise(start, end - start, _MADV_HUGEPAGE):
            continue
        for at in range(start, end, _SLICE):
            size = min(_SLICE, end - at)
            if madvise(at, size, _MADV_COLLAPSE) == 0:
                moved += size
    return moved


def _collapse_politely(regions: Sequence[Region]) -> None:
    with contextlib.suppress(OSError):
        os.setpriority(os.PRIO_PROCESS, threading.get_native_id(), _NICE)  # on Linux this is the thread's alone
    log.info("huge pages: %d MiB of this process moved into pages of 2 MiB", collapse(regions) >> 20)


def _regions(maps: str) -> list[Region]:
    """Private, writable, anonymous mappings of /proc/self/maps, cut to whole huge pages."""
    found = []
    for line in maps.splitlines():
        fields = line.split()
        if fields[1] != "rw-p" or (len(fields) > 5 and fields[5] != "[heap]"):
            continue
        low, high = (int(part, 16) for part in fields[0].split("-"))
        start, end = -(-low // HUGE) * HUGE, high // HUGE * HUGE
        if start < end:
            found.append((start, end))
    return found
