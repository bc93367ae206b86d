"""Order of waiting sequences: first come first served, or by priority with ageing.

Owns the queue's data structure. Both policies reduce to one static key per sequence, so the queue
is a heap: with ageing, the effective priority at time t is priority - (t - arrival) / ageing, and
the term in t is the same for everybody.
"""

from __future__ import annotations

import heapq
from collections.abc import Iterator

from octavo.scheduling.sequence import Sequence, State


def order_key(policy: str, priority: int, arrival: float, serial: int, sample: int, ageing: float) -> tuple[float, int, int]:
    """Smaller runs first. serial is the order of arrival in this engine; ageing is in seconds per
    priority level (0: none, so that a stream of better requests may starve a worse one)."""
    if policy == "fcfs":
        return (0.0, serial, sample)
    return (priority + (arrival / ageing if ageing else 0.0), serial, sample)


class Queue:
    """Waiting sequences, smallest key first. A sequence that left the WAITING state is dropped lazily."""

    def __init__(self) -> None:
        self._heap: list[tuple[tuple[float, int, int], int, Sequence]] = []
        self._count = 0
        self._pushes = 0

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return (s for _, _, s in self._heap if s.state is State.WAITING)

    def push(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        self._pushes += 1
        heapq.heappush(self._heap, (sequence.key, self._pushes, sequence))
        self._count += 1

    def peek(self) -> Sequence | None:
        while self._heap and self._heap[0][2].state is not State.WAITING:
            heapq.heappop(self._heap)
        return self._heap[0][2] if self._heap else None

    def pop(self) -> Sequence:
        sequence = self.peek()
        if sequence is None:
            raise IndexError("pop from an empty queue")
        heapq.heappop(self._heap)
        self._count -= 1
        return sequence

    def discard(self) -> None:
        """A waiting sequence has been finished by its owner: its entry goes now or when it comes up."""
        self._count -= 1
        if len(self._heap) > 64 and len(self._heap) > 4 * self._count:
            self._heap = [entry for entry in self._heap if entry[2].state is State.WAITING]
            heapq.heapify(self._heap)
