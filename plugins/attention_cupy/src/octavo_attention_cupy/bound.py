"""One layer, ready to launch: its kernels, their arguments as far as they do not change from step to step, and its work maps.

Everything that may compile, load or allocate happens here, when the backend is bound; a step does none of it.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from octavo.interfaces import AttentionLayer, Limits

from octavo_attention_cupy.compiler import load_function
from octavo_attention_cupy.geometry import PageGeometry
from octavo_attention_cupy.launch import DecodeArgs, Kernel, PlanArgs, PrefillArgs, PrologueArgs, WidenArgs, WriteArgs
from octavo_attention_cupy.provider import FP8
from octavo_attention_cupy.tuning import (
    DecodeChoice,
    PrefillChoice,
    crowd,
    decode_choice,
    hopper_choice,
    portable_choice,
    widened_pages,
)

LOG2E = 1.4426950408889634
ROW_WORK, BLOCK_WORK = 8, 12
"""int32 values of RowWork and BlockWork (cuda/work.cuh)."""
PLAN_THREADS, WRITE_THREADS, PROLOGUE_THREADS, WIDEN_THREADS = 1024, 256, 128, 256


@dataclass(slots=True)
class WorkMap:
    """The decode work map of one kind of layer (block table, window, segments, unit, blocks), filled once a step. `regimes`: the
    answers of `crowded` for which some layer needs it; `crowd`: segments from which on the answer is yes."""

    args: PlanArgs
    regimes: set[bool]
    crowd: int
    tensors: tuple[torch.Tensor, torch.Tensor]  # int32 [max rows, ROW_WORK] and [blocks, BLOCK_WORK]


@dataclass(slots=True)
class Decode:
    """A decode kernel of a layer, with its work map."""

    kernel: Kernel
    args: DecodeArgs
    blocks: int
    heads: int  # query heads of a segment at most
    segments: int  # of a row
    crowd: int  # see WorkMap


@dataclass(slots=True)
class Prefill:
    """A prefill kernel of a layer. tokens: new ones of a tile; stays: its blocks take item after item (see items.py)."""

    kernel: Kernel
    args: PrefillArgs
    tokens: int
    stays: bool


@dataclass(slots=True)
class Widened:
    """The Hopper kernel for a layer with an FP8 cache, and the kernel that first widens as many as `pages` pages for it."""

    kernel: Kernel
    args: WidenArgs
    prefill: Prefill
    pages: int


@dataclass(slots=True)
class Bound:
    """One layer. `decodes[False]` serves few rows, `decodes[True]` a crowd; `prefill` serves where `widened` is None or does not."""

    layer: AttentionLayer
    group: int
    geometry: PageGeometry
    cache: torch.Tensor
    sinks: torch.Tensor | None
    decodes: dict[bool, Decode]
    prefill: Prefill
    widened: Widened | None
    write: Kernel
    write_args: WriteArgs
    prologues: tuple[Kernel, Kernel] | None  # where K is as wide as V; the second spreads heads
    prologue_args: PrologueArgs


def _widened_pages(geometry: PageGeometry, limits: Limits) -> int:
    tokens = max(limits.max_model_len, limits.max_num_batched_tokens)
    return widened_pages(page_values=geometry.elements, page=geometry.page, tokens=tokens)


def workspace_bytes(
    layer: AttentionLayer, geometry: PageGeometry, limits: Limits, capability: tuple[int, int], prefill: str
) -> int:
    """What a layer's widened pages take, in bytes, as `Binder` has it: none but for FP8 that the Hopper kernel prefills."""
    group = layer.num_heads // layer.num_kv_heads
    hopper = capability == (9, 0) and hopper_choice(group=group, k_dim=layer.k_dim, v_dim=layer.v_dim) is not None
    if not hopper or prefill == "portable" or geometry.element == 2:
        return 0
    return _widened_pages(geometry, limits) * 2 * geometry.elements


class Binder:
    """Makes `Bound`s on one device. Kernels and work maps that layers have in common are made once."""

    def __init__(
        self,
        device: torch.device,
        capability: tuple[int, int],
        dtype: str,
        limits: Limits,
        cache_dir: Path | None,
        prefill: str,
    ) -> None:
        self.device, self.dtype, self.limits = device, dtype, limits
        self.cache_dir, self.prefill = cache_dir, prefill
        self.capability = capability
        properties = torch.cuda.get_device_properties(device)
        self.sms: int = properties.multi_processor_count
        self.shared_block: int = properties.shared_memory_per_block_optin
        self.shared_sm: int = properties.shared_memory_per_multiprocessor
        self.works: dict[tuple[Any, ...], WorkMap] = {}
        self._kernels: dict[tuple[Any, ...], Kernel] = {}

    def kernel(self, name: str, macros: dict[str, int], what: str, threads: int, shared: int = 0) -> Kernel:
        """Compiled or found, loaded, and allowed its shared memory."""
        key = (name, *sorted(macros.items()))
        if key not in self._kernels:
            what = f"{name} of {what}"
            function = load_function(name, macros, what=what, device=self.device.index, shared=shared, directory=self.cache_dir)
            self._kernels[key] = Kernel(function, what, threads, shared)
        return self._kernels[key]

    def plan(self) -> Kernel:
        return self.kernel("plan", {}, "the work map", PLAN_THREADS)

    def bind(self, group: int, layer: AttentionLayer, geometry: PageGeometry, cache: torch.Tensor) -> Bound:
        """`layer` of KV group number `group`, whose pages are `cache`. Raises ValueError if the option `prefill` asks for a kernel that
        cannot serve it."""
        macros = {
            "BF16": self.dtype == "bfloat16",
            "KV_BYTES": geometry.element,
            "E5M2": geometry.dtype == "float8_e5m2",
            "K_DIM": layer.k_dim,
            "V_DIM": layer.v_dim,
        }
        what = f"dims {layer.k_dim} and {layer.v_dim}, {self.dtype} queries, {geometry.dtype} cache"
        dims = {
            "group": layer.num_heads // layer.num_kv_heads,
            "k_dim": layer.k_dim,
            "v_dim": layer.v_dim,
            "element": geometry.element,
            "shared_block": self.shared_block,
        }
        sinks = None if layer.sinks is None else layer.sinks.detach().to(self.device, torch.float32).contiguous()
        common = self._common(layer, geometry, cache, sinks)
        stored = {name: common[name] for name in ("cache", "page_bytes", "page", "kv_heads", "v_scale")}
        stored["k_scale"] = layer.k_scale if geometry.dtype in FP8 else 1.0
        softened = macros | {"SOFTCAP": layer.softcap > 0}
        decodes = {}
        for crowded in (False, True):
            choice = decode_choice(**dims, shared_sm=self.shared_sm, crowded=crowded)
            decodes[crowded] = self._decode(group, layer, choice, softened, what, common, geometry.element, crowded)
        return Bound(
            layer, group, geometry, cache, sinks, decodes, *self._prefills(layer, geometry, softened, what, common),
            self.kernel("write", macros, what, WRITE_THREADS), WriteArgs(**stored),
            self._prologues(macros, what) if layer.k_dim == layer.v_dim else None,
            PrologueArgs(**stored, heads=layer.num_heads),
        )  # fmt: skip

    def _prologues(self, macros: dict[str, int], what: str) -> tuple[Kernel, Kernel]:
        return (
            self.kernel("prologue", macros | {"SPREAD": 0}, what, PROLOGUE_THREADS),
            self.kernel("prologue", macros | {"SPREAD": 1}, f"{what}, heads spread", PROLOGUE_THREADS),
        )

    def _prefills(
        self, layer: AttentionLayer, geometry: PageGeometry, macros: dict[str, int], what: str, common: dict[str, Any]
    ) -> tuple[Prefill, Widened | None]:
        """The kernel that reads the layer's cache, and the one that reads widened pages of it."""
        dims = {"k_dim": layer.k_dim, "v_dim": layer.v_dim}
        portable = portable_choice(**dims, element=geometry.element, shared_block=self.shared_block)
        hopper = hopper_choice(group=layer.num_heads // layer.num_kv_heads, **dims) if self.capability == (9, 0) else None
        if self.prefill == "hopper" and hopper is None:
            raise ValueError(f"layer {layer.index}: prefill=hopper needs capability 9.0 and dims of 64 or 128; this is {what}")
        if self.prefill == "portable" or hopper is None:
            return self._prefill(layer, portable, macros, what, common), None
        if geometry.element == 2:
            return self._prefill(layer, hopper, macros, what, common), None
        wide = self._prefill(
            layer,
            hopper,
            macros | {"KV_BYTES": 2, "E5M2": 0},
            f"{what}, widened",
            common | {"page_bytes": 2 * common["page_bytes"]},
        )
        pages = _widened_pages(geometry, self.limits)
        kernel = self.kernel("widen", {name: value for name, value in macros.items() if name != "SOFTCAP"}, what, WIDEN_THREADS)
        args = WidenArgs(**{name: common[name] for name in ("cache", "page_bytes", "page", "kv_heads")})
        return self._prefill(layer, portable, macros, what, common), Widened(kernel, args, wide, pages)

    def _prefill(
        self, layer: AttentionLayer, choice: PrefillChoice, macros: dict[str, int], what: str, common: dict[str, Any]
    ) -> Prefill:
        return Prefill(
            self.kernel(choice.kernel, macros | choice.macros, what, choice.threads, choice.shared),
            PrefillArgs(**common, window=layer.window or 0),
            choice.rows // (layer.num_heads // layer.num_kv_heads),
            choice.kernel == "prefill_hopper",
        )

    def _common(
        self, layer: AttentionLayer, geometry: PageGeometry, cache: torch.Tensor, sinks: torch.Tensor | None
    ) -> dict[str, Any]:
        """Arguments that decode and prefill share."""
        k_scale, v_scale = (layer.k_scale, layer.v_scale) if geometry.dtype in FP8 else (1.0, 1.0)
        scale = layer.scale * k_scale
        return {
            "cache": cache.data_ptr(),
            "sinks": 0 if sinks is None else sinks.data_ptr(),
            "page_bytes": geometry.elements * geometry.element,
            "page": geometry.page,
            "kv_heads": layer.num_kv_heads,
            "group": layer.num_heads // layer.num_kv_heads,
            "scale": scale / layer.softcap if layer.softcap else scale * LOG2E,
            "softcap": layer.softcap * LOG2E,
            "v_scale": v_scale,
        }

    def _decode(
        self,
        group: int,
        layer: AttentionLayer,
        choice: DecodeChoice,
        macros: dict[str, int],
        what: str,
        common: dict[str, Any],
        element: int,
        crowded: bool,
    ) -> Decode:
        kernel = self.kernel("decode", macros | choice.macros(), what, choice.warps * 32, choice.shared)
        pieces = -(-layer.num_heads // layer.num_kv_heads // choice.heads)
        segments, blocks = layer.num_kv_heads * pieces, self.sms * choice.blocks
        work = self._work(
            (group, layer.window or 0, segments, choice.unit, blocks),
            self.sms * crowd(k_dim=layer.k_dim, v_dim=layer.v_dim, element=element),
        )
        work.regimes.add(crowded)
        rows, starts = (t.data_ptr() for t in work.tensors)
        return Decode(
            kernel,
            DecodeArgs(**common, pieces=pieces, row_work=rows, block_work=starts),
            blocks,
            choice.heads,
            segments,
            work.crowd,
        )

    def _work(self, key: tuple[int, int, int, int, int], crowd: int) -> WorkMap:
        if key not in self.works:
            _, window, segments, unit, blocks = key
            rows = torch.zeros(self.limits.max_num_seqs, ROW_WORK, dtype=torch.int32, device=self.device)
            starts = torch.zeros(blocks, BLOCK_WORK, dtype=torch.int32, device=self.device)
            args = PlanArgs(
                row_work=rows.data_ptr(),
                block_work=starts.data_ptr(),
                blocks=blocks,
                heads=segments,
                unit=unit,
                least=1,
                window=window,
            )
            self.works[key] = WorkMap(args, set(), crowd, (rows, starts))
        return self.works[key]
