"""The running set: who holds a slot of the state table, and the counters of each as numpy columns.

Python cost per row is what bounds small models, so what a step needs of every row is a column over slots:

    known     tokens that exist, those in flight included
    computed  tokens whose KV a submitted step writes
    limit     prompt + max_tokens
    rank      first part of the sequence's key
    tenant    index of its share

Owns the free slots and the order of the set, which is that of keys: the last one is the next victim. Decides nothing.
"""

from __future__ import annotations

import bisect
import heapq
from collections.abc import Iterator

import numpy as np

from octavo.scheduling.sequence import Sequence, State


class RunningSet:
    """Sequences in order of their keys. size: slots that there are."""

    def __init__(self, size: int) -> None:
        self.known = np.zeros(size, np.int64)
        self.computed = np.zeros(size, np.int64)
        self.limit = np.zeros(size, np.int64)
        self.rank = np.zeros(size)
        self.tenant = np.zeros(size, np.intp)
        self._free = list(range(size))  # a heap: low slots first keeps tables dense
        self.sequences: list[Sequence] = []  # sorted by key; changed by `enter` and `leave` only
        self._slots = np.zeros(0, np.int32)
        self._stale = False

    def __len__(self) -> int:
        return len(self.sequences)

    def __iter__(self) -> Iterator[Sequence]:
        return iter(self.sequences)

    @property
    def last(self) -> Sequence | None:
        """The next victim."""
        return self.sequences[-1] if self.sequences else None

    @property
    def slots(self) -> np.ndarray:
        """int32: the slots in the order of the set."""
        if self._stale:
            self._slots = np.array([s.slot for s in self.sequences], np.int32)
            self._stale = False
        return self._slots

    @property
    def free_slot(self) -> int | None:
        """The slot that `enter` would give."""
        return self._free[0] if self._free else None

    def enter(self, sequence: Sequence, known: int, computed: int) -> int:
        """Give a sequence the free slot. There must be one."""
        slot = heapq.heappop(self._free)
        sequence.slot, sequence.state, sequence.extended = slot, State.RUNNING, known
        self.known[slot], self.computed[slot], self.limit[slot] = known, computed, sequence.limit
        self.rank[slot], self.tenant[slot] = sequence.key[0], sequence.tenant
        bisect.insort(self.sequences, sequence, key=lambda s: s.key)
        self._stale = True
        return slot

    def leave(self, sequence: Sequence) -> None:
        """Take its slot back; its state is the caller's to change."""
        self.sequences.remove(sequence)
        self._stale = True
        heapq.heappush(self._free, sequence.slot)
        sequence.slot = -1

    def work(self) -> np.ndarray:
        """int64, in the order of the set: tokens that each could compute now. The KV of the very last one is never needed."""
        slots = self.slots
        work: np.ndarray = np.minimum(self.known[slots], self.limit[slots] - 1) - self.computed[slots]
        return work
