"""DeepSeek V4: a residual of several lanes through windowed, compressed attention and mixtures of experts.

Owns the order of things. Must never hold a cache or anything else between steps.
"""

from __future__ import annotations

from dataclasses import replace
from functools import partial

import torch
from octavo.errors import LoadError
from octavo.interfaces import ExpertsSpec, Gate, Linear, ModelParts, Step
from octavo.model.layers import Embedding, Norm
from octavo.model.linear import torch_device
from octavo.model.moe import MoE, Router
from octavo.model.mxfp4 import SingleMxfp4Experts
from octavo.model.operators import gated
from torch import Tensor

from octavo_models_deepseek.hyper import HyperConnection, HyperHead
from octavo_models_deepseek.turn import Angles, PairRotary
from octavo_models_deepseek.v4_attention import WindowedAttention
from octavo_models_deepseek.v4_config import Cache, V4Config


class SharedExperts:
    """The MLP that every token takes, its two halves clamped."""

    def __init__(self, name: str, hidden: int, inner: int, gate: Gate, parts: ModelParts) -> None:
        self._gate_up = parts.linear(name, hidden, {"w1": inner, "w3": inner})
        self._down = parts.linear(name, inner, {"w2": hidden})
        self._gate = gate

    def finish(self) -> None:
        self._gate_up.finish()
        self._down.finish()

    def __call__(self, x: Tensor) -> Tensor:
        return self._down(gated(*self._gate_up(x).chunk(2, -1), self._gate))


class HashTable:
    """Experts by token id: `name` [vocab, top_k], whole numbers below `count`."""

    def __init__(self, name: str, shape: tuple[int, int], count: int, parts: ModelParts) -> None:
        self._name, self._count, self._device = name, count, torch_device(parts.device)
        parts.weights.declare(name, shape, self._fill, dtypes=("int64", "int32"))

    def _fill(self, tensor: Tensor) -> None:
        low, high = (int(end) for end in tensor.aminmax())
        if low < 0 or high >= self._count:
            raise LoadError(f"{self._name} names experts {low} to {high}, of which there are {self._count}, from 0")
        self._table = tensor.to(self._device, torch.int32, copy=True)

    def __call__(self, token_ids: Tensor) -> Tensor:
        """int64 [T] -> int32 [T, top_k]."""
        return self._table[token_ids]


class Layer:
    """Attention, then experts, each between the opening and closing of the lanes."""

    def __init__(
        self, name: str, index: int, config: V4Config, caches: tuple[Cache, ...], rotary: PairRotary, parts: ModelParts
    ) -> None:
        layer, hidden, eps = config.layers[index], config.hidden_size, config.norm_eps
        self._attention = WindowedAttention(f"{name}.attn", config, layer, caches, rotary, parts)
        self._lanes = tuple(HyperConnection(f"{name}.{kind}", config, parts) for kind in ("hc_attn", "hc_ffn"))
        self._norms = (
            Norm(f"{name}.attn_norm", hidden, eps, parts, format=self._attention.activation),
            Norm(f"{name}.ffn_norm", hidden, eps, parts),
        )
        gate, spec = f"{name}.ffn.gate", config.experts
        self._table = HashTable(f"{gate}.tid2eid", (config.vocab_size, spec.top_k), spec.count, parts) if layer.hashed else None
        router = Router(gate, hidden, spec.count, config.routing, parts, correction="" if layer.hashed else f"{gate}.bias")
        shared = SharedExperts(f"{name}.ffn.shared_experts", hidden, config.shared, spec.gate, parts)
        if config.packed:
            parts = replace(parts, experts=partial(_packed_experts, parts))
        self._experts = MoE(router, f"{name}.ffn.experts", spec, parts, shared)

    def finish(self) -> None:
        for part in (self._attention, self._experts, *self._lanes, *self._norms):
            part.finish()

    def __call__(self, step: Step, lanes: Tensor, angles: Angles) -> Tensor:
        """float32 [T, n, H] -> [T, n, H]."""
        x, back, mix = self._lanes[0].open(lanes)
        lanes = self._lanes[0].close(lanes, self._attention(step, self._norms[0](x, None)[0], angles), back, mix)
        x, back, mix = self._lanes[1].open(lanes)
        ids = None if self._table is None else self._table(step.token_ids)
        return self._lanes[1].close(lanes, self._experts(self._norms[1](x, None)[0], ids), back, mix)


def _packed_experts(parts: ModelParts, prefix: str, spec: ExpertsSpec) -> SingleMxfp4Experts:
    """Experts that are FP4 beside whatever the quantizer serves, in the model's dtype."""
    device, dtype = torch_device(parts.device), getattr(torch, parts.dtype)
    return SingleMxfp4Experts(prefix, spec, weights=parts.weights, device=device, dtype=dtype, run=parts.op("experts"))


class DeepseekV4:
    """interfaces.Model. Building declares every weight; `finish` once they are filled."""

    def __init__(self, config: V4Config, parts: ModelParts) -> None:
        self._embedding = Embedding("embed", config.vocab_size, config.hidden_size, parts)
        self._rotaries = [PairRotary(rope, parts) for rope in config.ropes]
        # The order of caches is that of the facts; their dtypes are the backend's to know, and not needed here.
        caches = config.caches(parts.dtype, parts.dtype)
        self._rope_of = [0 if layer.kind == "window" else 1 for layer in config.layers]
        self._layers = [
            Layer(f"layers.{i}", i, config, caches[i], self._rotaries[self._rope_of[i]], parts) for i in range(len(caches))
        ]
        self._hyper = HyperHead(config, parts)
        self._norm = Norm("norm", config.hidden_size, config.norm_eps, parts)
        self._head: Linear = (
            parts.tied(self._embedding.parameter.get, config.vocab_size)
            if config.tied_head
            else parts.linear("", config.hidden_size, {"head": config.vocab_size}, head=True)
        )
        self._lanes = config.lanes

    def finish(self) -> None:
        for part in (self._embedding, *self._layers, self._hyper, self._norm, self._head):
            part.finish()

    def forward(self, step: Step) -> Tensor:
        """Hidden states [T, H] after the final norm."""
        angles = [rotary.angles(step.positions) for rotary in self._rotaries]
        lanes = self._embedding(step.token_ids).unsqueeze(1).expand(-1, self._lanes, -1).contiguous()
        for layer, rope in zip(self._layers, self._rope_of, strict=True):
            lanes = layer(step, lanes, angles[rope])
        return self._norm(self._hyper(lanes), None)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] of hidden [S, H]."""
        return self._head(hidden)
