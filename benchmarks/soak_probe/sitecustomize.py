"""Loaded by Python itself in every process that benchmarks/soak.py starts: what the process holds, every second, in a file.

Resident memory also counts what the allocator keeps for itself and the pages of code that have been touched, so it says little about a
leak of a megabyte. Counted here is what the process has asked for and not given back: malloc's own count, of all its arenas, and
the blocks of Python's allocator, which takes its memory from the system directly.
"""

import ctypes
import os
import sys
import threading
import time


class _Mallinfo2(ctypes.Structure):
    _fields_ = [
        (name, ctypes.c_size_t)
        for name in ("arena", "ordblks", "smblks", "hblks", "hblkhd", "usmblks", "fsmblks", "uordblks", "fordblks", "keepcost")
    ]


def _watch(folder: str) -> None:
    mallinfo2 = ctypes.CDLL(None).mallinfo2  # glibc 2.33 or newer
    mallinfo2.restype = _Mallinfo2
    with open(os.path.join(folder, str(os.getpid())), "w", buffering=1) as out:
        while True:
            info = mallinfo2()
            out.write(f"{time.monotonic()} {info.uordblks + info.hblkhd} {sys.getallocatedblocks()}\n")
            time.sleep(1)


if "SOAK_PROBE" in os.environ:
    threading.Thread(target=_watch, args=(os.environ["SOAK_PROBE"],), daemon=True).start()
