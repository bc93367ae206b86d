"""Multi-head latent attention (MLA): every head's keys and values are projections of one latent vector a token.

Owns the absorption: what would expand a cached latent into keys and values (kv_b_proj) is folded into the query and the
output instead, so that the cache holds, and attention reads, the latent alone. With W_k and W_v a head's halves of
kv_b_proj, c a latent and r its RoPE part:

    q . k = q_nope . (W_k c) + q_rope . r = (W_k^T q_nope) . c + q_rope . r        sum p v = W_v (sum p c)

Rows with many new tokens are the exception: `expand.py`.

Stateless between steps; which kernel attends and how an entry is stored is the backend's.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import torch
from octavo.interfaces import Linear, ModelParts, Step
from octavo.model.layers import Angles
from octavo.model.parameter import Parameter
from torch import Tensor

from octavo_models_deepseek.config import LATENT_NORM_EPS, DeepseekConfig
from octavo_models_deepseek.expand import attend
from octavo_models_deepseek.indexer import Indexer
from octavo_models_deepseek.unit import UnitMatrix


class LatentNorm:
    """RMS norm of x [T, rank] on its own, without a residual."""

    def __init__(self, name: str, rank: int, parts: ModelParts) -> None:
        self._parameter = Parameter(f"{name}.weight", (rank,), parts, torch.float32)
        self._op, self._dtype = parts.op("rms_norm"), getattr(torch, parts.dtype)

    def finish(self) -> None:
        self._weight = self._parameter.get()

    def __call__(self, x: Tensor) -> Tensor:
        return self._op(x, self._weight, LATENT_NORM_EPS, self._dtype)  # type: ignore[no-any-return]


class Expansion:
    """kv_b_proj as the two stacks of matrices that absorption multiplies by."""

    def __init__(self, name: str, config: DeepseekConfig, parts: ModelParts) -> None:
        self._shape = (config.latent, config.num_heads, config.nope + config.v_dim)
        self._nope = config.nope
        linear = parts.linear(name, config.latent, {"kv_b_proj": config.num_heads * self._shape[2]})
        self._matrix = UnitMatrix(linear, config.latent, parts)

    def finish(self) -> None:
        """key [heads, nope, latent] turns a query into the latent's coordinates, value [heads, latent, v_dim] a sum of
        latents into a head's output."""
        whole = self._matrix.finish().view(self._shape)  # [latent, heads, nope + v]
        self.key = whole[..., : self._nope].permute(1, 2, 0).contiguous()
        self.value = whole[..., self._nope :].transpose(0, 1).contiguous()


class LatentAttention:
    """The attention block of a layer: [T, H] -> [T, H]."""

    def __init__(self, name: str, config: DeepseekConfig, index: int, parts: ModelParts) -> None:
        heads, head = config.num_heads, config.nope + config.rope.dim
        entry, hidden, bias = config.latent + config.rope.dim, config.hidden_size, config.attention_bias
        self._q_norm: LatentNorm | None = None
        self._q_b: Linear | None = None
        if config.query_rank is None:
            if bias:  # q_proj has none, so the two cannot share a Linear
                self._inputs = [parts.linear(name, hidden, {"q_proj": heads * head}), _entry(name, hidden, entry, parts, bias)]
            else:
                self._inputs = [parts.linear(name, hidden, {"q_proj": heads * head, "kv_a_proj_with_mqa": entry})]
            first = heads * head
        else:
            first = config.query_rank
            self._inputs = [parts.linear(name, hidden, {"q_a_proj": first, "kv_a_proj_with_mqa": entry}, bias=bias)]
            self._q_norm = LatentNorm(f"{name}.q_a_layernorm", first, parts)
            self._q_b = parts.linear(name, first, {"q_b_proj": heads * head})
        self._split = (first, config.latent, config.rope.dim)
        self._kv_norm = LatentNorm(f"{name}.kv_a_layernorm", config.latent, parts)
        self._expansion = Expansion(name, config, parts)
        self._output = parts.linear(name, heads * config.v_dim, {"o_proj": hidden}, bias=bias)
        self._rope: Callable[..., Tensor] = parts.op("qk_norm_rope")
        self._attend = parts.attention(config.attention_layer(index))
        self._expands, self._scale = config.expands, config.scale
        self._heads, self._nope, self._rope_dim, self._latent = heads, config.nope, config.rope.dim, config.latent
        self._interleave, self._v_dim, self._width = config.interleave, config.v_dim, heads * config.v_dim
        self._indexer: Indexer | None = None
        if config.index is not None:
            self._indexer = Indexer(f"{name}.indexer", config, config.index, config.num_layers + index, parts)
        # Several readers of one input take it plain.
        alone = len(self._inputs) == 1 and self._indexer is None
        self.activation = self._inputs[0].activation if alone else "plain"

    def finish(self) -> None:
        parts = [*self._inputs, self._q_norm, self._q_b, self._kv_norm, self._expansion, self._output, self._indexer]
        for part in parts:
            if part is not None:
                part.finish()

    def __call__(self, step: Step, x: Tensor, angles: Angles) -> Tensor:
        both = self._inputs[0](x) if len(self._inputs) == 1 else torch.cat([linear(x) for linear in self._inputs], -1)
        q, latent, key = both.split_with_sizes(self._split, -1)
        select = None
        if self._q_b is not None:
            assert self._q_norm is not None
            low = self._q_norm(q)
            q = self._q_b(low)
            if self._indexer is not None:
                select = self._indexer(step, x, low, angles)
        q = q.reshape(-1, self._heads, self._nope + self._rope_dim)
        latent = self._kv_norm(latent)
        turned = self._turned(q, key, angles)
        entry = torch.cat((latent, turned[:, self._heads]), -1).unsqueeze(1)
        value = entry[..., : self._latent]
        long = [] if not self._expands else np.flatnonzero(step.host.query_lens >= self._expands).tolist()
        out = q.new_empty(len(q), self._heads, self._v_dim)
        if len(long) == len(step.host.query_lens):
            self._attend.store(step, entry, value)  # type: ignore[attr-defined]
        else:
            query = self._absorbed(q, turned)
            found = self._attend.over(step, query, entry, value, select)  # type: ignore[attr-defined]
            torch.bmm(found.transpose(0, 1), self._expansion.value, out=out.transpose(0, 1))
        if long:
            self._expanded(step, q, turned, out, long)
        return self._output(out.view(-1, self._width))

    def _expanded(self, step: Step, q: Tensor, turned: Tensor, out: Tensor, rows: list[int]) -> None:
        """Fill in out [T, heads, v] for the rows of the step that have many new tokens."""
        ends = np.cumsum(step.host.query_lens)
        for row in rows:
            tokens = slice(int(ends[row] - step.host.query_lens[row]), int(ends[row]))
            query = torch.cat((q[tokens, :, : self._nope], turned[tokens, : self._heads]), -1)
            entries, _ = self._attend.read(int(step.host.rows[row]), 0, int(step.host.seq_lens[row]))  # type: ignore[attr-defined]
            out[tokens] = attend(query, entries[:, 0], self._expansion.key, self._expansion.value, self._scale)

    def _turned(self, q: Tensor, key: Tensor, angles: Angles) -> Tensor:
        """The rotated parts of q [T, heads, ...] and of the key [T, rope], side by side: [T, heads + 1, rope]."""
        tokens, heads, dim = len(q), self._heads, self._rope_dim
        turning = torch.cat((q[..., self._nope :], key.unsqueeze(1)), 1)
        if self._interleave:
            # Pairs (2j, 2j + 1) become (j, j + dim / 2): of query and key alike, so that their products stay.
            turning = turning.view(tokens, heads + 1, dim // 2, 2).transpose(2, 3).reshape(tokens, heads + 1, dim)
        return self._rope(turning, None, 0.0, *angles)

    def _absorbed(self, q: Tensor, turned: Tensor) -> Tensor:
        """The query in the latent's coordinates, [T, heads, latent + rope]."""
        query = q.new_empty(len(q), self._heads, self._latent + self._rope_dim)
        query[..., self._latent :] = turned[:, : self._heads]
        torch.bmm(q[..., : self._nope].transpose(0, 1), self._expansion.key, out=query[..., : self._latent].transpose(0, 1))
        return query


def _entry(name: str, hidden: int, width: int, parts: ModelParts, bias: bool) -> Linear:
    return parts.linear(name, hidden, {"kv_a_proj_with_mqa": width}, bias=bias)
