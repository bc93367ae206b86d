"""What a DeepSeek config.json means.

Owns the reading of a config (a plain dict) into a DeepseekConfig, checked and complete, and the refusal of what this
plugin does not build. Pure Python: choosing an adapter and reading a model's facts load no torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from octavo.errors import LoadError
from octavo.interfaces import AttentionLayer, ExpertsSpec, Routing
from octavo.model.rope import RopeConfig, longest_context, read_rope, rope_parameters

LATENT_NORM_EPS = 1e-6
"""Of the norms inside latent attention, whatever rms_norm_eps says."""


@dataclass(frozen=True, slots=True)
class Family:
    """How one architecture's config is read, where they differ. Numbers are the defaults of transformers' config classes,
    for keys that a config.json leaves out; None: the key must be there."""

    defaults: Mapping[str, Any]
    sigmoid: bool  # router scores: sigmoid with a correction bias, else softmax without
    interleave: bool | None  # RoPE pairs (2j, 2j + 1); None: the config's rope_interleave says, and it is true by default
    indexed: bool = False  # an index chooses the keys that a token attends to


_COMMON: dict[str, Any] = {
    "kv_lora_rank": 512,
    "q_lora_rank": 1536,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
}
_V3: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 4096, "n_routed_experts": 256, "n_shared_experts": 1, "num_experts_per_tok": 8, "n_group": 8,
    "topk_group": 4, "moe_intermediate_size": 2048, "first_k_dense_replace": 3, "routed_scaling_factor": 2.5, "norm_topk_prob": True,
}  # fmt: skip
_V32: dict[str, Any] = _V3 | {"max_position_embeddings": 163840, "index_topk": 2048, "index_head_dim": 128, "index_n_heads": 64}
_V2: dict[str, Any] = _COMMON | {
    "max_position_embeddings": 2048, "n_routed_experts": 64, "n_shared_experts": 2, "num_experts_per_tok": None, "n_group": None,
    "topk_group": None, "moe_intermediate_size": 1407, "first_k_dense_replace": 0, "routed_scaling_factor": 1.0, "topk_method": "greedy",
}  # fmt: skip

FAMILIES: dict[str, Family] = {
    "DeepseekV2ForCausalLM": Family(_V2, sigmoid=False, interleave=True),
    "DeepseekV3ForCausalLM": Family(_V3, sigmoid=True, interleave=None),
    "DeepseekV32ForCausalLM": Family(_V32, sigmoid=True, interleave=True, indexed=True),
}


@dataclass(frozen=True, slots=True)
class IndexConfig:
    """The indexer of sparse attention: heads of `dim`, which choose `top` keys a token."""

    heads: int
    dim: int
    top: int


@dataclass(frozen=True, slots=True)
class DeepseekConfig:
    """A DeepSeek model, complete: nothing is left to a default past this point.

    Per head q and k are `nope` dims without RoPE and rope.dim with it; v has `v_dim`. query_rank None: q is one matrix.
    routing and experts are None where no layer has experts; shared is the inner width of the shared experts, 0 for none.
    """

    architecture: str
    vocab_size: int
    hidden_size: int
    intermediate_size: int
    num_layers: int
    num_heads: int
    query_rank: int | None
    latent: int
    nope: int
    v_dim: int
    rope: RopeConfig
    interleave: bool
    scale: float
    norm_eps: float
    max_position: int
    tied_head: bool
    attention_bias: bool
    mlp_bias: bool
    dense_layers: int
    routing: Routing | None
    corrected: bool
    experts: ExpertsSpec | None
    shared: int
    index: IndexConfig | None

    def attention_layer(self, index: int) -> AttentionLayer:
        """Layer `index` as the attention backend sees it: every head against the one shared latent."""
        entry = self.latent + self.rope.dim
        return AttentionLayer(index, self.num_heads, 1, entry, self.latent, self.scale, expands=self.expands)

    @property
    def expands(self) -> int:
        """New tokens of a row from which expanding its keys and values takes less arithmetic than the absorbed form, for any
        length of the row (`expand.py`); 0, never, where an index chooses keys: there are never enough of them."""
        if self.index is not None:
            return 0
        absorbed, expanded = 2 * self.latent + self.rope.dim, self.nope + self.rope.dim + self.v_dim
        return -(-self.latent * (self.nope + self.v_dim) // max(1, absorbed - expanded))

    def index_layer(self, number: int) -> AttentionLayer:
        """The cache of an indexer's keys; number is its place among all caches, past the attention layers'."""
        assert self.index is not None
        return AttentionLayer(number, self.index.heads, 1, self.index.dim, self.index.dim, self.index.dim**-0.5)

    @property
    def mlp_weights(self) -> int:
        """Weights of all MLPs and experts."""
        total = 3 * self.hidden_size * self.intermediate_size * self.dense_layers
        if self.experts is not None:
            total += (
                3
                * self.hidden_size
                * (self.experts.count * self.experts.inner + self.shared)
                * (self.num_layers - self.dense_layers)
            )
        return total

    @property
    def mlp_values(self) -> int:
        """Values that a token's MLP or experts hold at most during a step."""
        mixed = 0 if self.experts is None else self.experts.top_k * self.experts.inner + self.shared
        return 3 * max(self.intermediate_size if self.dense_layers else 0, mixed)

    @property
    def attention_weights(self) -> int:
        """Weights of all attention blocks, indexers included; kv_b_proj stands there as what it is absorbed into."""
        hidden, heads, head = self.hidden_size, self.num_heads, self.nope + self.rope.dim
        query = hidden * heads * head if self.query_rank is None else self.query_rank * (hidden + heads * head)
        keys = hidden * (self.latent + self.rope.dim) + heads * self.latent * (self.nope + self.v_dim)
        each = query + keys + heads * self.v_dim * hidden
        if self.index is not None and self.query_rank is not None:
            each += self.index.heads * (self.query_rank * self.index.dim + hidden) + hidden * self.index.dim
        return self.num_layers * each

    def caches(self) -> tuple[AttentionLayer, ...]:
        """Every paged cache of the model in order: the attention layers', then the indexers'."""
        layers = [self.attention_layer(i) for i in range(self.num_layers)]
        if self.index is not None:
            layers += [self.index_layer(self.num_layers + i) for i in range(self.num_layers)]
        return tuple(layers)


def read_deepseek(config: Mapping[str, Any]) -> DeepseekConfig:
    """Read a config.json. Raises LoadError that names the key and the value."""
    names = config.get("architectures") or []
    name = next((name for name in names if name in FAMILIES), None)
    if name is None:
        raise LoadError(f"architectures {names!r} has none of {', '.join(FAMILIES)}")
    family = FAMILIES[name]
    read = Reader(config, family.defaults)
    if config.get("hidden_act", "silu") not in ("silu", "swish"):
        raise LoadError(f"hidden_act {config['hidden_act']!r} is not supported by {name}; there is silu")
    if config.get("moe_layer_freq", 1) != 1:
        raise LoadError(
            f"moe_layer_freq {config['moe_layer_freq']!r}: only 1 (experts in every layer past the dense ones) is supported"
        )
    nope, rope_dim, layers = read.count("qk_nope_head_dim"), read.count("qk_rope_head_dim"), read.count("num_hidden_layers")
    rope = read_rope(config, rope_dim, default_max_position=family.defaults["max_position_embeddings"])
    interleave = read.flag("rope_interleave", True) if family.interleave is None else family.interleave
    dense = min(read.count("first_k_dense_replace", low=0), layers)
    routing = experts = None
    shared = 0
    if dense < layers:
        routing, experts, shared = _mixture(read, family)
    return DeepseekConfig(
        architecture=name,
        vocab_size=read.count("vocab_size"),
        hidden_size=read.count("hidden_size"),
        intermediate_size=read.count("intermediate_size"),
        num_layers=layers,
        num_heads=read.count("num_attention_heads"),
        query_rank=None if read.absent("q_lora_rank") else read.count("q_lora_rank"),
        latent=read.count("kv_lora_rank"),
        nope=nope,
        v_dim=read.count("v_head_dim"),
        rope=rope,
        interleave=interleave,
        scale=(nope + rope_dim) ** -0.5 * _stretched(config, rope) ** 2,
        norm_eps=read.number("rms_norm_eps", 1e-6),
        max_position=longest_context(rope),
        tied_head=read.flag("tie_word_embeddings", False),
        attention_bias=read.flag("attention_bias", False),
        mlp_bias=not family.sigmoid and read.flag("mlp_bias", False),
        dense_layers=dense,
        routing=routing,
        corrected=family.sigmoid,
        experts=experts,
        shared=shared,
        index=_index(read, rope_dim) if family.indexed else None,
    )


def _mixture(read: Reader, family: Family) -> tuple[Routing, ExpertsSpec, int]:
    count, top_k, inner = read.count("n_routed_experts"), read.count("num_experts_per_tok"), read.count("moe_intermediate_size")
    grouped = family.sigmoid or _grouped(read)
    groups = read.count("n_group") if grouped else 1
    kept = read.count("topk_group") if grouped else 1
    if count % groups or kept > groups or top_k > count // groups * kept:
        raise LoadError(
            f"n_routed_experts {count}, n_group {groups}, topk_group {kept}, num_experts_per_tok {top_k}: the groups must be equal, "
            "and those kept must hold enough experts"
        )
    if family.sigmoid and count // groups < 2:
        raise LoadError(
            f"n_group {groups} of n_routed_experts {count}: a group is ranked by its best two experts, so it needs two"
        )
    routing = Routing(
        top_k=top_k,
        score="sigmoid" if family.sigmoid else "softmax",
        groups=groups,
        kept_groups=kept,
        group_score="sum2" if family.sigmoid else "max",
        renormalise=family.sigmoid and read.flag("norm_topk_prob", True),
        scale=read.number("routed_scaling_factor"),
    )
    shared = 0 if read.absent("n_shared_experts") else read.count("n_shared_experts", low=0) * inner
    return routing, ExpertsSpec(count=count, hidden=read.count("hidden_size"), inner=inner, top_k=top_k), shared


def _index(read: Reader, rope_dim: int) -> IndexConfig:
    index = IndexConfig(read.count("index_n_heads"), read.count("index_head_dim"), read.count("index_topk"))
    if index.dim < rope_dim:
        raise LoadError(f"index_head_dim {index.dim} is less than the {rope_dim} of qk_rope_head_dim")
    if read.absent("q_lora_rank"):
        raise LoadError("q_lora_rank is missing from the config: the indexer reads the low-rank query")
    return index


def _grouped(read: Reader) -> bool:
    method = read.get("topk_method")
    if method not in ("greedy", "group_limited_greedy"):
        raise LoadError(f"topk_method {method!r} is not supported; there are greedy and group_limited_greedy")
    return bool(method == "group_limited_greedy")


def _stretched(config: Mapping[str, Any], rope: RopeConfig) -> float:
    """What a stretched RoPE multiplies the softmax scale by, once for q and once for k: 0.1 * mscale_all_dim * ln(factor) + 1
    (YaRN, as transformers applies it to latent attention)."""
    every = rope_parameters(config).get("mscale_all_dim")
    if rope.type == "default" or not every or rope.factor <= 1:
        return 1.0
    return 0.1 * float(every) * math.log(rope.factor) + 1.0


class Reader:
    """Values of a config by key, with a family's defaults; LoadError that names the key."""

    def __init__(self, config: Mapping[str, Any], defaults: Mapping[str, Any]) -> None:
        self._config, self._defaults = config, defaults

    def get(self, key: str, default: Any = None) -> Any:
        return self._config.get(key, self._defaults.get(key, default))

    def absent(self, key: str) -> bool:
        return self.get(key) is None

    def count(self, key: str, *, low: int = 1) -> int:
        value = self.get(key)
        if value is None:
            raise LoadError(f"{key} is missing from the config")
        if isinstance(value, bool) or not isinstance(value, int) or value < low:
            raise LoadError(f"{key} must be a whole number of at least {low}, got {value!r}")
        return value

    def number(self, key: str, default: float | None = None) -> float:
        value = self.get(key, default)
        if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
            raise LoadError(f"{key} must be a number of at least 0, got {value!r}")
        return float(value)

    def flag(self, key: str, default: bool) -> bool:
        value = self.get(key, default)
        if value is None:
            return default
        if not isinstance(value, bool):
            raise LoadError(f"{key} must be true or false, got {value!r}")
        return value
