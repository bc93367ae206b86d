"""Rows with several new tokens: which kernel serves a layer, what its programs do, and the launches.

Owns the workspace that FP8 pages are widened into, or packed for products in FP8. Runs in eager steps only, so all lists are made on the host, once a step for
all layers that can share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import replace
from typing import Any

import torch
import triton
from octavo.interfaces import AttentionLayer, Step
from octavo.transfer import to_device
from octavo_ops_triton.launch import Launcher, constants_of

from octavo_attention_triton.bound import Bound
from octavo_attention_triton.geometry import ELEMENT_BYTES, PageGeometry
from octavo_attention_triton.kernels import prefill, repack, widen
from octavo_attention_triton.prefill_tiles import Items, tile_list
from octavo_attention_triton.provider import FP8, TritonOptions
from octavo_attention_triton.tuning import HOPPER_TOKENS, Tile, hopper_prefill_fits, prefill_tile
from octavo_attention_triton.widening import Batch, batches, pays, workspace_pages


def _pow2(n: int) -> int:
    return int(triton.next_power_of_2(n))


def _page_values(g: PageGeometry) -> int:
    return g.heads * g.page * (g.k_dim + g.v_dim)


class Prefill:
    """Of one backend. dtype: of queries; hopper: the device is of capability 9; roomy: a program may take 160 KiB of shared memory;
    sms: multiprocessors."""

    def __init__(
        self, options: TritonOptions, dtype: str, device: torch.device, launch: Launcher, *, hopper: bool, roomy: bool, sms: int
    ) -> None:
        self._choice, self._row_align, self._narrow = options.prefill, options.row_align, options.fp8_products
        self._dtype_name, self._dtype = dtype, getattr(torch, dtype)
        self._device, self._launch = device, launch
        self._hopper, self._roomy, self._sms = hopper, roomy, sms
        self._nothing = torch.zeros(1, dtype=torch.float32, device=device)

    def bind(self, layers: Iterable[tuple[AttentionLayer, PageGeometry]], wide_tokens: int) -> None:
        """Allocate the workspace: 16-bit values, as many as the largest layer needs for so many tokens; all layers share it."""
        self._wide_tokens = wide_tokens
        most = self.workspace_values(layers, wide_tokens)
        self._workspace = torch.empty(most, dtype=self._dtype, device=self._device)

    def workspace_values(self, layers: Iterable[tuple[AttentionLayer, PageGeometry]], wide_tokens: int) -> int:
        """Values of the workspace that `bind` allocates."""
        return max((self._wide_pages(layer, g, wide_tokens) * self._wide_values(layer, g) for layer, g in layers), default=0)

    def _hopper_serves(self, layer: AttentionLayer, g: PageGeometry) -> bool:
        """Whether the Hopper kernel prefills this layer: from its cache, or from FP8 pages that are widened for it."""
        return (
            self._hopper
            and self._choice != "portable"
            and hopper_prefill_fits(
                k_dim=g.k_dim,
                v_dim=g.v_dim,
                page=g.page,
                group=layer.num_heads // layer.num_kv_heads,
                dtype=self._dtype_name,
                kv_dtype=self._dtype_name if g.dtype in FP8 else g.dtype,
                row_align=self._row_align,
            )
        )

    def _multiplies_fp8(self, layer: AttentionLayer, g: PageGeometry) -> bool:
        """Whether this layer's long prompts are multiplied in FP8; the workspace then has tiles of HOPPER_TOKENS for pages."""
        plain = layer.window is None and not layer.softcap and layer.sinks is None and g.k_dim == g.v_dim == 128
        packed = g.dtype == "float8_e4m3fn" and g.v_transposed and g.page <= HOPPER_TOKENS
        return self._narrow and plain and packed and self._hopper_serves(layer, g)

    def wide_pages(self, layer: AttentionLayer, g: PageGeometry) -> int:
        """Pages of the workspace for FP8 pages of this layer; 0 where it needs none."""
        return self._wide_pages(layer, g, self._wide_tokens)

    def _wide_pages(self, layer: AttentionLayer, g: PageGeometry, tokens: int) -> int:
        if g.dtype not in FP8 or not self._hopper_serves(layer, g):
            return 0
        if self._multiplies_fp8(layer, g):
            return workspace_pages(replace(g, page=HOPPER_TOKENS), 1, tokens)
        return workspace_pages(g, self._dtype.itemsize, tokens)

    def _wide_values(self, layer: AttentionLayer, g: PageGeometry) -> int:
        """16-bit values of a page of the workspace."""
        if self._multiplies_fp8(layer, g):
            return _page_values(replace(g, page=HOPPER_TOKENS)) // 2
        return _page_values(g)

    def descriptor(self, layer: AttentionLayer, cache: torch.Tensor, g: PageGeometry) -> Any:
        """The copy descriptor of what the Hopper kernel reads if it prefills this layer, else None. ValueError if it is asked
        for and cannot."""
        if self._hopper_serves(layer, g):
            from octavo_attention_triton.kernels import hopper_prefill, hopper_prefill_fp8

            wide = self._workspace[: self.wide_pages(layer, g) * self._wide_values(layer, g)]
            if self._multiplies_fp8(layer, g):
                return hopper_prefill_fp8.descriptor(wide.view(cache.dtype))
            return hopper_prefill.descriptor(wide if len(wide) else cache, g.k_dim, g.page)
        if self._choice == "hopper":
            raise ValueError(
                f"layer {layer.index}: prefill=hopper needs capability 9, and a cache in the query dtype or FP8, of dim 64 or 128 without "
                f"row padding; this is {g.dtype} for {self._dtype_name} queries, dims {g.k_dim} and {g.v_dim}, page {g.page}, "
                f"{layer.num_heads // layer.num_kv_heads} heads a KV head"
            )
        return None

    def prepare(self, step: Step, layers: Iterable[Bound]) -> None:
        """The lists of a step with chunks, into its scratch."""
        lists: dict[tuple[Any, ...], torch.Tensor | Items] = {}
        widened: dict[tuple[Any, ...], Sequence[Batch] | None] = {}
        widens = self._choice == "hopper" or pays(step.host)
        for bound in layers:
            if bound.wide_pages and widens:
                layer, wide = bound.layer, self._wide_key(bound)
                if wide not in widened:
                    kind = (bound.shape["GROUP"], layer.num_kv_heads, self._sms, layer.window)
                    widened[wide] = batches(step.host, *kind, wide[3], bound.wide_pages, self._device)
                if widened[wide] is not None:
                    continue
            key = self._list_key(bound, step)
            if key not in lists:
                tokens, window, heads = key
                tiles = tile_list(step.host, tokens, window)
                lists[key] = (
                    Items.share(tiles, heads, self._sms, window, self._device) if heads else to_device(tiles, self._device)
                )
        step.scratch["triton.tiles"], step.scratch["triton.widened"] = lists, widened

    def _list_key(self, bound: Bound, step: Step) -> tuple[int, int | None, int]:
        """Query tokens of a tile, window, and, of layers that the Hopper kernel serves, KV heads (else 0)."""
        if bound.descriptor is not None and not bound.wide_pages:
            return HOPPER_TOKENS // int(bound.shape["GROUP"]), bound.layer.window, bound.layer.num_kv_heads
        return self._tile(bound, step).block_m // int(bound.shape["GROUP"]), bound.layer.window, 0

    def _tile(self, bound: Bound, step: Step) -> Tile:
        return prefill_tile(
            group=bound.shape["GROUP"], dim=max(bound.layer.k_dim, bound.layer.v_dim),
            kv_bytes=ELEMENT_BYTES[bound.geometry.dtype], query_bytes=self._dtype.itemsize, tokens=step.host.max_query_len,
            roomy=self._roomy,
        )  # fmt: skip

    def _wide_key(self, bound: Bound) -> tuple[Any, ...]:
        """Layers of one key widen the same pages of their caches, of as many tokens as the fourth says."""
        page = HOPPER_TOKENS if self._multiplies_fp8(bound.layer, bound.geometry) else bound.geometry.page
        return bound.shape["GROUP"], bound.layer.num_kv_heads, bound.layer.window, page, bound.wide_pages

    def run(self, bound: Bound, step: Step, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None) -> None:
        """Attention of the chunks' tokens; rows of one token are left to decode."""
        layer, table, shape = bound.layer, step.tables[bound.group], bound.shape
        if bound.wide_pages and (found := step.scratch["triton.widened"].get(self._wide_key(bound))) is not None:
            narrow = self._multiplies_fp8(layer, bound.geometry)
            for batch in found:
                if narrow:
                    self._in_fp8(bound, table, batch, q, out, lse)
                else:
                    self._widen(bound, table, batch.pages)
                    self._specialised(bound, batch.table, batch.items, q, out, lse)
            return
        tiles = step.scratch["triton.tiles"][self._list_key(bound, step)]
        if bound.descriptor is not None and not bound.wide_pages:
            self._specialised(bound, table, tiles, q, out, lse)
            return
        scale, softcap, v_scale = bound.numbers()
        log = self._nothing if lse is None else lse
        sinks = self._nothing if bound.sinks is None else bound.sinks
        strides = q.stride(0), q.stride(1), out.stride(0), out.stride(1), log.stride(0), table.stride(0)
        tile = self._tile(bound, step)
        prefill.prefill_kernel[(tiles.shape[0], layer.num_kv_heads)](
            q, out, log, bound.cache, table, tiles, sinks, scale, softcap, v_scale, layer.window or 0, *strides, bound.cache.stride(0),
            BLOCK_M=tile.block_m, BLOCK_N=tile.block_n, **shape,
            LSE=lse is not None, STAGES=tile.stages, num_warps=tile.warps,
        )  # fmt: skip

    def _widen(self, bound: Bound, table: torch.Tensor, pages: torch.Tensor) -> None:
        """Pages of the layer's cache into the workspace."""
        g = bound.geometry
        widen.widen_kernel[(pages.shape[0], g.heads)](
            bound.cache, table, pages, self._workspace, table.stride(0), bound.cache.stride(0),
            HEADS=g.heads, K_DIM=g.k_dim, V_DIM=g.v_dim, BLOCK_K=_pow2(g.k_dim), BLOCK_V=_pow2(g.v_dim), BLOCK_P=_pow2(g.page),
            PAGE=g.page, K_ROW=g.k_row, V_ROW=g.v_row, V_BASE=g.v_base, V_TRANSPOSED=g.v_transposed, num_warps=4,
        )  # fmt: skip

    def _specialised(
        self, bound: Bound, table: torch.Tensor, items: Items, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        from octavo_attention_triton.kernels import hopper_prefill as hopper

        layer, shape = bound.layer, bound.shape
        scale, softcap, v_scale = bound.numbers()
        log = self._nothing if lse is None else lse
        sinks = self._nothing if bound.sinks is None else bound.sinks
        key = ("hopper_prefill", lse is not None)
        if key not in bound.constants:
            bound.constants[key] = constants_of(
                hopper.hopper_prefill_kernel, GROUP=shape["GROUP"], DIM=shape["K_DIM"], BLOCK_N=hopper.BLOCK_N,
                BOX=min(shape["PAGE"], hopper.BLOCK_N), PAGE=shape["PAGE"], STAGES=hopper.STAGES, SOFTCAP=shape["SOFTCAP"],
                WINDOW=shape["WINDOW"], SINKS=shape["SINKS"], LSE=lse is not None,
            )  # fmt: skip
        strides = q.stride(0), q.stride(1), out.stride(0), out.stride(1), log.stride(0), 2 * layer.num_kv_heads * shape["PAGE"]
        self._launch(
            hopper.hopper_prefill_kernel, (items.starts.shape[0] - 1, 1),
            (q, out, log, table, items.records, items.starts, sinks),
            (layer.num_kv_heads, layer.window or 0, scale, softcap, v_scale, table.stride(0)), (*strides, *bound.constants[key]),
            warps=4, overlap=False, descriptors=(bound.descriptor,),
        )  # fmt: skip

    def _in_fp8(
        self, bound: Bound, table: torch.Tensor, batch: Batch, q: torch.Tensor, out: torch.Tensor, lse: torch.Tensor | None
    ) -> None:
        """Pages of the layer's e4m3 cache into tiles, and products in FP8 with them."""
        from octavo_attention_triton.kernels import hopper_prefill_fp8 as hopper

        layer, g = bound.layer, bound.geometry
        repack.repack_kernel[(batch.pages.shape[0], g.heads)](
            bound.cache.view(torch.int16), table, batch.pages, self._workspace.view(torch.int16), table.stride(0), bound.cache.stride(0),
            HEADS=g.heads, DIM=g.k_dim, PAGE=g.page, TOKENS=HOPPER_TOKENS, K_ROW=g.k_row, V_BASE=g.v_base, num_warps=4,
        )  # fmt: skip
        scale, _, v_scale = bound.numbers()
        log = self._nothing if lse is None else lse
        key = ("hopper_prefill_fp8", lse is not None)
        if key not in bound.constants:
            bound.constants[key] = constants_of(
                hopper.hopper_prefill_fp8_kernel, GROUP=bound.shape["GROUP"], DIM=hopper.DIM, BLOCK_N=hopper.BLOCK_N, STAGES=hopper.STAGES,
                LSE=lse is not None,
            )  # fmt: skip
        strides = q.stride(0), q.stride(1), out.stride(0), out.stride(1), log.stride(0)
        self._launch(
            hopper.hopper_prefill_fp8_kernel, (batch.items.starts.shape[0] - 1, 1),
            (q, out, log, batch.table, batch.items.records, batch.items.starts),
            (layer.num_kv_heads, scale, v_scale, batch.table.stride(0)), (*strides, *bound.constants[key]),
            warps=4, overlap=False, descriptors=(bound.descriptor,),
        )  # fmt: skip
