"""The attention backend: rows with one new token on a kernel of our own, prompts through core's torch backend.

Owns the list of decoding rows of a step and the calls. The cache has the layout of core's torch backend, whose code
reads it for prompts; the pool owns it. Must never read a cache entry that the step's rows do not hold.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

import numpy as np
import torch
from octavo.attention.torch_backend import TorchAttention
from octavo.interfaces import AttentionLayer, AttentionParts, BoundGroup, CacheLayout, KVSpec, Limits, Step
from torch import Tensor

from octavo_ops_cpu.jit.compiler import Kernel
from octavo_ops_cpu.jit.emitter import ITEM, float_bits
from octavo_ops_cpu.kernels.decode import Rows, decode
from octavo_ops_cpu.kernels.prologue import Heads, prologue
from octavo_ops_cpu.launch import NAMES, dtype_of, fitting

SCRATCH = "attention.cpu"


@dataclass(slots=True)
class _Layer:
    facts: AttentionLayer
    group: int
    block: int
    cache: Tensor
    kernel: Kernel
    sinks: Tensor | None  # float32 [heads]

    @property
    def address(self) -> int:
        return self.cache.data_ptr()


@dataclass(slots=True)
class _Decoding:
    """The rows of a step with one new token, int64 [rows, 3]: token of the step, line of the state table, keys."""

    rows: np.ndarray
    keys: int

    @property
    def count(self) -> int:
        return len(self.rows)


class CpuAttention:
    """interfaces.AttentionBackend, with interfaces.FusedPrologue."""

    graphs: Literal["none", "decode", "all"] = "none"

    def __init__(self, options: Any, parts: AttentionParts) -> None:
        self._dtype = NAMES[getattr(torch, parts.dtype)]
        self._prompts = TorchAttention(options, parts, least=2)
        self._layers: dict[int, _Layer] = {}
        self._prologues: dict[Heads, Kernel] = {}

    def layout(self, spec: KVSpec, block_size: int) -> CacheLayout:
        return self._prompts.layout(spec, block_size)

    def bind(self, groups: Sequence[BoundGroup], limits: Limits) -> None:
        self._prompts.bind(groups, limits)
        for bound in groups:
            for facts, cache in zip(bound.layers, bound.caches, strict=True):
                sinks = None if facts.sinks is None else facts.sinks.float().contiguous()
                shape = Rows(
                    heads=facts.num_heads, kv_heads=facts.num_kv_heads, width=facts.k_dim, block=bound.group.block_size,
                    dtype=self._dtype, window=facts.window or 0, softcap=facts.softcap, sinks=sinks is not None,
                )  # fmt: skip
                self._layers[facts.index] = _Layer(facts, bound.group.index, bound.group.block_size, cache, decode(shape), sinks)

    def prepare(self, step: Step) -> None:
        """Nothing: there are no graphs to prepare for."""

    def plan(self, step: Step) -> None:
        self._prompts.plan(step)
        host = step.host
        single = np.flatnonzero(host.query_lens == 1)
        starts = np.cumsum(host.query_lens) - host.query_lens
        rows = np.stack([starts[single], host.rows[single], host.seq_lens[single]], axis=1)
        step.scratch[SCRATCH] = _Decoding(np.ascontiguousarray(rows, np.int64), int(host.seq_lens[single].sum()))

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        self._prompts.write(layer, step, k, v)

    def prologue(
        self, layer: int, step: Step, qkv: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor
    ) -> Tensor:
        """`octavo.interfaces.FusedPrologue`: q is turned in place, K and V go to the cache."""
        bound = self._layers[layer]
        facts, (tokens, heads, dim) = bound.facts, qkv.shape
        if dim != facts.k_dim or not (qkv.is_contiguous() and cos.is_contiguous() and sin.is_contiguous()):
            raise ValueError(f"layer {layer}: qkv {list(qkv.shape)} is not dense, or not as wide as the cache's {facts.k_dim}")
        shape = Heads(
            heads=facts.num_heads, kv_heads=facts.num_kv_heads, width=dim, rotary=cos.shape[-1], block=bound.block,
            dtype=self._dtype, norm=None if weight is None else dtype_of(weight),
        )  # fmt: skip
        fitting(prologue(shape), tokens * heads * dim)(
            qkv.data_ptr(), 0 if weight is None else weight.data_ptr(), float_bits(eps), cos.data_ptr(), sin.data_ptr(),
            step.slot_mapping[bound.group].data_ptr(), bound.address, tokens,
        )  # fmt: skip
        return qkv[:, : facts.num_heads]

    def run(self, layer: int, step: Step, q: Tensor, out: Tensor, *, lse: Tensor | None = None) -> Tensor:
        bound, decoding = self._layers[layer], step.scratch[SCRATCH]
        if decoding.count:
            self._decode(bound, step, decoding, q, out, lse)
        if step.host.max_query_len > 1:
            self._prompts.run(layer, step, q, out, lse=lse)
        return out

    def _decode(self, bound: _Layer, step: Step, decoding: _Decoding, q: Tensor, out: Tensor, lse: Tensor | None) -> None:
        facts, table = bound.facts, step.tables[bound.group]
        if q.stride(1) != facts.k_dim or q.stride(2) != 1:
            q = q.contiguous()
        stats = None if lse is None else torch.empty(decoding.count, facts.num_heads, 2)
        fitting(bound.kernel, decoding.keys * facts.num_heads * facts.k_dim // 4)(
            q.data_ptr(), q.stride(0) * ITEM[self._dtype], out.data_ptr(), 0 if stats is None else stats.data_ptr(),
            bound.address, table.data_ptr(), table.stride(0), decoding.rows.ctypes.data, decoding.count,
            float_bits(facts.scale), 0 if bound.sinks is None else bound.sinks.data_ptr(),
        )  # fmt: skip
        if lse is not None and stats is not None:
            best, total = stats.unbind(-1)
            lse.index_copy_(0, torch.from_numpy(decoding.rows[:, 0].copy()), best + total.log())

    def gather(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        return self._prompts.gather(layer, row, length)

    def copy_blocks(self, group: int, source: Tensor, target: Tensor) -> None:
        self._prompts.copy_blocks(group, source, target)
