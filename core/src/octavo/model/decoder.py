"""The decoder: one model for every family that `octavo.model.families` reads.

Owns the order of things (embedding, layers, final norm, head). Must never hold a cache or anything
else between steps.
"""

from __future__ import annotations

import logging

import torch
from torch import Tensor

from octavo.interfaces import Linear, ModelParts, Step
from octavo.model.decoder_config import DecoderConfig
from octavo.model.layers import DecoderLayer, Embedding, Norm
from octavo.model.linear import torch_device
from octavo.model.rotary import Rotary

log = logging.getLogger(__name__)


class Decoder:
    """interfaces.Model. Building declares every weight; `finish` once they are filled."""

    selects = True

    def __init__(self, config: DecoderConfig, parts: ModelParts) -> None:
        dtype, device = getattr(torch, parts.dtype), torch_device(parts.device)
        self._embedding = Embedding(
            "model.embed_tokens", config.vocab_size, config.hidden_size, parts, scale=config.embedding_scale
        )
        self._layers = [DecoderLayer(f"model.layers.{i}", i, config, layer, parts) for i, layer in enumerate(config.layers)]
        self._norm = Norm("model.norm", config.hidden_size, config.norm_eps, parts, offset=config.norm_offset)
        self._head, self._softcap = self._build_head(config, parts), config.logit_softcap
        # Layers with equal RoPE share one set of angles, computed once a step.
        ropes = config.ropes
        longest, angles = parts.limits.max_model_len, parts.op("rope_angles")
        self._rotaries = [Rotary(rope, max_len=longest, dtype=dtype, device=device, angles=angles) for rope in ropes]
        self._rope_of = [ropes.index(layer.rope) for layer in config.layers]

    def _build_head(self, config: DecoderConfig, parts: ModelParts) -> Linear:
        if not config.tied_head:
            return parts.linear("", config.hidden_size, {"lm_head": config.vocab_size}, head=True)
        parts.weights.declare("lm_head.weight", None, _ignore_head, optional=True)
        return parts.tied(self._embedding.parameter.get, config.vocab_size)

    def finish(self) -> None:
        self._embedding.finish()
        for layer in self._layers:
            layer.finish()
        self._norm.finish()
        self._head.finish()

    def forward(self, step: Step) -> Tensor:
        """Hidden states after the final norm, [T, H], or [S, H] where step.wanted names S tokens: what the last
        layer does after its attention is then done for those alone (of a prompt, that is one token of all)."""
        angles = [rotary(step) for rotary in self._rotaries]
        x, residual = self._embedding(step.token_ids), None
        last = len(self._layers) - 1
        for i, (layer, rope) in enumerate(zip(self._layers, self._rope_of, strict=True)):
            x, residual = layer(step, x, residual, angles[rope], step.wanted if i == last else None)
        return self._norm(x, residual)[0]

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] of hidden [S, H]."""
        logits = self._head(hidden)
        return logits if not self._softcap else logits.div_(self._softcap).tanh_().mul_(self._softcap)


def _ignore_head(tensor: Tensor) -> None:
    log.warning(
        "the checkpoint has lm_head.weight although tie_word_embeddings is true: it is ignored, the embedding is the head"
    )
