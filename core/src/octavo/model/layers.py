"""The parts of a decoder layer: embedding, norms, self-attention, gated MLP or experts.

Each asks for what it uses (ModelParts) and declares its weights. None knows how weights are packed,
how the cache is laid out or which kernel serves an operator. Stateless between steps.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch
from torch import Tensor

from octavo.interfaces import AttentionLayer, ModelParts, Step
from octavo.model.decoder_config import DecoderConfig, LayerConfig, MixtureConfig
from octavo.model.moe import Block, MoE, Router
from octavo.model.parameter import Buffer, Parameter

Angles = tuple[Tensor, Tensor]
"""cos and sin of a step, as `octavo.model.rotary` makes them."""


class Embedding:
    """Token ids to rows of `name`.weight [vocab, H], times `scale`, which is rounded to the model's dtype first: it was
    when the model was trained."""

    def __init__(self, name: str, vocab: int, hidden: int, parts: ModelParts, *, scale: float = 1.0) -> None:
        self.parameter = Parameter(f"{name}.weight", (vocab, hidden), parts)
        self._op = parts.op("embedding")
        self._scale = float(torch.tensor(scale, dtype=getattr(torch, parts.dtype)))

    def finish(self) -> None:
        self._weight = self.parameter.get()

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> float32 [T, H], the start of the residual stream."""
        rows: Tensor = self._op(token_ids, self._weight)
        return rows if self._scale == 1.0 else rows.mul_(self._scale)


class Norm:
    """RMS norm of the running sum: adds the last block's output to it, if there is one, and normalises. `offset` is
    added to the stored weight."""

    def __init__(
        self, name: str, hidden: int, eps: float, parts: ModelParts, *, offset: float = 0.0, format: str = "plain"
    ) -> None:
        self._parameter = Parameter(f"{name}.weight", (hidden,), parts, torch.float32)
        self._eps, self._offset, self._dtype = eps, offset, getattr(torch, parts.dtype)
        self._first, self._next = parts.op("rms_norm", format), parts.op("add_rms_norm", format)

    def finish(self) -> None:
        self._weight = self._parameter.get() + self._offset

    def __call__(self, x: Tensor, residual: Tensor | None) -> tuple[Tensor, Tensor]:
        """x [T, H], residual float32 [T, H] -> (normalised, new residual). At the first norm of a model residual
        is None and x the embedding."""
        if residual is None:
            return self.alone(x), x
        return self._next(x, residual, self._weight, self._eps)  # type: ignore[no-any-return]

    def alone(self, x: Tensor) -> Tensor:
        """x [T, H] normalised, in the model's dtype."""
        return self._first(x.float(), self._weight, self._eps, self._dtype)  # type: ignore[no-any-return]


class HeadNorm:
    """Weights of the RMS norm of every q and k head: one for all q heads and one for all k heads."""

    def __init__(self, name: str, config: DecoderConfig, parts: ModelParts) -> None:
        # 1 + w keeps the digits of w in float32 only; weights that are used as stored stay in the model's dtype.
        dtype = torch.float32 if config.norm_offset else None
        self._q, self._k = (Parameter(f"{name}.{part}_norm.weight", (config.head_dim,), parts, dtype) for part in "qk")
        self._heads, self._kv_heads, self._offset = config.num_heads, config.num_kv_heads, config.norm_offset

    def finish(self) -> Tensor:
        """[q heads + k heads, D]."""
        weights = torch.cat((self._q.get().expand(self._heads, -1), self._k.get().expand(self._kv_heads, -1)))
        return weights + self._offset if self._offset else weights


class SelfAttention:
    """QKV in one Linear, optional q and k norms, RoPE, paged attention, output projection."""

    def __init__(self, name: str, config: DecoderConfig, layer: AttentionLayer, parts: ModelParts) -> None:
        heads, kv_heads, dim = config.num_heads, config.num_kv_heads, config.head_dim
        widths = {"q_proj": heads * dim, "k_proj": kv_heads * dim, "v_proj": kv_heads * dim}
        if config.fused_names:
            widths = {"qkv_proj": sum(widths.values())}
        self.qkv = parts.linear(name, config.hidden_size, widths, bias=config.qkv_bias)
        self.output = parts.linear(name, heads * dim, {"o_proj": config.hidden_size}, bias=config.o_bias)
        self.norm = HeadNorm(name, config, parts) if config.qk_norm else None
        self._norm_weight: Tensor | None = None
        self._eps = config.norm_eps
        if config.sinks:
            layer = replace(layer, sinks=Buffer(f"{name}.sinks", (heads,), parts, torch.float32).value)
        self._attend = parts.attention(layer)
        self._heads, self._dim, self._width = heads + 2 * kv_heads, dim, heads * dim

    def finish(self) -> None:
        self.qkv.finish()
        self.output.finish()
        if self.norm is not None:
            self._norm_weight = self.norm.finish()

    def __call__(self, step: Step, x: Tensor, angles: Angles, wanted: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H], or [S, H] of the wanted tokens, int64 [S]."""
        qkv = self.qkv(x).view(-1, self._heads, self._dim)
        found = self._attend.turned(step, qkv, self._norm_weight, self._eps, *angles).view(-1, self._width)
        return self.output(found if wanted is None else found.index_select(0, wanted))


class GatedMLP:
    """act(gate x) * (up x), then down; gate and up in one Linear. `activation` is the input format it wants."""

    def __init__(self, name: str, config: DecoderConfig, parts: ModelParts) -> None:
        hidden, inner = config.hidden_size, config.intermediate_size
        widths = {"gate_up_proj": 2 * inner} if config.fused_names else {"gate_proj": inner, "up_proj": inner}
        self.gate_up = parts.linear(name, hidden, widths, bias=config.mlp_bias)
        self.down = parts.linear(name, inner, {"down_proj": hidden}, bias=config.mlp_bias)
        self.activation = self.gate_up.activation
        self._name, self._act = config.activation, parts.op(f"{config.activation}_mul", self.down.activation)
        self._gated: Callable[[Tensor], Tensor] | None = None

    def finish(self) -> None:
        self.gate_up.finish()
        self.down.finish()
        fused = getattr(self.gate_up, "gated", None)
        if fused is not None and self.down.activation == self.gate_up.activation:
            self._gated = fused(self._name)

    def __call__(self, x: Tensor) -> Tensor:
        """[T, H] -> [T, H]."""
        return self.down(self._act(self.gate_up(x)) if self._gated is None else self._gated(x))


def mixture(name: str, mix: MixtureConfig, parts: ModelParts) -> MoE:
    """The mixture of experts of the layer `name`."""
    module, spec = f"{name}.{mix.module}", mix.experts_spec
    router = Router(f"{module}.{mix.router}", spec.hidden, spec.count, mix.routing, parts, bias=mix.router_bias)
    return MoE(router, f"{module}.{mix.experts}", spec, parts)


class DecoderLayer:
    """Norm, attention, norm, MLP or experts, over a running sum that the norms carry (pre-norm residual); in a
    sandwich, what attention and MLP give is normalised too before it joins the sum."""

    def __init__(self, name: str, index: int, config: DecoderConfig, layer: LayerConfig, parts: ModelParts) -> None:
        def norm(part: str, format: str = "plain") -> Norm:
            return Norm(f"{name}.{part}", config.hidden_size, config.norm_eps, parts, offset=config.norm_offset, format=format)

        self.attention = SelfAttention(f"{name}.self_attn", config, config.attention_layer(index), parts)
        mix = layer.mixture
        self.mlp: Block = GatedMLP(f"{name}.mlp", config, parts) if mix is None else mixture(name, mix, parts)
        self.before_attention = norm("input_layernorm", self.attention.qkv.activation)
        before_mlp = "pre_feedforward_layernorm" if config.sandwich else "post_attention_layernorm"
        self.before_mlp = norm(before_mlp, self.mlp.activation)
        self.after_attention = norm("post_attention_layernorm") if config.sandwich else None
        self.after_mlp = norm("post_feedforward_layernorm") if config.sandwich else None

    def finish(self) -> None:
        for part in (self.attention, self.mlp, self.before_attention, self.before_mlp, self.after_attention, self.after_mlp):
            if part is not None:
                part.finish()

    def __call__(
        self, step: Step, x: Tensor, residual: Tensor | None, angles: Angles, wanted: Tensor | None = None
    ) -> tuple[Tensor, Tensor]:
        """x is the previous layer's output, not yet added to residual (the sum of all before it). wanted int64 [S]:
        past its attention the layer goes on with these tokens alone."""
        x, residual = self.before_attention(x, residual)
        x = self.attention(step, x, angles, wanted)
        if wanted is not None:
            residual = residual.index_select(0, wanted)
        if self.after_attention is not None:
            x = self.after_attention.alone(x)
        x, residual = self.before_mlp(x, residual)
        x = self.mlp(x)
        return (x if self.after_mlp is None else self.after_mlp.alone(x)), residual
