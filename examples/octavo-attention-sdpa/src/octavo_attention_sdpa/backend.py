"""SdpaAttention: gather a row's blocks, mask what it may not see, call scaled_dot_product_attention.

The cache layout is this backend's own: a page is [block_size, kv_heads, k_dim + v_dim], K and V of a
token side by side, so that one gather fetches both, and gathered pages join into one run of keys
without another copy.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Literal

import numpy as np
import torch
from octavo.interfaces import AttentionLayer, AttentionParts, BoundGroup, CacheLayout, KVSpec, Limits, Step
from torch import Tensor
from torch.nn.functional import scaled_dot_product_attention

from octavo_attention_sdpa.provider import SdpaOptions


@dataclass(frozen=True, slots=True)
class Bound:
    """One layer with its memory."""

    layer: AttentionLayer
    group: int
    block_size: int
    cache: Tensor  # [blocks, block_size, kv_heads, k_dim + v_dim]


@dataclass(frozen=True, slots=True)
class Call:
    """One SDPA call of a step, shared by the layers of a group: G rows with n new tokens each.

    tokens: int64 [G, n], their places in the flat step. blocks: int64 [G, columns]. visible: bool
    [G, 1, n, keys], keys = columns * block_size. written: bool [G, 1, keys, 1], keys that any of the
    row's queries sees; what is under the others may be anything, NaN included.
    """

    tokens: Tensor
    blocks: Tensor
    visible: Tensor
    written: Tensor


class SdpaAttention:
    """octavo.interfaces.AttentionBackend. Runs on the host's plan of a step, so it cannot be captured in a graph."""

    graphs: Literal["none", "decode", "all"] = "none"

    def __init__(self, options: SdpaOptions, parts: AttentionParts) -> None:
        self._rows_at_once = options.rows_at_once
        self._bound: dict[int, Bound] = {}
        self._groups: list[BoundGroup] = []
        self._tables: tuple[Tensor, ...] = ()

    def layout(self, spec: KVSpec, block_size: int) -> CacheLayout:
        shape = (block_size, spec.heads, spec.k_dim + spec.v_dim)
        item = getattr(torch, spec.dtype).itemsize
        return CacheLayout(spec.dtype, shape, int(np.prod(shape)) * item, "[slot, kv_head, k | v]")

    def bind(self, groups: Sequence[BoundGroup], limits: Limits) -> None:
        self._groups = list(groups)
        for bound in groups:
            for layer, cache in zip(bound.layers, bound.caches, strict=True):
                self._bound[layer.index] = Bound(layer, bound.group.index, bound.group.block_size, cache)

    def prepare(self, step: Step) -> None:
        self._tables = step.tables  # views of buffers that live as long as the engine

    def plan(self, step: Step) -> None:
        for bound in self._groups:
            group = bound.group
            step.scratch["sdpa", group.index] = list(self._calls(step, group.index, group.block_size, group.spec.window))

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        bound = self._bound[layer]
        slots = step.slot_mapping[bound.group]
        block, offset = slots // bound.block_size, slots % bound.block_size
        bound.cache[block, offset] = torch.cat((k, v), dim=-1).to(bound.cache.dtype)

    def run(self, layer: int, step: Step, q: Tensor, out: Tensor, *, lse: Tensor | None = None) -> Tensor:
        bound = self._bound[layer]
        numbers = bound.layer
        for call in step.scratch["sdpa", bound.group]:
            queries = q[call.tokens].transpose(1, 2)  # [G, heads, n, k_dim]
            keys, values = self._fetch(bound, call, q.dtype)
            result = scaled_dot_product_attention(
                queries,
                keys,
                values,
                attn_mask=call.visible,
                scale=numbers.scale,
                enable_gqa=numbers.num_heads != numbers.num_kv_heads,
            )
            out[call.tokens] = result.transpose(1, 2).to(out.dtype)
            if lse is not None:
                lse[call.tokens] = self._lse(numbers, call, queries, keys)
        return out

    def gather(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        bound = self._bound[layer]
        columns = -(-length // bound.block_size)
        blocks = self._tables[bound.group][row, :columns].long().clamp(min=0)
        pages = bound.cache[blocks].flatten(0, 1)[:length]  # [length, kv_heads, k | v]
        return pages[..., : bound.layer.k_dim], pages[..., bound.layer.k_dim :]

    def copy_blocks(self, group: int, source: Tensor, target: Tensor) -> None:
        for bound in self._bound.values():
            if bound.group == group:
                bound.cache[target] = bound.cache[source]

    def _calls(self, step: Step, group: int, block_size: int, window: int | None) -> Iterator[Call]:
        """Rows with equally many new tokens share a call: all decoding rows are one, each chunk of a prompt another."""
        host, device = step.host, step.token_ids.device
        starts = np.cumsum(host.query_lens) - host.query_lens
        for length in np.unique(host.query_lens):
            same = np.flatnonzero(host.query_lens == length)
            for at in range(0, len(same), self._rows_at_once):
                rows = same[at : at + self._rows_at_once]
                ends = torch.from_numpy(host.seq_lens[rows]).to(device)
                columns = -(-int(host.seq_lens[rows].max()) // block_size)
                table = step.tables[group][torch.from_numpy(host.rows[rows]).to(device), :columns]
                new = torch.arange(int(length), device=device)
                position = (ends - int(length))[:, None] + new  # [G, n]: of each query
                key = torch.arange(columns * block_size, device=device)
                visible = key <= position[:, :, None]
                if window is not None:
                    visible &= key > position[:, :, None] - window
                yield Call(
                    tokens=torch.from_numpy(starts[rows]).to(device)[:, None] + new,
                    blocks=table.long().clamp(min=0),  # -1 is a column whose block was given back: nobody sees it
                    visible=visible[:, None],
                    written=visible.any(dim=1)[:, None, :, None],
                )

    def _fetch(self, bound: Bound, call: Call, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """K and V, [G, kv_heads, keys, dim]. Unseen keys become 0: a masked NaN would still poison the sum."""
        pages = bound.cache[call.blocks].flatten(1, 2).transpose(1, 2).to(dtype)
        pages = pages.masked_fill(~call.written, 0)
        return pages[..., : bound.layer.k_dim], pages[..., bound.layer.k_dim :]

    def _lse(self, numbers: AttentionLayer, call: Call, queries: Tensor, keys: Tensor) -> Tensor:
        """log sum exp of the scaled scores, float32 [G, n, heads]: SDPA does not return its own."""
        keys = keys.repeat_interleave(numbers.num_heads // numbers.num_kv_heads, dim=1)
        scores = (queries.float() @ keys.float().transpose(2, 3)) * numbers.scale
        return scores.masked_fill(~call.visible, float("-inf")).logsumexp(dim=-1).transpose(1, 2)
