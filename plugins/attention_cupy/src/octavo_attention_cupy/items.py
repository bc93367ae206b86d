"""What the blocks of a prefill kernel take, as arrays on the host: tiles of new tokens, shares of them, and pages to be widened.

Pure numpy: knows no device and no kernel but for the size of a tile. A step with prefill is not captured, so its lengths are known here.
"""

from __future__ import annotations

import numpy as np
from octavo.interfaces import StepHost

TILE = 8
"""int32 values of PrefillTile (cuda/prefill_args.cuh)."""
HEAD = 5
"""Where the KV head stands among them."""
KV_TILE = 128
"""Tokens of K and V of a step of the Hopper kernel (TOKENS of cuda/prefill_hopper_copy.cuh)."""


def tile_list(host: StepHost, size: int, window: int | None, only: np.ndarray | None = None) -> np.ndarray:
    """int32 [tiles, TILE] of the rows with several new tokens, `size` of them or fewer each, longest first. only: of these rows of the
    step (indices), which are numbered in that order instead of by their place in the block table."""
    lens, ends = host.query_lens.astype(np.int64), host.seq_lens.astype(np.int64)
    starts = np.cumsum(lens) - lens
    many = np.flatnonzero(lens > 1) if only is None else only
    table_rows = host.rows[many] if only is None else np.arange(len(only))
    counts = -(-lens[many] // size)
    of = np.repeat(many, counts)
    nth = np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.zeros((of.size, TILE), dtype=np.int32)
    tiles[:, 0] = starts[of] + nth * size
    tiles[:, 1] = np.minimum(lens[of] - nth * size, size)
    tiles[:, 2] = ends[of] - lens[of] + nth * size
    tiles[:, 3] = np.repeat(table_rows, counts)
    tiles[:, 4] = ends[of]
    return tiles[np.argsort(-_kv_tiles(tiles, window), kind="stable")]


def _kv_tiles(tiles: np.ndarray, window: int | None) -> np.ndarray:
    """Tiles of K and V that each tile of new tokens reads, in tokens' order of size: what it costs."""
    first = 0 if window is None else np.maximum(tiles[:, 2] - window + 1, 0) // KV_TILE
    return -(-(tiles[:, 2] + tiles[:, 1]) // KV_TILE) - first


def share(tiles: np.ndarray, heads: int, blocks: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """Items, a tile and one of `heads` KV heads each, dealt out to at most `blocks` blocks that stay: int32 [items, TILE], block after
    block, and int32 [blocks + 1], where each block's begin. Shares are even: in rounds, the most costly of the items that are left to
    the block that has the least. A block takes its items head after head, so that K and V of few heads are in use at a time."""
    items = np.tile(tiles, (heads, 1))
    items[:, HEAD] = np.repeat(np.arange(heads), len(tiles))
    # An item's start and end take half as long as a tile of K and V.
    cost = 2 * _kv_tiles(items, window) + 1
    order = np.argsort(-cost, kind="stable")
    blocks = min(blocks, len(items))
    load, owner = np.zeros(blocks, np.int64), np.empty(len(items), np.int64)
    for at in range(0, len(items), blocks):
        taken = order[at : at + blocks]
        least = np.argsort(load, kind="stable")[: len(taken)]
        owner[taken] = least
        load[least] += cost[taken]
    starts = np.zeros(blocks + 1, np.int32)
    starts[1:] = np.cumsum(np.bincount(owner, minlength=blocks))
    return items[np.lexsort((-cost, items[:, HEAD], owner))], starts


def widened_rows(host: StepHost, window: int | None, page: int, capacity: int) -> list[list[tuple[int, int, int]]] | None:
    """The rows with several new tokens in batches of at most `capacity` pages, as (index of the row, first column, columns) of the block
    table; None if one row alone has more. Columns before a window are left out."""
    batches: list[list[tuple[int, int, int]]] = []
    room = 0
    for index in np.flatnonzero(host.query_lens > 1).tolist():
        end, new = int(host.seq_lens[index]), int(host.query_lens[index])
        low = 0 if window is None else max(end - new - window + 1, 0) // page
        count = -(-end // page) - low
        if count > capacity:
            return None
        if count > room:
            batches.append([])
            room = capacity
        batches[-1].append((index, low, count))
        room -= count
    return batches


def page_lists(host: StepHost, rows: list[tuple[int, int, int]]) -> tuple[np.ndarray, np.ndarray]:
    """Of a batch of `widened_rows`: int32 [n, 2], row and column of the block table of each page of the workspace, and a block table
    int32 [rows, columns] that says where the workspace has them (-1: nowhere)."""
    table = np.full((len(rows), max(low + count for _, low, count in rows)), -1, np.int32)
    pages, at = [], 0
    for i, (index, low, count) in enumerate(rows):
        columns = np.arange(low, low + count, dtype=np.int32)
        pages.append(np.stack((np.full(count, host.rows[index], np.int32), columns), 1))
        table[i, low : low + count] = np.arange(at, at + count)
        at += count
    return np.concatenate(pages), table
