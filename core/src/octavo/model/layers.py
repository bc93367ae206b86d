"""The parts of a decoder layer: embedding, norms, self-attention, gated MLP.

Each asks for what it uses (ModelParts) and declares its weights. None knows how weights are packed,
how the cache is laid out or which kernel serves an operator. Stateless between steps.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.interfaces import AttentionLayer, ModelParts, Step
from octavo.model.families import DecoderConfig, LayerConfig
from octavo.model.parameter import Parameter

Angles = tuple[Tensor, Tensor]
"""cos and sin of a step, as `octavo.model.rotary` makes them."""


class Embedding:
    """Token ids to rows of `name`.weight [vocab, H]."""

    def __init__(self, name: str, vocab: int, hidden: int, parts: ModelParts) -> None:
        self.parameter = Parameter(f"{name}.weight", (vocab, hidden), parts)
        self._op = parts.op("embedding")

    def finish(self) -> None:
        self._weight = self.parameter.get()

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> float32 [T, H], the start of the residual stream."""
        return self._op(token_ids, self._weight)  # type: ignore[no-any-return]


class Norm:
    """RMS norm of the running sum: adds the last block's output to it, if there is one, and normalises."""

    def __init__(self, name: str, hidden: int, eps: float, parts: ModelParts, *, format: str = "plain") -> None:
        self._parameter = Parameter(f"{name}.weight", (hidden,), parts, torch.float32)
        self._eps, self._dtype = eps, getattr(torch, parts.dtype)
        self._first, self._next = parts.op("rms_norm", format), parts.op("add_rms_norm", format)

    def finish(self) -> None:
        self._weight = self._parameter.get()

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [T, H], residual float32 [T, H] -> (normalised, new residual). At the first norm of a model residual
        is None and x the embedding."""
        if residual is None:
            return self._first(x, self._weight, self._eps, self._dtype), x
        return self._next(x, residual, self._weight, self._eps)  # type: ignore[no-any-return]


class HeadNorm:
    """Weights of the RMS norm of every q and k head: one for all q heads and one for all k heads (Qwen3)."""

    def __init__(self, name: str, config: DecoderConfig, parts: ModelParts) -> None:
        shape = (config.head_dim,)
        self._q, self._k = Parameter(f"{name}.q_norm.weight", shape, parts), Parameter(f"{name}.k_norm.weight", shape, parts)
        self._heads, self._kv_heads = config.num_heads, config.num_kv_heads

    def finish(self) -> Tensor:
        """[q heads + k heads, D]."""
        return torch.cat((self._q.get().expand(self._heads, -1), self._k.get().expand(self._kv_heads, -1)))


class SelfAttention:
    """QKV in one Linear, optional q and k norms, RoPE, paged attention, output projection."""

    def __init__(self, name: str, config: DecoderConfig, layer: AttentionLayer, parts: ModelParts) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        widths = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        self.qkv = parts.linear(name, config.hidden_size, widths, bias=config.qkv_bias)
        self.output = parts.linear(name, heads * dim, {"o_proj": config.hidden_size}, bias=config.o_bias)
        self.norm = HeadNorm(name, config, parts) if config.qk_norm else None
        self._norm_weight: Tensor | None = None
        self._eps, self._norm_rope = config.norm_eps, parts.op("qk_norm_rope")
        self._attend = parts.attention(layer)
        self._heads, self._dim, self._width = (heads, kv_heads), dim, heads * dim
        self._split = (heads + kv_heads, kv_heads)

    def finish(self) -> None:
        self.qkv.finish()
        self.output.finish()
        if self.norm is not None:
            self._norm_weight = self.norm.finish()

    def __call__(self, step: Step, x: Tensor, angles: Angles) -> Tensor:
        """[T, H] -> [T, H]."""
        qk, v = self.qkv(x).view(-1, sum(self._split), self._dim).split_with_sizes(self._split, 1)
        qk = self._norm_rope(qk, self._norm_weight, self._eps, *angles)
        q, k = qk.split_with_sizes(self._heads, 1)
        return self.output(self._attend(step, q, k, v).view(-1, self._width))


class GatedMLP:
    """act(gate x) * (up x), then down; gate and up in one Linear."""

    def __init__(self, name: str, config: DecoderConfig, parts: ModelParts) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        self.gate_up = parts.linear(name, hidden, {"gate_proj": inner, "up_proj": inner}, bias=config.mlp_bias)
        self.down = parts.linear(name, inner, {"down_proj": hidden}, bias=config.mlp_bias)
        self._act = parts.op(f"{config.activation}_mul", self.down.activation)

    def finish(self) -> None:
        self.gate_up.finish()
        self.down.finish()

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down(self._act(self.gate_up(x)))


class DecoderLayer:
    """Norm, attention, norm, MLP over a running sum that the norms carry (pre-norm residual)."""

    def __init__(self, name: str, index: int, config: DecoderConfig, layer: LayerConfig, parts: ModelParts) -> None:
        self.attention = SelfAttention(f"{name}.self_attn", config, config.attention_layer(index), parts)
        self.mlp = GatedMLP(f"{name}.mlp", config, parts)
        hidden, eps = config.hidden_size, config.norm_eps
        self.before_attention = Norm(f"{name}.input_layernorm", hidden, eps, parts, format=self.attention.qkv.activation)
        self.before_mlp = Norm(f"{name}.post_attention_layernorm", hidden, eps, parts, format=self.mlp.gate_up.activation)

    def finish(self) -> None:
        for part in (self.attention, self.mlp, self.before_attention, self.before_mlp):
            part.finish()

    def __call__(self, step: Step, x: Tensor, residual: Tensor | None, angles: Angles) -> tuple[Tensor, Tensor]:
        """x is the previous layer's output, not yet added to residual (the sum of all before it)."""
        x, residual = self.before_attention(x, residual)
        x, residual = self.before_mlp(self.attention(step, x, angles), residual)
        return self.mlp(x), residual
