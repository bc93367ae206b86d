"""Multimodal checkpoints whose language model is one of the decoder's families: the part that is served, which is text.

Owns which architectures those are, and the translation of their configs and tensor names to the language model's own. Pure
Python. Towers and projectors for other media are known and left unread.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Any

from octavo.errors import LoadError

WRAPPED: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "Gemma3ForConditionalGeneration": (
        "Gemma3ForCausalLM",
        {"vocab_size": 262208, "num_attention_heads": 8, "num_key_value_heads": 4, "head_dim": 256, "hidden_size": 2304,
         "intermediate_size": 9216, "num_hidden_layers": 26},
    ),
    "Mistral3ForConditionalGeneration": ("MistralForCausalLM", {}),
}  # fmt: skip
"""Architecture: (its language model's, what transformers takes for keys of text_config that a file leaves out)."""

_LANGUAGE = re.compile(r"(?:model\.)?language_model\.(?:model\.)?(?P<rest>.+)")
_MEDIA = re.compile(r"(?:model\.)?(?:vision_tower|multi_modal_projector)\..+")


def wrapped(config: Mapping[str, Any]) -> str | None:
    """The multimodal architecture of a config.json; None if it is not one of WRAPPED."""
    return next((name for name in config.get("architectures") or () if name in WRAPPED), None)


def text_part(config: Mapping[str, Any]) -> Mapping[str, Any]:
    """The config of the language model: the one given, unless its architecture is in WRAPPED."""
    name = wrapped(config)
    if name is None:
        return config
    inner = config.get("text_config")
    if not isinstance(inner, Mapping):
        raise LoadError(f"{name}: text_config must be an object, got {inner!r}")
    architecture, defaults = WRAPPED[name]
    shared = {key: config[key] for key in ("tie_word_embeddings",) if key in config}
    return {**defaults, **shared, **inner, "architectures": [architecture]}


def text_name(name: str) -> str:
    """A tensor of the language model by the name that it has in a checkpoint of its own; others keep theirs."""
    match = _LANGUAGE.fullmatch(name)
    if match is None:
        return name
    rest = match["rest"]
    return rest if rest.startswith("lm_head.") else f"model.{rest}"


def is_media(name: str) -> bool:
    """Whether a tensor belongs to what reads other media than text."""
    return _MEDIA.fullmatch(name) is not None
