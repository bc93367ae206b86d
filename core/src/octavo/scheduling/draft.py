"""Draft: the rows of a batch while the scheduler puts it together, so that a victim's share can be undone."""

from __future__ import annotations

from octavo.scheduling.sequence import Sequence


class Draft:
    """budget: tokens that the step may still take."""

    def __init__(self, budget: int) -> None:
        self.budget = budget
        self.rows: dict[int, tuple[Sequence, int, int, bool]] = {}  # slot -> sequence, start, take, sample
        self.admitted: dict[int, Sequence] = {}  # slot -> sequence that the runner has to learn about

    def add(self, sequence: Sequence, start: int, take: int, sample: bool) -> None:
        self.rows[sequence.slot] = (sequence, start, take, sample)
        self.budget -= take

    def undo(self, slot: int) -> None:
        row = self.rows.pop(slot, None)
        if row is not None:
            self.budget += row[2]
        self.admitted.pop(slot, None)

    def columns(self) -> tuple[list[Sequence], list[int], list[int], list[bool], list[int]]:
        """sequence, start, take, sample, source (itself) of every row."""
        rows = self.rows.values()
        return [r[0] for r in rows], [r[1] for r in rows], [r[2] for r in rows], [r[3] for r in rows], list(range(len(rows)))
