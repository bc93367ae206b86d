"""DeepSeek with grouped heads and a window: Llama's layers, 8 KV heads, a sliding window of 4K and a context of 128K by
dynamic RoPE interpolation with a base of a million.

Owns what such a config leaves out; core's decoder builds the model. Which keys a token sees is decided by true positions,
never by interpolated ones: a stretched RoPE does not widen the window. Loads torch only when a model is built.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from octavo.catalog import Accept, Needs, Provider, Reject
from octavo.errors import LoadError
from octavo.interfaces import Model, ModelFacts, ModelParts
from octavo.model.adapters import DecoderAdapter
from octavo.model.families import read_decoder

ARCHITECTURE = "DeepseekForCausalLM"
WINDOW, KV_HEADS, ORIGINAL, THETA, STRETCH = 4096, 8, 4096, 1e6, 32.0


def as_decoder(config: Mapping[str, Any]) -> dict[str, Any]:
    """The config as core's decoder reads a windowed one. LoadError for the mixture of experts that has this name too."""
    if config.get("n_routed_experts"):
        raise LoadError(
            f"n_routed_experts {config['n_routed_experts']!r}: the {ARCHITECTURE} that is built has dense layers and a window; "
            "DeepSeekMoE (2024) is not"
        )
    made = dict(config) | {"architectures": ["MistralForCausalLM"]}
    made.setdefault("sliding_window", WINDOW)
    made.setdefault("max_position_embeddings", ORIGINAL)
    made.setdefault("num_key_value_heads", KV_HEADS)
    made.setdefault("rope_theta", THETA)
    if not (config.get("rope_scaling") or config.get("rope_parameters")):
        made["rope_parameters"] = {"rope_type": "dynamic", "factor": STRETCH}
    return made


class WindowedAdapter:
    """interfaces.ModelAdapter: core's decoder under another reading of the config."""

    def __init__(self, options: Any, parts: None) -> None:
        self._decoder = DecoderAdapter(options, parts)
        self.ignored = self._decoder.ignored

    def facts(self, config: Mapping[str, Any], dtype: str, kv_dtype: str) -> ModelFacts:
        return self._decoder.facts(as_decoder(config), dtype, kv_dtype)

    def build(self, config: Mapping[str, Any], parts: ModelParts) -> Model:
        return self._decoder.build(as_decoder(config), parts)

    def recommend(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return self._decoder.recommend(as_decoder(config))


def accepts(needs: Needs, options: Any) -> Accept | Reject:
    if needs.facts.get("architecture") != ARCHITECTURE:
        return Reject(f"architecture {needs.facts.get('architecture')!r} is not {ARCHITECTURE}")
    try:
        decoder = read_decoder(as_decoder(needs.facts["config"]))
    except LoadError as error:
        return Reject(str(error))
    window = decoder.layers[0].window
    seen = f"a window of {window} tokens" if window else "no window"
    return Accept(reason=f"{decoder.num_kv_heads} KV heads and {seen}, in a context of {decoder.max_position}")


provider = Provider(
    name="deepseek_windowed",
    kind="model",
    load="octavo_models_deepseek.windowed:WindowedAdapter",
    priority=20,
    accepts=accepts,
    summary="DeepSeek with grouped heads, a sliding window and dynamic RoPE interpolation",
)
