"""Integer geometry of paged memory: positions, columns, slots, and how many blocks a length needs.

Owns the arithmetic of block boundaries, so that it is written (and tested) once. Never holds
state, never sees a tensor.

A sequence's position p lives in *column* p // block_size of its row of the block table, at offset
p % block_size; its *slot* is table[row, column] * block_size + offset.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.interfaces import KVGroup


def blocks_for(tokens: int, block_size: int) -> int:
    """Blocks that `tokens` tokens fill or begin to fill; also the columns that attention over them reads."""
    return -(-tokens // block_size)


def first_visible(position: int, window: int | None) -> int:
    """The first position that a query at `position` sees: a window of W holds W keys, the query's own included."""
    return 0 if window is None else max(0, position - window + 1)


def slots(table: np.ndarray, rows: np.ndarray, positions: np.ndarray, block_size: int) -> np.ndarray:
    """Slots, int64 [T], of positions [T] of state-table rows [T], under one group's table [max_rows, columns].

    The entries must hold blocks: a slot that comes out negative belongs to a position that nobody reserved.
    """
    columns, offsets = np.divmod(np.asarray(positions, np.int64), block_size)
    return np.asarray(table[rows, columns], np.int64) * block_size + offsets


def window_blocks(window: int, block_size: int, max_step_tokens: int) -> int:
    """Most blocks that a window group of one sequence holds, at any context, when it is trimmed before each step.

    A step of n tokens reads the window - 1 tokens before it and writes its own: an interval of
    window - 1 + n tokens, which touches this many blocks at the worst alignment.
    """
    return (window - 1 + max_step_tokens + block_size - 2) // block_size + 1


def sequence_blocks(groups: Sequence[KVGroup], tokens: int, max_step_tokens: int = 0) -> int:
    """Blocks over all groups that one sequence of `tokens` tokens needs at its peak.

    max_step_tokens bounds what one step adds to a row; 0 means unknown, and a window group is then
    counted as if one step could be the whole sequence.
    """
    total = 0
    for group in groups:
        need = blocks_for(tokens, group.block_size)
        if group.spec.window is not None and max_step_tokens:
            need = min(need, window_blocks(group.spec.window, group.block_size, max_step_tokens))
        total += need
    return total
