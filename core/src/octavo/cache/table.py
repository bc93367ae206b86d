"""The block table of one KV group: which columns of which rows hold blocks, and what has changed.

Owns the int32 table, the span of columns that each row holds, and the record of entries that the
device has not been told about. Knows nothing of references, tokens or keys.
"""

from __future__ import annotations

import numpy as np

from octavo.cache.geometry import blocks_for
from octavo.interfaces import KVGroup
from octavo.request import TableUpdate


class GroupTable:
    """Block table int32 [max_rows, columns]; entries that hold no block are -1.

    Row r holds blocks exactly in columns [first[r], held[r]): first moves up as a window is
    trimmed. published[r] counts the columns, from 0, that have been offered to the prefix index.
    Entries are addressed by *flat* indices, row * columns + column.
    """

    def __init__(self, group: KVGroup, max_rows: int, max_model_len: int) -> None:
        self.group = group.index
        self.block_size = group.block_size
        self.window = group.spec.window
        self.columns = blocks_for(max_model_len, group.block_size)
        self.array = np.full((max_rows, self.columns), -1, np.int32)
        self.flat = self.array.reshape(-1)
        self.first = np.zeros(max_rows, np.int32)
        self.held = np.zeros(max_rows, np.int32)
        self.published = np.zeros(max_rows, np.int32)
        self._changed: list[np.ndarray] = []
        self._stamp = np.empty(self.flat.size, np.int32)  # scratch of `changes`; touched only where entries change

    def span(self, rows: np.ndarray, low: np.ndarray, high: np.ndarray) -> np.ndarray:
        """Flat indices of columns [low, high) of each row, row by row, columns ascending. high >= low."""
        count = high - low
        base = rows * self.columns + low
        ends = count.cumsum()
        total = int(ends[-1]) if ends.size else 0
        flat: np.ndarray = np.repeat(base - ends + count, count) + np.arange(total)
        return flat

    def assign(self, flat: np.ndarray, blocks: np.ndarray) -> None:
        """Put blocks into these (distinct) entries."""
        if flat.size:
            self.flat[flat] = blocks
            self._changed.append(flat)

    def clear(self, flat: np.ndarray) -> np.ndarray:
        """Empty these entries and return the blocks they held."""
        blocks: np.ndarray = self.flat[flat]
        self.assign(flat, np.int32(-1))  # type: ignore[arg-type]
        return blocks

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
        rows, columns = np.divmod(flat, self.columns)
        return TableUpdate(self.group, rows.astype(np.int32), columns.astype(np.int32), self.flat[flat])
