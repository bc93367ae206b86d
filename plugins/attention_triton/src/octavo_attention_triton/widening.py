"""Prefill over an FP8 cache with the kernel for 16-bit caches: a layer's pages are widened into a workspace that it then reads.

Owns the workspace, which all layers share since they run one after the other, and when widening pays. A token costs three bytes a
value of traffic, whatever the number of its queries: next to nothing in long chunks.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import torch
from octavo.attention.prompts import page_lists, widened_rows
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
    """Rows that are widened together. pages int32 [n, 3]: (state-table row, column, tokens) of each page of the workspace; table int32
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


def batches(
    host: StepHost, group: int, heads: int, programs: int, window: int | None, page: int, capacity: int, device: torch.device
) -> Sequence[Batch] | None:
    """The rows with several new tokens, as many together as the workspace's `capacity` pages hold; None if one alone does not fit. heads:
    KV heads, of `group` query heads each; programs: of the kernel."""
    found = widened_rows(host, window, page, capacity, HOPPER_TOKENS)
    if found is None:
        return None
    made = []
    for rows in found:
        pages, table = page_lists(host, rows)
        tokens = [np.minimum(host.seq_lens[w.row] - page * np.arange(w.first, w.first + w.pages), page) for w in rows]
        pages = np.column_stack((pages, np.concatenate(tokens))).astype(np.int32)
        # A tile of K and V may reach past a row's last page: what it reads there is masked, but must be a page.
        table = np.maximum(np.maximum.accumulate(table, axis=1), 0)
        tiles = tile_list(host, HOPPER_TOKENS // group, window, np.array([w.row for w in rows]))
        items = Items.share(tiles, heads, programs, window, device)
        made.append(Batch(to_device(pages, device), to_device(table, device), items))
    return made
