"""Prefill over an FP8 cache with the kernel for 16-bit caches: a layer's pages are widened into a workspace that it then reads.

Owns the workspace, which all layers share since they run one after the other, when widening pays, and which rows of a step are
widened together. A token costs three bytes a value of traffic, whatever the number of its queries: next to nothing in long chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from octavo.interfaces import StepHost
from octavo.transfer import to_device

from octavo_attention_triton.geometry import PageGeometry
from octavo_attention_triton.prefill_tiles import Items, tile_list
from octavo_attention_triton.tuning import HOPPER_TOKENS

MOST_BYTES = 512 << 20
"""Of the workspace. Rows that need more are read by the portable kernel."""
WORTH = 1 << 19
"""Pairs of a new token and one that it may see from which a step's rows are widened."""


@dataclass(frozen=True, slots=True)
class Batch:
    """Rows that are widened together. pages int32 [n, 2]: (state-table row, column) of each page of the workspace; table int32
    [rows, columns]: where the workspace has a row's column; items: the kernel's work, whose rows are the table's."""

    pages: torch.Tensor
    table: torch.Tensor
    items: Items


def workspace_pages(geometry: PageGeometry, wide_bytes: int, tokens: int) -> int:
    """Pages that hold `tokens`, or as many as MOST_BYTES do. wide_bytes: of a widened value."""
    whole = -(-tokens // HOPPER_TOKENS) * HOPPER_TOKENS // min(geometry.page, HOPPER_TOKENS)
    return min(whole, MOST_BYTES // (geometry.heads * geometry.page * (geometry.k_dim + geometry.v_dim) * wide_bytes))


def pays(host: StepHost) -> bool:
    """Whether the chunks of a step are long enough for two kernels instead of one."""
    many = host.query_lens > 1
    return int((host.query_lens[many].astype(np.int64) * host.seq_lens[many]).sum()) >= WORTH


def split(host: StepHost, window: int | None, page: int, capacity: int) -> list[list[tuple[int, int, int]]] | None:
    """The rows with several new tokens in batches of at most `capacity` pages, as (index of the row, first column, columns); None if
    one row alone needs more. Columns that no tile reads, before a window, are left out."""
    step = max(page, HOPPER_TOKENS)  # a tile of the kernel reads whole ones
    batches: list[list[tuple[int, int, int]]] = []
    room = 0
    for index in np.flatnonzero(host.query_lens > 1).tolist():
        end, new = int(host.seq_lens[index]), int(host.query_lens[index])
        low = 0 if window is None else max(0, end - new - window + 1) // step * (step // page)
        count = -(-end // page) - low
        if count > capacity:
            return None
        if count > room:
            batches.append([])
            room = capacity
        batches[-1].append((index, low, count))
        room -= count
    return batches


def batches(
    host: StepHost, group: int, heads: int, programs: int, window: int | None, page: int, capacity: int, device: torch.device
) -> Sequence[Batch] | None:
    """`split`'s batches on the device; None if a row does not fit. heads: KV heads, of `group` query heads each; programs: of the kernel."""
    found = split(host, window, page, capacity)
    if found is None:
        return None
    made = []
    for rows in found:
        indices = np.array([index for index, _, _ in rows])
        width = max(low + count for _, low, count in rows)
        table, pages, at = np.zeros((len(rows), width), np.int32), [], 0
        for i, (index, low, count) in enumerate(rows):
            columns = np.arange(low, low + count, dtype=np.int32)
            pages.append(np.stack((np.full(count, host.rows[index], np.int32), columns), 1))
            table[i, low:] = np.minimum(at + np.arange(width - low), at + count - 1)
            at += count
        tiles = tile_list(host, HOPPER_TOKENS // group, window, indices)
        items = Items.share(tiles, heads, programs, window, device)
        made.append(Batch(to_device(np.concatenate(pages), device), to_device(table, device), items))
    return made
