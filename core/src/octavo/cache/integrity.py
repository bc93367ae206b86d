"""The integrity check of `BlockAllocator`: every invariant, spelled out.

Reads the allocator's private state and never changes it. Slow on purpose: for tests and the idle
loop. The checks of the parts are with the parts (`Blocks.check`, `PrefixIndex.check`).
"""

from __future__ import annotations

from typing import TYPE_CHECKING

import numpy as np

if TYPE_CHECKING:
    from octavo.cache.allocator import BlockAllocator


def _require(holds: bool | np.bool_, message: str) -> None:
    if not holds:
        raise AssertionError(message)


def check(allocator: BlockAllocator) -> None:
    """Raise AssertionError, naming the invariant, if one is broken."""
    a = allocator
    a._blocks.check()
    a._index.check(a._blocks.published)
    if a._spill is not None:
        a._spill.tier.check()
    counts = a._pins.references()
    owner = np.full(a._blocks.capacity, -1)
    for table in a._tables:
        named = table.array[table.array >= 0]
        counts += np.bincount(named, minlength=a._blocks.capacity)
        _require((np.isin(owner[named], (-1, table.group))).all(), "a block belongs to two groups")
        owner[named] = table.group
    wrong = np.flatnonzero(counts != a._blocks.references)
    _require(
        not wrong.size,
        f"references of blocks {wrong.tolist()} are {a._blocks.references[wrong].tolist()}, but tables name them "
        f"(and pins hold) them {counts[wrong].tolist()} times",
    )
    for row in range(a._room.size):
        _check_row(a, row)


def _check_row(a: BlockAllocator, row: int) -> None:
    if not a._room[row]:
        for table in a._tables:
            _require((table.array[row] == -1).all(), f"empty row {row} holds blocks in group {table.group}")
        _require(a._lineages[row] is None, f"empty row {row} has tokens")
        _require(np.array_equal(a._state[row], a._empty), f"empty row {row} has state {a._state[row].tolist()}")
        return
    lineage = a._lineages[row]
    if lineage is not None:
        _require(len(lineage.tokens) == 4 * a._known[row], f"row {row} knows {a._known[row]} tokens, its lineage differs")
    for table in a._tables:
        first, held, size = int(table.first[row]), int(table.held[row]), table.block_size
        where = f"row {row}, group {table.group}"
        _require(0 <= first <= held <= table.columns, f"{where}: holds columns [{first}, {held}) of {table.columns}")
        holds = np.flatnonzero(table.array[row] >= 0)
        _require(np.array_equal(holds, np.arange(first, held)), f"{where}: holds columns {holds.tolist()}, not [{first}, {held})")
        _require(table.window is not None or first == 0, f"{where}: a full group was trimmed")
        _require(a._capacity[row] <= held * size, f"{where}: capacity {a._capacity[row]} is more than its blocks hold")
        _require(a._surplus[row] >= (held - 1) * size, f"{where}: surplus bound {a._surplus[row]} misses its last block")
        _require(table.published[row] <= max(held, 0), f"{where}: published {table.published[row]} of {held} columns")
        alone = table.array[row, max(first, -(-int(a._writable[row]) // size)) : held]
        _require((a._blocks.references[alone] == 1).all(), f"{where}: a block past {a._writable[row]} is shared")
        _require(not a._blocks.published[alone].any(), f"{where}: a block past {a._writable[row]} is published")
        if lineage is not None:
            _require(a._due[row] <= (table.published[row] + 1) * size, f"{where}: a block would be published late")
        if table.window is not None:
            late = a._trimmable[row] > (first + 1) * size + table.window - 1
            _require(not late, f"{where}: its first block would be trimmed late")
