"""TritonLatent: Octavo's attention contract for latent caches (MLA), one shared head whose V is the first part of its K.

Owns the layout (a page is [slot, k_dim]: nothing is stored twice), the work maps and the workspaces, all allocated in
`bind`. It never allocates the cache, and inside a captured graph it reads lengths, tables and slots only through the step's
tensors. Queries come absorbed: [T, heads, k_dim], already in the latent's coordinates.

Two ways of attending: layers in which every token sees all keys before it share tiles of keys among tokens or split long rows
(here); chosen keys, windows, entries of several tokens and sinks go token by token (`latent_chosen`). Choosing and compressing is
`latent_index`.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
import triton
from octavo.interfaces import AttentionLayer, AttentionParts, BoundGroup, CacheLayout, KVSpec, Limits, Step

from octavo_attention_triton.kernels import latent as portable
from octavo_attention_triton.kernels.decode import merge_kernel
from octavo_attention_triton.kernels.plan import INFO, ITEM, plan
from octavo_attention_triton.latent_chosen import LOG2E, Entries, TokenAttention
from octavo_attention_triton.latent_index import Index, compress
from octavo_attention_triton.latent_provider import LatentOptions, hopper_fits, shares_keys

FLOAT8 = (torch.float8_e4m3fn, torch.float8_e5m2)
MAX_SPLITS = 512
HOPPER_ROWS = 64


def _pow2(n: int) -> int:
    return int(triton.next_power_of_2(n))


@dataclass(frozen=True, slots=True)
class Shape:
    """How a layer's items are computed: heads and matrix rows of a program, keys of a tile, programs a multiprocessor that
    rows are split for."""

    block_h: int
    block_m: int
    block_n: int
    warps: int
    stages: int
    ctas_per_sm: int

    @classmethod
    def portable(cls, heads: int, v_dim: int, dtype: torch.dtype) -> Shape:
        """16 rows where one token's heads fill them no further; 32 elsewhere, so that keys are read half as often."""
        rows = 16 if heads <= 16 or dtype == torch.float32 else 32
        if dtype == torch.float32:
            return cls(min(rows, _pow2(heads)), rows, 16, 4, 1, 2)
        wide = v_dim > 256
        return cls(min(rows, _pow2(heads)), rows, 32 if wide else 64, 4 if rows == 16 else 8, 2, 2)

    @classmethod
    def hopper(cls, heads: int) -> Shape:
        return cls(min(HOPPER_ROWS, _pow2(heads)), HOPPER_ROWS, 64, 8, 2, 1)

    @property
    def tokens(self) -> int:
        """Query tokens of an item of a prompt."""
        return self.block_m // self.block_h


@dataclass(slots=True)
class WorkMap:
    """The decode work map that layers of one group and shape share."""

    items: torch.Tensor  # int32 [budget + max rows, ITEM]
    cuts: torch.Tensor  # int32 [max rows, INFO]
    budget: int
    tile: int


@dataclass(slots=True)
class Dense:
    """What a layer needs whose tokens see all keys before them."""

    shape: Shape
    work: WorkMap
    descriptor: Any  # of the cache, where the Hopper kernel serves this layer


@dataclass(slots=True)
class Bound:
    """One layer, ready to launch. dense None: token by token always."""

    layer: AttentionLayer
    entries: Entries
    dense: Dense | None
    token: TokenAttention | None  # None: never attended to

    @property
    def cache(self) -> torch.Tensor:
        return self.entries.cache


class TritonLatent:
    """`octavo.interfaces.AttentionBackend` and `SparseBackend` of latent groups. graphs "decode": a step of one token a row may be
    captured."""

    graphs: Literal["none", "decode", "all"] = "decode"

    def __init__(self, options: LatentOptions, parts: AttentionParts) -> None:
        self.options = options
        self.dtype: torch.dtype = getattr(torch, parts.dtype)
        on_cuda = parts.device.type == "cuda"
        self.device = torch.device("cuda", parts.device.index) if on_cuda else torch.device(parts.device.type)
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count if on_cuda else 1
        self.hopper = on_cuda and parts.device.capability[0] == 9
        self.pdl = on_cuda and parts.device.capability >= (9, 0)
        self._layers: dict[int, Bound] = {}
        self._works: dict[tuple[int, int, Shape], WorkMap] = {}
        self._groups: list[BoundGroup] = []
        self._tables: tuple[torch.Tensor, ...] = ()
        self._index: Index | None = None

    # ------------------------------------------------------------ build

    def layout(self, spec: KVSpec, block_size: int) -> CacheLayout:
        """[slot, k_dim]. ValueError for a spec that is not latent. A block that holds no whole number of entries has its share of
        bytes, by which the pool scales blocks until they do; `bind` refuses it."""
        if spec.kind != "latent" or spec.heads != 1:
            raise ValueError(f"KV spec of kind {spec.kind!r}, {spec.heads} heads: this backend keeps one shared latent head")
        every = spec.tokens_per_entry
        dtype: torch.dtype = getattr(torch, spec.dtype)
        page = block_size // every
        order = f"[slot {page}{f' of {every} tokens' if every > 1 else ''}, {spec.v_dim} latent + {spec.k_dim - spec.v_dim} rope]"
        return CacheLayout(spec.dtype, (page, spec.k_dim), block_size * spec.k_dim * dtype.itemsize // every, order)

    def bind(self, groups: Sequence[BoundGroup], limits: Limits) -> None:
        """Take the caches; allocate work maps and the partial results of split rows (float32)."""
        self._groups, self.limits = list(groups), limits
        partials = width = 1
        for bound in groups:
            for layer, cache in zip(bound.layers, bound.caches, strict=True):
                made = self._layers[layer.index] = self._bound(bound, layer, cache)
                width = max(width, layer.v_dim if made.token else 1)
                if made.token is not None:
                    partials = max(partials, made.token.partials * layer.num_heads)
                if made.dense is not None:
                    partials = max(partials, made.dense.work.items.shape[0] * layer.num_heads)
        self._part = torch.zeros(partials * width, dtype=torch.float32, device=self.device)
        self._part_lse = torch.zeros(partials, dtype=torch.float32, device=self.device)
        self._nothing = torch.zeros(1, dtype=torch.float32, device=self.device)
        if any(bound.layer.k_dim == bound.layer.v_dim and bound.layer.window is None for bound in self._layers.values()):
            self._index = Index(limits, self.device, self.dtype, self.sms)

    def _bound(self, bound: BoundGroup, layer: AttentionLayer, cache: torch.Tensor) -> Bound:
        spec, every = bound.group.spec, bound.group.spec.tokens_per_entry
        page, stored = bound.group.block_size // every, getattr(torch, spec.dtype)
        if bound.group.block_size % every:
            raise ValueError(
                f"KV group {bound.group.index}: blocks of {bound.group.block_size} tokens hold no whole number of entries of {every}"
            )
        if tuple(cache.shape[1:]) != (page, layer.k_dim) or not cache.is_contiguous() or cache.dtype != stored:
            raise ValueError(
                f"layer {layer.index}: cache is {cache.dtype} {tuple(cache.shape)}, its layout is {stored} "
                f"[blocks, {page}, {layer.k_dim}], contiguous: allocate it from `layout`"
            )
        entries = Entries(cache, page, every, bound.group.index, layer.window)
        descriptor = self._descriptor(layer, cache, page) if shares_keys(layer, every) else None
        token = None
        if layer.num_heads:
            token = TokenAttention(layer, entries, self.dtype, self.sms, pdl=self.pdl, hopper=descriptor is not None)
        if not shares_keys(layer, every):
            return Bound(layer, entries, None, token)
        shape = Shape.hopper(layer.num_heads) if descriptor else Shape.portable(layer.num_heads, layer.v_dim, self.dtype)
        work = self._work(bound.group.index, layer.num_heads, shape)
        return Bound(layer, entries, Dense(shape, work, descriptor), token)

    def _descriptor(self, layer: AttentionLayer, cache: torch.Tensor, page: int) -> Any:
        """The cache's copy descriptor if the Hopper kernel serves this layer, else None; ValueError if it is asked for and cannot."""
        if self.options.kernel == "portable":
            return None
        dtype, stored = (str(kind).removeprefix("torch.") for kind in (self.dtype, cache.dtype))
        if self.hopper and hopper_fits(k_dim=layer.k_dim, v_dim=layer.v_dim, page=page, dtype=dtype, kv_dtype=stored):
            from octavo_attention_triton.kernels import hopper_latent

            return hopper_latent.descriptor(cache, page)
        if self.options.kernel == "hopper":
            raise ValueError(
                f"layer {layer.index}: kernel=hopper needs capability 9 and a 16-bit cache of 512 + 64 in the query dtype; this is "
                f"{stored} for {dtype} queries, {layer.v_dim} + {layer.k_dim - layer.v_dim}, page {page}"
            )
        return None

    def _work(self, group: int, heads: int, shape: Shape) -> WorkMap:
        key = (group, heads, shape)
        if key not in self._works:
            budget = max(1, self.sms * shape.ctas_per_sm // triton.cdiv(heads, shape.block_h))
            rows = self.limits.max_num_seqs
            items = torch.full((budget + rows, ITEM), -1, dtype=torch.int32, device=self.device)
            cuts = torch.full((rows, INFO), -1, dtype=torch.int32, device=self.device)
            self._works[key] = WorkMap(items, cuts, budget, shape.block_n)
        return self._works[key]

    # ------------------------------------------------------------ a step

    def prepare(self, step: Step) -> None:
        """Host work: the item lists of rows with several new tokens (a decode step has none)."""
        self._tables = step.tables
        if step.host.max_query_len <= 1:
            return
        kinds = {(bound.dense.shape.tokens, bound.layer.expands) for bound in self._layers.values() if bound.dense}
        step.scratch["latent.prompts"] = {kind: self._prompts(step, *kind) for kind in kinds}
        step.scratch["latent.decodes"] = bool((step.host.query_lens == 1).any())

    def _prompts(self, step: Step, size: int, expands: int) -> torch.Tensor:
        """int32 [items, ITEM], longest first: `size` tokens of a row an item, against all keys up to their own. Rows of at
        least `expands` tokens (0: none) are the model's."""
        lens, ends = step.host.query_lens.astype(np.int64), step.host.seq_lens.astype(np.int64)
        many = np.flatnonzero((lens > 1) & (lens < expands) if expands else lens > 1)
        counts = -(-lens[many] // size)
        of = np.repeat(many, counts)
        nth = np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)
        items = np.zeros((of.size, ITEM), dtype=np.int32)
        items[:, 7] = np.minimum(lens[of] - nth * size, size)
        items[:, 0] = (np.cumsum(lens) - lens)[of] + nth * size
        items[:, 1] = step.host.rows[of]
        items[:, 3] = ends[of] - lens[of] + nth * size + items[:, 7]
        items[:, 5] = 1
        items[:, 6] = of
        host = torch.from_numpy(items[np.argsort(-items[:, 3], kind="stable")])
        if self.device.type == "cuda":
            host = host.pin_memory()
        return host.to(self.device, non_blocking=True)

    def plan(self, step: Step) -> None:
        """Device work once a step: a work map for each kind of layer. Depends on the step's tensors only."""
        rows = step.seq_lens.shape[0]
        for work in self._works.values():
            plan(
                step.query_start, step.seq_lens, step.rows, None, work.items, work.cuts, budget=work.budget, capacity=work.budget + rows,
                max_items=work.items.shape[0], max_rows=self.limits.max_num_seqs, tile=work.tile, min_tiles=1,
                window=None, max_splits=MAX_SPLITS,
            )  # fmt: skip

    def write(self, layer: int, step: Step, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k [T, 1, k_dim]. v is its first part, and is not read."""
        bound = self._layers[layer]
        entries, stored = bound.entries, bound.cache.dtype
        if k.shape[0]:
            portable.store_kernel[(k.shape[0],)](
                k, bound.cache, step.slot_mapping[entries.group], k.stride(0), bound.cache.stride(0), 1.0 / bound.layer.k_scale,
                K_DIM=bound.layer.k_dim, PAGE=entries.page, EVERY=entries.every, BLOCK_K=_pow2(bound.layer.k_dim),
                LIMIT=torch.finfo(stored).max if stored in FLOAT8 else 0.0, num_warps=2,
            )  # fmt: skip

    def choose(self, layer: int, step: Step, q: torch.Tensor, weights: torch.Tensor, count: int) -> torch.Tensor:
        """`SparseBackend.choose`: q [T, heads, k_dim], weights float32 [T, heads]; int32 [T, count]."""
        bound = self._layers[layer]
        if self._index is None:
            raise ValueError(f"layer {layer}: an index keeps keys that are values, of all tokens; no cache of this model does")
        return self._index.choose(bound.layer, bound.entries, step, q, weights, count)

    def compress(self, layer: int, step: Step, places: torch.Tensor, *, overlapping: bool) -> torch.Tensor:
        """`SparseBackend.compress`: places float32 [rate, width]; float32 [T, width or, if overlapping, half of it]."""
        bound = self._layers[layer]
        return compress(bound.entries, bound.layer.v_dim, step, places, overlapping=overlapping)

    def run(
        self, layer: int, step: Step, q: torch.Tensor, out: torch.Tensor, *, lse: torch.Tensor | None = None,
        select: torch.Tensor | None = None,
    ) -> torch.Tensor:  # fmt: skip
        """Causal attention of q [T, heads, k_dim]; fills out [T, heads, v_dim] and lse (natural log, float32 [T, heads]).
        select: `SparseBackend.run`'s."""
        bound = self._layers[layer]
        if select is not None or bound.dense is None:
            if bound.token is None:
                raise ValueError(f"layer {layer} has no query heads: its cache is stored and read, never attended to")
            bound.token.run(step, q, out, lse, select, self._part, self._part_lse)
            return out
        dense, prompts = bound.dense, step.host.max_query_len > 1
        if not prompts or step.scratch["latent.decodes"]:
            rows = step.seq_lens.shape[0]
            self._launch(bound, dense, step, q, out, lse, dense.work.items[: dense.work.budget + rows], packed=False)
            log = self._nothing if lse is None else lse
            merge_kernel[(bound.layer.num_heads, rows)](
                dense.work.cuts, self._part, self._part_lse, out, log, self._nothing, 1.0, out.stride(0), out.stride(1), log.stride(0),
                HEADS=bound.layer.num_heads, V_DIM=bound.layer.v_dim, BLOCK_V=_pow2(bound.layer.v_dim), FEW=16, CHUNK=16,
                SINKS=False, LSE=lse is not None, PDL=self.pdl, num_warps=4, **({"launch_pdl": True} if self.pdl else {}),
            )  # fmt: skip
        if prompts:
            items = step.scratch["latent.prompts"][dense.shape.tokens, bound.layer.expands]
            if items.shape[0]:
                self._launch(bound, dense, step, q, out, lse, items, packed=True)
        return out

    def _launch(
        self, bound: Bound, dense: Dense, step: Step, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None, items: torch.Tensor,
        *, packed: bool,
    ) -> None:  # fmt: skip
        layer, shape, table, page = bound.layer, dense.shape, step.tables[bound.entries.group], bound.entries.page
        log = self._nothing if lse is None else lse
        grid = (triton.cdiv(layer.num_heads, shape.block_h), items.shape[0])
        strides = q.stride(0), q.stride(1), out.stride(0), out.stride(1), log.stride(0), table.stride(0)
        scale = layer.scale * LOG2E
        if dense.descriptor is not None:
            from octavo_attention_triton.kernels.hopper_latent import hopper_latent_kernel

            hopper_latent_kernel[grid](
                q, out, log, dense.descriptor, table, items, self._part, self._part_lse, scale, *strides, page,
                HEADS=layer.num_heads, BLOCK_H=shape.block_h, BOX=min(page, shape.block_n), PAGE=page,
                PACKED=packed, LSE=lse is not None, num_warps=shape.warps,
            )  # fmt: skip
            return
        portable.latent_kernel[grid](
            q, out, log, bound.cache, table, items, self._part, self._part_lse, scale * layer.k_scale, layer.k_scale, *strides,
            bound.cache.stride(0),
            HEADS=layer.num_heads, BLOCK_H=shape.block_h, BLOCK_M=shape.block_m, K_DIM=layer.k_dim, V_DIM=layer.v_dim,
            BLOCK_N=shape.block_n, BLOCK_V=max(16, _pow2(layer.v_dim)), BLOCK_R=max(16, _pow2(layer.k_dim - layer.v_dim)),
            PAGE=page, PACKED=packed, LSE=lse is not None, PRECISION="ieee" if self.dtype == torch.float32 else "tf32",
            STAGES=shape.stages, num_warps=shape.warps,
        )  # fmt: skip

    # ------------------------------------------------------------ whole blocks

    def gather(self, layer: int, row: int, length: int, start: int = 0) -> tuple[torch.Tensor, torch.Tensor]:
        """Entries (of tokens, or of several each) [start, length) of a row, [length - start, 1, k_dim], and their first part, [.., 1, v_dim]."""
        bound = self._layers[layer]
        if not self._tables:
            raise RuntimeError("gather: no step has been prepared yet, so there is no block table to read")
        page = bound.entries.page
        first = start // page
        blocks = self._tables[bound.entries.group][row, first : -(-length // page)].long().clamp_min(0)
        at = first * page
        entries = _bytes(bound.cache)[blocks].view(bound.cache.dtype).reshape(-1, 1, bound.layer.k_dim)[start - at : length - at]
        if bound.cache.dtype in FLOAT8:
            entries = entries.to(self.dtype) * bound.layer.k_scale
        return entries, entries[..., : bound.layer.v_dim]

    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks (int64 ids) in every layer of a group; sources are read before any target is written."""
        for bound in self._groups:
            if bound.group.index == group:
                for cache in map(_bytes, bound.caches):
                    cache.index_copy_(0, target, cache.index_select(0, source))


def _bytes(cache: torch.Tensor) -> torch.Tensor:
    """The cache as torch's index operators take it: they do not take float8."""
    return cache.view(torch.uint8) if cache.dtype in FLOAT8 else cache
