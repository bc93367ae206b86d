"""Which rows of a decode step begin with the same blocks, so that a kernel may read those once for all of them.

Owns a host copy of one group's block tables. Rows share a prefix because the prefix cache gave them the same
blocks (or they are forks): equal block ids are equal keys and values, nothing is compared but ids. Only blocks
that lie wholly before a row's new token count. Must never look at what a row's table holds past its own tokens.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.interfaces import KVGroup, SharedPrefix
from octavo.request import TableUpdate

FEWEST_ROWS = 4
MOST_GROUPS = 8
COLUMNS = 16
"""Blocks that are compared at a time: prefixes are short beside the longest table."""


class PrefixSharing:
    """For the one full-attention group of a model; a model with several, or with none, shares nothing."""

    def __init__(self, groups: Sequence[KVGroup], max_rows: int, max_len: int) -> None:
        full = [g for g in groups if g.spec.kind == "full" and g.spec.window is None]
        self._group = full[0] if len(full) == 1 else None
        if self._group is not None:
            self._table = np.full((max_rows, -(-max_len // self._group.block_size)), -1, np.int32)

    def update(self, tables: Sequence[TableUpdate]) -> None:
        for update in tables:
            if self._group is not None and update.group == self._group.index:
                self._table[update.rows, update.cols] = update.blocks

    def find(self, slots: np.ndarray, start: np.ndarray) -> tuple[SharedPrefix, ...]:
        """slots and start of the step's rows, whose new token is at position start: the largest sets of rows
        first, at least FEWEST_ROWS each, with the tokens that all of a set share."""
        if self._group is None or len(slots) < FEWEST_ROWS:
            return ()
        size = self._group.block_size
        if (slots == slots[0]).all():  # tokens of one sequence: the end of a prompt
            before = int(start.min()) // size * size
            return (SharedPrefix(np.arange(len(slots)), before, self._group.index),) if before else ()
        whole = start // size  # blocks of each row that are full
        heads = np.where(whole > 0, self._table[slots, 0], -1)
        order = np.argsort(heads, kind="stable")
        # Rows with one first block stand together in this order: where each such set begins and ends.
        borders = np.flatnonzero(np.diff(heads[order], prepend=-2, append=-2))
        counts = np.diff(borders)
        sets = np.flatnonzero((counts >= FEWEST_ROWS) & (heads[order[borders[:-1]]] >= 0))
        found: list[SharedPrefix] = []
        for i in sets[np.argsort(-counts[sets], kind="stable")][:MOST_GROUPS]:
            rows = order[borders[i] : borders[i + 1]]
            blocks = self._common(slots[rows], int(whole[rows].min()))
            found.append(SharedPrefix(rows, blocks * size, self._group.index))
        return tuple(found)

    def _common(self, slots: np.ndarray, most: int) -> int:
        """Blocks, of at most `most`, that the tables of all these rows have in common."""
        for at in range(0, most, COLUMNS):
            part = self._table[slots, at : min(at + COLUMNS, most)]
            differs = np.flatnonzero((part != part[0]).any(0))
            if len(differs):
                return at + int(differs[0])
        return most
