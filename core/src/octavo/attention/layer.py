"""PagedAttention: what a model's attention layer calls, bound to a backend.

Owns the order write, then run. Must never know how the cache is laid out or which step it is in: the
step is passed.
"""

from __future__ import annotations

from torch import Tensor

from octavo.interfaces import AttentionBackend, AttentionLayer, Step


class PagedAttention:
    """Callable (step, q, k, v) -> out; the engine's build makes one for each layer (ModelParts.attention)."""

    def __init__(self, layer: AttentionLayer, backend: AttentionBackend) -> None:
        self._index, self._heads, self._v_dim = layer.index, layer.num_heads, layer.v_dim
        self._write, self._run = backend.write, backend.run

    def __call__(self, step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        """Store k [T, kv_heads, k_dim] and v [T, kv_heads, v_dim] at the step's slots, then attend with
        q [T, heads, k_dim] over the cache: a new tensor [T, heads, v_dim]."""
        self._write(self._index, step, k, v)
        return self._run(self._index, step, q, q.new_empty(q.shape[0], self._heads, self._v_dim))
