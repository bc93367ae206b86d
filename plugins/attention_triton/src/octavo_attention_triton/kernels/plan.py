"""The work map of a decode step: who reads which tokens, made on the device once a step for all layers.

An item is ITEM int32 values: query token (-1: idle), state-table row, first token, end token, first item of
its row, splits of its row, row of the step, spare. Items of a row are neighbours, which makes an item's number
the place of its partial result. The map is sized by `capacity`; idle items end at once. `cuts` says the same by
row of the step, for whoever adds the parts up: INFO int32 values, query token (-1: not decoding), first item, splits, spare.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl

ITEM = 8
INFO = 4


@triton.jit
def _row(query_start, seq_lens, skip, r, count, SKIP: tl.constexpr, TILE: tl.constexpr, WINDOW: tl.constexpr):
    """Of rows r of the step: query token, length (0 where it is not decoding), first token that is read, its tile, and tiles."""
    live = r < count
    token = tl.load(query_start + r, mask=live, other=0)
    decoding = live & (tl.load(query_start + r + 1, mask=live, other=0) - token == 1)
    length = tl.where(decoding, tl.load(seq_lens + r, mask=live, other=0), 0)
    first = tl.zeros_like(length)
    if SKIP:
        first = tl.where(decoding, tl.load(skip + r, mask=live, other=0), 0)
    if WINDOW > 0:
        first = tl.maximum(length - WINDOW, 0)
    tile0 = first // TILE
    return tl.where(decoding, token, -1), length, first, tile0, tl.cdiv(length, TILE) - tile0


@triton.jit
def _splits(token, tiles, total, budget, MIN_TILES: tl.constexpr, MAX_SPLITS: tl.constexpr):
    """Items of rows: their share of the budget, rounded, at least one and none of less than MIN_TILES tiles."""
    splits = (tiles.to(tl.int64) * budget + total // 2) // total
    splits = tl.minimum(splits.to(tl.int32), tl.minimum(tiles // MIN_TILES, MAX_SPLITS))
    return tl.where(token >= 0, tl.maximum(splits, 1), 0)


@triton.jit(do_not_specialize=["count", "budget", "capacity"])
def plan_kernel(
    query_start, seq_lens, rows, skip, items, cuts, count, budget, capacity,
    SKIP: tl.constexpr, TILE: tl.constexpr, MIN_TILES: tl.constexpr, WINDOW: tl.constexpr,
    MAX_SPLITS: tl.constexpr, ROWS: tl.constexpr, LANES: tl.constexpr, BLOCK_C: tl.constexpr,
):  # fmt: skip
    """Cut the visible tiles of every row with one new token into about `budget` equal parts; rows of the largest come first, so that
    the last programs to start are short ones.

    At most budget + count items are made. Rows with several new tokens (prefill) get none. A row of length zero gets one empty item: its
    output is defined (zeros).
    """
    r = tl.arange(0, ROWS)
    token, length, first, tile0, tiles = _row(query_start, seq_lens, skip, r, count, SKIP, TILE, WINDOW)
    total = tl.maximum(tl.sum(tiles, 0), 1)
    largest = tl.cdiv(tiles, tl.maximum(_splits(token, tiles, total, budget, MIN_TILES, MAX_SPLITS), 1))
    r = ROWS - 1 - tl.sort(largest * ROWS + (ROWS - 1 - r), descending=True) % ROWS

    live = r < count
    token, length, first, tile0, tiles = _row(query_start, seq_lens, skip, r, count, SKIP, TILE, WINDOW)
    row = tl.load(rows + r, mask=live, other=0).to(tl.int32)
    splits = _splits(token, tiles, total, budget, MIN_TILES, MAX_SPLITS)
    place = tl.cumsum(splits, 0) - splits
    used = tl.sum(splits, 0)
    tl.store(cuts + r * 4, token, mask=live)
    tl.store(cuts + r * 4 + 1, place, mask=live)
    tl.store(cuts + r * 4 + 2, splits, mask=live)

    c = tl.arange(0, BLOCK_C)
    tl.store(items + c * 8, tl.full([BLOCK_C], -1, tl.int32), mask=(c >= used) & (c < capacity))

    lane = tl.arange(0, LANES)[None, :]
    most = tl.max(splits, 0)
    parts = tl.maximum(splits, 1)[:, None]
    for j0 in range(0, most, LANES):
        j = j0 + lane
        mask = j < splits[:, None]
        start = (tile0[:, None] + tiles[:, None] * j // parts) * TILE
        end = (tile0[:, None] + tiles[:, None] * (j + 1) // parts) * TILE
        item = items + (place[:, None] + j) * 8
        whole = tl.zeros_like(j + r[:, None])
        tl.store(item, token[:, None] + whole, mask=mask)
        tl.store(item + 1, row[:, None] + whole, mask=mask)
        tl.store(item + 2, tl.maximum(start, first[:, None]), mask=mask)
        tl.store(item + 3, tl.minimum(end, length[:, None]), mask=mask)
        tl.store(item + 4, place[:, None] + whole, mask=mask)
        tl.store(item + 5, splits[:, None] + whole, mask=mask)
        tl.store(item + 6, r[:, None] + whole, mask=mask)


def plan(
    query_start: torch.Tensor, seq_lens: torch.Tensor, rows: torch.Tensor, skip: torch.Tensor | None, items: torch.Tensor, cuts: torch.Tensor,
    *, budget: int, capacity: int, max_items: int, max_rows: int, tile: int, min_tiles: int, window: int | None, max_splits: int,
) -> None:  # fmt: skip
    """Fill `items` (int32 [>= capacity, ITEM]) and `cuts` (int32 [>= rows, INFO]) for a step of len(seq_lens) <= max_rows rows. capacity >= budget + rows.
    skip int32 [>= rows]: tokens, whole tiles, at the begin of each row that are left out (None: nobody's; not with a window)."""
    count = seq_lens.shape[0]
    # Two variants at most: few rows in many lanes, or every row.
    padded = 16 if count <= 16 else int(triton.next_power_of_2(max_rows))
    plan_kernel[(1,)](
        query_start, seq_lens, rows, seq_lens if skip is None else skip, items, cuts, count, budget, capacity,
        SKIP=skip is not None, TILE=tile, MIN_TILES=min_tiles, WINDOW=window or 0, MAX_SPLITS=max_splits,
        ROWS=padded, LANES=max(1, min(128, 2048 // padded)), BLOCK_C=int(triton.next_power_of_2(max_items)), num_warps=8 if padded > 64 else 4,
    )  # fmt: skip
