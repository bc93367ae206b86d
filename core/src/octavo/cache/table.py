"""The block table of one KV group: which columns of which rows hold blocks, and what has changed.

Owns the int32 table, the span of columns that each row holds, and the record of entries that the
device has not been told about. Knows nothing of references, tokens or keys.
"""

from __future__ import annotations

import numpy as np

from octavo.cache.geometry import blocks_for
from octavo.interfaces import KVGroup
from octavo.request import TableUpdate

_EMPTY = np.array(-1)


class GroupTable:
    """Block table int32 [max_rows, columns]; entries that hold no block are -1.

    Row r holds blocks exactly in columns [first[r], held[r]): first moves up as a window is
    trimmed. published[r] counts the columns, from 0, that have been offered to the prefix index.
    The three are columns of the allocator's row state, int64 [max_rows, 3], which it hands in.

    Entries are addressed by *flat* indices, row * columns + column. size, round_up and width are
    block_size, block_size - 1 and columns as 0-d arrays, for arithmetic on arrays.
    """

    def __init__(self, group: KVGroup, counts: np.ndarray, max_model_len: int) -> None:
        self.group = group.index
        self.block_size = group.block_size
        self.window = group.spec.window
        self.columns = blocks_for(max_model_len, group.block_size)
        self.size, self.round_up, self.width = (np.array(n) for n in (self.block_size, self.block_size - 1, self.columns))
        self.array = np.full((len(counts), self.columns), -1, np.int32)
        self.flat = self.array.reshape(-1)
        self.first, self.held, self.published = counts.T
        self.fast_published, self.fast_flat = self.published.data, self.flat.data  # the same memory, for scalar access
        self._changed: list[np.ndarray] = []
        self._stamp = np.empty(self.flat.size, np.int32)  # scratch of `changes`; touched only where entries change

    def span(self, rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Flat indices of columns [low, high) of each row, row by row, columns ascending. high >= low."""
        if rows.size == 1:
            start = int(rows[0]) * self.columns
            return np.arange(start + int(low[0]), start + int(high[0]))
        count = high - low
        base: np.ndarray = rows * self.width + low
        ends = count.cumsum()
        total = int(ends[-1]) if ends.size else 0
        if total == rows.size == np.count_nonzero(count):  # one column each, as in decoding
            return base
        flat: np.ndarray = (base - ends + count).repeat(count) + np.arange(total)
        return flat

    def assign(self, flat: np.ndarray, blocks: np.ndarray) -> None:
        """Put blocks into these (distinct) entries."""
        if flat.size:
            self.flat[flat] = blocks.astype(np.int32)
            self._changed.append(flat)

    def clear(self, flat: np.ndarray) -> np.ndarray:
        """Empty these entries and return the blocks they held."""
        blocks = self.blocks(flat)
        self.assign(flat, _EMPTY)
        return blocks

    def blocks(self, flat: np.ndarray) -> np.ndarray:
        """The blocks of these entries, as ids that index arrays fast (np.intp)."""
        held: np.ndarray = self.flat[flat].astype(np.intp)
        return held

    def move(self, blocks: np.ndarray, targets: np.ndarray) -> None:
        """Entries that name one of these blocks name its target from now on."""
        flat = np.flatnonzero(np.isin(self.flat, blocks))
        place = dict(zip(blocks.tolist(), targets.tolist(), strict=True))
        self.assign(flat, np.array([place[block] for block in self.flat[flat].tolist()], np.intp))

    def changes(self) -> TableUpdate | None:
        """Entries assigned since the last call, each once, with their present value; None if there are none."""
        if not self._changed:
            return None
        if len(self._changed) == 1:
            flat = self._changed[0]
        else:
            flat = np.concatenate(self._changed)
            order = np.arange(flat.size, dtype=np.int32)
            self._stamp[flat] = order
            flat = flat[self._stamp[flat] == order]
        self._changed = []
        rows = flat // self.width
        columns = flat - rows * self.width
        return TableUpdate(self.group, rows.astype(np.int32), columns.astype(np.int32), self.flat[flat])
