"""The tile list of an eager step's prefill: which query tokens each program of a prefill kernel takes.

Owns the cutting of rows into tiles, their order, and, for persistent programs, who takes which; made on the host, since an eager
step knows its lengths there.
"""

from __future__ import annotations

import heapq
from dataclasses import dataclass

import numpy as np
import torch
from octavo.attention.prompts import query_tiles
from octavo.interfaces import StepHost
from octavo.transfer import to_device

from octavo_attention_triton.kernels.prefill import TILE
from octavo_attention_triton.tuning import HOPPER_TOKENS


@dataclass(frozen=True, slots=True)
class Items:
    """Work of the Hopper kernel's persistent programs, an item being a tile of one KV head. records int32 [items, TILE]: a tile's record
    with the head in its sixth place; program p takes those from starts[p] to starts[p + 1], int32 [programs + 1], in that order."""

    records: torch.Tensor
    starts: torch.Tensor

    @classmethod
    def share(cls, tiles: np.ndarray, heads: int, programs: int, window: int | None, device: torch.device) -> Items:
        """The tiles of `heads` KV heads for at most `programs` programs."""
        records, starts = share(tiles, heads, programs, window)
        flat = to_device(np.concatenate((records.ravel(), starts)), device)
        return cls(flat[: records.size].view(records.shape), flat[records.size :])


def share(tiles: np.ndarray, heads: int, programs: int, window: int | None) -> tuple[np.ndarray, np.ndarray]:
    """`Items` on the host: head after head, whose K and V so stay in the L2, and each item to the program that is done first. Dealt out
    in turn instead, the programs of a step of 8192 tokens would differ by a quarter: with heads of nearly twice as many tiles as there
    are programs, some get the long ones of every head."""
    ends = tiles[:, 2] + tiles[:, 1]
    first = 0 if window is None else np.maximum(tiles[:, 2] - window + 1, 0) // HOPPER_TOKENS
    # In halves of a KV tile; an item's start and end take as long as one and a half.
    cost = 2 * (-(-ends // HOPPER_TOKENS) - first) + 3
    programs = min(programs, len(tiles) * heads)
    free = [(0, p) for p in range(programs)]
    owner = np.empty(len(tiles) * heads, np.int32)
    for item, work in enumerate(cost.tolist() * heads):
        at, p = free[0]
        owner[item] = p
        heapq.heapreplace(free, (at + work, p))
    records = np.tile(tiles, (heads, 1))
    records[:, 5] = np.repeat(np.arange(heads), len(tiles))
    starts = np.zeros(programs + 1, np.int32)
    starts[1:] = np.cumsum(np.bincount(owner, minlength=programs))
    return records[np.argsort(owner, kind="stable")], starts


def tile_list(host: StepHost, size: int, window: int | None, only: np.ndarray | None = None) -> np.ndarray:
    """`query_tiles` of a step as the kernels read them, int32 [tiles, TILE], longest first, so that the last programs to run are short ones.
    `window` bounds what a tile has to read."""
    tiles = query_tiles(host, size, TILE, only)
    work = tiles[:, 2] + tiles[:, 1]
    if window is not None:
        work = np.minimum(work, window + size)
    return tiles[np.argsort(-work, kind="stable")]
