"""TransformersAdapter: any causal language model of the transformers library, served through its own modules.

Owns what such a model must be like, and the refusal, by name, of what it is not. transformers computes everything but attention: it
hands queries, keys and values to a function that may be registered (its attention interface) and asks another for its masks. Octavo
registers both, so the cache is paged and a step is one flat row of tokens with their positions. Geometry is not read from config keys:
the model is built on the meta device and run once with the two functions taking notes (`octavo.model.transformers_probe`).
The speed cost is real, and `accepts` states it. Loads torch and transformers only when its facts are asked for.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from copy import deepcopy
from functools import lru_cache
from typing import TYPE_CHECKING, Any

from octavo.errors import LoadError
from octavo.interfaces import AttentionLayer, Model, ModelFacts, ModelParts

if TYPE_CHECKING:
    from octavo.model.transformers_probe import Call
    from octavo.model.transformers_weights import CheckpointMap

COST = (
    "transformers' own modules, paged: nothing is fused, weights are not packed or quantised, and steps are not captured in "
    "CUDA graphs, so a small step costs what Python and its launches cost"
)
"""What serving through this adapter costs; `explain` shows it."""

_ALIBI = ("bloom", "mpt")
_LAYERS = ("full_attention", "sliding_attention")


class TransformersAdapter:
    """interfaces.ModelAdapter of architectures that nobody has an adapter of their own for."""

    def __init__(self, options: Any, parts: None) -> None:
        self._map: CheckpointMap | None = None

    def facts(self, config: Mapping[str, Any], dtype: str, kv_dtype: str) -> ModelFacts:
        """Geometry, as one pass over the model without weights shows it. kv_dtype "auto" is the model's dtype. LoadError, naming
        the reason, for a model that cannot be served this way."""
        parsed, calls = _look(json.dumps(config))
        layers = tuple(_layer(index, call) for index, call in enumerate(calls))
        kv_dtype = dtype if kv_dtype == "auto" else kv_dtype
        return ModelFacts(
            architecture=str((config.get("architectures") or [""])[0]),
            vocab_size=int(parsed.vocab_size),
            hidden_size=int(parsed.hidden_size),
            max_position=int(getattr(parsed, "max_position_embeddings", 0) or 0),
            layers=layers,
            kv_specs=tuple(layer.kv_spec(kv_dtype) for layer in layers),
            tied_head=bool(getattr(parsed, "tie_word_embeddings", False)),
        )

    def build(self, config: Mapping[str, Any], parts: ModelParts) -> Model:
        from octavo.model.transformers_model import PagedTransformers

        parsed, calls = _look(json.dumps(config))
        model = PagedTransformers(deepcopy(parsed), calls, [_layer(index, call) for index, call in enumerate(calls)], parts)
        self._map = model.map
        return model

    def canonical(self, name: str) -> str:
        """The name by which the model declared a checkpoint tensor: some files leave the base model's prefix out."""
        return name if self._map is None else self._map.canonical(name)

    def ignored(self, name: str) -> bool:
        """What transformers ignores itself: second names of tied weights, saved masks and RoPE frequencies."""
        return name.endswith("rotary_emb.inv_freq") or (self._map is not None and self._map.ignored(name))

    def recommend(self, config: Mapping[str, Any]) -> Mapping[str, Any]:
        return {}


@lru_cache(maxsize=4)
def _look(config: str) -> tuple[Any, tuple[Call, ...]]:
    """transformers' object of a config.json's text, and the attention of its model: the plan asks, then the build."""
    from octavo.model.transformers_probe import parse, probe

    parsed = parse(json.loads(config))
    refuse(parsed)
    return parsed, tuple(probe(parsed))


def _layer(index: int, call: Call) -> AttentionLayer:
    return AttentionLayer(
        index=index,
        num_heads=call.heads,
        num_kv_heads=call.kv_heads,
        k_dim=call.k_dim,
        v_dim=call.v_dim,
        scale=call.scale,
        window=call.window,
        softcap=call.softcap,
        has_sinks=call.sinks,
        module=call.module,
    )


def refuse(parsed: Any) -> None:
    """LoadError for what the parsed config alone shows: position codes that attention would have to add, state that is no
    cache of keys, frequencies that depend on who shares the step."""
    name = type(parsed).__name__
    if parsed.model_type in _ALIBI or getattr(parsed, "alibi", False) or _position_kind(parsed) == "alibi":
        raise LoadError(f"{name}: ALiBi adds a bias by distance to every attention score, which paged attention here does not do")
    if getattr(parsed, "is_encoder_decoder", False):
        raise LoadError(f"{name}: an encoder-decoder model; only decoders are served")
    other = sorted({str(kind) for kind in getattr(parsed, "layer_types", None) or ()} - set(_LAYERS))
    if other:
        raise LoadError(f"{name}: layers of type {', '.join(other)}; this way serves {' and '.join(_LAYERS)} only")
    for found in _ropes(parsed):
        kind = found.get("rope_type", found.get("type", "default"))
        if kind in ("dynamic", "longrope"):
            raise LoadError(
                f"{name}: rope_type {kind!r}: transformers chooses the frequencies by the longest row of a step, so cached keys "
                "would not fit"
            )


def _position_kind(parsed: Any) -> str:
    return str(getattr(parsed, "position_embedding_type", "") or "")


def _ropes(parsed: Any) -> list[Mapping[str, Any]]:
    """Every RoPE dict of a config, flat or keyed by layer type."""
    found = getattr(parsed, "rope_parameters", None) or {}
    if not isinstance(found, Mapping):
        return []
    nested = [value for value in found.values() if isinstance(value, Mapping)]
    return nested or [found]


PATTERN = re.compile(r".+(ForCausalLM|LMHeadModel)")
"""Architectures that may be causal language models of transformers; whether it has them is asked when the model is chosen."""
