"""The attention backend: one kernel for rows with one new token, and one for prompts in bfloat16; other prompts go to core's
torch backend.

Owns the lists of a step's rows and the calls. The cache has the layout of core's torch backend, which reads it where it
computes; the pool owns it. Must never read a cache entry that the step's rows do not hold.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

import numpy as np
import torch
from octavo.attention.torch_backend import TorchAttention
from octavo.interfaces import AttentionLayer, AttentionParts, BoundGroup, CacheLayout, KVSpec, Limits, Step
from torch import Tensor

from octavo_ops_cpu.jit.compiler import link_thread_pool
from octavo_ops_cpu.jit.emitter import ITEM, float_bits
from octavo_ops_cpu.kernels.decode import Rows, decode
from octavo_ops_cpu.kernels.prologue import Heads, prologue
from octavo_ops_cpu.kernels.prompt import chunk_of, prompt
from octavo_ops_cpu.launch import NAMES, dtype_of, fitting
from octavo_ops_cpu.provider import multiplies

SCRATCH = "attention.cpu"


@dataclass(slots=True)
class _Layer:
    facts: AttentionLayer
    group: int
    shape: Rows
    cache: Tensor
    sinks: Tensor | None  # float32 [heads]

    @property
    def block(self) -> int:
        return self.shape.block

    @property
    def address(self) -> int:
        return self.cache.data_ptr()


@dataclass(slots=True)
class _Work:
    """A step's rows: with one new token, int64 [rows, 3], as `decode` takes them, `keys` in all; and with more, int64 [rows, 4]:
    first token of the step, line of the state table, position of the first token, tokens."""

    single: np.ndarray
    keys: int
    prompts: np.ndarray
    chunks: dict[int, np.ndarray] = field(default_factory=dict)

    def chunked(self, size: int) -> np.ndarray:
        """`prompts` in chunks of at most `size` tokens, as the kernel `prompt` takes them: those with the most keys first."""
        if size not in self.chunks:
            pieces = [
                (token + at, line, position + at, min(size, tokens - at))
                for token, line, position, tokens in self.prompts.tolist()
                for at in range(0, tokens, size)
            ]
            pieces.sort(key=lambda piece: -(piece[2] + piece[3]))
            self.chunks[size] = np.array(pieces, np.int64)
        return self.chunks[size]


class CpuAttention:
    """interfaces.AttentionBackend, with interfaces.FusedPrologue."""

    graphs: Literal["none", "decode", "all"] = "none"

    def __init__(self, options: Any, parts: AttentionParts) -> None:
        link_thread_pool()
        self._dtype = NAMES[getattr(torch, parts.dtype)]
        self._prompts = TorchAttention(options, parts, least=2)
        self._layers: dict[int, _Layer] = {}
        self._multiplies = multiplies(parts.device, parts.dtype)
        self._tables: tuple[Tensor, ...] = ()  # the state table's, whose buffers outlive a step

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
                self._layers[facts.index] = _Layer(facts, bound.group.index, shape, cache, sinks)

    def prepare(self, step: Step) -> None:
        """Nothing: there are no graphs to prepare for."""

    def plan(self, step: Step) -> None:
        self._tables = step.tables
        host = step.host
        new, ends, starts = host.query_lens, host.seq_lens, np.cumsum(host.query_lens) - host.query_lens
        single = new == 1
        rows = np.stack([starts[single], host.rows[single], ends[single]], axis=1, dtype=np.int64)
        many = np.stack([starts, host.rows, ends - new, new], axis=1, dtype=np.int64)[~single]
        step.scratch[SCRATCH] = _Work(rows, int(ends[single].sum()), many)
        if len(many) and not self._multiplies:
            self._prompts.plan(step)

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        bound = self._layers[layer]
        slots, block = step.slot_mapping[bound.group], bound.block
        pages, at = slots // block, slots % block
        bound.cache[pages, 0, :, at] = k
        bound.cache[pages, 1, :, at] = v

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
        bound, work = self._layers[layer], step.scratch[SCRATCH]
        facts, table = bound.facts, step.tables[bound.group]
        if q.stride(1) != facts.k_dim or q.stride(2) != 1:
            q = q.contiguous()
        stats = None if lse is None else torch.ones(q.shape[0], facts.num_heads, 2)

        def call(kernel: Callable[..., None], rows: np.ndarray) -> None:
            kernel(
                q.data_ptr(), q.stride(0) * ITEM[self._dtype], out.data_ptr(), 0 if stats is None else stats.data_ptr(),
                bound.address, table.data_ptr(), table.stride(0), rows.ctypes.data, len(rows),
                float_bits(facts.scale), 0 if bound.sinks is None else bound.sinks.data_ptr(),
            )  # fmt: skip

        if len(work.single):
            call(fitting(decode(bound.shape), work.keys * facts.num_heads * facts.k_dim // 4), work.single)
        if len(work.prompts) and self._multiplies:
            call(prompt(bound.shape).pooled, work.chunked(chunk_of(bound.shape)))
        if lse is not None and stats is not None:
            torch.add(stats[..., 0], stats[..., 1].log(), out=lse)
        if len(work.prompts) and not self._multiplies:
            self._prompts.run(layer, step, q, out, lse=lse)
        return out

    def gather(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        if not self._tables:
            raise RuntimeError("gather needs the block tables, which come with the first planned step")
        bound = self._layers[layer]
        positions = torch.arange(length)
        pages = self._tables[bound.group][row].long()[positions // bound.block].clamp_(min=0)  # -1: out of the window
        at = positions % bound.block
        return bound.cache[pages, 0, :, at], bound.cache[pages, 1, :, at]

    def copy_blocks(self, group: int, source: Tensor, target: Tensor) -> None:
        self._prompts.copy_blocks(group, source, target)
