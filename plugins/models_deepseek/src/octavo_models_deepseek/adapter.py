"""DeepseekAdapter: geometry and building of DeepSeek models. Loads torch only when a model is built."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.interfaces import KVSpec, Model, ModelFacts, ModelParts

from octavo_models_deepseek.config import read_deepseek

_DERIVED = re.compile(r"(.*\.)?rotary_emb\.inv_freq")
_LAYER = re.compile(r"model\.layers\.(\d+)\..+")


class DeepseekAdapter:
    """interfaces.ModelAdapter of DeepSeek V2, V3 and V3.2."""

    def __init__(self, options: Any, parts: None) -> None:
        self._layers: int | None = None

    def facts(self, config: Mapping[str, Any], dtype: str, kv_dtype: str) -> ModelFacts:
        """Geometry of a config.json. kv_dtype "auto" is the model's dtype."""
        model = read_deepseek(config)
        layers = model.caches()
        kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
        return ModelFacts(
            architecture=model.architecture,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            max_position=model.max_position,
            layers=layers,
            kv_specs=tuple(KVSpec("latent", 1, layer.k_dim, layer.v_dim, kv_dtype) for layer in layers),
            tied_head=model.tied_head,
            ropes=(model.rope,),
            mlp_weights=model.mlp_weights,
            mlp_values=model.mlp_values,
            attention_weights=model.attention_weights,
        )

    def build(self, config: Mapping[str, Any], parts: ModelParts) -> Model:
        from octavo_models_deepseek.model import Deepseek

        read = read_deepseek(config)
        self._layers = read.num_layers
        return Deepseek(read, parts)

    def ignored(self, name: str) -> bool:
        """Saved RoPE frequencies, and layers past the last: they predict tokens further ahead (MTP), which is not used."""
        if _DERIVED.fullmatch(name):
            return True
        layer = _LAYER.fullmatch(name)
        return layer is not None and self._layers is not None and int(layer[1]) >= self._layers

    def recommend(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """None: a page of any size holds one short run of memory a token."""
        return {}
