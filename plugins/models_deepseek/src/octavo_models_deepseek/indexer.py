"""The indexer of sparse attention (DeepSeek V3.2): a small attention of its own that chooses each token's keys.

Owns its projections and norm; its keys are a paged cache beside the latent one. Scores are the backend's
(`interfaces.SparseBackend.choose`). Stateless between steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from octavo.interfaces import ModelParts, Step
from octavo.model.layers import Angles
from octavo.model.matrix import Matrix, Offers, head_matrix
from octavo.model.parameter import Parameter
from torch import Tensor

from octavo_models_deepseek.config import DeepseekConfig, IndexConfig

NORM_EPS = 1e-6


class Indexer:
    """(x, the normed low-rank query) -> positions int32 [T, top], or None where every token sees all of its keys."""

    def __init__(self, name: str, config: DeepseekConfig, index: IndexConfig, number: int, parts: ModelParts) -> None:
        """number: of the index layer among the model's caches."""
        assert config.query_rank is not None
        self._heads, self._dim, self._top = index.heads, index.dim, index.top
        self._query = parts.linear(name, config.query_rank, {"wq_b": index.heads * index.dim})
        self._key = parts.linear(name, config.hidden_size, {"wk": index.dim})
        self._norm = tuple(Parameter(f"{name}.k_norm.{kind}", (index.dim,), parts, torch.float32) for kind in ("weight", "bias"))
        self._offers = Offers(small=parts.find("small_linear"))  # type: ignore[arg-type]
        self._weights = Parameter(f"{name}.weights_proj.weight", (index.heads, config.hidden_size), parts)
        self._rope = parts.op("qk_norm_rope")
        self._cache = parts.attention(config.index_layer(number))

    def finish(self) -> None:
        self._query.finish()
        self._key.finish()
        self._norm_weight, self._norm_bias = (parameter.get() for parameter in self._norm)
        # Never quantised, and its product float32: it ranks keys, and a rank that flips changes what is seen.
        self._head_weights: Matrix = head_matrix(self._weights.get(), None, self._offers)

    def __call__(self, step: Step, x: Tensor, low: Tensor, angles: Angles) -> Tensor | None:
        """x [T, H], low [T, query rank]. RoPE turns the leading dims, pairs (j, j + d / 2), unlike the main attention's."""
        key = F.layer_norm(self._key(x).float(), (self._dim,), self._norm_weight, self._norm_bias, NORM_EPS).to(x.dtype)
        query = self._query(low).view(-1, self._heads, self._dim)
        both = self._rope(torch.cat((query, key.unsqueeze(1)), 1), None, 0.0, *angles)
        weights = self._head_weights(x) * self._heads**-0.5
        return self._cache.choose(step, both[:, : self._heads], weights, both[:, self._heads :], self._top)  # type: ignore[attr-defined,no-any-return]
