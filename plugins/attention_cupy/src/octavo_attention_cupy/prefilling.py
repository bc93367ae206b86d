"""Rows with several new tokens: which kernel serves a layer in a step, what its blocks take, and the launches.

Owns the workspace that FP8 pages are widened into, which all layers share, since they run one after the other. Such steps are not
captured, so lists are made on the host, once a step for all layers that can share them.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from octavo.attention.prompts import page_lists, widened_rows
from octavo.interfaces import Step
from octavo.transfer import to_device

from octavo_attention_cupy.bound import Bound, Prefill, Widened
from octavo_attention_cupy.items import share, tile_list
from octavo_attention_cupy.tuning import widening_pays


@dataclass(frozen=True, slots=True)
class Launch:
    """One launch of a prefill kernel: `tiles`, and for a kernel whose blocks stay `starts` (int32, see `items.share`). Of an FP8 cache
    whose pages are widened first: int32 pages [n, 2] and the workspace's block table."""

    tiles: torch.Tensor
    starts: torch.Tensor | None = None
    pages: torch.Tensor | None = None
    table: torch.Tensor | None = None


class Prefilling:
    """Of one backend. sms: multiprocessors; always_widen: also where chunks are so short that it takes longer."""

    def __init__(self, device: torch.device, sms: int, layers: Iterable[Bound], *, always_widen: bool) -> None:
        self._device, self._sms, self._always = device, sms, always_widen
        self._layers = list(layers)
        widened = [bound.widened for bound in self._layers if bound.widened is not None]
        size = max((w.pages * w.prefill.args.page_bytes for w in widened), default=0)
        self._workspace = torch.empty(size, dtype=torch.uint8, device=device)
        for w in widened:
            w.args.wide = w.prefill.args.cache = self._workspace.data_ptr()

    def prepare(self, step: Step) -> None:
        """The launches of a step, into its scratch, by what layers must have in common to share them."""
        launches: dict[tuple[Any, ...], list[Launch] | None] = {}
        widens = self._always or widening_pays(step.host)
        for bound in self._layers:
            for serves in (bound.widened if widens else None, bound.prefill):
                if serves is None:
                    continue
                key = self._key(bound, serves)
                if key not in launches:
                    launches[key] = self._launches(step, bound, serves)
                if launches[key] is not None:
                    break
        step.scratch["cupy.prefill"] = launches

    def _key(self, bound: Bound, serves: Prefill | Widened) -> tuple[Any, ...]:
        if isinstance(serves, Widened):
            return bound.group, bound.layer.window, serves.prefill.tokens, bound.layer.num_kv_heads, serves.pages
        return (bound.layer.window, serves.tokens, *([bound.layer.num_kv_heads] if serves.stays else []))

    def _launches(self, step: Step, bound: Bound, serves: Prefill | Widened) -> list[Launch] | None:
        """None if pages of the step cannot be widened."""
        window, heads = bound.layer.window, bound.layer.num_kv_heads
        if isinstance(serves, Prefill):
            tiles = tile_list(step.host, serves.tokens, window)
            return [self._shared(tiles, heads, window) if serves.stays else Launch(to_device(tiles, self._device))]
        batches = widened_rows(step.host, window, bound.geometry.page, serves.pages)
        if batches is None:
            return None
        launches = []
        for rows in batches:
            tiles = tile_list(step.host, serves.prefill.tokens, window, np.array([w.row for w in rows]))
            pages, table = (to_device(x, self._device) for x in page_lists(step.host, rows))
            launches.append(self._shared(tiles, heads, window, pages, table))
        return launches

    def _shared(self, tiles: np.ndarray, heads: int, window: int | None, *widened: torch.Tensor) -> Launch:
        items, starts = (to_device(x, self._device) for x in share(tiles, heads, self._sms, window))
        return Launch(items, starts, *widened)

    def run(self, bound: Bound, step: Step, fill: Any) -> None:
        """Attention of the rows with several new tokens. fill(args): what this call's tensors say of a PrefillArgs."""
        launches = step.scratch["cupy.prefill"]
        widened = bound.widened
        found = None if widened is None else launches.get(self._key(bound, widened))
        prefill = bound.prefill if found is None or widened is None else widened.prefill
        fill(prefill.args)
        for launch in launches[self._key(bound, bound.prefill)] if found is None else found:
            args = prefill.args
            if widened is not None and launch.pages is not None and launch.table is not None:
                table = step.tables[bound.group]
                widened.args.table, widened.args.table_row = table.data_ptr(), table.stride(0)
                widened.args.pages = launch.pages.data_ptr()
                widened.kernel((launch.pages.shape[0], bound.layer.num_kv_heads), widened.args, self._device)
                args.table, args.table_row = launch.table.data_ptr(), launch.table.stride(0)
            args.tiles = launch.tiles.data_ptr()
            if launch.starts is None:
                prefill.kernel((launch.tiles.shape[0], bound.layer.num_kv_heads), args, self._device)
            else:
                args.starts = launch.starts.data_ptr()
                prefill.kernel((launch.starts.shape[0] - 1, 1), args, self._device)
