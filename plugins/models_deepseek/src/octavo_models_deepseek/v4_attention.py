"""Attention of DeepSeek V4: one shared head over a window, joined by compressed entries of what lies before.

Owns the order of things and the merging of the two softmaxes by their log-sum-exps (the sinks are in the window's). K is V,
so the rotation that K carries is taken off the output again, at the query's position. Stateless between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from octavo.interfaces import Linear, ModelParts, Step
from octavo.model.matrix import Matrix, Offers, head_matrix
from octavo.model.parameter import Buffer, Parameter
from torch import Tensor

from octavo_models_deepseek.turn import Angles, PairRotary, pair_join, pair_turn
from octavo_models_deepseek.unit import UnitMatrix
from octavo_models_deepseek.v4_compress import Compressor
from octavo_models_deepseek.v4_config import Cache, V4Config, V4Layer


class EntryIndex:
    """Chooses each token's entries: a compressor of its own, and scores of many small heads."""

    def __init__(
        self, name: str, config: V4Config, layer: V4Layer, caches: dict[str, Cache], rotary: PairRotary, parts: ModelParts
    ) -> None:
        self._shape, self._top = (config.index.heads, config.index.dim), config.index.top
        self._compress = Compressor(
            f"{name}.compressor", config, caches["index parts"], layer.rate, config.index.dim, rotary, parts
        )
        self._query = parts.linear(name, config.query_rank, {"wq_b": config.index.heads * config.index.dim})
        self._offers = Offers(small=parts.find("small_linear"))  # type: ignore[arg-type]
        self._weights = Parameter(f"{name}.weights_proj.weight", (config.index.heads, config.hidden_size), parts)
        self._cache = parts.attention(caches["index entries"].layer)
        self._turn = parts.find("pair_turn") or pair_turn

    def finish(self) -> None:
        self._compress.finish()
        self._query.finish()
        self._head_weights: Matrix = head_matrix(self._weights.get(), None, self._offers)

    def __call__(self, step: Step, x: Tensor, low: Tensor, angles: Angles) -> Tensor | None:
        """Numbers of entries int32 [T, top], or None where every token sees all of its row's."""
        query = self._turn(self._query(low).view(-1, *self._shape), *angles, x.dtype)
        weights = self._head_weights(x) * self._shape[0] ** -0.5
        return self._cache.choose(step, query, weights, self._compress(step, x), self._top)  # type: ignore[attr-defined,no-any-return]


class WindowedAttention:
    """The attention block of a layer: [T, H] -> [T, H]."""

    def __init__(
        self, name: str, config: V4Config, layer: V4Layer, caches: tuple[Cache, ...], rotary: PairRotary, parts: ModelParts
    ) -> None:
        heads, dim, groups = config.num_heads, config.head_dim, config.output_groups
        by_use = {cache.use: cache for cache in caches}
        self._inputs = parts.linear(name, config.hidden_size, {"wq_a": config.query_rank, "wkv": dim})
        self._query: Linear = parts.linear(name, config.query_rank, {"wq_b": heads * dim})
        self._norms = tuple(
            Parameter(f"{name}.{kind}.weight", (size,), parts, torch.float32)
            for kind, size in (("q_norm", config.query_rank), ("kv_norm", dim))
        )
        each = heads * dim // groups
        self._grouped = UnitMatrix(parts.linear(name, each, {"wo_a": groups * config.output_rank}), each, parts)
        self._output: Linear = parts.linear(name, groups * config.output_rank, {"wo_b": config.hidden_size})
        sinks = Buffer(f"{name}.attn_sink", (heads,), parts, torch.float32).value
        self._window = parts.attention(replace(by_use["window"].layer, sinks=sinks))
        self._compress: Compressor | None = None
        self._index: EntryIndex | None = None
        if layer.kind != "window":
            self._compress = Compressor(f"{name}.compressor", config, by_use["parts"], layer.rate, dim, rotary, parts)
            self._entries = parts.attention(by_use["entries"].layer)
        if layer.kind == "sparse":
            self._index = EntryIndex(f"{name}.indexer", config, layer, dict(by_use), rotary, parts)
        self._rms: Callable[..., Tensor] = parts.op("rms_norm")
        self._turn: Callable[..., Tensor] = parts.find("pair_turn") or pair_turn
        self._join: Callable[..., Tensor] = parts.find("pair_join") or pair_join
        self._split, self._heads, self._dim = (config.query_rank, dim), heads, dim
        self._groups, self._eps = groups, config.norm_eps
        self.activation = self._inputs.activation if layer.kind == "window" else "plain"

    def finish(self) -> None:
        for part in (self._inputs, self._query, self._output, self._compress, self._index):
            if part is not None:
                part.finish()
        self._q_norm, self._kv_norm = (norm.get() for norm in self._norms)
        matrix = self._grouped.finish()  # [each, groups * rank]: block g belongs to group g
        self._blocks = matrix.view(len(matrix), self._groups, -1).transpose(0, 1).contiguous()

    def __call__(self, step: Step, x: Tensor, angles: Angles) -> Tensor:
        low, entry = self._inputs(x).split_with_sizes(self._split, -1)
        dtype, eps = low.dtype, self._eps
        low = self._rms(low, self._q_norm, eps, dtype)
        query = self._turn(self._query(low).view(-1, self._heads, self._dim), *angles, dtype, eps=eps)
        entry = self._turn(entry.unsqueeze(1), *angles, dtype, eps=eps, weight=self._kv_norm)
        self._window.store(step, entry, entry)  # type: ignore[attr-defined]
        found = self._window.weighed(step, query)  # type: ignore[attr-defined]
        if self._compress is None:
            out = self._turn(found[0], *angles, dtype, back=True)
        else:
            made = self._compress(step, x)
            self._entries.store(step, made, made)  # type: ignore[attr-defined]
            select = None if self._index is None else self._index(step, x, low, angles)
            out = self._join(found, self._entries.weighed(step, query, select), *angles)  # type: ignore[attr-defined]
        grouped = torch.bmm(out.reshape(len(low), self._groups, -1).transpose(0, 1), self._blocks)  # [groups, T, rank]
        return self._output(grouped.transpose(0, 1).reshape(len(low), -1))
