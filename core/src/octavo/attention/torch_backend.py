"""TorchAttention: paged attention in plain torch. Runs on any device, for any shape and block size.

Owns its cache layout and the arithmetic; the pool owns the memory, `octavo.attention.plan` the work
list. It is core's default on the CPU, and in float32 the reference that other backends are held
against. Must never read a cache entry that the step's rows do not hold.

Keys and values of a row are gathered into dense [kv_heads, keys, dim] matrices, with the q heads of a
group as rows of one matrix (no key is copied per q head). Dense, because oneDNN copies what is not.
Softmax is computed in float32; scores and probabilities are stored in the model's dtype, as
transformers' eager attention does, except that float16 is computed in float32 throughout.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.attention import sparse
from octavo.attention.flash import causal_attention
from octavo.attention.plan import ROW_BLOCK, EntryPlanner, GroupPlan, GroupPlanner, LongTile, ShortTile
from octavo.interfaces import AttentionLayer, AttentionParts, BoundGroup, CacheLayout, KVGroup, KVSpec, Limits, Step

FEW_TASKS = 24
"""Decoding rows in bfloat16 are left to torch's fused attention on a CPU while rows * kv heads is at most this:
one operator costs less than four small ones (1 to 2 ms a step of 30 layers), but more for each row and head."""

_FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)


@dataclass(slots=True)
class _Layer:
    """A layer with its cache: `entries` [blocks * planes * block_size, width]."""

    facts: AttentionLayer
    plan: str  # where step.scratch holds its group's GroupPlan
    group: KVGroup
    cache: Tensor
    entries: Tensor
    sinks: Tensor | None  # float32 [kv_heads, group]

    @property
    def size(self) -> int:
        """Entries of a block: its tokens, or fewer where an entry stands for several."""
        return self.group.block_size // self.group.spec.tokens_per_entry


class TorchAttention:
    """interfaces.AttentionBackend. Layout of a block: [K or V, kv_head, slot, width], width the larger
    of k_dim and v_dim; of a latent one [slot, k_dim], whose V is the first v_dim of its K.

    A layer's lse is the natural logarithm of the softmax's denominator, its sink included. least: rows with fewer new
    tokens in a step are left alone, their part of `out` too; for a backend of the same layout that has a kernel for them.
    """

    graphs: Literal["none", "decode", "all"] = "none"

    def __init__(self, options: Any, parts: AttentionParts, *, least: int = 1) -> None:
        self._least = least
        self._dtype: torch.dtype = getattr(torch, parts.dtype)
        self._fuses = parts.device.type == "cpu" and self._dtype == torch.bfloat16
        self._compute = torch.float32 if self._dtype == torch.float16 else self._dtype
        self._planners: dict[str, GroupPlanner] = {}  # by the key of step.scratch that holds their plans
        self._layers: dict[int, _Layer] = {}
        self._tables: tuple[Tensor, ...] = ()  # the state table's, whose buffers outlive a step

    def layout(self, spec: KVSpec, block_size: int) -> CacheLayout:
        if spec.kind not in ("full", "window", "latent"):
            raise ValueError(f"attention 'torch' keeps full, window and latent caches, not {spec.kind!r}")
        dtype: torch.dtype = getattr(torch, spec.dtype)
        if spec.tokens_per_entry != 1 and spec.kind != "latent":
            raise ValueError(
                f"attention 'torch' keeps an entry for each token of a {spec.kind} cache, not one for {spec.tokens_per_entry}"
            )
        if spec.kind == "latent":
            if spec.heads != 1:
                raise ValueError(f"a latent cache has one shared head, not {spec.heads}")
            every = spec.tokens_per_entry
            size = block_size * spec.k_dim * dtype.itemsize // every
            order = "[slot, latent and rope]" if every == 1 else f"[slot of {every} tokens, entry]"
            return CacheLayout(spec.dtype, (block_size // every, spec.k_dim), size, order)
        shape = (2, spec.heads, block_size, max(spec.k_dim, spec.v_dim))
        return CacheLayout(spec.dtype, shape, math.prod(shape) * dtype.itemsize, "[k or v, kv_head, slot, width]")

    def bind(self, groups: Sequence[BoundGroup], limits: Limits) -> None:
        for bound in groups:
            key = f"attention.torch.{bound.group.index}"
            every, size = bound.group.spec.tokens_per_entry, bound.group.block_size
            if size % every:
                raise ValueError(
                    f"KV group {bound.group.index}: blocks of {size} tokens hold no whole number of entries of {every}"
                )
            planner = GroupPlanner if every == 1 else EntryPlanner
            self._planners[key] = planner(bound.group, bound.caches[0].device, bound.layers[0].expands, self._least)
            for facts, cache in zip(bound.layers, bound.caches, strict=True):
                entries = cache.view(-1, cache.shape[-1])
                if cache.dtype in _FLOAT8:
                    entries = entries.view(torch.uint8)  # moved as bytes: index operators do not take float8
                sinks = facts.sinks
                if sinks is not None:
                    sinks = sinks.to(cache.device, torch.float32).view(facts.num_kv_heads, -1)
                self._layers[facts.index] = _Layer(facts, key, bound.group, cache, entries, sinks)

    def prepare(self, step: Step) -> None:
        """Nothing: there are no graphs to prepare for."""

    def plan(self, step: Step) -> None:
        self._tables = step.tables
        for key, planner in self._planners.items():
            step.scratch[key] = planner.plan(step)

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        bound, plan = self._at(layer, step)
        if bound.group.spec.kind == "latent":
            k = _encode(k if plan.stores is None else k[plan.stores], bound.cache.dtype, bound.facts.k_scale)
            bound.entries.index_copy_(0, plan.writes, k[:, 0])
            return
        if bound.cache.dtype != k.dtype:
            k, v = _encode(k, bound.cache.dtype, bound.facts.k_scale), _encode(v, bound.cache.dtype, bound.facts.v_scale)
        width = bound.entries.shape[1]
        if k.shape[-1] != v.shape[-1]:
            k, v = F.pad(k, (0, width - k.shape[-1])), F.pad(v, (0, width - v.shape[-1]))
        bound.entries.index_copy_(0, plan.writes, torch.cat((k, v), 1).view(-1, width))

    def choose(self, layer: int, step: Step, q: Tensor, weights: Tensor, count: int) -> Tensor:
        bound, _ = self._at(layer, step)
        every, chosen = bound.group.spec.tokens_per_entry, []
        for row, tokens, end in self._rows(step):
            keys, _ = self.gather(layer, row, end // every)
            seen = _seen(step, tokens, every)
            chosen.append(sparse.choose(q[tokens], weights[tokens], keys[:, 0], seen, count, bound.facts.scale))
        return torch.cat(chosen)

    def compress(self, layer: int, step: Step, places: Tensor, *, overlapping: bool) -> Tensor:
        bound, _ = self._at(layer, step)
        width, rate = bound.facts.v_dim, len(places)
        made = places.new_zeros(len(step.positions), width // 2 if overlapping else width)
        ends = ((step.positions + 1) % rate == 0).nonzero()[:, 0]
        span = 2 * rate if overlapping else rate
        positions = step.positions[ends].unsqueeze(1) + torch.arange(1 - span, 1, device=ends.device)
        held = positions >= 0
        positions.clamp_(min=0)  # in the place of a token before the first, the first: it counts for nothing
        blocks = self._tables[bound.group.index][step.token_rows[ends]].gather(1, positions // bound.size)
        both = self._read(bound, self._planners[bound.plan].entries(blocks, positions), tuple(positions.shape))[0].float()
        values, gates = both.chunk(2, -1)
        made[ends] = sparse.compress(values, gates, held, places, overlapping=overlapping)
        return made

    def run(
        self, layer: int, step: Step, q: Tensor, out: Tensor, *, lse: Tensor | None = None, select: Tensor | None = None
    ) -> Tensor:
        bound, plan = self._at(layer, step)
        if select is not None or bound.group.spec.tokens_per_entry > 1:
            return self._sparse(layer, bound, step, q, out, lse, select)
        plain = self._fuses and lse is None and bound.sinks is None and not bound.facts.softcap
        for tile in plan.short:
            if plain and tile.query_len == 1 and tile.size * bound.facts.num_kv_heads <= FEW_TASKS:
                self._few(bound, tile, q, out)
            else:
                self._short(bound, tile, q, out, lse)
        for row in plan.long:
            if plain and self._flash(bound, row):
                keys, values = self._read(bound, row.entries, (bound.facts.num_kv_heads, row.position + row.length - row.first))
                rows = slice(row.start, row.start + row.length)
                out[rows] = causal_attention(q[rows], keys, values, bound.facts.scale)
            else:
                self._long(bound, row, q, out, lse)
        return out

    def _sparse(
        self, layer: int, bound: _Layer, step: Step, q: Tensor, out: Tensor, lse: Tensor | None, select: Tensor | None
    ) -> Tensor:
        """Over chosen keys, or over every entry of the windows that are closed."""
        every, scale = bound.group.spec.tokens_per_entry, bound.facts.scale
        if bound.sinks is not None and lse is None:
            lse = out.new_empty(out.shape[:2], dtype=torch.float32)
        for row, tokens, end in self._rows(step):
            sums = None if lse is None else lse[tokens]
            if select is not None:
                read = partial(self._entries_at, bound, self._tables[bound.group.index][row])
                sparse.attend(q[tokens], select[tokens], read, out[tokens], scale, sums)
            else:
                keys, _ = self.gather(layer, row, end // every)
                sparse.attend_first(q[tokens], keys[:, 0], _seen(step, tokens, every), out[tokens], scale, sums)
        if bound.sinks is not None and lse is not None:
            sinks = bound.sinks.view(-1)
            out.mul_(torch.sigmoid(lse - sinks).unsqueeze(-1))
            torch.logaddexp(lse, sinks, out=lse)
        return out

    @staticmethod
    def _rows(step: Step) -> Iterator[tuple[int, slice, int]]:
        """Of each row: its line of the state table, its tokens in the step, and its length after the step."""
        start = 0
        for row, new, end in zip(
            step.host.rows.tolist(), step.host.query_lens.tolist(), step.host.seq_lens.tolist(), strict=True
        ):
            yield row, slice(start, start + new), end
            start += new

    def _entries_at(self, bound: _Layer, table: Tensor, positions: Tensor) -> Tensor:
        """Latent entries [..., k_dim] of positions int64 [...] of the row with this block table."""
        flat = positions.reshape(-1)
        blocks = table.index_select(0, flat // bound.size)
        entries = self._planners[bound.plan].entries(blocks.unsqueeze(0), flat.unsqueeze(0))
        return self._read(bound, entries, tuple(positions.shape))[0]

    def gather(self, layer: int, row: int, length: int, start: int = 0) -> tuple[Tensor, Tensor]:
        if not self._tables:
            raise RuntimeError("gather needs the block tables, which come with the first planned step")
        bound = self._layers[layer]
        table = self._tables[bound.group.index]
        positions = torch.arange(start, length, device=table.device)
        # Blocks that a window has given back have no entry (-1): their tokens read block 0, unspecified.
        blocks = table[row].index_select(0, positions // bound.size).clamp_(min=0)
        entries = self._planners[bound.plan].entries(blocks.unsqueeze(0), positions.unsqueeze(0))
        keys, values = self._read(bound, entries, (bound.group.spec.heads, length - start))
        keys, values = keys.transpose(0, 1), values.transpose(0, 1)
        return keys.to(self._dtype), values.to(self._dtype)

    def copy_blocks(self, group: int, source: Tensor, target: Tensor) -> None:
        for layer in self._layers.values():
            if layer.group.index == group:
                raw = layer.cache.view(torch.uint8) if layer.cache.dtype in _FLOAT8 else layer.cache
                raw.index_copy_(0, target, raw.index_select(0, source))

    # ------------------------------------------------------------ one tile

    @staticmethod
    def _flash(layer: _Layer, row: LongTile) -> bool:
        """Whether every new token sees every key before it, and keys are as wide as values."""
        window, facts = layer.group.spec.window, layer.facts
        return facts.k_dim == facts.v_dim and (window is None or row.position + row.length <= window)

    def _few(self, layer: _Layer, tile: ShortTile, q: Tensor, out: Tensor) -> None:
        facts = layer.facts
        batch, heads, group = tile.size, facts.num_kv_heads, facts.num_heads // facts.num_kv_heads
        keys, values = self._read(layer, tile.entries, (batch, heads, tile.keys))
        chosen = q if tile.queries is None else q.index_select(0, tile.queries)
        found = F.scaled_dot_product_attention(  # the q heads of a group are the queries of their kv head
            chosen.view(batch, heads, group, -1), keys, values, attn_mask=tile.bias(self._compute), scale=facts.scale
        )
        _place(out, tile.queries, found.unsqueeze(2))

    def _short(self, layer: _Layer, tile: ShortTile, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        facts = layer.facts
        batch, new, heads = tile.size, tile.query_len, facts.num_kv_heads
        group = facts.num_heads // heads
        keys, values = self._read(layer, tile.entries, (batch * heads, tile.keys))
        chosen = q if tile.queries is None else q.index_select(0, tile.queries)
        if new > 1:
            chosen = chosen.view(batch, new, heads, group, -1).transpose(1, 2)
        queries = chosen.reshape(batch * heads, new * group, facts.k_dim).to(self._compute)
        scores = queries.new_empty(batch * heads, new * group, tile.keys)
        scores.baddbmm_(queries, keys.transpose(1, 2), beta=0, alpha=facts.scale)
        if facts.softcap:
            _cap(scores, facts.softcap)
        shaped = scores.view(batch, heads, new, group, -1)
        if tile.hidden is not None:
            shaped[..., tile.clear :].masked_fill_(tile.hidden, -math.inf)
        weights, sums = _weights(shaped, layer.sinks, lse is not None)
        found = torch.bmm(weights.view(scores.shape), values)
        _place(out, tile.queries, found.view(batch, heads, new, group, -1))
        if lse is not None and sums is not None:
            _place(lse.unsqueeze(-1), tile.queries, sums.unsqueeze(-1))

    def _long(self, layer: _Layer, tile: LongTile, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        facts, window = layer.facts, layer.group.spec.window
        heads, group = facts.num_kv_heads, facts.num_heads // facts.num_kv_heads
        keys, values = self._read(layer, tile.entries, (heads, tile.position + tile.length - tile.first))
        at = 0
        while at < tile.length:
            new = min(tile.length - at, ROW_BLOCK - (tile.position + at) % ROW_BLOCK)
            rows = slice(tile.start + at, tile.start + at + new)
            # Of the gathered keys these queries see some in [low, own + new); `own` is the first one's own key.
            own = tile.position + at - tile.first
            low = max(0, own - window + 1) if window else 0
            queries = q[rows].view(new, heads, group, -1).transpose(0, 1).reshape(heads, new * group, -1).to(self._compute)
            scores = queries.new_empty(heads, new * group, own + new - low)
            for head in range(heads):  # one by one: a slice of one head's keys is dense, a slice of all is not
                scores[head].addmm_(queries[head], keys[head, low : own + new].t(), beta=0, alpha=facts.scale)
            if facts.softcap:
                _cap(scores, facts.softcap)
            shaped = scores.view(1, heads, new, group, -1)
            _hide(shaped, own - low, window)
            weights, sums = _weights(shaped, layer.sinks, lse is not None)
            found = queries.new_empty(heads, new * group, facts.v_dim)
            for head in range(heads):
                torch.mm(weights[0, head].view(new * group, -1), values[head, low : own + new], out=found[head])
            _place(out[rows], None, found.view(1, heads, new, group, -1))
            if lse is not None and sums is not None:
                _place(lse[rows].unsqueeze(-1), None, sums.unsqueeze(-1))
            at += new

    # ------------------------------------------------------------ the cache

    def _at(self, layer: int, step: Step) -> tuple[_Layer, GroupPlan]:
        bound = self._layers[layer]
        return bound, step.scratch[bound.plan]

    def _read(self, layer: _Layer, entries: Tensor, shape: tuple[int, ...]) -> tuple[Tensor, Tensor]:
        """Keys and values of `entries`, in the dtype of the arithmetic: [*shape, k_dim] and [*shape, v_dim]."""
        facts, dtype = layer.facts, layer.cache.dtype
        found = layer.entries.index_select(0, entries)
        if dtype in _FLOAT8:
            found = found.view(dtype)
        if layer.group.spec.kind == "latent":
            keys = found.to(self._compute).view(*shape, facts.k_dim)
            if dtype in _FLOAT8:
                keys = keys * facts.k_scale
            return keys, keys[..., : facts.v_dim]
        keys, values = found.to(self._compute).view(2, *shape, -1).unbind()
        if dtype in _FLOAT8:
            keys, values = keys * facts.k_scale, values * facts.v_scale
        if facts.k_dim != facts.v_dim:
            keys, values = keys[..., : facts.k_dim], values[..., : facts.v_dim]
        return keys, values


def _seen(step: Step, tokens: slice, every: int) -> Tensor:
    """int64: how many of its row's entries each of these tokens sees: those of windows that are closed by then."""
    return (step.positions[tokens] + 1) // every


def _cap(scores: Tensor, cap: float) -> None:
    scores.div_(cap).tanh_().mul_(cap)


def _weights(scores: Tensor, sinks: Tensor | None, want_lse: bool) -> tuple[Tensor, Tensor | None]:
    """softmax over the last axis of scores [batch, kv_heads, new, group, keys], computed in float32, and its
    lse [batch, kv_heads, new, group], None if nobody wants it. A sink takes its share of the softmax and
    leaves: the weights then sum to less than one."""
    weights = torch.softmax(scores, -1)
    if not want_lse and sinks is None:
        return weights, None
    sums = torch.logsumexp(scores.float(), -1)
    if sinks is not None:
        each = sinks.unsqueeze(1)
        weights.mul_(torch.sigmoid(sums - each).unsqueeze(-1))
        sums = torch.logaddexp(sums, each)
    return weights, sums


def _place(out: Tensor, queries: Tensor | None, found: Tensor) -> None:
    """Put found [batch, kv_heads, new, group, dim] where it belongs in out [T, heads, dim]: at `queries`
    (one that is repeated gets the same values twice), or in order."""
    batch, heads, new, group, dim = found.shape
    ordered = found.transpose(1, 2) if new > 1 else found
    if queries is None:
        out.view(batch, new, heads, group, dim).copy_(ordered if new > 1 else found.view(batch, 1, heads, group, dim))
    else:
        out.index_copy_(0, queries, ordered.reshape(batch * new, heads * group, dim).to(out.dtype))


def _encode(x: Tensor, dtype: torch.dtype, scale: float) -> Tensor:
    """x as a cache of `dtype` stores it; for float8 divided by the scale, saturated, and seen as bytes."""
    if dtype not in _FLOAT8:
        return x.to(dtype)
    limit = torch.finfo(dtype).max
    return (x.float() / scale).clamp_(-limit, limit).to(dtype).view(torch.uint8)


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
