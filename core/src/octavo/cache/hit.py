"""The longest cached prefix that every KV group can serve.

Owns the rule of what a hit needs: in a full group all blocks before its end, in a window group only
those that the next query sees. Looks up, changes nothing.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

from octavo.cache.geometry import first_visible
from octavo.cache.prefix import Lineage, PrefixIndex
from octavo.cache.table import GroupTable


def longest_hit(index: PrefixIndex, tables: Sequence[GroupTable], lineage: Lineage, known: int) -> tuple[int, list[list[int]]]:
    """The longest hit in tokens, and per group the blocks that it needs, last column last.

    A hit is a multiple of every block size and leaves out the last of the `known` tokens. Full groups
    bound it from the left: a run of blocks from the start. Window groups are then read from the
    right, and each miss moves the end to before the missing block, until all agree.
    """
    stride = math.lcm(*(table.block_size for table in tables))
    windowed = [table for table in tables if table.window is not None]
    hit = max(0, known - 1) // stride * stride
    runs: dict[int, list[int]] = {}
    for table in tables:
        if table.window is None:
            run = runs[table.group] = index.match(lineage, table.group, table.block_size, hit // table.block_size)
            hit = len(run) * table.block_size // stride * stride
    looked_up: dict[tuple[int, int], int] = {}
    settled = not windowed
    while hit and not settled:
        settled = True
        for table in windowed:
            size = table.block_size
            for column in range(hit // size - 1, first_visible(hit, table.window) // size - 1, -1):
                place = (table.group, column)
                if place not in looked_up:
                    looked_up[place] = index.find(lineage, table.group, size, column)
                if looked_up[place] < 0:
                    hit, settled = column * size // stride * stride, False
                    break
    found = []
    for table in tables:
        end = hit // table.block_size
        if table.window is None:
            found.append(runs[table.group][:end])
        else:
            first = first_visible(hit, table.window) // table.block_size
            found.append([looked_up[table.group, column] for column in range(first, end)])
    return hit, found
