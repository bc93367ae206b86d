"""Who goes first: by level, then by what its tenant has had, then by arrival.

Owns the order of sequences and the queue of those that wait. The level is the priority, better by one
for every `ageing` seconds of waiting, so that a stream of better requests starves nobody for ever;
first come first served puts everybody on one level. Within a level tenants share by weight: each has a
counter of the tokens computed for it, divided by its weight, and the least served goes first (virtual
token counters). With one tenant what is left is the order of arrival. Never sees blocks or slots.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Iterator

import numpy as np

from octavo.scheduling.sequence import Sequence, State

Key = tuple[float, int, int]

_ROUNDING = 1e-6  # of a level: a clock's seconds are large numbers, and a request is not late when it arrives


class Shares:
    """The service of every tenant: computed tokens over its weight. Tenants are a closed set (they come from
    the operator's keys), and are never forgotten."""

    def __init__(self) -> None:
        self._index: dict[str, int] = {}
        self._weights = np.ones(0)
        self.served = np.zeros(0)

    def __len__(self) -> int:
        return len(self._index)

    def of(self, tenant: str, weight: float) -> int:
        """The tenant's index, with its weight as of now."""
        index = self._index.setdefault(tenant, len(self._index))
        if index == len(self.served):
            self.served, self._weights = np.append(self.served, 0.0), np.append(self._weights, 1.0)
        self._weights[index] = weight
        return index

    def charge(self, tenants: np.ndarray, tokens: np.ndarray) -> None:
        """Count computed tokens: tokens[i] of tenant tenants[i]."""
        if len(self) > 1:
            self.served += np.bincount(tenants, tokens, len(self)) / self._weights

    def refund(self, tenant: int, tokens: int) -> None:
        """Take back what a preempted sequence has to compute a second time."""
        self.served[tenant] -= tokens / self._weights[tenant]

    def lift(self, tenant: int, floor: float) -> None:
        """A tenant comes back to the queue: time without work earns no credit."""
        self.served[tenant] = max(self.served[tenant], floor)


class Order:
    """The order of one scheduler. ageing: seconds of waiting that count as one level, 0 for none."""

    def __init__(self, policy: str, ageing: float, clock: Callable[[], float]) -> None:
        self._priorities, self._ageing, self._clock = policy == "priority", ageing, clock
        self.shares = Shares()

    def key(self, priority: int, arrival: float, serial: int, sample: int) -> Key:
        """The static part of the order, smaller first: the level at time t is this key's first part less
        t / ageing, and that term is the same for everybody. serial is the order of arrival in this engine."""
        if not self._priorities:
            return (0.0, serial, sample)
        return (priority + (arrival / self._ageing if self._ageing else 0.0), serial, sample)

    def level(self, rank: float) -> int:
        """The level now of a key whose first part is `rank`."""
        return math.ceil(rank - self._elapsed() - _ROUNDING)

    def rows(self, chunk: np.ndarray, ranks: np.ndarray, tenants: np.ndarray) -> np.ndarray:
        """The order of running rows, given in key order: those that decode, then prompts' chunks."""
        if len(self.shares) < 2:
            return np.argsort(chunk, kind="stable")
        levels = np.ceil(ranks - self._elapsed() - _ROUNDING)
        return np.lexsort((self.shares.served[tenants], levels, chunk))

    def standing(self, sequence: Sequence) -> tuple[int, float]:
        """level and service, for comparing sequences of different tenants."""
        return self.level(sequence.key[0]), float(self.shares.served[sequence.tenant])

    @property
    def flat(self) -> bool:
        """Whether arrival alone decides: one level and one tenant."""
        return not self._priorities and len(self.shares) < 2

    def _elapsed(self) -> float:
        return self._clock() / self._ageing if self._priorities and self._ageing else 0.0


class _Lane:
    """One tenant's waiting sequences, smallest key first; a sequence that left the WAITING state is dropped lazily."""

    def __init__(self) -> None:
        self.heap: list[tuple[Key, int, Sequence]] = []
        self.count = 0

    def head(self) -> Sequence:
        """The first one that waits. The lane is not empty."""
        while self.heap[0][2].state is not State.WAITING:
            heapq.heappop(self.heap)
        return self.heap[0][2]

    def sweep(self) -> None:
        if len(self.heap) > 64 and len(self.heap) > 4 * self.count:
            self.heap = [entry for entry in self.heap if entry[2].state is State.WAITING]
            heapq.heapify(self.heap)


class Queue:
    """Waiting sequences, a lane per tenant."""

    def __init__(self, order: Order) -> None:
        self._order = order
        self._lanes: dict[int, _Lane] = {}
        self._count = 0
        self._pushes = 0
        self._last: int | None = None  # the tenant of whoever was taken last

    def __len__(self) -> int:
        return self._count

    def __iter__(self) -> Iterator[Sequence]:
        return (s for lane in self._lanes.values() for _, _, s in lane.heap if s.state is State.WAITING)

    def waiting(self, tenant: int) -> int:
        """How many of this tenant's sequences wait."""
        lane = self._lanes.get(tenant)
        return lane.count if lane else 0

    def share(self, tenant: int, weight: float, places: int) -> float:
        """This tenant's part of so many places, beside the tenants that wait."""
        others = sum(lane.head().request.weight for other, lane in self._lanes.items() if other != tenant)
        return places * weight / (weight + others)

    def push(self, sequence: Sequence) -> None:
        sequence.state = State.WAITING
        lane = self._lanes.get(sequence.tenant)
        if lane is None:
            self._lift(sequence)
            lane = self._lanes[sequence.tenant] = _Lane()
        self._pushes += 1
        heapq.heappush(lane.heap, (sequence.key, self._pushes, sequence))
        lane.count += 1
        self._count += 1

    def _lift(self, sequence: Sequence) -> None:
        """Level with the least served of those that already wait beside it, else with whoever was taken last."""
        level, served = self._order.level(sequence.key[0]), self._order.shares.served
        beside = [served[t] for t, lane in self._lanes.items() if self._order.level(lane.head().key[0]) == level]
        if beside or self._last is not None:
            self._order.shares.lift(sequence.tenant, float(min(beside) if beside else served[self._last]))

    def peek(self) -> Sequence | None:
        """Who goes next. Of one level, what has begun goes on before what has not: somebody is reading it."""
        if len(self._lanes) < 2:
            return next(iter(self._lanes.values())).head() if self._lanes else None
        heads = [lane.head() for lane in self._lanes.values()]
        served = self._order.shares.served
        return min(heads, key=lambda s: (self._order.level(s.key[0]), s.cached < 0, served[s.tenant], s.key))

    def pop(self, sequence: Sequence) -> None:
        """Take the sequence that `peek` returned."""
        heapq.heappop(self._lanes[sequence.tenant].heap)
        self._last = sequence.tenant
        self._drop(sequence.tenant)

    def discard(self, sequence: Sequence) -> None:
        """A waiting sequence has been finished by its owner: its entry goes now or when it comes up."""
        self._drop(sequence.tenant)

    def _drop(self, tenant: int) -> None:
        lane = self._lanes[tenant]
        lane.count -= 1
        self._count -= 1
        if lane.count:
            lane.sweep()
        else:
            del self._lanes[tenant]
