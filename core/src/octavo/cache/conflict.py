"""Which held blocks a row may not simply write: those that others hold, and those that are published.

Owns the decision of copy on write. Reads tables and references, changes neither: `BlockAllocator` counts
what all groups need before it does anything.
"""

from __future__ import annotations

import numpy as np

from octavo.cache.blocks import Blocks
from octavo.cache.table import GroupTable


class Conflict:
    """Held blocks that rows are about to write in one group, and that are not theirs alone.

    replaced: flat table entries that get a new block, because others keep the old one. copied:
    bool, same length, whether the old content before the row's start is needed. rewritten: blocks
    that the row keeps (the last of their holders to write) and whose published content ends.
    """

    def __init__(self, table: GroupTable, rows: np.ndarray, start: np.ndarray, stop: np.ndarray, blocks: Blocks) -> None:
        self.table = table
        low = start // table.size
        count = np.maximum(stop - low, 0)
        flat = table.span(rows, low, low + count)
        held = table.blocks(flat)
        if (held < 0).any():
            row, column = divmod(int(flat[held < 0][0]), table.columns)
            raise ValueError(f"reserve: row {row} writes column {column} of group {table.group}, which has been trimmed")
        leaves = blocks.references[held] > 1
        # Where every holder writes in this very call, the last of them keeps the block.
        for block in np.unique(held[leaves]).tolist():
            writers = np.flatnonzero(held == block)
            if writers.size == blocks.references[block]:
                leaves[writers[-1]] = False
        self.replaced = flat[leaves]
        self.copied = (flat % table.columns * table.block_size < start.repeat(count))[leaves]
        self.rewritten = held[~leaves]
