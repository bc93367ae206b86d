"""DecoderAdapter: core's model adapter, for the families of `octavo.model.families`.

Owns the translation from config.json to ModelFacts. Loads torch only when a model is built.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.interfaces import Model, ModelFacts, ModelParts
from octavo.model.decoder_config import DecoderConfig
from octavo.model.families import read_decoder
from octavo.model.text_part import is_media, text_name, text_part, wrapped

_IGNORED = re.compile(r"(.*\.)?rotary_emb\.inv_freq|(.*\.)?self_attn\.(masked_bias|bias)")
"""Buffers that old transformers versions saved: derived from the config, never weights."""


class DecoderAdapter:
    """interfaces.ModelAdapter of every architecture in FAMILIES, also as the language model of those in WRAPPED."""

    def __init__(self, options: Any, parts: None) -> None:
        self._wrapped = False

    def facts(self, config: Mapping[str, Any], dtype: str, kv_dtype: str) -> ModelFacts:
        """Geometry of a config.json. kv_dtype "auto" is the model's dtype."""
        decoder = self._read(config)
        kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
        layers = tuple(decoder.attention_layer(index) for index in range(len(decoder.layers)))
        return ModelFacts(
            architecture=decoder.architecture,
            vocab_size=decoder.vocab_size,
            hidden_size=decoder.hidden_size,
            max_position=decoder.max_position,
            layers=layers,
            kv_specs=tuple(layer.kv_spec(kv_dtype) for layer in layers),
            tied_head=decoder.tied_head,
            ropes=decoder.ropes,
            mlp_weights=decoder.mlp_weights,
            mlp_values=decoder.mlp_values,
        )

    def build(self, config: Mapping[str, Any], parts: ModelParts) -> Model:
        from octavo.model.decoder import Decoder

        return Decoder(self._read(config), parts)

    def _read(self, config: Mapping[str, Any]) -> DecoderConfig:
        self._wrapped = wrapped(config) is not None
        return read_decoder(text_part(config))

    def canonical(self, name: str) -> str:
        """Tensors of a language model within a larger one have its name before theirs."""
        return text_name(name) if self._wrapped else name

    def ignored(self, name: str) -> bool:
        return _IGNORED.fullmatch(name) is not None or (self._wrapped and is_media(name))

    def recommend(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Small blocks for a small window, which wastes up to a block at each end; otherwise the backend's
        preference stands."""
        windows = [layer.window for layer in self._read(config).layers if layer.window is not None]
        return {"block_size": 16} if windows and min(windows) < 256 else {}
