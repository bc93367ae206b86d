"""RoPE as a checkpoint's config describes it: which type, with which numbers, over which lengths.

Owns the reading of `rope_parameters` (transformers 5) and `rope_scaling` (transformers 4), the
refusal of what it does not know, and the rule by which a sequence's variant is chosen where the
type depends on length. Pure Python: the tensors are in `octavo.model.rotary`. Must never ignore a
key, because a RoPE that is nearly right gives fluent nonsense.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import LoadError

RopeType = Literal["default", "linear", "dynamic", "yarn", "longrope", "llama3"]

LAYER_TYPES = ("full_attention", "sliding_attention", "chunked_attention")
"""Keys by which rope_parameters may be nested."""

_COMMON = {"rope_type", "type", "rope_theta", "partial_rotary_factor"}
_TYPES: dict[str, RopeType] = {
    "default": "default",
    "linear": "linear",
    "dynamic": "dynamic",
    "yarn": "yarn",
    "longrope": "longrope",
    "su": "longrope",  # its first name, in early Phi-3 configs
    "llama3": "llama3",
}
_KEYS: dict[RopeType, tuple[set[str], set[str]]] = {  # type: (required, optional)
    "default": (set(), set()),
    "linear": ({"factor"}, set()),
    "dynamic": ({"factor"}, set()),
    "yarn": (
        set(),
        {
            "factor",
            "original_max_position_embeddings",
            "attention_factor",
            "beta_fast",
            "beta_slow",
            "mscale",
            "mscale_all_dim",
            "truncate",
        },
    ),
    "longrope": ({"short_factor", "long_factor"}, {"factor", "attention_factor", "original_max_position_embeddings"}),
    "llama3": ({"factor", "low_freq_factor", "high_freq_factor"}, {"original_max_position_embeddings"}),
}


@dataclass(frozen=True, slots=True)
class RopeConfig:
    """One RoPE, checked and complete. Hashable: layers with equal configs share their angles.

    dim: rotated dimensions at the front of each head (even). original: the context of pre-training
    (yarn, longrope, llama3; for dynamic it is max_position). attention_factor multiplies cos and sin.
    """

    type: RopeType
    dim: int
    theta: float
    max_position: int
    original: int
    factor: float = 1.0
    attention_factor: float = 1.0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    short_factor: tuple[float, ...] = ()
    long_factor: tuple[float, ...] = ()

    @property
    def varies(self) -> bool:
        """Whether the frequencies depend on the length of the sequence."""
        return self.type in ("dynamic", "longrope")

    def length(self, bound: int) -> int:
        """The length whose frequencies a sequence of at most `bound` tokens uses, fixed at admission
        so that cached keys stay valid: for dynamic NTK `bound` rounded up to original * 2^i."""
        if not self.varies or bound <= self.original:
            return self.original
        if self.type == "longrope":
            return self.original + 1  # any length past the original uses the long factors
        return self.original << (-(-bound // self.original) - 1).bit_length()

    def variant(self, bound: int) -> str:
        """Names the frequencies of `length(bound)`, for cache keys; empty where the type does not vary."""
        if not self.varies:
            return ""
        length = self.length(bound)
        if self.type == "longrope":
            return "longrope:long" if length > self.original else "longrope:short"
        return f"dynamic:{length}"

    def ntk_multiplier(self, length: int) -> float:
        """What dynamic NTK multiplies theta by for a sequence of `length` tokens:
        (f * L / Lmax - (f - 1)) ^ (d / (d - 2)), and 1 up to Lmax (as transformers)."""
        stretch = self.factor * max(length, self.original) / self.original - (self.factor - 1)
        return float(stretch ** (self.dim / (self.dim - 2)))


def _whole(config: Mapping[str, Any]) -> Mapping[str, Any]:
    found = config.get("rope_scaling") or config.get("rope_parameters") or {}
    if not isinstance(found, Mapping):
        raise LoadError(f"rope_parameters must be an object, got {found!r}")
    return found


def _nested(config: Mapping[str, Any]) -> list[str]:
    """The layer types by which the RoPE of this config is keyed; empty where all layers share one."""
    return [key for key in _whole(config) if key in LAYER_TYPES]


def rope_parameters(config: Mapping[str, Any], layer_type: str | None = None) -> Mapping[str, Any]:
    """The RoPE dict of a config.json: `rope_scaling` if it is there and not empty, else
    `rope_parameters`, else {}; the entry of `layer_type` where it is keyed by layer type."""
    found, nested = _whole(config), _nested(config)
    if not nested:
        return found
    if layer_type not in nested:
        raise LoadError(f"rope_parameters is keyed by {', '.join(nested)}, but the model has layers of type {layer_type!r}")
    inner = found[layer_type]
    if not isinstance(inner, Mapping):
        raise LoadError(
            f"rope_parameters[{layer_type!r}] must be an object, got {inner!r} (layers without RoPE are not supported)"
        )
    return inner


def read_rope(
    config: Mapping[str, Any],
    head_dim: int,
    *,
    layer_type: str | None = None,
    default_theta: float = 10000.0,
    default_max_position: int | None = None,
) -> RopeConfig:
    """Read the RoPE of a config.json (of either layout) for heads of `head_dim`.

    Raises LoadError that names the key: an unknown type, an unknown or missing key, a bad value.
    """
    found = rope_parameters(config, layer_type)
    kind = _rope_type(found)
    _check_keys(found, kind)

    theta = _number(found, "rope_theta", None)
    if theta is None:
        theta = _number(config, "rope_theta", default_theta)
    partial = _number(found, "partial_rotary_factor", None)
    if partial is None:
        partial = _number(config, "partial_rotary_factor", 1.0)
    assert theta is not None and partial is not None
    dim = int(head_dim * partial)
    if dim < 2 or dim % 2 or dim > head_dim:
        raise LoadError(
            f"partial_rotary_factor {partial:g} of head_dim {head_dim} rotates {dim} dimensions: it must be even and in [2, {head_dim}]"
        )
    if kind == "dynamic" and dim < 4:
        raise LoadError(f"rope_type 'dynamic' needs at least 4 rotated dimensions, got {dim}")

    max_position = _length(config, "max_position_embeddings", default_max_position)
    if max_position is None:
        raise LoadError("max_position_embeddings is missing from the config")
    original = max_position
    if kind in ("yarn", "longrope", "llama3"):
        top = None if _nested(config) else _length(config, "original_max_position_embeddings", None)
        original = top or _length(found, "original_max_position_embeddings", None) or max_position
    factor = _number(found, "factor", None)
    if factor is None:
        factor = max_position / original if kind in ("yarn", "longrope") else 1.0

    low, high = _number(found, "low_freq_factor", 1.0), _number(found, "high_freq_factor", 4.0)
    assert low is not None and high is not None
    if kind == "llama3" and not low < high:
        raise LoadError(f"rope: high_freq_factor {high:g} must be greater than low_freq_factor {low:g}")
    truncate = found.get("truncate")
    if not (truncate is None or isinstance(truncate, bool)):
        raise LoadError(f"rope: truncate must be true or false, got {truncate!r}")
    return RopeConfig(
        type=kind,
        dim=dim,
        theta=theta,
        max_position=max_position,
        original=original,
        factor=factor,
        attention_factor=_attention_factor(found, kind, factor, original),
        low_freq_factor=low,
        high_freq_factor=high,
        beta_fast=_number(found, "beta_fast", 32.0) or 32.0,
        beta_slow=_number(found, "beta_slow", 1.0) or 1.0,
        truncate=truncate is not False,
        short_factor=_factors(found, "short_factor", dim) if kind == "longrope" else (),
        long_factor=_factors(found, "long_factor", dim) if kind == "longrope" else (),
    )


def stretched(config: Mapping[str, Any], *, factor: float | None = None, theta: float | None = None) -> dict[str, Any]:
    """This config with another RoPE: `theta` its base, `factor` how far its context is stretched. The type stays; a RoPE
    without one becomes dynamic, which leaves sequences within the original context as they were.

    LoadError where the factor would not mean that: a RoPE per layer type, or longrope, whose lists are made for one factor.
    """
    changed = dict(config)
    if factor is None and theta is None:
        return changed
    nested = _nested(config)
    if nested:
        raise LoadError(f"the model has a RoPE for each of {', '.join(nested)}: one factor or theta cannot be set for all")
    found = dict(_whole(config))
    kind = _rope_type(found)
    if factor is not None:
        if kind == "longrope":
            raise LoadError(
                "the model's RoPE is longrope, whose lists of factors are made for one context: it cannot be stretched"
            )
        found.pop("type", None)
        found |= {"rope_type": "dynamic" if kind == "default" else kind, "factor": factor}
    if theta is not None:
        found["rope_theta"] = changed["rope_theta"] = theta
    changed["rope_scaling" if config.get("rope_scaling") else "rope_parameters"] = found
    return changed


def longest_context(rope: RopeConfig) -> int:
    """Tokens that the checkpoint claims to handle. dynamic and yarn state the context before stretching
    (yarn configs may state the stretched one: the larger counts); linear configs disagree on which of
    the two max_position_embeddings is, so it is taken as it stands."""
    if rope.type == "dynamic":
        return int(rope.max_position * rope.factor)
    if rope.type == "yarn":
        return max(rope.max_position, int(rope.original * rope.factor))
    return rope.max_position


def variants(ropes: Iterable[RopeConfig], bound: int) -> str:
    """The part of a prefix-cache key that says under which frequencies keys were computed, for a sequence of at most
    `bound` tokens: empty where no RoPE of the model depends on length."""
    return "|".join(rope.variant(bound) for rope in ropes if rope.varies)


def _rope_type(found: Mapping[str, Any]) -> RopeType:
    name = found.get("rope_type") or found.get("type") or "default"
    known = _TYPES.get(name) if isinstance(name, str) else None
    if known is None:
        raise LoadError(f"rope_type {name!r} is not known; there are {', '.join(_KEYS)}")
    return known


def _check_keys(found: Mapping[str, Any], kind: RopeType) -> None:
    required, optional = _KEYS[kind]
    unknown = sorted(set(found) - required - optional - _COMMON)
    if unknown:
        raise LoadError(
            f"rope_type {kind!r} has the unknown key {unknown[0]!r} = {found[unknown[0]]!r}; "
            f"it may have {', '.join(sorted(required | optional | _COMMON))}"
        )
    missing = sorted(key for key in required if found.get(key) is None)
    if missing:
        raise LoadError(f"rope_type {kind!r} needs the key {missing[0]!r}")


def _attention_factor(found: Mapping[str, Any], kind: str, factor: float, original: int) -> float:
    """What multiplies cos and sin. yarn: an explicit value replaces every formula; else the ratio of
    m(mscale) to m(mscale_all_dim) if both are there and not 0; else m(1), m(k) = 0.1 k ln f + 1.
    longrope: sqrt(1 + ln f / ln original). (YaRN, LongRoPE; as transformers.)"""
    if kind not in ("yarn", "longrope"):
        return 1.0
    explicit = _number(found, "attention_factor", None, low=0.0)
    if explicit is not None:
        return explicit
    if factor <= 1.0:
        return 1.0
    if kind == "longrope":
        return math.sqrt(1 + math.log(factor) / math.log(original))
    mscale, all_dim = _number(found, "mscale", None, low=0.0), _number(found, "mscale_all_dim", None, low=0.0)
    if mscale and all_dim:
        return (0.1 * mscale * math.log(factor) + 1.0) / (0.1 * all_dim * math.log(factor) + 1.0)
    return 0.1 * math.log(factor) + 1.0


def _number(found: Mapping[str, Any], key: str, default: float | None, *, low: float | None = None) -> float | None:
    """A finite number, positive unless `low` says otherwise; null and absent give the default."""
    value = found.get(key)
    if value is None:
        return default
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or (value <= 0 if low is None else value < low):
        raise LoadError(
            f"rope: {key} must be a finite number {'above 0' if low is None else f'of at least {low:g}'}, got {value!r}"
        )
    return float(value)


def _length(found: Mapping[str, Any], key: str, default: int | None) -> int | None:
    value = found.get(key)
    if value is None:
        return default
    fine = isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
    if not fine or value != int(value) or value < 1:
        raise LoadError(f"{key} must be a whole number of at least 1, got {value!r}")
    return int(value)


def _factors(found: Mapping[str, Any], key: str, dim: int) -> tuple[float, ...]:
    value = found[key]
    fine = isinstance(value, (list, tuple)) and all(
        isinstance(v, (int, float)) and not isinstance(v, bool) and math.isfinite(v) and v > 0 for v in value
    )
    if not fine or len(value) != dim // 2:
        size = f"{len(value)} entries" if isinstance(value, (list, tuple)) else repr(value)
        raise LoadError(
            f"rope: {key} must be a list of {dim // 2} positive numbers (half of {dim} rotated dimensions), got {size}"
        )
    return tuple(float(v) for v in value)
