"""Draft: the rows of a batch while the scheduler puts it together, so that a victim's share can be undone.

Owns the budget of tokens, and which chunks of prompts stand back for a request that goes before them.
"""

from __future__ import annotations

from octavo.scheduling.policies import Order
from octavo.scheduling.sequence import Sequence, State

Row = tuple[Sequence, int, int, bool]
"""Sequence, start, take, sample."""


class Draft:
    """budget: tokens that the step may still take."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: dict[int, Row] = {}  # by slot
        self.admitted: dict[int, Sequence] = {}  # slot -> sequence that the runner has to learn about
        self._displaced: list[Row] = []

    def add(self, sequence: Sequence, start: int, take: int, sample: bool) -> None:
        self.rows[sequence.slot] = (sequence, start, take, sample)
        self.budget -= take

    def undo(self, slot: int) -> None:
        row = self.rows.pop(slot, None)
        if row is not None:
            self.budget += row[2]
        self.admitted.pop(slot, None)

    def displace(self, waiting: Sequence, order: Order) -> bool:
        """Take out the chunk of a running prompt that goes after `waiting`, the last such: a long prompt must hold up
        neither a better priority nor a tenant that has had less. False if all go before it."""
        if order.flat:
            return False
        chunks = [row for slot, row in self.rows.items() if row[2] > 1 and slot not in self.admitted]
        last = max(chunks, key=lambda row: (*order.standing(row[0]), row[0].key), default=None)
        if last is None or order.standing(waiting) >= order.standing(last[0]):
            return False
        self.undo(last[0].slot)
        self._displaced.append(last)
        return True

    def resume(self, *, whole: bool) -> None:
        """Give displaced chunks what is left of the budget; each has kept its slot and the blocks for all of it.
        whole: all of a chunk or nothing."""
        for sequence, start, wanted, sample in self._displaced:
            take = min(wanted, self.budget)
            if sequence.state is not State.RUNNING or sequence.slot in self.rows or take <= 0:
                continue
            if take == wanted or not whole:
                self.add(sequence, start, take, sample and take == wanted)

    def columns(self) -> tuple[list[Sequence], list[int], list[int], list[bool], list[int]]:
        """sequence, start, take, sample, source (itself) of every row."""
        rows = self.rows.values()
        return [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], [r[3] for r in rows], list(range(len(rows)))
