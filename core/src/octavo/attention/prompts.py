"""A step's prompts as work for prefill kernels, on the host: tiles of new tokens, and pages that are widened before they are read.

For attention backends with kernels of their own. Pure numpy: knows no device and no kernel. A step with prefill is not captured, so its
lengths are known here; how tiles are shared among the blocks of a kernel is the backend's, which knows what they cost.
"""

from __future__ import annotations

from typing import NamedTuple

import numpy as np

from octavo.interfaces import StepHost


class Widened(NamedTuple):
    """The columns of one row of the block table that are widened. row: its index in the step."""

    row: int
    first: int
    pages: int


def query_tiles(host: StepHost, size: int, width: int, only: np.ndarray | None = None) -> np.ndarray:
    """int32 [tiles, width] of the rows with several new tokens, `size` of them or fewer each, row after row. The first five values of a
    tile are its first token in the step, its tokens, the position of the first, its row of the block table, and the row's length after
    the step; the others are zero. only: of these rows of the step (indices), which are numbered in that order instead of by their place
    in the block table."""
    lens, ends = host.query_lens.astype(np.int64), host.seq_lens.astype(np.int64)
    starts = np.cumsum(lens) - lens
    many = np.flatnonzero(lens > 1) if only is None else only
    table_rows = host.rows[many] if only is None else np.arange(len(only))
    counts = -(-lens[many] // size)
    of = np.repeat(many, counts)
    nth = np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)
    made = np.zeros((of.size, width), dtype=np.int32)
    made[:, 0] = starts[of] + nth * size
    made[:, 1] = np.minimum(lens[of] - nth * size, size)
    made[:, 2] = ends[of] - lens[of] + nth * size
    made[:, 3] = np.repeat(table_rows, counts)
    made[:, 4] = ends[of]
    return made


def widened_rows(host: StepHost, window: int | None, page: int, capacity: int, tile: int = 1) -> list[list[Widened]] | None:
    """The rows with several new tokens in batches of at most `capacity` pages of `page` tokens; None if one row alone has more. Columns
    before a window are left out, whole tiles of `tile` tokens at a time: what the kernel reads of K and V at once."""
    step = max(page, tile)
    batches: list[list[Widened]] = []
    room = 0
    for row in np.flatnonzero(host.query_lens > 1).tolist():
        end, new = int(host.seq_lens[row]), int(host.query_lens[row])
        first = 0 if window is None else max(end - new - window + 1, 0) // step * (step // page)
        pages = -(-end // page) - first
        if pages > capacity:
            return None
        if pages > room:
            batches.append([])
            room = capacity
        batches[-1].append(Widened(row, first, pages))
        room -= pages
    return batches


def page_lists(host: StepHost, rows: list[Widened]) -> tuple[np.ndarray, np.ndarray]:
    """Of a batch of `widened_rows`: int32 [n, 2], row and column of the block table of each page of the workspace, and a block table
    int32 [rows, columns] that says where the workspace has them (-1: nowhere)."""
    table = np.full((len(rows), max(first + pages for _, first, pages in rows)), -1, np.int32)
    listed, at = [], 0
    for i, (row, first, pages) in enumerate(rows):
        columns = np.arange(first, first + pages, dtype=np.int32)
        listed.append(np.stack((np.full(pages, host.rows[row], np.int32), columns), 1))
        table[i, first : first + pages] = np.arange(at, at + pages)
        at += pages
    return np.concatenate(listed), table
