"""The backend: Octavo's attention contract on CUDA C++ kernels.

Owns the work maps and workspaces, all allocated in `bind`, where all kernels are compiled and loaded too: a step launches and does
nothing else. It never allocates the cache, and inside a captured graph it reads lengths, tables and slots only through
the step's tensors.

A step may mix rows with one new token (decode) and rows with several (prefill): each kind has its own kernel. A graph may be
captured where every row has one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import numpy as np
import torch
from octavo.interfaces import AttentionLayer, AttentionParts, BoundGroup, CacheLayout, KVSpec, Limits, Step

from octavo_attention_cupy.compiler import load_function
from octavo_attention_cupy.geometry import PageGeometry
from octavo_attention_cupy.launch import DecodeArgs, Kernel, PlanArgs, PrefillArgs, WriteArgs
from octavo_attention_cupy.provider import FP8, CupyOptions
from octavo_attention_cupy.tuning import DecodeChoice, PrefillChoice, decode_choice, prefill_choice

LOG2E = 1.4426950408889634
ROW_WORK, BLOCK_WORK, TILE = 8, 12, 8
"""int32 values of RowWork and BlockWork (cuda/work.cuh) and of PrefillTile (cuda/prefill.cu)."""
PLAN_THREADS, WRITE_THREADS = 1024, 256


@dataclass(slots=True)
class WorkMap:
    """The decode work map of one kind of layer (block table, window, segments, unit, blocks), filled by `plan`."""

    args: PlanArgs
    row_work: torch.Tensor  # int32 [max rows, ROW_WORK]
    block_work: torch.Tensor  # int32 [blocks, BLOCK_WORK]


@dataclass(slots=True)
class Bound:
    """One layer, ready to launch: cache, kernels, and their arguments as far as they do not change from step to step."""

    layer: AttentionLayer
    group: int
    geometry: PageGeometry
    cache: torch.Tensor
    sinks: torch.Tensor | None
    blocks: int
    tile: PrefillChoice
    write: Kernel
    decode: Kernel
    prefill: Kernel
    write_args: WriteArgs
    decode_args: DecodeArgs
    prefill_args: PrefillArgs

    @property
    def prefill_tokens(self) -> int:
        """New tokens of one prefill tile."""
        return self.tile.rows // self.decode_args.group


class CupyAttention:
    """`octavo.interfaces.AttentionBackend` on CUDA C++. graphs "decode": a step of one token a row may be captured."""

    graphs: Literal["none", "decode", "all"] = "decode"

    def __init__(self, options: CupyOptions, parts: AttentionParts) -> None:
        self.options, self.dtype_name = options, parts.dtype
        self.dtype: torch.dtype = getattr(torch, parts.dtype)
        self.device = torch.device("cuda", parts.device.index)
        self.capability = parts.device.capability
        self.properties = torch.cuda.get_device_properties(self.device)
        self._kernels: dict[tuple[Any, ...], Kernel] = {}
        self._layers: dict[int, Bound] = {}
        self._works: dict[tuple[Any, ...], WorkMap] = {}
        self._groups: list[BoundGroup] = []
        self._tables: tuple[torch.Tensor, ...] = ()
        # Whether a kernel since `plan` has waited for it: until then no kernel may start before it ends.
        self._settled = False

    # ------------------------------------------------------------ build

    def layout(self, spec: KVSpec, block_size: int) -> CacheLayout:
        """See `PageGeometry`. Raises ValueError for a spec that has no paged K and V, or dims that no kernel reads."""
        return PageGeometry.of(spec, block_size).layout()

    def bind(self, groups: Sequence[BoundGroup], limits: Limits) -> None:
        """Take the caches; compile and load kernels; allocate work maps and the partial sums of split rows (float32)."""
        self._groups, self.limits = list(groups), limits
        parts = sums = counters = 1
        for bound in groups:
            geometry = PageGeometry.of(bound.group.spec, bound.group.block_size)
            for layer, cache in zip(bound.layers, bound.caches, strict=True):
                if layer.window is None and bound.group.spec.window is not None:
                    layer = replace(layer, window=bound.group.spec.window)
                self._check(layer, cache, geometry)
                choice = self._decode_choice(layer, geometry)
                self._layers[layer.index] = self._bound(bound.group.index, layer, geometry, cache, choice)
                places = 2 * self._blocks(choice) * choice.heads
                parts, sums = max(parts, places * layer.v_dim), max(sums, places * 2)
                counters = max(counters, limits.max_num_seqs * self._segments(layer, choice))
        self._plan = self._kernel("plan", {}, "the work map", PLAN_THREADS)
        self._part = torch.zeros(parts, dtype=torch.float32, device=self.device)
        self._part_sums = torch.zeros(sums, dtype=torch.float32, device=self.device)
        # Arrival counters: zero before and after every launch, the last arrival resets its own.
        self._arrived = torch.zeros(counters, dtype=torch.int32, device=self.device)
        for each in self._layers.values():
            each.decode_args.part, each.decode_args.part_sums = self._part.data_ptr(), self._part_sums.data_ptr()
            each.decode_args.arrived = self._arrived.data_ptr()

    def _check(self, layer: AttentionLayer, cache: torch.Tensor, geometry: PageGeometry) -> None:
        pages = (cache.shape[0], geometry.elements)
        if tuple(cache.shape) != pages or not cache.is_contiguous() or cache.dtype != getattr(torch, geometry.dtype):
            raise ValueError(
                f"layer {layer.index}: cache is {cache.dtype} {tuple(cache.shape)}, its layout is {geometry.dtype} "
                f"[blocks, {geometry.elements}], contiguous: allocate it from `layout`"
            )

    def _decode_choice(self, layer: AttentionLayer, geometry: PageGeometry) -> DecodeChoice:
        return decode_choice(
            group=layer.num_heads // layer.num_kv_heads,
            k_dim=layer.k_dim,
            v_dim=layer.v_dim,
            element=geometry.element,
            shared_block=self.properties.shared_memory_per_block_optin,
            shared_sm=self.properties.shared_memory_per_multiprocessor,
        )

    def _blocks(self, choice: DecodeChoice) -> int:
        return self.properties.multi_processor_count * choice.blocks

    def _pieces(self, layer: AttentionLayer, choice: DecodeChoice) -> int:
        return -(-layer.num_heads // layer.num_kv_heads // choice.heads)

    def _segments(self, layer: AttentionLayer, choice: DecodeChoice) -> int:
        return layer.num_kv_heads * self._pieces(layer, choice)

    def _kernel(self, name: str, macros: dict[str, int], what: str, threads: int, shared: int = 0) -> Kernel:
        key = (name, *sorted(macros.items()))
        if key not in self._kernels:
            directory = self.options.cache_dir
            function = load_function(name, macros, device=self.device.index, shared=shared, directory=directory)
            self._kernels[key] = Kernel(function, f"{name} of {what}", threads, shared)
        return self._kernels[key]

    def _bound(
        self, group: int, layer: AttentionLayer, geometry: PageGeometry, cache: torch.Tensor, choice: DecodeChoice
    ) -> Bound:
        macros = {
            "BF16": self.dtype == torch.bfloat16,
            "KV_BYTES": geometry.element,
            "E5M2": geometry.dtype == "float8_e5m2",
            "K_DIM": layer.k_dim,
            "V_DIM": layer.v_dim,
        }
        what = f"dims {layer.k_dim} and {layer.v_dim}, {self.dtype_name} queries, {geometry.dtype} cache"
        softcap = {"SOFTCAP": layer.softcap > 0}
        tile: PrefillChoice = prefill_choice(
            k_dim=layer.k_dim,
            v_dim=layer.v_dim,
            element=geometry.element,
            shared_block=self.properties.shared_memory_per_block_optin,
            hopper=self.capability == (9, 0) and self.options.prefill == "auto",
        )
        shape = {
            "N_TILES": choice.n_tiles,
            "SLICE": choice.slice,
            "WARPS": choice.warps,
            "STAGES": choice.stages,
            "BLOCKS_PER_SM": choice.blocks,
        }
        write = self._kernel("write", macros, what, WRITE_THREADS)
        decode = self._kernel("decode", macros | softcap | shape, what, choice.warps * 32, choice.shared)
        prefill = self._kernel(tile.kernel, macros | softcap | tile.macros, what, tile.threads, tile.shared)
        sinks = None if layer.sinks is None else layer.sinks.detach().to(self.device, torch.float32).contiguous()
        work = self._work(group, layer, choice)
        fp8 = geometry.dtype in FP8
        k_scale, v_scale = (layer.k_scale, layer.v_scale) if fp8 else (1.0, 1.0)
        scale, heads = layer.scale * k_scale, layer.num_heads // layer.num_kv_heads
        common: dict[str, Any] = {
            "cache": cache.data_ptr(),
            "sinks": 0 if sinks is None else sinks.data_ptr(),
            "page_bytes": geometry.elements * geometry.element,
            "page": geometry.page,
            "kv_heads": layer.num_kv_heads,
            "group": heads,
            "scale": scale / layer.softcap if layer.softcap else scale * LOG2E,
            "softcap": layer.softcap * LOG2E,
            "v_scale": v_scale,
        }
        decode_args = DecodeArgs(
            **common,
            pieces=self._pieces(layer, choice),
            row_work=work.row_work.data_ptr(),
            block_work=work.block_work.data_ptr(),
        )
        write_args = WriteArgs(
            cache=cache.data_ptr(),
            page_bytes=common["page_bytes"],
            page=geometry.page,
            kv_heads=layer.num_kv_heads,
            k_scale=k_scale,
            v_scale=v_scale,
        )
        return Bound(
            layer, group, geometry, cache, sinks, self._blocks(choice), tile, write, decode, prefill,
            write_args, decode_args, PrefillArgs(**common, window=layer.window or 0),
        )  # fmt: skip

    def _work(self, group: int, layer: AttentionLayer, choice: DecodeChoice) -> WorkMap:
        blocks, segments, window = self._blocks(choice), self._segments(layer, choice), layer.window or 0
        key = (group, window, segments, choice.unit, blocks)
        if key not in self._works:
            row_work = torch.zeros(self.limits.max_num_seqs, ROW_WORK, dtype=torch.int32, device=self.device)
            block_work = torch.zeros(blocks, BLOCK_WORK, dtype=torch.int32, device=self.device)
            args = PlanArgs(
                row_work=row_work.data_ptr(),
                block_work=block_work.data_ptr(),
                blocks=blocks,
                heads=segments,
                unit=choice.unit,
                least=1,
                window=window,
            )
            self._works[key] = WorkMap(args, row_work, block_work)
        return self._works[key]

    # ------------------------------------------------------------ a step

    def prepare(self, step: Step) -> None:
        """Host work: the prefill tile lists of an eager step (a decode step has none)."""
        self._tables = step.tables
        if step.host.max_query_len <= 1:
            return
        lists: dict[tuple[int, int | None], torch.Tensor] = {}
        for bound in self._layers.values():
            key = (bound.prefill_tokens, bound.layer.window)
            if key not in lists:
                lists[key] = self._tiles(step, *key)
        step.scratch["cupy.tiles"] = lists
        step.scratch["cupy.decodes"] = bool((step.host.query_lens == 1).any())

    def _tiles(self, step: Step, size: int, window: int | None) -> torch.Tensor:
        """int32 [tiles, TILE]: `size` new tokens or fewer each, longest first."""
        lens, ends = step.host.query_lens.astype(np.int64), step.host.seq_lens.astype(np.int64)
        starts = np.cumsum(lens) - lens
        many = np.flatnonzero(lens > 1)
        counts = -(-lens[many] // size)
        of = np.repeat(many, counts)
        nth = np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)
        tiles = np.zeros((of.size, TILE), dtype=np.int32)
        tiles[:, 0] = starts[of] + nth * size
        tiles[:, 1] = np.minimum(lens[of] - nth * size, size)
        tiles[:, 2] = ends[of] - lens[of] + nth * size
        tiles[:, 3] = step.host.rows[of]
        tiles[:, 4] = ends[of]
        work = tiles[:, 2] + tiles[:, 1]
        if window is not None:
            work = np.minimum(work, window + size)
        host = torch.from_numpy(tiles[np.argsort(-work, kind="stable")]).pin_memory()
        return host.to(self.device, non_blocking=True)

    def plan(self, step: Step) -> None:
        """Device work once a step: one work map for each kind of layer. Depends on the step's tensors only."""
        self._settled = False
        for work in self._works.values():
            args = work.args
            args.query_start, args.seq_lens = step.query_start.data_ptr(), step.seq_lens.data_ptr()
            args.table_rows, args.rows = step.rows.data_ptr(), step.seq_lens.shape[0]
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

    def run(self, layer: int, step: Step, q: torch.Tensor, out: torch.Tensor, *, lse: torch.Tensor | None = None) -> torch.Tensor:
        """Causal attention of q [T, heads, k_dim]; fills out [T, heads, v_dim] and lse (natural log, float32 [T, heads])."""
        bound = self._layers[layer]
        prefills = step.host.max_query_len > 1
        if not prefills or step.scratch["cupy.decodes"]:
            self._fill(bound.decode_args, bound, step, q, out, lse)
            # The kernel reads the work map before it waits for its predecessor, so the first one after `plan` starts when that ended.
            bound.decode((bound.blocks, 1), bound.decode_args, self.device, early=self._settled and self.capability >= (9, 0))
            self._settled = True
        if prefills:
            tiles = step.scratch["cupy.tiles"][bound.prefill_tokens, bound.layer.window]
            self._fill(bound.prefill_args, bound, step, q, out, lse)
            args, heads = bound.prefill_args, bound.layer.num_kv_heads
            args.tiles, args.count = tiles.data_ptr(), tiles.shape[0]
            stays = bound.tile.kernel == "prefill_hopper"  # its blocks take all items; the other has a block for each
            grid = (min(self.properties.multi_processor_count, args.count * heads), 1) if stays else (args.count, heads)
            bound.prefill(grid, args, self.device)
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
