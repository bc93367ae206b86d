"""What each decoder-only family means by its config.json.

Owns the table FAMILIES and the reading of a config (a plain dict) into a DecoderConfig, checked and complete: every head
shape, window, bias, RoPE and expert of every layer. Adding a family is adding an entry. Pure Python, so that choosing an
adapter and reading a model's facts load no torch.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import LoadError
from octavo.interfaces import ExpertsSpec, Gate, Routing
from octavo.model.decoder_config import DecoderConfig, LayerConfig, MixtureConfig
from octavo.model.fields import choice, count, flag, layer_types, mapping, need, number, whole_list
from octavo.model.rope import RopeConfig, longest_context, read_rope, rope_parameters

Config = Mapping[str, Any]

_ACTIVATIONS = {"silu": "silu", "swish": "silu", "gelu_pytorch_tanh": "gelu_tanh"}


# ---------------------------------------------------------------- windows, in tokens, by layer


def _no_window(config: Config, layers: int) -> tuple[int | None, ...]:
    return (None,) * layers


def _one_window(missing: int | None) -> Callable[[Config, int], tuple[int | None, ...]]:
    """One number for every layer; `missing` if the key is, null is off."""

    def windows(config: Config, layers: int) -> tuple[int | None, ...]:
        return (count(config, "sliding_window") if "sliding_window" in config else missing,) * layers

    return windows


def _asked_window(config: Config, layers: int) -> tuple[int | None, ...]:
    """One number for every layer, off unless use_sliding_window."""
    return _one_window(4096)(config, layers) if flag(config, "use_sliding_window", False) else _no_window(config, layers)


def _late_windows(config: Config, layers: int) -> tuple[int | None, ...]:
    """Qwen: off unless use_sliding_window; then by layer_types, else layers from max_window_layers on."""
    window = _asked_window(config, 1)[0]
    types = layer_types(config, layers)
    if types is None:
        first = config.get("max_window_layers", 28)
        if isinstance(first, bool) or not isinstance(first, int) or first < 0:
            raise LoadError(f"max_window_layers must be a whole number of at least 0, got {first!r}")
        return tuple(window if i >= first else None for i in range(layers))
    return tuple(window if kind == "sliding_attention" else None for kind in types)


def _alternating(config: Config, layers: int, pattern: int) -> tuple[str, ...]:
    """By layer_types, else every layer slides but each pattern-th."""
    if (types := layer_types(config, layers)) is not None:
        return types
    pattern = count(config, "sliding_window_pattern", pattern) or pattern
    return tuple("sliding_attention" if (i + 1) % pattern else "full_attention" for i in range(layers))


def _alternating_windows(pattern: int, missing: int) -> Callable[[Config, int], tuple[int | None, ...]]:
    def windows(config: Config, layers: int) -> tuple[int | None, ...]:
        (window,) = _one_window(missing)(config, 1)
        return tuple(window if kind == "sliding_attention" else None for kind in _alternating(config, layers, pattern))

    return windows


# ---------------------------------------------------------------- RoPE, by layer


def _one_rope(config: Config, family: Family, head_dim: int, layers: int) -> tuple[RopeConfig, ...]:
    rope = read_rope(config, head_dim, default_theta=family.rope_theta, default_max_position=family.max_position)
    return (rope,) * layers


def _gemma3_ropes(config: Config, family: Family, head_dim: int, layers: int) -> tuple[RopeConfig, ...]:
    """Full layers have rope_theta (1e6) and the scaling, sliding layers rope_local_base_freq (1e4) and none."""
    types, nested = _alternating(config, layers, 6), mapping(config, "rope_parameters")
    full = {**mapping(nested, "full_attention"), **mapping(config, "rope_scaling")}
    full.setdefault("rope_theta", config.get("rope_theta") or 1e6)
    sliding = dict(mapping(nested, "sliding_attention"))
    sliding.setdefault("rope_theta", config.get("rope_local_base_freq") or 1e4)
    whole = {key: config[key] for key in ("max_position_embeddings",) if key in config}
    read = {
        kind: read_rope({**whole, "rope_parameters": found}, head_dim, default_max_position=family.max_position)
        for kind, found in (("full_attention", full), ("sliding_attention", sliding))
    }
    return tuple(read[kind] for kind in types)


def _phi3_ropes(config: Config, family: Family, head_dim: int, layers: int) -> tuple[RopeConfig, ...]:
    """Its longrope was once called su or yarn; the original context is 4096 unless the config says."""
    found = dict(rope_parameters(config))
    for key in ("rope_type", "type"):
        if found.get(key) in ("su", "yarn"):
            found[key] = "longrope"
    config = {"original_max_position_embeddings": 4096, **config, "rope_scaling": None, "rope_parameters": found}
    return _one_rope(config, family, head_dim, layers)


_GPT_OSS_ROPE = {
    "rope_type": "yarn", "factor": 32.0, "beta_fast": 32.0, "beta_slow": 1.0, "truncate": False,
    "original_max_position_embeddings": 4096,
}  # fmt: skip


def _gpt_oss_ropes(config: Config, family: Family, head_dim: int, layers: int) -> tuple[RopeConfig, ...]:
    found = rope_parameters(config) or _GPT_OSS_ROPE
    return _one_rope({**config, "rope_scaling": None, "rope_parameters": found}, family, head_dim, layers)


# ---------------------------------------------------------------- experts, by layer


def _no_mixture(config: Config, index: int) -> MixtureConfig | None:
    return None


def _experts(config: Config, count_key: str, inner_key: str, **more: Any) -> ExpertsSpec:
    spec = ExpertsSpec(
        count=need(config, count_key),
        hidden=need(config, "hidden_size"),
        inner=need(config, inner_key),
        top_k=need(config, "num_experts_per_tok"),
        **more,
    )
    if spec.top_k > spec.count:
        raise LoadError(f"num_experts_per_tok {spec.top_k} is more than {count_key} {spec.count}")
    return spec


def _qwen_mixture(config: Config, index: int) -> MixtureConfig | None:
    """Every decoder_sparse_step-th layer that mlp_only_layers does not name."""
    step = count(config, "decoder_sparse_step", 1) or 1
    if index in whole_list(config, "mlp_only_layers") or (index + 1) % step:
        return None
    spec = _experts(config, "num_experts", "moe_intermediate_size")
    return MixtureConfig(spec, Routing(spec.top_k, renormalise=flag(config, "norm_topk_prob", False)))


def _mixtral_mixture(config: Config, index: int) -> MixtureConfig | None:
    spec = _experts(config, "num_local_experts", "intermediate_size", names=("w1", "w3", "w2"))
    return MixtureConfig(spec, Routing(spec.top_k, renormalise=True), module="block_sparse_moe")


def _gpt_oss_mixture(config: Config, index: int) -> MixtureConfig | None:
    gate = Gate(number(config, "swiglu_alpha", 1.702), number(config, "swiglu_limit", 7.0), 1.0)
    spec = _experts(config, "num_local_experts", "intermediate_size", gate=gate, bias=True, stacked=True)
    return MixtureConfig(spec, Routing(spec.top_k, "softmax_chosen"), router="router", router_bias=True)


# ---------------------------------------------------------------- the table


def _no_bias(config: Config) -> bool:
    return False


def _bias(key: str, default: bool = False) -> Callable[[Config], bool]:
    return lambda config: flag(config, key, default)


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture's config is read, where families differ. The defaults are those of
    transformers' config classes, for keys that a config.json leaves out. A softcap of 0 is off; None: the architecture has none."""

    max_position: int
    head_dim: int | None = None  # None: hidden_size / num_attention_heads
    windows: Callable[[Config, int], tuple[int | None, ...]] = _no_window
    ropes: Callable[[Config, Family, int, int], tuple[RopeConfig, ...]] = _one_rope
    mixture: Callable[[Config, int], MixtureConfig | None] = _no_mixture
    qkv_bias: Callable[[Config], bool] = _no_bias
    o_bias: Callable[[Config], bool] = _no_bias
    mlp_bias: Callable[[Config], bool] = _no_bias
    qk_norm: bool = False
    norm_eps: float = 1e-6
    norm_offset: float = 0.0
    sandwich: bool = False
    scale_embedding: bool = False  # by the root of hidden_size
    query_scalar: float | None = None  # of query_pre_attn_scalar; None: the head's width
    softcap: float | None = None
    logit_softcap: float | None = None
    activation: tuple[str, str] = ("hidden_act", "silu")  # key, default
    rope_theta: float = 10000.0
    tied_head: bool = False
    sinks: bool = False
    fused_names: bool = False


def _cap(config: Config, key: str, default: float | None) -> float:
    return 0.0 if default is None else number(config, key, default)


_attention_bias = _bias("attention_bias")

FAMILIES: dict[str, Family] = {
    "LlamaForCausalLM": Family(max_position=2048, qkv_bias=_attention_bias, o_bias=_attention_bias, mlp_bias=_bias("mlp_bias")),
    "MistralForCausalLM": Family(max_position=131072, windows=_one_window(4096)),
    "MixtralForCausalLM": Family(
        max_position=131072, windows=_one_window(None), norm_eps=1e-5, rope_theta=1e6, mixture=_mixtral_mixture
    ),
    "Qwen2ForCausalLM": Family(max_position=32768, windows=_late_windows, qkv_bias=lambda config: True),
    "Qwen3ForCausalLM": Family(
        max_position=32768,
        head_dim=128,
        windows=_late_windows,
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        qk_norm=True,
    ),
    "Qwen3MoeForCausalLM": Family(
        max_position=32768,
        windows=_asked_window,
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        qk_norm=True,
        mixture=_qwen_mixture,
    ),
    "Phi3ForCausalLM": Family(max_position=4096, windows=_one_window(None), ropes=_phi3_ropes, norm_eps=1e-5, fused_names=True),
    "GemmaForCausalLM": Family(
        max_position=8192,
        head_dim=256,
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        norm_offset=1.0,
        scale_embedding=True,
        activation=("hidden_act", "gelu_pytorch_tanh"),
        tied_head=True,
    ),
    "Gemma2ForCausalLM": Family(
        max_position=8192,
        head_dim=256,
        windows=_alternating_windows(2, 4096),
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        norm_offset=1.0,
        sandwich=True,
        scale_embedding=True,
        query_scalar=256.0,
        softcap=50.0,
        logit_softcap=30.0,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied_head=True,
    ),
    "Gemma3ForCausalLM": Family(
        max_position=131072,
        head_dim=256,
        windows=_alternating_windows(6, 4096),
        ropes=_gemma3_ropes,
        qkv_bias=_attention_bias,
        o_bias=_attention_bias,
        qk_norm=True,
        norm_offset=1.0,
        sandwich=True,
        scale_embedding=True,
        query_scalar=256.0,
        logit_softcap=0.0,
        activation=("hidden_activation", "gelu_pytorch_tanh"),
        tied_head=True,
    ),
    "GptOssForCausalLM": Family(
        max_position=131072,
        head_dim=64,
        windows=_alternating_windows(2, 128),
        ropes=_gpt_oss_ropes,
        mixture=_gpt_oss_mixture,
        qkv_bias=_bias("attention_bias", True),
        o_bias=_bias("attention_bias", True),
        norm_eps=1e-5,
        rope_theta=150000.0,
        sinks=True,
    ),
}

DECODER_ARCHITECTURES: tuple[str, ...] = tuple(FAMILIES)
"""Values of config.json's `architectures` that `octavo.model.decoder` builds."""


def read_decoder(config: Config) -> DecoderConfig:
    """Read a config.json. Raises LoadError that names the key and the value."""
    name = architecture(config)
    family = FAMILIES[name]
    if flag(config, "use_bidirectional_attention", False):
        raise LoadError("use_bidirectional_attention is true: such a model embeds whole texts and cannot generate")
    hidden, heads = need(config, "hidden_size"), need(config, "num_attention_heads")
    kv_heads = count(config, "num_key_value_heads", heads) or heads
    if heads % kv_heads:
        raise LoadError(f"num_attention_heads {heads} is not a multiple of num_key_value_heads {kv_heads}")
    head_dim = count(config, "head_dim", None if "head_dim" in config else family.head_dim)
    if head_dim is None:
        if hidden % heads:
            raise LoadError(f"hidden_size {hidden} is not a multiple of num_attention_heads {heads}, and head_dim is not given")
        head_dim = hidden // heads
    eps = config.get("rms_norm_eps", family.norm_eps)
    if isinstance(eps, bool) or not isinstance(eps, (int, float)) or not 0 <= eps < 1:
        raise LoadError(f"rms_norm_eps must be a number in [0, 1), got {eps!r}")
    layers = need(config, "num_hidden_layers")
    ropes = family.ropes(config, family, head_dim, layers)
    scalar = float(head_dim) if family.query_scalar is None else number(config, "query_pre_attn_scalar", family.query_scalar)
    activation_key, activation = family.activation
    return DecoderConfig(
        architecture=name,
        vocab_size=need(config, "vocab_size"),
        hidden_size=hidden,
        intermediate_size=need(config, "intermediate_size"),
        num_heads=heads,
        num_kv_heads=kv_heads,
        head_dim=head_dim,
        norm_eps=float(eps),
        activation=choice(config, activation_key, _ACTIVATIONS, activation),
        max_position=max(longest_context(rope) for rope in ropes),
        tied_head=flag(config, "tie_word_embeddings", family.tied_head),
        qkv_bias=family.qkv_bias(config),
        o_bias=family.o_bias(config),
        mlp_bias=family.mlp_bias(config),
        qk_norm=family.qk_norm,
        scale=scalar**-0.5,
        softcap=_cap(config, "attn_logit_softcapping", family.softcap),
        logit_softcap=_cap(config, "final_logit_softcapping", family.logit_softcap),
        norm_offset=family.norm_offset,
        sandwich=family.sandwich,
        embedding_scale=hidden**0.5 if family.scale_embedding else 1.0,
        sinks=family.sinks,
        fused_names=family.fused_names,
        layers=tuple(
            LayerConfig(window, rope, family.mixture(config, i))
            for i, (window, rope) in enumerate(zip(family.windows(config, layers), ropes, strict=True))
        ),
    )


def architecture(config: Config) -> str:
    """The one entry of `architectures` that this decoder builds."""
    names = config.get("architectures") or []
    known = [name for name in names if name in FAMILIES]
    if not known:
        raise LoadError(f"architectures {names!r} has none of {', '.join(FAMILIES)}")
    return str(known[0])
