"""The model: embedding, layers of latent attention and (past the dense ones) mixtures of experts, norm, head.

Owns the order of things. Must never hold a cache or anything else between steps.
"""

from __future__ import annotations

from typing import Protocol

import torch
from octavo.interfaces import Linear, ModelParts, Step
from octavo.model.layers import Angles, Embedding, Norm
from octavo.model.linear import torch_device
from octavo.model.moe import MoE, Router
from octavo.model.rotary import Rotary
from torch import Tensor

from octavo_models_deepseek.config import DeepseekConfig
from octavo_models_deepseek.mla import LatentAttention


class FeedForward(Protocol):
    """[T, H] -> [T, H], in the activation format that it names."""

    activation: str

    def __call__(self, x: Tensor) -> Tensor: ...

    def finish(self) -> None: ...


class MLP:
    """silu(gate x) * (up x), then down: a dense layer's, or the shared experts'."""

    def __init__(self, name: str, config: DeepseekConfig, inner: int, parts: ModelParts) -> None:
        bias = config.mlp_bias
        self._gate_up = parts.linear(name, config.hidden_size, {"gate_proj": inner, "up_proj": inner}, bias=bias)
        self._down = parts.linear(name, inner, {"down_proj": config.hidden_size}, bias=bias)
        self._act = parts.op("silu_mul", self._down.activation)
        self.activation = self._gate_up.activation

    def finish(self) -> None:
        self._gate_up.finish()
        self._down.finish()

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(self._act(self._gate_up(x)))


class Layer:
    """Norm, attention, norm, MLP or experts over a running sum that the norms carry."""

    def __init__(self, name: str, index: int, config: DeepseekConfig, parts: ModelParts) -> None:
        hidden, eps = config.hidden_size, config.norm_eps
        self.attention = LatentAttention(f"{name}.self_attn", config, index, parts)
        dense = index < config.dense_layers
        self.mlp: FeedForward = (
            MLP(f"{name}.mlp", config, config.intermediate_size, parts) if dense else _experts(f"{name}.mlp", config, parts)
        )
        self._norms = (
            Norm(f"{name}.input_layernorm", hidden, eps, parts, format=self.attention.activation),
            Norm(f"{name}.post_attention_layernorm", hidden, eps, parts, format=self.mlp.activation),
        )

    def finish(self) -> None:
        for part in (self.attention, self.mlp, *self._norms):
            part.finish()

    def __call__(self, step: Step, x: Tensor, residual: Tensor | None, angles: Angles) -> tuple[Tensor, Tensor]:
        """x is the previous layer's output, not yet added to residual (the sum of all before it)."""
        x, residual = self._norms[0](x, residual)
        x, residual = self._norms[1](self.attention(step, x, angles), residual)
        return self.mlp(x), residual


def _experts(name: str, config: DeepseekConfig, parts: ModelParts) -> MoE:
    assert config.routing is not None and config.experts is not None
    correction = f"{name}.gate.e_score_correction_bias" if config.corrected else ""
    router = Router(f"{name}.gate", config.hidden_size, config.experts.count, config.routing, parts, correction=correction)
    shared = MLP(f"{name}.shared_experts", config, config.shared, parts) if config.shared else None
    return MoE(router, f"{name}.experts", config.experts, parts, shared)


class Deepseek:
    """interfaces.Model. Building declares every weight; `finish` once they are filled."""

    def __init__(self, config: DeepseekConfig, parts: ModelParts) -> None:
        self._embedding = Embedding("model.embed_tokens", config.vocab_size, config.hidden_size, parts)
        self._layers = [Layer(f"model.layers.{i}", i, config, parts) for i in range(config.num_layers)]
        self._norm = Norm("model.norm", config.hidden_size, config.norm_eps, parts)
        self._head: Linear = (
            parts.tied(self._embedding.parameter.get, config.vocab_size)
            if config.tied_head
            else parts.linear("", config.hidden_size, {"lm_head": config.vocab_size}, head=True)
        )
        dtype, device = getattr(torch, parts.dtype), torch_device(parts.device)
        self._rotary = Rotary(
            config.rope, max_len=parts.limits.max_model_len, dtype=dtype, device=device, angles=parts.op("rope_angles")
        )

    def finish(self) -> None:
        for part in (self._embedding, *self._layers, self._norm, self._head):
            part.finish()

    def forward(self, step: Step) -> Tensor:
        """Hidden states [T, H] after the final norm."""
        angles = self._rotary(step)
        x, residual = self._embedding(step.token_ids), None
        for layer in self._layers:
            x, residual = layer(step, x, residual, angles)
        return self._norm(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] of hidden [S, H]."""
        return self._head(hidden)
