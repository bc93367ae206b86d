"""What a DeepSeek V4 config.json means, and which caches its layers keep.

Owns the reading of a config into a V4Config. Pure Python. Both layouts are read: DeepSeek's own (compress_ratios,
num_hash_layers, qk_rope_head_dim, one rope_scaling) and transformers' (layer_types, mlp_layer_types, rope_parameters by use).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import LoadError
from octavo.interfaces import AttentionLayer, ExpertsSpec, Gate, KVSpec, Routing
from octavo.model.fields import mapping
from octavo.model.rope import RopeConfig, read_rope

from octavo_models_deepseek.config import IndexConfig, Reader

ARCHITECTURE = "DeepseekV4ForCausalLM"
Kind = Literal["window", "sparse", "heavy"]

_KINDS: dict[Any, Kind] = {
    "sliding_attention": "window", "compressed_sparse_attention": "sparse", "heavily_compressed_attention": "heavy",
    0: "window", 4: "sparse", 128: "heavy",
}  # fmt: skip
_DEFAULTS: dict[str, Any] = {
    "hidden_size": 4096, "moe_intermediate_size": 2048, "num_hidden_layers": 43, "num_attention_heads": 64, "head_dim": 512,
    "q_lora_rank": 1024, "num_experts_per_tok": 6, "n_routed_experts": 256, "n_shared_experts": 1, "routed_scaling_factor": 1.5,
    "max_position_embeddings": 1048576, "num_hash_layers": 3, "hc_mult": 4, "hc_sinkhorn_iters": 20, "sliding_window": 128, "o_groups": 8,
    "o_lora_rank": 1024, "index_n_heads": 64, "index_head_dim": 128, "index_topk": 512, "vocab_size": 129280,
}  # fmt: skip


@dataclass(frozen=True, slots=True)
class V4Layer:
    """kind: attention over the window alone, or also over entries of `rate` tokens each, all of them (heavy) or chosen by an
    index (sparse). hashed: experts by token id."""

    kind: Kind
    rate: int
    hashed: bool


@dataclass(frozen=True, slots=True)
class Cache:
    """One paged cache of a layer: what it is for, and its place among all caches of the model."""

    use: Literal["window", "parts", "entries", "index parts", "index entries"]
    layer: AttentionLayer
    spec: KVSpec


@dataclass(frozen=True, slots=True)
class V4Config:
    """A DeepSeek V4, complete. lanes: streams of the residual; sinkhorn: how often their mixing matrix is normalised.
    rotated: trailing dims of a head that RoPE turns, by `ropes` (layers of the window alone, all others). packed: routed experts
    are FP4 (MXFP4) in the checkpoint, whatever the rest is."""

    vocab_size: int
    hidden_size: int
    layers: tuple[V4Layer, ...]
    num_heads: int
    head_dim: int
    rotated: int
    ropes: tuple[RopeConfig, RopeConfig]
    query_rank: int
    window: int
    output_groups: int
    output_rank: int
    index: IndexConfig
    lanes: int
    sinkhorn: int
    lane_eps: float
    norm_eps: float
    routing: Routing
    experts: ExpertsSpec
    packed: bool
    shared: int
    max_position: int
    tied_head: bool

    @property
    def mlp_weights(self) -> int:
        """Weights of all experts."""
        return 3 * self.hidden_size * (self.experts.count * self.experts.inner + self.shared) * len(self.layers)

    @property
    def mlp_values(self) -> int:
        """Values that a token's experts hold at most during a step."""
        return 3 * (self.experts.top_k * self.experts.inner + self.shared)

    @property
    def attention_weights(self) -> int:
        """Weights of all attention blocks, compressors and indexers included."""
        hidden, dim, width = self.hidden_size, self.head_dim, self.num_heads * self.head_dim
        each = (
            hidden * (self.query_rank + dim) + self.query_rank * width + self.output_rank * (width + self.output_groups * hidden)
        )
        kinds = [layer.kind for layer in self.layers]
        index = self.index.heads * (self.query_rank * self.index.dim + hidden) + 4 * hidden * self.index.dim
        return len(kinds) * each + kinds.count("heavy") * 2 * hidden * dim + kinds.count("sparse") * (4 * hidden * dim + index)

    def caches(self, dtype: str, kv_dtype: str) -> tuple[tuple[Cache, ...], ...]:
        """Of every layer its caches, numbered through, all latent: keys are also values. Of a layer that compresses, the
        projections of a window that is still open (`parts`: values and gates side by side) are a window cache of their own: an
        entry is made from them when its window closes, whatever steps its tokens came in, and a prefix hit finds them. They
        are never attended to and stay in the model's dtype."""
        found: list[tuple[Cache, ...]] = []
        number = 0
        for layer in self.layers:
            made: list[Cache] = []
            for use, heads, dim, window, every in self._uses(layer):
                parts = "parts" in use
                key = 2 * dim if parts else dim
                attention = AttentionLayer(number, heads, 1, key, dim, key**-0.5, window, has_sinks=use == "window")
                spec = KVSpec("latent", 1, key, dim, dtype if parts else kv_dtype, window, every)
                made.append(Cache(use, attention, spec))
                number += 1
            found.append(tuple(made))
        return tuple(found)

    def _uses(self, layer: V4Layer) -> list[tuple[Any, int, int, int | None, int]]:
        """(use, query heads, dims of a value, window, tokens an entry)."""
        heads, dim, rate, index = self.num_heads, self.head_dim, layer.rate, self.index
        uses: list[tuple[Any, int, int, int | None, int]] = [("window", heads, dim, self.window, 1)]
        if layer.kind == "heavy":
            uses += [("parts", 0, dim, rate, 1), ("entries", heads, dim, None, rate)]
        if layer.kind == "sparse":  # windows overlap: an entry is made of two of them
            uses += [("parts", 0, 2 * dim, 2 * rate, 1), ("entries", heads, dim, None, rate)]
            uses += [("index parts", 0, 2 * index.dim, 2 * rate, 1), ("index entries", index.heads, index.dim, None, rate)]
        return uses


def read_v4(config: Mapping[str, Any]) -> V4Config:
    """Read a config.json. Raises LoadError that names the key and the value."""
    if ARCHITECTURE not in (config.get("architectures") or []):
        raise LoadError(f"architectures {config.get('architectures')!r} has no {ARCHITECTURE}")
    read = Reader(config, _DEFAULTS)
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise LoadError(f"hidden_act {config['hidden_act']!r} is not supported by {ARCHITECTURE}; there is silu")
    score = config.get("scoring_func", "sqrtsoftplus")
    if score not in ("sqrtsoftplus", "softmax", "sigmoid"):
        raise LoadError(f"scoring_func {score!r} is not supported; there are sqrtsoftplus, softmax and sigmoid")
    heads, dim, groups = read.count("num_attention_heads"), read.count("head_dim"), read.count("o_groups")
    if heads % groups:
        raise LoadError(f"num_attention_heads {heads} is not a multiple of o_groups {groups}")
    rotated = _rotated(read, dim)
    index = IndexConfig(read.count("index_n_heads"), read.count("index_head_dim"), read.count("index_topk"))
    if index.dim < rotated:
        raise LoadError(f"index_head_dim {index.dim} is less than the {rotated} dims that RoPE turns")
    inner, count, top_k = read.count("moe_intermediate_size"), read.count("n_routed_experts"), read.count("num_experts_per_tok")
    gate = Gate(limit=read.number("swiglu_limit", 10.0))
    hidden = read.count("hidden_size")
    return V4Config(
        vocab_size=read.count("vocab_size"),
        hidden_size=hidden,
        layers=_layers(config, read),
        num_heads=heads,
        head_dim=dim,
        rotated=rotated,
        ropes=_ropes(config, rotated, read.number("rope_theta", 1e4), read.number("compress_rope_theta", 1.6e5)),
        query_rank=read.count("q_lora_rank"),
        window=read.count("sliding_window"),
        output_groups=groups,
        output_rank=read.count("o_lora_rank"),
        index=index,
        lanes=read.count("hc_mult"),
        sinkhorn=read.count("hc_sinkhorn_iters"),
        lane_eps=read.number("hc_eps", 1e-6),
        norm_eps=read.number("rms_norm_eps", 1e-6),
        routing=Routing(top_k, score, renormalise=True, scale=read.number("routed_scaling_factor")),
        experts=ExpertsSpec(count, hidden, inner, top_k, gate, names=("w1", "w3", "w2")),
        packed=_packed(config),
        shared=read.count("n_shared_experts") * inner,
        max_position=read.count("max_position_embeddings"),
        tied_head=read.flag("tie_word_embeddings", False),
    )


def _packed(config: Mapping[str, Any]) -> bool:
    """Whether the routed experts are FP4: DeepSeek's config.json says so, or its quantization_config."""
    named = config.get("expert_dtype") or mapping(config, "quantization_config").get("expert_dtype")
    if named not in (None, "fp4", "fp8"):
        raise LoadError(f"expert_dtype {named!r} is not supported by {ARCHITECTURE}; there are fp4 and fp8")
    return bool(named == "fp4")


def _layers(config: Mapping[str, Any], read: Reader) -> tuple[V4Layer, ...]:
    count = read.count("num_hidden_layers")
    named = config.get("layer_types") or config.get("compress_ratios")
    if named is None:
        named = [128] * min(count, 2) + [4 if i % 2 else 128 for i in range(max(count - 2, 0))]
    if not isinstance(named, list) or len(named) < count or any(_kind(kind) is None for kind in named[:count]):
        raise LoadError(
            f"layer_types or compress_ratios must name {count} layers of {', '.join(map(str, _KINDS))}, got {named!r}"
        )
    rates = mapping(config, "compress_rates")
    csa = config.get("compress_rate_csa") or rates.get("compressed_sparse_attention", 4)
    hca = config.get("compress_rate_hca") or rates.get("heavily_compressed_attention", 128)
    rated = Reader({"compress_rate_csa": csa, "compress_rate_hca": hca}, {})
    rate: dict[Kind, int] = {"window": 1, "sparse": rated.count("compress_rate_csa"), "heavy": rated.count("compress_rate_hca")}
    hashed = config.get("mlp_layer_types")
    if hashed is None:
        hashed = ["hash_moe"] * read.count("num_hash_layers", low=0) + ["moe"] * count
    if not isinstance(hashed, list) or len(hashed) < count or any(kind not in ("hash_moe", "moe") for kind in hashed[:count]):
        raise LoadError(f"mlp_layer_types must name {count} layers hash_moe or moe, got {hashed!r}")
    kinds = [kind for kind in map(_kind, named[:count]) if kind is not None]
    return tuple(V4Layer(kind, rate[kind], use == "hash_moe") for kind, use in zip(kinds, hashed, strict=False))


def _kind(named: Any) -> Kind | None:
    return _KINDS.get(named) if isinstance(named, (str, int)) and not isinstance(named, bool) else None


def _rotated(read: Reader, head_dim: int) -> int:
    """Dims of a head that RoPE turns."""
    if not read.absent("qk_rope_head_dim"):
        dim = read.count("qk_rope_head_dim")
    else:
        dim = int(head_dim * (64 / 512 if read.absent("partial_rotary_factor") else read.number("partial_rotary_factor")))
    if dim % 2 or not 2 <= dim <= head_dim:
        raise LoadError(
            f"qk_rope_head_dim (or head_dim times partial_rotary_factor) must be even and in [2, {head_dim}], got {dim!r}"
        )
    return dim


def _ropes(config: Mapping[str, Any], rotated: int, theta: float, compressed_theta: float) -> tuple[RopeConfig, RopeConfig]:
    """The RoPE of layers with a window alone, and that of all others: stretched, its cosines and sines never scaled."""
    found = mapping(config, "rope_parameters") or mapping(config, "rope_scaling")
    if isinstance(found.get("main"), Mapping) and isinstance(found.get("compress"), Mapping):
        main, other = dict(found["main"]), dict(found["compress"])
    else:
        other = {k: v for k, v in found.items() if k not in ("main", "compress")} | {"rope_theta": compressed_theta}
        main = {"rope_type": "default", "rope_theta": theta}
    if (other.get("rope_type") or other.get("type")) == "yarn":
        other.setdefault("attention_factor", 1.0)
    length = {"max_position_embeddings": config.get("max_position_embeddings", _DEFAULTS["max_position_embeddings"])}
    for each in (main, other):
        each.pop("partial_rotary_factor", None)  # `rotated` has it
    made = tuple(read_rope({"rope_parameters": each, **length}, rotated) for each in (main, other))
    if any(rope.varies for rope in made) or not all(math.isfinite(rope.theta) for rope in made):
        raise LoadError(
            f"rope_parameters {found!r}: a RoPE that depends on the sequence's length is not supported by {ARCHITECTURE}"
        )
    return made[0], made[1]
