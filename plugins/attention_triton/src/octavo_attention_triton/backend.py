"""The backend: Octavo's attention contract on Triton kernels.

Owns the page layout (geometry.py), the work maps and the workspaces, all allocated in `bind`. It never allocates
the cache, and inside a captured graph it reads lengths, tables and slots only through the step's tensors.

A step may mix rows with one new token (decode) and rows with several (prefill): each kind has its own kernel, and
each kernel skips the rows of the other. A graph may be captured where every row has one token.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Literal, get_args

import torch
import triton
from octavo.interfaces import AttentionLayer, AttentionParts, BoundGroup, CacheLayout, KVGroup, KVSpec, Limits, Step, StepHost
from octavo_ops_triton.launch import Launcher, constants_of

from octavo_attention_triton.bound import Bound, WorkMap
from octavo_attention_triton.cascade import Cascade, most_parts, partial_rows, worth
from octavo_attention_triton.geometry import ELEMENT_BYTES, PageGeometry
from octavo_attention_triton.kernels import decode, write
from octavo_attention_triton.kernels import shared as cascade_kernels
from octavo_attention_triton.kernels.plan import INFO, ITEM, plan
from octavo_attention_triton.kernels.shared import BLOCK_M, BLOCK_N
from octavo_attention_triton.prefilling import Prefill
from octavo_attention_triton.provider import FP8, TritonOptions
from octavo_attention_triton.storing import Store
from octavo_attention_triton.tuning import PACKED, Crowd, DecodeChoice, decode_block_n, decode_choice

MAX_SPLITS = 512
FEW_PARTS = 16
"""Parts of a split row that are added up at once."""
TL_DTYPES = {
    torch.float32: triton.language.float32,
    torch.bfloat16: triton.language.bfloat16,
    torch.float16: triton.language.float16,
}


def _pow2(n: int) -> int:
    return int(triton.next_power_of_2(n))


def _wide_tokens(limits: Limits) -> int:
    """The longest row, and all prompts that a step computes from their beginning."""
    return max(limits.max_model_len, limits.max_num_batched_tokens)


def _windowed(layer: AttentionLayer, spec: KVSpec) -> AttentionLayer:
    """The layer with the window that its cache has, if it says none itself."""
    return replace(layer, window=spec.window) if layer.window is None and spec.window is not None else layer


class TritonAttention:
    """`octavo.interfaces.AttentionBackend` on Triton. graphs "decode": a step of one token a row may be captured.
    compiles_ahead: steps may be run with its kernels left out (octavo.engine.rehearsal)."""

    graphs: Literal["none", "decode", "all"] = "decode"
    compiles_ahead = True

    def __init__(self, options: TritonOptions, parts: AttentionParts) -> None:
        self.options = options
        self.dtype: torch.dtype = getattr(torch, parts.dtype)
        on_cuda = parts.device.type == "cuda"
        self.device = torch.device("cuda", parts.device.index) if on_cuda else torch.device(parts.device.type)
        self.sms = torch.cuda.get_device_properties(self.device).multi_processor_count if on_cuda else 1
        # Large tiles need 160 KiB of shared memory: compute capability 8.0 and 9.0 have it, 8.6 and 8.9 do not.
        self.roomy = not on_cuda or torch.cuda.get_device_properties(self.device).shared_memory_per_block_optin >= 160 << 10
        self.pdl = on_cuda and parts.device.capability >= (9, 0)
        self._launch = Launcher(pdl=self.pdl)
        self._store = Store(self._launch)
        hopper = on_cuda and parts.device.capability[0] == 9
        self._prefill = Prefill(options, parts.dtype, self.device, self._launch, hopper=hopper, roomy=self.roomy, sms=self.sms)
        # Whether a kernel since `plan` has waited for it: until then no kernel may start before it ends.
        self._settled = False
        self._layers: dict[int, Bound] = {}
        self._works: dict[tuple[Any, ...], WorkMap] = {}
        self._groups: list[BoundGroup] = []
        self._tables: tuple[torch.Tensor, ...] = ()

    # ------------------------------------------------------------ build

    def _geometry(self, spec: KVSpec, block_size: int) -> PageGeometry:
        # Shorter runs of tokens than a tile would be gathered byte by byte: measured 3x slower at pages of 16.
        transposed = self.options.fp8_v_transposed and spec.dtype in FP8 and block_size % 64 == 0
        return PageGeometry.of(spec, block_size, row_align=self.options.row_align, v_transposed=transposed)

    def layout(self, spec: KVSpec, block_size: int) -> CacheLayout:
        """See `PageGeometry`. Raises ValueError for a spec that has no paged K and V."""
        if spec.kind not in ("full", "window") or spec.tokens_per_entry != 1:
            raise ValueError(
                f"KV spec of kind {spec.kind} with {spec.tokens_per_entry} tokens an entry: this backend holds K and V of every token"
            )
        return self._geometry(spec, block_size).layout()

    def workspace_bytes(self, groups: Sequence[KVGroup], layers: Sequence[AttentionLayer], limits: Limits) -> int:
        """What `bind` takes for widened pages of an FP8 cache: up to 512 MiB."""
        bound = [
            (_windowed(layers[i], group.spec), self._geometry(group.spec, group.block_size))
            for group in groups
            for i in group.layers
        ]
        return self._prefill.workspace_values(bound, _wide_tokens(limits)) * self.dtype.itemsize

    def bind(self, groups: Sequence[BoundGroup], limits: Limits) -> None:
        """Take the caches; allocate work maps and the partial results of split rows (float32)."""
        self._groups = list(groups)
        self.limits = limits
        rows = limits.max_num_seqs
        partials = 1
        geometries = [self._geometry(bound.group.spec, bound.group.block_size) for bound in groups]
        layers = [
            (_windowed(layer, bound.group.spec), g) for bound, g in zip(groups, geometries, strict=True) for layer in bound.layers
        ]
        self._prefill.bind(layers, _wide_tokens(limits))
        for bound, geometry in zip(groups, geometries, strict=True):
            for layer, cache in zip(bound.layers, bound.caches, strict=True):
                layer = _windowed(layer, bound.group.spec)
                self._check(layer, cache, geometry)
                work = self._work(bound, layer, geometry, rows)
                self._layers[layer.index] = Bound(
                    layer, bound.group.index, cache, geometry, work,
                    None if layer.sinks is None else layer.sinks.detach().to(self.device).contiguous(),
                    self._shape(layer, geometry), self._prefill.descriptor(layer, cache, geometry), self._prefill.wide_pages(layer, geometry),
                )  # fmt: skip
                partials = max(partials, work.items.shape[0] * layer.num_heads)
        width = max((b.layer.v_dim for b in self._layers.values()), default=1)
        self._part = torch.zeros(partials * width, dtype=torch.float32, device=self.device)
        self._part_lse = torch.zeros(partials, dtype=torch.float32, device=self.device)
        # Arrival counters: zero before and after every launch, the last arrival resets its own.
        self._arrived = torch.zeros(partials, dtype=torch.int32, device=self.device)
        self._nothing = torch.zeros(1, dtype=torch.float32, device=self.device)
        self._bind_shared(rows)

    def _bind_shared(self, rows: int) -> None:
        """Buffers of steps whose rows share a prefix, for the layers without a window."""
        able = [b for b in self._layers.values() if b.layer.window is None and int(b.shape["GROUP"]) <= BLOCK_M]
        self._token_bytes = max((b.geometry.layout().page_bytes // b.geometry.page for b in able), default=0)
        self._cascades = {g: Cascade.make(g, rows, self.device) for g in {int(b.shape["GROUP"]) for b in able}}
        values = max((b.layer.num_heads * b.layer.v_dim for b in able), default=0)
        sums = max((b.layer.num_heads for b in able), default=0)
        self._shared = torch.zeros(partial_rows(rows) * values, dtype=torch.float32, device=self.device)
        self._shared_lse = torch.zeros(partial_rows(rows) * sums, dtype=torch.float32, device=self.device)

    def _check(self, layer: AttentionLayer, cache: torch.Tensor, geometry: PageGeometry) -> None:
        pages = (cache.shape[0], geometry.elements)
        if tuple(cache.shape) != pages or not cache.is_contiguous() or cache.dtype != getattr(torch, geometry.dtype):
            raise ValueError(
                f"layer {layer.index}: cache is {cache.dtype} {tuple(cache.shape)}, its layout is {geometry.dtype} "
                f"[blocks, {geometry.elements}], contiguous: allocate it from `layout`"
            )

    def _work(self, bound: BoundGroup, layer: AttentionLayer, geometry: PageGeometry, rows: int) -> WorkMap:
        facts = {
            "dim": max(layer.k_dim, layer.v_dim),
            "kv_bytes": ELEMENT_BYTES[geometry.dtype],
            "roomy": self.roomy,
        }
        finite = self._finite(geometry)
        group = layer.num_heads // layer.num_kv_heads
        choices = {
            crowd: self._choice(decode_choice(group=group, crowd=crowd, finite=finite, **facts)) for crowd in get_args(Crowd)
        }
        key = (bound.group.index, layer.window, layer.num_kv_heads, *choices.values())
        if key not in self._works:
            most = max(self._budget(choice, layer.num_kv_heads) for choice in choices.values())
            items = torch.full((most + rows, ITEM), -1, dtype=torch.int32, device=self.device)
            cuts = torch.full((rows, INFO), -1, dtype=torch.int32, device=self.device)
            self._works[key] = WorkMap(layer.window, decode_block_n(**facts), layer.num_kv_heads, choices, items, cuts)
        return self._works[key]

    def _finite(self, geometry: PageGeometry) -> bool:
        """Whether masked tiles of V go through `tile.finite16`: an instruction of capability 8.9, which Triton's interpreter lacks."""
        fp8 = geometry.v_transposed and self.dtype != torch.float32
        return fp8 and self.device.type == "cuda" and torch.cuda.get_device_capability(self.device) >= (8, 9)

    def _choice(self, choice: DecodeChoice) -> DecodeChoice:
        """The tuned choice, where the options do not say otherwise."""
        merge, ctas = self.options.merge, self.options.ctas_per_sm
        fused = choice.fused if merge == "auto" else merge == "fused"
        return replace(choice, fused=fused, ctas_per_sm=ctas or choice.ctas_per_sm)

    def _budget(self, choice: DecodeChoice, kv_heads: int) -> int:
        """Items that fill the device once, each run by one program a KV head; so many that the second kernel, where there is one,
        adds up whole chunks."""
        items = max(1, self.sms * choice.ctas_per_sm // kv_heads)
        return items if choice.fused or items < 16 else items // 16 * 16

    def _pick(self, work: WorkMap, rows: int) -> DecodeChoice:
        pairs = rows * work.kv_heads
        crowd: Crowd = (
            "packed" if pairs >= PACKED * self.sms else "crowded" if pairs >= self.sms else "few" if rows > 1 else "one"
        )
        return work.choices[crowd]

    def _shape(self, layer: AttentionLayer, geometry: PageGeometry) -> dict[str, Any]:
        dot, normalise = self.dtype, False
        if geometry.dtype in FP8 and self.dtype != torch.float32:
            # The hardware converts FP8 to float16 in one instruction, to bfloat16 in several.
            dot, normalise = torch.float16, self.dtype == torch.bfloat16
        return {
            "GROUP": layer.num_heads // layer.num_kv_heads, "K_DIM": layer.k_dim, "V_DIM": layer.v_dim,
            "BLOCK_K": max(16, _pow2(layer.k_dim)), "BLOCK_V": max(16, _pow2(layer.v_dim)),
            "PAGE": geometry.page, "K_ROW": geometry.k_row, "V_ROW": geometry.v_row, "V_BASE": geometry.v_base,
            "V_TRANSPOSED": geometry.v_transposed, "DOT": TL_DTYPES[dot], "NORMALISE": normalise,
            "PRECISION": "ieee" if self.dtype == torch.float32 else "tf32",
            "WINDOW": layer.window is not None, "SOFTCAP": layer.softcap > 0, "SINKS": layer.sinks is not None,
        }  # fmt: skip

    # ------------------------------------------------------------ a step

    def prepare(self, step: Step) -> None:
        """Host work: the prefill tile lists of an eager step (a decode step has none)."""
        self._tables = step.tables
        if step.host.max_query_len <= 1:
            shared = worth(step.host.shared, self._token_bytes, self.options.shared_prefix_bytes)
            step.scratch["triton.shared"] = bool(shared)
            for group, cascade in self._cascades.items() if shared else ():
                heads = max(b.layer.num_kv_heads for b in self._layers.values() if b.shape["GROUP"] == group)
                cascade.update(shared, step.host, heads, self.sms)
            return
        self._prefill.prepare(step, self._layers.values())
        step.scratch["triton.decodes"] = bool((step.host.query_lens == 1).any())

    def variant(self, host: StepHost) -> str:
        """`octavo.interfaces.StepVariants`."""
        return "shared" if worth(host.shared, self._token_bytes, self.options.shared_prefix_bytes) else ""

    def plan(self, step: Step) -> None:
        """Device work once a step: one work map for each kind of layer. Depends on the step's tensors only."""
        rows = step.seq_lens.shape[0]
        self._settled = False
        shared = step.scratch.get("triton.shared", False)
        for work in self._works.values():
            skip = next(iter(self._cascades.values())).skip if shared and work.window is None else None
            budget = self._budget(self._pick(work, rows), work.kv_heads)
            plan(
                step.query_start, step.seq_lens, step.rows, skip, work.items, work.cuts, budget=budget, capacity=budget + rows,
                max_items=work.items.shape[0], max_rows=self.limits.max_num_seqs, tile=work.block_n, min_tiles=1,
                window=work.window, max_splits=MAX_SPLITS,
            )  # fmt: skip

    def write(self, layer: int, step: Step, k: torch.Tensor, v: torch.Tensor) -> None:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim], divided by the layer's scales if the cache is FP8."""
        self._store.write(self._layers[layer], step, k, v)

    def prologue_spreads(self, layer: AttentionLayer) -> bool:
        """`octavo.interfaces.SpreadingPrologue`: whatever the width."""
        return True

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
        prologue = self._store.prologue_spread if spread else self._store.prologue
        return prologue(self._layers[layer], step, qkv, weight, eps, cos, sin)

    def run(self, layer: int, step: Step, q: torch.Tensor, out: torch.Tensor, *, lse: torch.Tensor | None = None) -> torch.Tensor:
        """Causal attention of q [T, heads, k_dim]; fills out [T, heads, v_dim] and lse (natural log, float32 [T, heads])."""
        bound = self._layers[layer]
        prefills = step.host.max_query_len > 1
        if not prefills and step.scratch.get("triton.shared") and bound.layer.window is None:
            return self._decode_shared(bound, step, q, out, lse)
        if not prefills or step.scratch["triton.decodes"]:
            self._decode(bound, step, q, out, lse)
        if prefills:
            self._prefill.run(bound, step, q, out, lse)
        return out

    def _decode(self, bound: Bound, step: Step, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        layer, work, table = bound.layer, bound.work, step.tables[bound.group]
        rows, group = step.seq_lens.shape[0], bound.shape["GROUP"]
        scale, softcap, v_scale = bound.numbers()
        choice = self._pick(work, rows)
        tile, fused = choice.tile, choice.fused
        block_g, block_v = _pow2(group), bound.shape["BLOCK_V"]
        log = self._nothing if lse is None else lse
        sinks = self._nothing if bound.sinks is None else bound.sinks
        key: tuple[Any, ...] = ("decode", choice, lse is not None)
        if key not in bound.constants:
            bound.constants[key] = constants_of(
                decode.decode_kernel, HEADS=layer.num_heads, BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, BLOCK_G=block_g, **bound.shape,
                LSE=lse is not None, FUSED=fused, CHUNK=max(1, min(16, 8192 // (block_g * block_v))), STAGES=tile.stages,
                MASK_ALL=choice.mask_all, SHORT=not fused, FINITE=self._finite(bound.geometry),
            )  # fmt: skip
        strides = q.stride(0), q.stride(1), out.stride(0), out.stride(1), log.stride(0)
        # Programmatic dependent launch: the kernel reads the work map before it waits for its predecessor, so the
        # first one after `plan` is launched the plain way.
        self._launch(
            decode.decode_kernel, (layer.num_kv_heads, self._budget(choice, layer.num_kv_heads) + rows),
            (q, out, log, bound.cache, table, work.items, self._part, self._part_lse, self._arrived, sinks),
            (scale, softcap, v_scale, table.stride(0)), (*strides, bound.cache.stride(0), *bound.constants[key]),
            warps=tile.warps, overlap=self._settled,
        )  # fmt: skip
        self._settled = True
        if not fused:
            chunk = min(64, _pow2(self._budget(choice, layer.num_kv_heads)))
            key = ("merge", chunk, lse is not None)
            if key not in bound.constants:
                bound.constants[key] = constants_of(
                    decode.merge_kernel, HEADS=layer.num_heads, V_DIM=layer.v_dim, BLOCK_V=block_v, FEW=min(FEW_PARTS, chunk),
                    CHUNK=max(1, min(chunk, 8192 // block_v)), SINKS=bound.shape["SINKS"], LSE=lse is not None,
                )  # fmt: skip
            self._launch(
                decode.merge_kernel, (layer.num_heads, rows), (work.cuts, self._part, self._part_lse, out, log, sinks), (v_scale,),
                (*strides[2:], *bound.constants[key]), warps=2,
            )  # fmt: skip

    def _decode_shared(
        self, bound: Bound, step: Step, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> torch.Tensor:
        """What each row has of its own, the shared prefixes once for all their rows, and the sum of both."""
        layer, rows, table = bound.layer, step.seq_lens.shape[0], step.tables[bound.group]
        cascade = self._cascades[int(bound.shape["GROUP"])]
        most, heads = most_parts(rows), rows * layer.num_heads
        parts = self._shared[: (most + 1) * heads * layer.v_dim].view(most + 1, heads * layer.v_dim)
        sums = self._shared_lse[: (most + 1) * heads].view(most + 1, heads)
        own = parts[-1].view(rows, layer.num_heads, layer.v_dim)  # the last place is for what a row has of its own
        own_lse = sums[-1].view(rows, layer.num_heads)
        self._decode(bound, step, q, own, own_lse)
        scale, softcap, v_scale = bound.numbers()
        shape = {k: v for k, v in bound.shape.items() if k not in ("WINDOW", "SINKS")}
        pdl: dict[str, Any] = {"PDL": True, "launch_pdl": True} if self.pdl else {"PDL": False}
        cascade_kernels.shared_kernel[(cascade.tiles_for(rows), layer.num_kv_heads, most)](
            q, parts, sums, bound.cache, table, cascade.tiles, cascade.members, scale, softcap, v_scale,
            q.stride(0), q.stride(1), table.stride(0), bound.cache.stride(0), parts.stride(0), sums.stride(0),
            HEADS=layer.num_heads, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, STAGES=2 if bound.geometry.k_dim > 128 else 5, num_warps=4, **shape, **pdl,
        )  # fmt: skip
        log = self._nothing if lse is None else lse
        block_v = bound.shape["BLOCK_V"]
        block_h = max(1, min(_pow2(layer.num_heads), 1024 // block_v))
        cascade_kernels.combine_kernel[(rows, triton.cdiv(layer.num_heads, block_h))](
            own, own_lse, parts, sums, cascade.parts, out, log, parts.stride(0), sums.stride(0), out.stride(0), out.stride(1),
            HEADS=layer.num_heads, V_DIM=layer.v_dim, BLOCK_H=block_h, BLOCK_V=block_v, LSE=lse is not None, num_warps=4, **pdl,
        )  # fmt: skip
        return out

    # ------------------------------------------------------------ whole blocks

    def gather(self, layer: int, row: int, length: int) -> tuple[torch.Tensor, torch.Tensor]:
        """K and V of a row's first tokens, as stored (FP8 values times their scale), in the query dtype. Slow."""
        bound = self._layers[layer]
        g = bound.geometry
        if not self._tables:
            raise RuntimeError("gather: no step has been prepared yet, so there is no block table to read")
        blocks = self._tables[bound.group][row, : -(-length // g.page)].long().clamp_min(0)
        k, v = g.unpack(bound.cache.view(torch.uint8)[blocks].view(bound.cache.dtype).to(torch.float32), length)
        fp8 = bound.cache.dtype in write.FP8_MAX
        k_scale, v_scale = (bound.layer.k_scale, bound.layer.v_scale) if fp8 else (1.0, 1.0)
        return (k * k_scale).to(self.dtype), (v * v_scale).to(self.dtype)

    def copy_blocks(self, group: int, source: torch.Tensor, target: torch.Tensor) -> None:
        """Copy whole blocks (int64 ids) in every layer of a group; sources are read before any target is written."""
        for bound in self._groups:
            if bound.group.index == group:
                for cache in bound.caches:
                    data = cache.view(torch.uint8)
                    data.index_copy_(0, target, data.index_select(0, source))
