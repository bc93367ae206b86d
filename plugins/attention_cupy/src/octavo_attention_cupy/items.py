"""What the blocks of a prefill kernel take, as arrays on the host: tiles of new tokens, and shares of them.

Pure numpy: knows no device and no kernel but for the size of a tile. A step with prefill is not captured, so its lengths are known here.
"""

from __future__ import annotations

import numpy as np
from octavo.attention.prompts import query_tiles
from octavo.interfaces import StepHost

TILE = 8
"""int32 values of PrefillTile (cuda/prefill_args.cuh)."""
HEAD = 5
"""Where the KV head stands among them."""
KV_TILE = 128
"""Tokens of K and V of a step of the Hopper kernel (TOKENS of cuda/prefill_hopper_copy.cuh)."""


def tile_list(host: StepHost, size: int, window: int | None, only: np.ndarray | None = None) -> np.ndarray:
    """`query_tiles` of a step as the kernels read them, int32 [tiles, TILE], longest first."""
    tiles = query_tiles(host, size, TILE, only)
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
