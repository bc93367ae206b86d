"""V4Adapter: geometry, names and building of DeepSeek V4, and its provider. Loads torch only when a model is built."""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.catalog import Accept, Needs, Provider, Reject
from octavo.errors import LoadError
from octavo.interfaces import Model, ModelFacts, ModelParts

from octavo_models_deepseek.v4_config import ARCHITECTURE, read_v4

_NAMES = (
    (re.compile(r"^model\."), ""),
    (re.compile(r"^embed_tokens\."), "embed."),
    (re.compile(r"^lm_head\."), "head."),
    (re.compile(r"^hc_head\.hc_"), "hc_head_"),
    (re.compile(r"(^layers\.\d+\.attn)\.norm\."), r"\1.kv_norm."),
    (re.compile(r"\.scale$"), ".weight_scale_inv"),
)
"""What transformers calls differently when it saves a model again -> DeepSeek's own names; and the block scales of FP8 weights
-> the name that they have in every other checkpoint."""


class V4Adapter:
    """interfaces.ModelAdapter of DeepSeek V4."""

    def __init__(self, options: Any, parts: None) -> None:
        pass

    def facts(self, config: Mapping[str, Any], dtype: str, kv_dtype: str) -> ModelFacts:
        """Geometry of a config.json. kv_dtype "auto" is the model's dtype."""
        model = read_v4(config)
        caches = [cache for layer in model.caches(dtype, dtype if kv_dtype == "auto" else kv_dtype) for cache in layer]
        return ModelFacts(
            architecture=ARCHITECTURE,
            vocab_size=model.vocab_size,
            hidden_size=model.hidden_size,
            max_position=model.max_position,
            layers=tuple(cache.layer for cache in caches),
            kv_specs=tuple(cache.spec for cache in caches),
            tied_head=model.tied_head,
            ropes=model.ropes,
            mlp_weights=model.mlp_weights,
            mlp_values=model.mlp_values,
            attention_weights=model.attention_weights,
        )

    def build(self, config: Mapping[str, Any], parts: ModelParts) -> Model:
        from octavo_models_deepseek.v4_model import DeepseekV4

        return DeepseekV4(read_v4(config), parts)

    def canonical(self, name: str) -> str:
        """interfaces.CanonicalNames: DeepSeek's own names."""
        for pattern, ours in _NAMES:
            name = pattern.sub(ours, name)
        return name

    def ignored(self, name: str) -> bool:
        """Layers that predict tokens further ahead (MTP), and saved RoPE frequencies."""
        return name.startswith("mtp.") or name.endswith("rotary_emb.inv_freq")

    def recommend(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        """Small blocks: those of entries that stand for many tokens are as many times longer, and a prefix is found
        again at the ends of the longest."""
        return {"block_size": 8}


def accepts(needs: Needs, options: Any) -> Accept | Reject:
    name = needs.facts.get("architecture", "")
    if name != ARCHITECTURE:
        return Reject(f"architecture {name!r} is not {ARCHITECTURE}")
    try:
        config = read_v4(needs.facts["config"])
    except LoadError as error:
        return Reject(str(error))
    kinds = [layer.kind for layer in config.layers]
    # FP4 experts are two values a byte, and dequantised; that shared ones, of the same name, are not is a small part.
    stored = {f"{name}.weight": 2 for name in config.experts.names} if config.packed else {}
    return Accept(
        {"stored_values": stored},
        reason=f"{len(kinds)} layers with a window of {config.window}, {kinds.count('heavy')} of them over every compressed entry "
        f"and {kinds.count('sparse')} over the {config.index.top} best{'; FP4 experts are dequantised' if config.packed else ''}",
    )


provider = Provider(
    name="deepseek_v4",
    kind="model",
    load="octavo_models_deepseek.v4_adapter:V4Adapter",
    priority=20,
    accepts=accepts,
    summary="DeepSeek V4: a window and compressed entries, hyper-connections, experts by score or by token id",
)
