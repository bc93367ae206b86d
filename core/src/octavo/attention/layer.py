"""PagedAttention: what a model's attention layer calls, bound to a backend.

Owns the order write, then run. Must never know how the cache is laid out or which step it is in: the
step is passed.
"""

from __future__ import annotations

from torch import Tensor

from octavo.errors import PluginError
from octavo.interfaces import AttentionBackend, AttentionLayer, Step


class PagedAttention:
    """Callable (step, q, k, v) -> out; the engine's build makes one for each layer (ModelParts.attention)."""

    def __init__(self, layer: AttentionLayer, backend: AttentionBackend) -> None:
        self._index, self._heads, self._v_dim = layer.index, layer.num_heads, layer.v_dim
        self._write, self._run = backend.write, backend.run
        self._choose, self._captures = getattr(backend, "choose", None), backend.graphs != "none"

    def choose(self, step: Step, q: Tensor, weights: Tensor, k: Tensor, count: int) -> Tensor | None:
        """Of an index layer: store k [T, 1, k_dim], then each token's `count` best keys for q [T, heads, k_dim] and weights
        float32 [T, heads], as `SparseBackend.choose` says: int32 [T, count]. None where no row has more keys than that
        and every token sees all of its own; never with a backend whose steps are captured, for the next replay may be longer."""
        if self._choose is None:
            raise PluginError(f"layer {self._index} chooses keys by an index, which the attention backend does not offer")
        self._write(self._index, step, k, k)
        if step.host.max_seq_len <= count and not self._captures:
            return None
        return self._choose(self._index, step, q, weights, count)  # type: ignore[no-any-return]

    def over(self, step: Step, q: Tensor, k: Tensor, v: Tensor, select: Tensor | None) -> Tensor:
        """As a call, over the keys at positions select int32 [T, count] alone (-1: none); None is all."""
        if select is None:
            return self(step, q, k, v)
        self._write(self._index, step, k, v)
        return self._run(self._index, step, q, q.new_empty(q.shape[0], self._heads, self._v_dim), select=select)

    def __call__(self, step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim] at the step's slots, then attend with
        q [T, heads, k_dim] over the cache: a new tensor [T, heads, v_dim]."""
        self._write(self._index, step, k, v)
        return self._run(self._index, step, q, q.new_empty(q.shape[0], self._heads, self._v_dim))
