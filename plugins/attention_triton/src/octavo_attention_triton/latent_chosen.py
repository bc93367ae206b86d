"""Launching attention where every token has keys of its own (`kernels.chosen`): how it is shaped, split and added up.

Owns the number of parts that a token's keys are cut into, from the number of tokens alone, and the tables that say where the
parts lie. Partial results are written to buffers of the backend's.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
from octavo.interfaces import AttentionLayer, Step

from octavo_attention_triton.kernels.chosen import chosen_kernel
from octavo_attention_triton.kernels.decode import merge_kernel
from octavo_attention_triton.kernels.plan import INFO, ITEM

LOG2E = 1.4426950408889634
MAX_SPLITS = 32
HOPPER_TILE = 64
"""Keys of a tile of the Hopper kernel, and heads of its program at most."""


def _pow2(n: int) -> int:
    return int(triton.next_power_of_2(n))


@dataclass(frozen=True, slots=True)
class Tiling:
    """Heads of a program, keys of a tile, warps, tiles in flight."""

    block_h: int
    block_n: int
    warps: int
    stages: int

    @classmethod
    def of(cls, heads: int, v_dim: int, dtype: torch.dtype) -> Tiling:
        if dtype == torch.float32:
            return cls(16, 16, 4, 1)
        rows = min(64, max(16, _pow2(heads)))
        return cls(rows, 32 if v_dim > 256 else 64, 4 if rows == 16 else 8, 3)


@dataclass(frozen=True, slots=True)
class Entries:
    """Where a layer's entries lie: cache [blocks, page, k_dim], of `every` tokens an entry, in the block tables of a group;
    window: a token sees the last so many alone (None: all)."""

    cache: torch.Tensor
    page: int
    every: int
    group: int
    window: int | None


class TokenAttention:
    """Attention of one layer's tokens, each over its own keys. hopper: chosen keys go through the warp-specialised kernel."""

    def __init__(
        self, layer: AttentionLayer, entries: Entries, dtype: torch.dtype, sms: int, *, pdl: bool, hopper: bool = False
    ) -> None:
        self._layer, self._entries, self._pdl = layer, entries, pdl
        self._hopper = hopper and layer.sinks is None and entries.every == 1
        self._items: dict[tuple[int, int], torch.Tensor] = {}  # of the Hopper kernel, by splits and number of keys
        self._tiling = Tiling.of(layer.num_heads, layer.v_dim, dtype)
        self._blocks = triton.cdiv(layer.num_heads, self._tiling.block_h)
        # Parts of all tokens together: one program of the Hopper kernel fills a multiprocessor, of the other two may share one.
        self._most = max(1, (sms if self._hopper else 2 * sms) // self._blocks)
        self._precision = "ieee" if dtype == torch.float32 else "tf32"
        device = entries.cache.device
        self._nothing = torch.zeros(1, dtype=torch.float32, device=device)
        self._sinks = None if layer.sinks is None else layer.sinks.to(device, torch.float32).contiguous()
        self._cuts = {splits: self._cut(splits, device) for splits in (2, 4, 8, 16, 32) if splits <= self._most}

    @property
    def partials(self) -> int:
        """Partial results of a head that a launch leaves at most."""
        return self._most

    def _cut(self, splits: int, device: torch.device) -> torch.Tensor:
        """The parts of every token, as `merge_kernel` reads them: int32 [tokens, INFO]."""
        tokens = torch.arange(max(1, self._most // splits), dtype=torch.int32, device=device)
        cuts = torch.zeros(len(tokens), INFO, dtype=torch.int32, device=device)
        cuts[:, 0], cuts[:, 1], cuts[:, 2] = tokens, tokens * splits, splits
        return cuts

    def _splits(self, tokens: int, keys: int) -> int:
        """A power of two: as many parts as fill the device, none of less than a tile of `keys`."""
        splits, limit = 1, min(MAX_SPLITS, self._most // max(1, tokens), triton.cdiv(keys, self._tiling.block_n))
        while 2 * splits <= limit:
            splits *= 2
        return splits

    def run(
        self, step: Step, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, select: torch.Tensor | None,
        part: torch.Tensor, part_lse: torch.Tensor,
    ) -> None:  # fmt: skip
        """Fill out [T, heads, v_dim] and lse. select int32 [T, count], or None: the window, or every entry that is whole."""
        layer, entries, tokens = self._layer, self._entries, q.shape[0]
        if tokens == 0:
            return
        count = 0 if select is None else select.shape[1]
        window = 0 if count or entries.window is None else entries.window
        splits = self._splits(tokens, count or window or 1 << 30)
        table, log, nothing = step.tables[entries.group], self._nothing if lse is None else lse, self._nothing
        sinks = nothing if self._sinks is None else self._sinks
        strides = q.stride(0), q.stride(1), out.stride(0), out.stride(1), log.stride(0), table.stride(0), entries.cache.stride(0)
        if self._hopper and select is not None:
            self._gathered(step, q, out, log, select, part, part_lse, splits, strides, lse is not None)
        else:
            self._portable(step, q, out, log, select, sinks, part, part_lse, splits, strides, lse is not None)
        if splits > 1:
            merge_kernel[(layer.num_heads, tokens)](
                self._cuts[splits], part, part_lse, out, log, sinks, 1.0, out.stride(0), out.stride(1), log.stride(0),
                HEADS=layer.num_heads, V_DIM=layer.v_dim, BLOCK_V=_pow2(layer.v_dim), FEW=16, CHUNK=16, SINKS=self._sinks is not None,
                LSE=lse is not None, PDL=self._pdl, num_warps=4, **({"launch_pdl": True} if self._pdl else {}),
            )  # fmt: skip

    def _gathered(
        self, step: Step, q: torch.Tensor, out: torch.Tensor, log: torch.Tensor, select: torch.Tensor, part: torch.Tensor,
        part_lse: torch.Tensor, splits: int, strides: tuple[int, ...], lse: bool,
    ) -> None:  # fmt: skip
        from octavo_attention_triton.kernels.hopper_chosen import hopper_chosen_kernel

        layer, entries = self._layer, self._entries
        items = self._split(len(q), splits, select.shape[1], q.device)
        hopper_chosen_kernel[(self._blocks, len(q) * splits)](
            q, out, log, entries.cache, step.tables[entries.group], step.token_rows, step.positions, select, items, part, part_lse,
            layer.scale * LOG2E, *strides, select.stride(0),
            HEADS=layer.num_heads, BLOCK_H=min(HOPPER_TILE, _pow2(layer.num_heads)), PAGE=entries.page, LSE=lse, num_warps=8,
        )  # fmt: skip

    def _split(self, tokens: int, splits: int, count: int, device: torch.device) -> torch.Tensor:
        """The parts of at least `tokens` tokens' `count` keys, in whole tiles, as items of `kernels.plan`."""
        key = splits, count
        if key not in self._items or len(self._items[key]) < tokens * splits:
            size = max(tokens, self._most // splits) * splits
            number = torch.arange(size, dtype=torch.int32, device=device)
            items = torch.zeros(size, ITEM, dtype=torch.int32, device=device)
            tiles = triton.cdiv(count, HOPPER_TILE)
            items[:, 0] = number // splits
            items[:, 2] = tiles * (number % splits) // splits * HOPPER_TILE
            items[:, 3] = (tiles * (number % splits + 1) // splits * HOPPER_TILE).clamp_(max=count)
            items[:, 5] = splits
            self._items[key] = items
        return self._items[key]

    def _portable(
        self, step: Step, q: torch.Tensor, out: torch.Tensor, log: torch.Tensor, select: torch.Tensor | None, sinks: torch.Tensor,
        part: torch.Tensor, part_lse: torch.Tensor, splits: int, strides: tuple[int, ...], lse: bool,
    ) -> None:  # fmt: skip
        layer, entries, tiling, tokens = self._layer, self._entries, self._tiling, len(q)
        count = 0 if select is None else select.shape[1]
        window = 0 if count or entries.window is None else entries.window
        table = step.tables[entries.group]
        chosen_kernel[(self._blocks, tokens, splits)](
            q, out, log, entries.cache, table, step.token_rows, step.positions, step.positions if select is None else select, sinks,
            part, part_lse, layer.scale * layer.k_scale * LOG2E, layer.k_scale, *strides, 0 if select is None else select.stride(0),
            HEADS=layer.num_heads, BLOCK_H=tiling.block_h, K_DIM=layer.k_dim, V_DIM=layer.v_dim, BLOCK_N=tiling.block_n,
            BLOCK_V=max(16, _pow2(layer.v_dim)), BLOCK_R=0 if layer.k_dim == layer.v_dim else max(16, _pow2(layer.k_dim - layer.v_dim)),
            PAGE=entries.page, EVERY=entries.every, WINDOW=window, COUNT=count, SPLITS=splits, SINKS=self._sinks is not None,
            LSE=lse, PRECISION=self._precision, STAGES=tiling.stages, num_warps=tiling.warps,
        )  # fmt: skip
