"""TorchAttention: paged attention in plain torch. Runs on any device, for any shape and block size.

Owns its cache layout and the arithmetic; the pool owns the memory, `octavo.attention.plan` the work
list. It is core's default on the CPU, and in float32 the reference that other backends are held
against. Must never read a cache entry that the step's rows do not hold.

Keys and values of a row are gathered into a dense [kv_heads, keys, k_dim + v_dim] and multiplied in
batches over kv heads, with the q heads of a group as rows of one matrix (no key is copied per q head).
Softmax is computed in float32; scores and probabilities are stored in the model's dtype, as
transformers' eager attention does.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import Tensor

from octavo.attention.plan import ROW_BLOCK, GroupPlan, LongTile, ShortTile, plan_group
from octavo.interfaces import AttentionLayer, AttentionParts, BoundGroup, CacheLayout, KVGroup, KVSpec, Limits, Step

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(slots=True)
class _Layer:
    """A layer with its cache: `entries` [blocks * kv_heads * block_size, k_dim + v_dim]."""

    facts: AttentionLayer
    plan: str  # where step.scratch holds its group's GroupPlan
    group: KVGroup
    cache: Tensor
    entries: Tensor
    sinks: Tensor | None  # float32 [kv_heads, group]
    k_scale: float  # 1.0 unless the cache is float8
    v_scale: float


class TorchAttention:
    """interfaces.AttentionBackend. Layout of a block: [kv_heads, slot, k_dim + v_dim], K beside V.

    A layer's lse is the natural logarithm of the softmax's denominator, its sink included.
    """

    graphs: Literal["none", "decode", "all"] = "none"

    def __init__(self, options: Any, parts: AttentionParts) -> None:
        self._dtype: torch.dtype = getattr(torch, parts.dtype)
        self._groups: tuple[KVGroup, ...] = ()
        self._layers: dict[int, _Layer] = {}
        self._tables: tuple[Tensor, ...] = ()  # the state table's, whose buffers outlive a step

    def layout(self, spec: KVSpec, block_size: int) -> CacheLayout:
        if spec.kind not in ("full", "window"):
            raise ValueError(f"attention 'torch' keeps full and window caches, not {spec.kind!r}")
        shape = (spec.heads, block_size, spec.k_dim + spec.v_dim)
        dtype: torch.dtype = getattr(torch, spec.dtype)
        return CacheLayout(spec.dtype, shape, math.prod(shape) * dtype.itemsize, "[kv_head, slot, k_dim + v_dim]")

    def bind(self, groups: Sequence[BoundGroup], limits: Limits) -> None:
        self._groups = tuple(bound.group for bound in groups)
        for bound in groups:
            for facts, cache in zip(bound.layers, bound.caches, strict=True):
                entries = cache.view(-1, facts.k_dim + facts.v_dim)
                scales = (1.0, 1.0)
                if cache.dtype in _FLOAT8:
                    entries = entries.view(torch.uint8)  # moved as bytes: index operators do not take float8
                    scales = (facts.k_scale, facts.v_scale)
                sinks = facts.sinks
                if sinks is not None:
                    sinks = sinks.to(cache.device, torch.float32).view(facts.num_kv_heads, -1)
                self._layers[facts.index] = _Layer(facts, _plan_key(bound.group), bound.group, cache, entries, sinks, *scales)

    def prepare(self, step: Step) -> None:
        """Nothing: there are no graphs to prepare for."""

    def plan(self, step: Step) -> None:
        self._tables = step.tables
        for group in self._groups:
            step.scratch[_plan_key(group)] = plan_group(step, group)

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        bound, plan = self._at(layer, step)
        kv = torch.cat((k, v), -1).view(-1, k.shape[-1] + v.shape[-1])
        if bound.cache.dtype != kv.dtype:
            kv = self._encode(bound, kv)
        bound.entries.index_copy_(0, plan.writes, kv)

    def run(self, layer: int, step: Step, q: Tensor, out: Tensor, *, lse: Tensor | None = None) -> Tensor:
        bound, plan = self._at(layer, step)
        for tile in plan.short:
            self._short(bound, tile, q, out, lse)
        for row in plan.long:
            self._long(bound, row, q, out, lse)
        return out

    def gather(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        if not self._tables:
            raise RuntimeError("gather needs the block tables, which come with the first planned step")
        bound = self._layers[layer]
        heads, size = bound.group.spec.heads, bound.group.block_size
        table = self._tables[bound.group.index]
        positions = torch.arange(length, device=table.device)
        # Blocks that a window has given back have no entry (-1): their tokens read block 0, unspecified.
        blocks = table[row].gather(0, positions // size).long().clamp_(min=0)
        each = torch.arange(heads, device=table.device)
        entries = ((blocks.unsqueeze(1) * heads + each) * size + (positions % size).unsqueeze(1)).view(-1)
        keys, values = self._read(bound, entries, (length, heads))
        return keys * bound.k_scale, values * bound.v_scale

    def copy_blocks(self, group: int, source: Tensor, target: Tensor) -> None:
        for layer in self._layers.values():
            if layer.group.index == group:
                raw = layer.cache.view(torch.uint8) if layer.cache.dtype in _FLOAT8 else layer.cache
                raw.index_copy_(0, target, raw.index_select(0, source))

    # ------------------------------------------------------------ one tile

    def _short(self, layer: _Layer, tile: ShortTile, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        facts = layer.facts
        batch, heads, group = tile.size, facts.num_kv_heads, facts.num_heads // facts.num_kv_heads
        keys, values = self._read(layer, tile.entries, (batch * heads, tile.keys))
        chosen = q if tile.queries is None else q.index_select(0, tile.queries)
        new = tile.query_len
        if new == 1:  # rows of q are already [batch, kv_head, group]
            queries = chosen.reshape(batch * heads, group, facts.k_dim)
        else:
            queries = chosen.view(batch, new, heads, group, -1).transpose(1, 2).reshape(batch * heads, new * group, -1)
        scores = self._scores(layer, queries, keys)
        if tile.hidden is not None:
            scores.view(batch, heads, new, group, -1)[..., tile.clear :].masked_fill_(tile.hidden, -math.inf)
        found, sums = self._mix(layer, scores.view(batch, heads, new, group, -1), values, lse is not None)
        if tile.queries is None:
            out.copy_(found.view(out.shape))
            if lse is not None and sums is not None:
                lse.copy_(sums.view(lse.shape))
            return
        found = found.view(batch, heads, new, group, -1).transpose(1, 2).reshape(batch * new, facts.num_heads, facts.v_dim)
        out.index_copy_(0, tile.queries, found)  # a repeated query writes the same value twice
        if lse is not None and sums is not None:
            lse.index_copy_(0, tile.queries, sums.transpose(1, 2).reshape(batch * new, facts.num_heads))

    def _long(self, layer: _Layer, tile: LongTile, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        facts = layer.facts
        heads, group = facts.num_kv_heads, facts.num_heads // facts.num_kv_heads
        length = tile.position + tile.length - tile.first
        keys, values = self._read(layer, tile.entries, (heads, length))
        window = layer.group.spec.window
        for at in range(0, tile.length, ROW_BLOCK):
            rows = slice(tile.start + at, tile.start + min(at + ROW_BLOCK, tile.length))
            count = rows.stop - rows.start
            # Of the gathered keys this block sees [low, high); those before `own` it sees in full or by window.
            own = tile.position + at - tile.first
            low, high = max(0, own - window + 1) if window else 0, own + count
            queries = q[rows].view(count, heads, group, -1).transpose(0, 1).reshape(heads, count * group, -1)
            scores = self._scores(layer, queries, keys[:, low:high]).view(1, heads, count, group, high - low)
            _hide(scores, own - low, window)
            found, sums = self._mix(layer, scores, values[:, low:high], lse is not None)
            out[rows].view(count, heads, group, -1).copy_(found.view(heads, count, group, -1).transpose(0, 1))
            if lse is not None and sums is not None:
                lse[rows].view(count, heads, group).copy_(sums[0].transpose(0, 1))

    def _scores(self, layer: _Layer, queries: Tensor, keys: Tensor) -> Tensor:
        """scale * queries keys^T, capped: [batch, rows, keys]."""
        scale, cap = layer.facts.scale * layer.k_scale, layer.facts.softcap
        scores = queries.new_empty(queries.shape[0], queries.shape[1], keys.shape[1])
        scores.baddbmm_(queries, keys.transpose(1, 2), beta=0, alpha=scale)
        if cap:
            scores.div_(cap).tanh_().mul_(cap)
        return scores

    def _mix(self, layer: _Layer, scores: Tensor, values: Tensor, want_lse: bool) -> tuple[Tensor, Tensor | None]:
        """softmax(scores) values, for scores [batch, kv_heads, new, group, keys] already masked: the sums
        [batch * kv_heads, new * group, v_dim], and the lse [batch, kv_heads, new, group] if wanted."""
        shape = scores.shape
        rows = (-1, shape[2] * shape[3], shape[4])
        found = torch.bmm(torch.softmax(scores, -1).view(rows), values)
        sums = torch.logsumexp(scores.float(), -1) if want_lse or layer.sinks is not None else None
        if layer.sinks is not None and sums is not None:
            sinks = layer.sinks.unsqueeze(1)
            found.mul_(torch.sigmoid(sums - sinks).view(found.shape[0], found.shape[1], 1))
            sums = torch.logaddexp(sums, sinks)
        if layer.v_scale != 1.0:
            found.mul_(layer.v_scale)
        return found, sums

    # ------------------------------------------------------------ the cache

    def _at(self, layer: int, step: Step) -> tuple[_Layer, GroupPlan]:
        bound = self._layers[layer]
        return bound, step.scratch[bound.plan]

    def _read(self, layer: _Layer, entries: Tensor, shape: tuple[int, int]) -> tuple[Tensor, Tensor]:
        """Keys and values of `entries`, in the model's dtype: views [*shape, k_dim] and [*shape, v_dim]."""
        found = layer.entries.index_select(0, entries)
        if layer.cache.dtype != self._dtype:
            found = (found.view(layer.cache.dtype) if layer.cache.dtype in _FLOAT8 else found).to(self._dtype)
        return found.view(*shape, -1).split_with_sizes((layer.facts.k_dim, layer.facts.v_dim), -1)  # type: ignore[return-value]

    def _encode(self, layer: _Layer, kv: Tensor) -> Tensor:
        """kv [T * kv_heads, k_dim + v_dim] as the cache stores it: divided by the scales, saturated, cast."""
        dtype, k_dim = layer.cache.dtype, layer.facts.k_dim
        if dtype not in _FLOAT8:
            return kv.to(dtype)
        kv = kv.float()
        kv[:, :k_dim] /= layer.k_scale
        kv[:, k_dim:] /= layer.v_scale
        limit = torch.finfo(dtype).max
        return kv.clamp_(-limit, limit).to(dtype).view(torch.uint8)


def _plan_key(group: KVGroup) -> str:
    return f"attention.torch.{group.index}"


def _hide(scores: Tensor, own: int, window: int | None) -> None:
    """Mask scores [1, kv_heads, new, group, keys] of consecutive queries, the first of which is key `own`:
    key j is visible to query i iff own + i - window < j <= own + i."""
    new, device = scores.shape[2], scores.device
    if new > 1:
        later = torch.ones(new, new, dtype=torch.bool, device=device).triu_(1)
        scores[..., own:].masked_fill_(later.unsqueeze(1), -math.inf)
    if window and own + new > window:
        columns = own + new - window  # the last query is the only one that sees none of them
        limit = torch.arange(own - window, own - window + new, device=device)
        edge = torch.arange(columns, device=device) <= limit.unsqueeze(1)
        scores[..., :columns].masked_fill_(edge.unsqueeze(1), -math.inf)
