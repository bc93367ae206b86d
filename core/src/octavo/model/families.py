"""What each decoder-only family means by its config.json.

Owns the reading of a config (a plain dict) into a DecoderConfig, checked and complete: every head
shape, window, bias and RoPE of every layer. Adding a family is adding an entry of FAMILIES. Pure
Python, so that choosing an adapter and reading a model's facts load no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import LoadError
from octavo.interfaces import AttentionLayer
from octavo.model.rope import RopeConfig, read_rope

_LEGACY_LAYER_TYPES = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
}
_ACTIVATIONS = {"silu": "silu", "swish": "silu"}


@dataclass(frozen=True, slots=True)
class LayerConfig:
    """What differs between layers: the attention window in tokens (None sees everything) and the RoPE."""

    window: int | None
    rope: RopeConfig


@dataclass(frozen=True, slots=True)
class DecoderConfig:
    """A decoder, complete: nothing is left to a default past this point."""

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_heads: int
    num_kv_heads: int
    head_dim: int
    norm_eps: float
    activation: str
    max_position: int
    tied_head: bool
    qkv_bias: bool
    o_bias: bool
    mlp_bias: bool
    qk_norm: bool
    layers: tuple[LayerConfig, ...]

    def attention_layer(self, index: int) -> AttentionLayer:
        """Layer `index` as the attention backend sees it."""
        return AttentionLayer(
            index=index,
            num_heads=self.num_heads,
            num_kv_heads=self.num_kv_heads,
            k_dim=self.head_dim,
            v_dim=self.head_dim,
            scale=self.head_dim**-0.5,
            window=self.layers[index].window,
            module=f"model.layers.{index}.self_attn",
        )


def _no_bias(config: Mapping[str, Any]) -> bool:
    return False


def _bias(key: str) -> Callable[[Mapping[str, Any]], bool]:
    return lambda config: _flag(config, key, False)


def _no_window(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _one_window(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """One number for every layer; 4096 if the key is missing, null is off."""
    window = _count(config, "sliding_window") if "sliding_window" in config else 4096
    return (window,) * layers


def _late_windows(config: Mapping[str, Any], layers: int) -> tuple[int | None, ...]:
    """Qwen: off unless use_sliding_window; then by layer_types, else layers from max_window_layers on."""
    window = _one_window(config, 1)[0] if _flag(config, "use_sliding_window", False) else None
    types = layer_types(config, layers)
    if types is None:
        first = config.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise LoadError(f"max_window_layers must be a whole number of at least 0, got {first!r}")
        return tuple(window if i >= first else None for i in range(layers))
    return tuple(window if kind == "sliding_attention" else None for kind in types)


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture's config is read, where families differ. The defaults are those of
    transformers' config classes, for keys that a config.json leaves out."""

    max_position: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    windows: Callable[[Mapping[str, Any], int], tuple[int | None, ...]] = _no_window
    qkv_bias: Callable[[Mapping[str, Any]], bool] = _no_bias
    o_bias: Callable[[Mapping[str, Any]], bool] = _no_bias
    mlp_bias: Callable[[Mapping[str, Any]], bool] = _no_bias
    qk_norm: bool = False
    norm_eps: float = 1e-6
    rope_theta: float = 10000.0


FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(
        max_position=2048, qkv_bias=_bias("attention_bias"), o_bias=_bias("attention_bias"), mlp_bias=_bias("mlp_bias")
    ),
    "MistralForCausalLM": Family(max_position=131072, windows=_one_window),
    "Qwen2ForCausalLM": Family(max_position=32768, windows=_late_windows, qkv_bias=lambda config: True),
    "Qwen3ForCausalLM": Family(
        max_position=32768,
        head_dim=128,
        windows=_late_windows,
        qkv_bias=_bias("attention_bias"),
        o_bias=_bias("attention_bias"),
        qk_norm=True,
    ),
}

DECODER_ARCHITECTURES: tuple[str, ...] = tuple(FAMILIES)
"""Values of config.json's `architectures` that `octavo.model.decoder` builds."""


def read_decoder(config: Mapping[str, Any]) -> DecoderConfig:
    """Read a config.json. Raises LoadError that names the key and the value."""
    name = architecture(config)
    family = FAMILIES[name]
    hidden, heads = _need(config, "hidden_size"), _need(config, "num_attention_heads")
    kv_heads = _count(config, "num_key_value_heads", heads) or heads
    if heads % kv_heads:
        raise LoadError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = _count(config, "head_dim", None if "head_dim" in config else family.head_dim)
    if head_dim is None:
        if hidden % heads:
            raise LoadError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not given")
        head_dim = hidden // heads
    activation = config.get("hidden_act", "silu")
    if activation not in _ACTIVATIONS:
        raise LoadError(f"hidden_act {activation!r} is not supported by {name}; there are {', '.join(_ACTIVATIONS)}")
    eps = config.get("rms_norm_eps", family.norm_eps)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
        raise LoadError(f"rms_norm_eps must be a number in [0, 1), got {eps!r}")
    count = _need(config, "num_hidden_layers")
    rope = read_rope(config, head_dim, default_theta=family.rope_theta, default_max_position=family.max_position)
    return DecoderConfig(
        architecture=name,
        vocab_size=_need(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=_need(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(eps),
        activation=_ACTIVATIONS[activation],
        max_position=longest_context(rope),
        tied_head=_flag(config, "tie_word_embeddings", False),
        qkv_bias=family.qkv_bias(config),
        o_bias=family.o_bias(config),
        mlp_bias=family.mlp_bias(config),
        qk_norm=family.qk_norm,
        layers=tuple(LayerConfig(window, rope) for window in family.windows(config, count)),
    )


def architecture(config: Mapping[str, Any]) -> str:
    """The one entry of `architectures` that this decoder builds."""
    names = config.get("architectures") or []
    known = [name for name in names if name in FAMILIES]
    if not known:
        raise LoadError(f"architectures {names!r} has none of {', '.join(FAMILIES)}")
    return str(known[0])


def longest_context(rope: RopeConfig) -> int:
    """Tokens that the checkpoint claims to handle. dynamic and yarn state the context before stretching
    (yarn configs may state the stretched one: the larger counts); linear configs disagree on which of
    the two max_position_embeddings is, so it is taken as it stands."""
    if rope.type == "dynamic":
        return int(rope.max_position * rope.factor)
    if rope.type == "yarn":
        return max(rope.max_position, int(rope.original * rope.factor))
    return rope.max_position


def layer_types(config: Mapping[str, Any], layers: int) -> tuple[str, ...] | None:
    """The config's layer_types with today's names, None if it has none. LoadError for other kinds."""
    types = config.get("layer_types")
    if types is None:
        return None
    if not isinstance(types, (list, tuple)) or len(types) != layers:
        raise LoadError(f"layer_types must list {layers} layers, got {types!r}")
    named = tuple(str(_LEGACY_LAYER_TYPES.get(kind, kind)) for kind in types)
    for i, kind in enumerate(named):
        if kind not in ("full_attention", "sliding_attention"):
            raise LoadError(f"layer_types[{i}] is {kind!r}; this decoder has full_attention and sliding_attention")
    return named


def _flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise LoadError(f"{key} must be true or false, got {value!r}")
    return value


def _count(config: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    """A positive whole number; null and absent give the default."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LoadError(f"{key} must be a whole number of at least 1, got {value!r}")
    return value


def _need(config: Mapping[str, Any], key: str) -> int:
    value = _count(config, key)
    if value is None:
        raise LoadError(f"{key} is missing from the config")
    return value
