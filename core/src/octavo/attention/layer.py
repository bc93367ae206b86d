"""PagedAttention: what a model's attention layer calls, bound to a backend.

Owns the order write, then run, the choice of the backend's own prologue where it has one, and that queries and keys are
spread where the cache rounds them (`octavo.model.spread`). Must never
know how the cache is laid out or which step it is in: the step is passed.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor

from octavo.errors import PluginError
from octavo.interfaces import AttentionBackend, AttentionLayer, Step
from octavo.model.spread import gathered


def prologue_spreads(backend: AttentionBackend, layer: AttentionLayer) -> bool:
    """Whether the backend has a prologue that spreads the heads of such a layer (`octavo.interfaces.SpreadingPrologue`)."""
    spreads: Callable[[AttentionLayer], bool] | None = getattr(backend, "prologue_spreads", None)
    return hasattr(backend, "prologue") and spreads is not None and spreads(layer)


class PagedAttention:
    """Callable (step, q, k, v) -> out; the engine's build makes one for each layer (ModelParts.attention).

    norm_rope is the operator "qk_norm_rope", for backends without a prologue. spread, if given, is the operator of that name:
    the backend then sees queries and keys that it has turned, and norm_rope is "qk_norm_rope_spread". A prologue is used where it
    turns them itself (`prologue_spreads`)."""

    def __init__(
        self,
        layer: AttentionLayer,
        backend: AttentionBackend,
        norm_rope: Callable[..., Tensor],
        spread: Callable[[Tensor], Tensor] | None = None,
    ) -> None:
        self._index, self._heads, self._v_dim = layer.index, layer.num_heads, layer.v_dim
        self._write, self._run, self._gather = backend.write, cast("Any", backend.run), cast("Any", backend.gather)
        self._choose, self._captures = getattr(backend, "choose", None), backend.graphs != "none"
        self._compress = getattr(backend, "compress", None)
        self._prologue: Callable[..., Tensor] | None = getattr(backend, "prologue", None)
        if spread is not None and self._prologue is not None:
            self._prologue = partial(self._prologue, spread=True) if prologue_spreads(backend, layer) else None
        self._spread = spread
        self._norm_rope = norm_rope
        self._split = (layer.num_heads, layer.num_kv_heads, layer.num_kv_heads)

    def choose(self, step: Step, q: Tensor, weights: Tensor, k: Tensor, count: int) -> Tensor | None:
        """Of an index layer: store k [T, 1, k_dim], then each token's `count` best keys for q [T, heads, k_dim] and weights
        float32 [T, heads], as `SparseBackend.choose` says: int32 [T, count]. None where no row has more keys than that
        and every token sees all of its own; never in a step that may be captured, for the next replay may be longer."""
        if self._choose is None:
            raise PluginError(f"layer {self._index} chooses keys by an index, which the attention backend does not offer")
        self._write(self._index, step, k, k)
        if step.host.max_seq_len <= count and not (self._captures and step.host.max_query_len <= 1):
            return None
        return self._choose(self._index, step, q, weights, count)  # type: ignore[no-any-return]

    def store(self, step: Step, k: Tensor, v: Tensor) -> None:
        """Store only. Of a cache whose entries stand for several tokens, those of tokens that end none are not stored."""
        self._write(self._index, step, self._turn(k), v)

    def compress(self, step: Step, places: Tensor, *, overlapping: bool) -> Tensor:
        """`SparseBackend.compress`, over what is stored."""
        if self._compress is None:
            raise PluginError(
                f"layer {self._index} makes one entry of several tokens, which the attention backend does not offer"
            )
        return self._compress(self._index, step, places, overlapping=overlapping)  # type: ignore[no-any-return]

    def read(self, row: int, start: int, end: int) -> tuple[Tensor, Tensor]:
        """Keys and values of tokens (entries, where one stands for several) [start, end) of a state-table row."""
        keys, values = self._gather(self._index, row, end, start)
        return (gathered(keys) if self._spread else keys), values

    def weighed(self, step: Step, q: Tensor, select: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """Attention over what is stored, and its log-sum-exp float32 [T, heads], to be merged with another cache's. A token
        that sees nothing has zeros and -inf."""
        lse = q.new_empty(q.shape[:2], dtype=torch.float32)
        out = q.new_empty(q.shape[0], self._heads, self._v_dim)
        extra = {} if select is None else {"select": select}
        self._run(self._index, step, self._turn(q), out, lse=lse, **extra)
        return out, lse

    def over(self, step: Step, q: Tensor, k: Tensor, v: Tensor, select: Tensor | None) -> Tensor:
        """As a call, over the keys at positions select int32 [T, count] alone (-1: none); None is all."""
        if select is None:
            return self(step, q, k, v)
        self._write(self._index, step, self._turn(k), v)
        out = q.new_empty(q.shape[0], self._heads, self._v_dim)
        self._run(self._index, step, self._turn(q), out, select=select)
        return out

    def __call__(self, step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim] at the step's slots, then attend with
        q [T, heads, k_dim] over the cache: a new tensor [T, heads, v_dim]."""
        self._write(self._index, step, self._turn(k), v)
        return self._attend(step, self._turn(q))

    def turned(self, step: Step, qkv: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        """The same of qkv [T, heads + 2 kv_heads, D], whose q and k heads are first normalised by weight
        [heads + kv_heads, D] (None: they are not) and turned by the angles of the step. May overwrite qkv."""
        if self._prologue is not None:
            return self._attend(step, self._prologue(self._index, step, qkv, weight, eps, cos, sin))
        heads, kv_heads, _ = self._split
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        q, k = self._norm_rope(qk, weight, eps, cos, sin).split_with_sizes((heads, kv_heads), 1)
        self._write(self._index, step, k, v)
        return self._attend(step, q)

    def _turn(self, x: Tensor) -> Tensor:
        return x if self._spread is None else self._spread(x)

    def _attend(self, step: Step, q: Tensor) -> Tensor:
        found: Tensor = self._run(self._index, step, q, q.new_empty(q.shape[0], self._heads, self._v_dim))
        return found
