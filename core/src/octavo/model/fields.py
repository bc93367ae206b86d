"""Reading single values out of a config.json, checked: what is wrong is refused by the name of its key.

Owns the checks; which keys there are and what they mean belongs to whoever reads a family. Pure Python.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

from octavo.errors import LoadError

_LEGACY_LAYER_TYPES = {
    "attention": "full_attention",
    "mamba": "linear_attention",
    "deepseek_sparse_attention": "indexed_attention",
}


def flag(config: Mapping[str, Any], key: str, default: bool) -> bool:
    """true or false; null and absent give the default."""
    value = config.get(key)
    if value is None:
        return default
    if not isinstance(value, bool):
        raise LoadError(f"{key} must be true or false, got {value!r}")
    return value


def count(config: Mapping[str, Any], key: str, default: int | None = None) -> int | None:
    """A positive whole number; null and absent give the default."""
    value = config.get(key)
    if value is None:
        return default
    if isinstance(value, bool) or not isinstance(value, int) or value < 1:
        raise LoadError(f"{key} must be a whole number of at least 1, got {value!r}")
    return value


def need(config: Mapping[str, Any], key: str) -> int:
    """A positive whole number that must be there."""
    value = count(config, key)
    if value is None:
        raise LoadError(f"{key} is missing from the config")
    return value


def number(config: Mapping[str, Any], key: str, default: float) -> float:
    """A finite number, 0 or more; absent gives the default, null 0.0, which stands for off."""
    value = config.get(key, default)
    if value is None:
        return 0.0
    if isinstance(value, bool) or not isinstance(value, (int, float)) or not math.isfinite(value) or value < 0:
        raise LoadError(f"{key} must be a finite number, 0 or more, or null, got {value!r}")
    return float(value)


def choice(config: Mapping[str, Any], key: str, names: Mapping[str, str], default: str) -> str:
    """One of `names`, as what it stands for; null and absent give the default."""
    value = config.get(key)
    if value is None:
        value = default
    if not isinstance(value, str) or value not in names:
        raise LoadError(f"{key} {value!r} is not supported here; there are {', '.join(names)}")
    return names[value]


def mapping(config: Mapping[str, Any], key: str) -> Mapping[str, Any]:
    """An object; null and absent give an empty one."""
    value = config.get(key)
    if value is None:
        return {}
    if not isinstance(value, Mapping):
        raise LoadError(f"{key} must be an object, got {value!r}")
    return value


def whole_list(config: Mapping[str, Any], key: str) -> tuple[int, ...]:
    """A list of whole numbers from 0 on; null and absent give an empty one."""
    value = config.get(key)
    if value is None:
        return ()
    if not isinstance(value, Sequence) or any(isinstance(v, bool) or not isinstance(v, int) or v < 0 for v in value):
        raise LoadError(f"{key} must be a list of whole numbers, got {value!r}")
    return tuple(value)


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
