"""The backend: Octavo's attention contract on CUDA C++ kernels.

Owns the workspaces, allocated in `bind`, where all kernels are compiled and loaded too (bound.py): a step launches and does nothing
else. It never allocates the cache, and inside a captured graph it reads lengths, tables and slots only through
the step's tensors.

A step may mix rows with one new token (decode) and rows with several (prefill): each kind has its own kernel. A graph may be
captured where every row has one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Literal

import torch
from octavo.interfaces import AttentionLayer, AttentionParts, BoundGroup, CacheLayout, KVGroup, KVSpec, Limits, Step

from octavo_attention_cupy.bound import PROLOGUE_THREADS, WRITE_THREADS, Binder, Bound, WorkMap, workspace_bytes
from octavo_attention_cupy.geometry import PageGeometry
from octavo_attention_cupy.launch import DecodeArgs, PrefillArgs
from octavo_attention_cupy.prefilling import Prefilling
from octavo_attention_cupy.provider import FP8, CupyOptions


class CupyAttention:
    """`octavo.interfaces.AttentionBackend` on CUDA C++. graphs "decode": a step of one token a row may be captured."""

    graphs: Literal["none", "decode", "all"] = "decode"

    def __init__(self, options: CupyOptions, parts: AttentionParts) -> None:
        self.options, self.dtype_name = options, parts.dtype
        self.dtype: torch.dtype = getattr(torch, parts.dtype)
        self.device = torch.device("cuda", parts.device.index)
        self.capability = parts.device.capability
        self._layers: dict[int, Bound] = {}
        self._works: list[WorkMap] = []
        self._groups: list[BoundGroup] = []
        self._tables: tuple[torch.Tensor, ...] = ()
        # Whether a kernel since `plan` has waited for it: until then no kernel may start before it ends.
        self._settled = False

    # ------------------------------------------------------------ build

    def layout(self, spec: KVSpec, block_size: int) -> CacheLayout:
        """See `PageGeometry`. Raises ValueError for a spec that has no paged K and V, or dims that no kernel reads."""
        return PageGeometry.of(spec, block_size).layout()

    def workspace_bytes(self, groups: Sequence[KVGroup], layers: Sequence[AttentionLayer], limits: Limits) -> int:
        """What `bind` takes for widened pages of an FP8 cache: up to 512 MiB."""
        return max(
            (
                workspace_bytes(
                    layers[i], PageGeometry.of(group.spec, group.block_size), limits, self.capability, self.options.prefill
                )
                for group in groups
                for i in group.layers
            ),
            default=0,
        )

    def bind(self, groups: Sequence[BoundGroup], limits: Limits) -> None:
        """Take the caches; compile and load kernels; allocate work maps and the partial sums of split rows (float32)."""
        binder = Binder(self.device, self.capability, self.dtype_name, limits, self.options.cache_dir, self.options.prefill)
        self._groups, self._max_rows = list(groups), limits.max_num_seqs
        for bound in groups:
            geometry = PageGeometry.of(bound.group.spec, bound.group.block_size)
            for layer, cache in zip(bound.layers, bound.caches, strict=True):
                if layer.window is None and bound.group.spec.window is not None:
                    layer = replace(layer, window=bound.group.spec.window)
                self._check(layer, cache, geometry)
                self._layers[layer.index] = binder.bind(bound.group.index, layer, geometry, cache)
        self._prefilling = Prefilling(
            self.device, binder.sms, self._layers.values(), always_widen=self.options.prefill == "hopper"
        )
        self._plan, self._works = binder.plan(), list(binder.works.values())
        decodes = [(decode, bound.layer.v_dim) for bound in self._layers.values() for decode in bound.decodes.values()]
        places = [2 * decode.blocks * decode.heads for decode, _ in decodes]
        self._part = torch.zeros(
            max((n * v_dim for n, (_, v_dim) in zip(places, decodes, strict=True)), default=1),
            dtype=torch.float32,
            device=self.device,
        )
        self._part_sums = torch.zeros(2 * max(places, default=1), dtype=torch.float32, device=self.device)
        # Arrival counters: zero before and after every launch, the last arrival resets its own.
        counters = limits.max_num_seqs * max((decode.segments for decode, _ in decodes), default=1)
        self._arrived = torch.zeros(counters, dtype=torch.int32, device=self.device)
        for decode, _ in decodes:
            decode.args.part, decode.args.part_sums = self._part.data_ptr(), self._part_sums.data_ptr()
            decode.args.arrived = self._arrived.data_ptr()

    def _check(self, layer: AttentionLayer, cache: torch.Tensor, geometry: PageGeometry) -> None:
        pages = (cache.shape[0], geometry.elements)
        if tuple(cache.shape) != pages or not cache.is_contiguous() or cache.dtype != getattr(torch, geometry.dtype):
            raise ValueError(
                f"layer {layer.index}: cache is {cache.dtype} {tuple(cache.shape)}, its layout is {geometry.dtype} "
                f"[blocks, {geometry.elements}], contiguous: allocate it from `layout`"
            )

    # ------------------------------------------------------------ a step

    def prepare(self, step: Step) -> None:
        """Host work: what the blocks of an eager step's prefill take (a decode step has none)."""
        self._tables = step.tables
        if step.host.max_query_len <= 1:
            return
        self._prefilling.prepare(step)
        step.scratch["cupy.decodes"] = bool((step.host.query_lens == 1).any())

    def plan(self, step: Step) -> None:
        """Device work once a step: one work map for each kind of layer. Depends on the step's tensors only. Raises ValueError if there
        are more rows than work maps were made for."""
        self._settled = False
        rows = step.seq_lens.shape[0]
        if rows > self._max_rows:
            raise ValueError(f"a step of {rows} rows: the backend was bound for {self._max_rows} (max_num_seqs)")
        for work in self._works:
            args = work.args
            if (rows * args.heads >= work.crowd) not in work.regimes:
                continue
            args.query_start, args.seq_lens = step.query_start.data_ptr(), step.seq_lens.data_ptr()
            args.table_rows, args.rows = step.rows.data_ptr(), rows
            self._plan((1, 1), args, self.device)

    def write(self, layer: int, step: Step, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim], divided by the layer's scales if the cache is FP8."""
        bound = self._layers[layer]
        args, g, tokens = bound.write_args, bound.geometry, k.shape[0]
        if tokens == 0:
            return
        args.k, args.v, args.slots = k.data_ptr(), v.data_ptr(), step.slot_mapping[bound.group].data_ptr()
        args.k_token, args.k_head, args.v_token, args.v_head = k.stride(0), k.stride(1), v.stride(0), v.stride(1)
        args.tokens = tokens
        # Strides are in elements of two bytes: 8 of them are 16 bytes.
        args.wide = (args.k | args.v) % 16 == 0 and (args.k_token | args.k_head | args.v_token | args.v_head) % 8 == 0
        threads = tokens * g.heads * (g.k_dim + g.v_dim) * g.element // 16
        bound.write((-(-threads // WRITE_THREADS), 1), args, self.device)

    def prologue_spreads(self, layer: AttentionLayer) -> bool:
        """Of any head that `prologue` takes."""
        return layer.k_dim == layer.v_dim

    def prologue(
        self,
        layer: int,
        step: Step,
        qkv: torch.Tensor,
        weight: torch.Tensor | None,
        eps: float,
        cos: torch.Tensor,
        sin: torch.Tensor,
        *,
        spread: bool = False,
    ) -> torch.Tensor:
        """`octavo.interfaces.SpreadingPrologue`: q is turned in place, K and V go to the cache."""
        bound = self._layers[layer]
        args, (tokens, heads, dim), rotary = bound.prologue_args, qkv.shape, cos.shape[-1]
        if bound.prologues is None or dim != bound.layer.k_dim:
            raise ValueError(
                f"layer {layer}: qkv {list(qkv.shape)} is not as wide as K {bound.layer.k_dim} and V {bound.layer.v_dim}"
            )
        q = qkv[:, : bound.layer.num_heads]
        if tokens == 0:
            return q
        args.qkv, args.cosine, args.sine = qkv.data_ptr(), cos.data_ptr(), sin.data_ptr()
        args.weight = 0 if weight is None else weight.data_ptr()
        if (args.qkv | args.weight) % 16 or not all(
            x.is_contiguous() for x in (qkv, cos, sin) + (() if weight is None else (weight,))
        ):
            raise ValueError(
                f"layer {layer}: qkv, weight, cos and sin must be dense, qkv and weight start at multiples of 16 bytes"
            )
        args.slots = step.slot_mapping[bound.group].data_ptr()
        args.tokens, args.rotary, args.eps = tokens, rotary, eps
        args.wide = rotary % 16 == 0 and (args.cosine | args.sine) % 16 == 0
        lanes = next(n for n in (1, 2, 4, 8, 16) if n * 16 >= dim)
        kernel, grid = bound.prologues[spread], -(-tokens * heads * lanes // PROLOGUE_THREADS)
        kernel((grid, 1), args, self.device, early=self.capability >= (9, 0))
        return q

    def run(self, layer: int, step: Step, q: torch.Tensor, out: torch.Tensor, *, lse: torch.Tensor | None = None) -> torch.Tensor:
        """Causal attention of q [T, heads, k_dim]; fills out [T, heads, v_dim] and lse (natural log, float32 [T, heads])."""
        bound = self._layers[layer]
        prefills = step.host.max_query_len > 1
        if not prefills or step.scratch["cupy.decodes"]:
            few = bound.decodes[False]
            decode = bound.decodes[step.seq_lens.shape[0] * few.segments >= few.crowd]
            self._fill(decode.args, bound, step, q, out, lse)
            # The kernel reads the work map before it waits for its predecessor, so the first one after `plan` starts when that ended.
            decode.kernel((decode.blocks, 1), decode.args, self.device, early=self._settled and self.capability >= (9, 0))
            self._settled = True
        if prefills:
            self._prefilling.run(bound, step, lambda args: self._fill(args, bound, step, q, out, lse))
        return out

    def _fill(
        self,
        args: DecodeArgs | PrefillArgs,
        bound: Bound,
        step: Step,
        q: torch.Tensor,
        out: torch.Tensor,
        lse: torch.Tensor | None,
    ) -> None:
        table = step.tables[bound.group]
        args.q, args.out, args.table = q.data_ptr(), out.data_ptr(), table.data_ptr()
        args.q_token, args.q_head, args.out_token, args.out_head = q.stride(0), q.stride(1), out.stride(0), out.stride(1)
        args.table_row = table.stride(0)
        args.lse, args.lse_token = (0, 0) if lse is None else (lse.data_ptr(), lse.stride(0))
        if (args.q | args.out) % 16 or (args.q_token | args.q_head | args.out_token | args.out_head) % 8:
            raise ValueError(
                f"layer {bound.layer.index}: q and out must start at multiples of 16 bytes, as must their tokens and heads; q has "
                f"strides {q.stride()}, out {out.stride()} (elements of 2 bytes)"
            )

    # ------------------------------------------------------------ whole blocks

    def gather(self, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a row's first tokens, as stored (FP8 values times their scale), in the query dtype. Slow."""
        bound = self._layers[layer]
        g = bound.geometry
        if not self._tables:
            raise RuntimeError("gather: no step has been prepared yet, so there is no block table to read")
        blocks = self._tables[bound.group][row, : -(-length // g.page)].long().clamp_min(0)
        pages = bound.cache.view(torch.uint8)[blocks].view(bound.cache.dtype).to(torch.float32)
        pages = pages.view(-1, g.heads, g.page * (g.k_dim + g.v_dim))
        found = []
        for dim, start, scale in ((g.k_dim, 0, bound.layer.k_scale), (g.v_dim, g.page * g.k_dim, bound.layer.v_scale)):
            places = torch.from_numpy(start + g.places(dim)).to(self.device).view(1, 1, -1)
            rows = pages.gather(2, places.expand(*pages.shape[:2], -1)).view(-1, g.heads, g.page, dim)
            rows = rows.permute(0, 2, 1, 3).reshape(-1, g.heads, dim)
            found.append((rows[:length] * (scale if g.dtype in FP8 else 1.0)).to(self.dtype))
        return found[0], found[1]

    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks (int64 ids) in every layer of a group; sources are read before any target is written."""
        for bound in self._groups:
            if bound.group.index == group:
                for cache in bound.caches:
                    data = cache.view(torch.uint8)
                    data.index_copy_(0, target, data.index_select(0, source))
