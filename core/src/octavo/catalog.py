"""The catalogue: Provider, Accept, Reject, Needs, and how one provider is chosen.

Owns the value types of the plugin contract and the resolution rule. Loads no provider's class
until it is chosen; holds no global state.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict

CONTRACT = 1
"""Version of the plugin contract that this core implements; a Provider states the one it was written for."""

Kind = Literal["allocator", "scheduler", "attention", "quantizer", "model", "operators", "executor"]


class Options(BaseModel):
    """Base of a provider's typed options (config key ``plugins.<kind>.<name>``). Unknown keys are errors."""

    model_config = ConfigDict(extra="forbid", frozen=True)


@dataclass(frozen=True, slots=True)
class Device:
    """Facts of the device that the parts will run on. capability is (major, minor) on CUDA, else (0, 0)."""

    type: str = "cpu"  # "cpu" | "cuda"
    index: int = 0
    name: str = ""
    capability: tuple[int, int] = (0, 0)
    memory: int = 0  # bytes, total
    free_memory: int = 0  # bytes, what other processes hold already subtracted
    driver: str = ""
    features: frozenset[str] = frozenset()  # CPU flags such as "avx512_bf16", "amx_bf16"; "fp8" on CUDA


@dataclass(frozen=True, slots=True)
class Needs:
    """What a part must be able to do, asked before anything is allocated.

    facts holds kind-specific values; the names are fixed by `octavo.interfaces` (for attention:
    head_dims, num_heads, num_kv_heads, windows, sinks, softcap, kv_dtype, block_size (None where
    it is free); for quantizer: method, config; for model: architecture, config).
    """

    kind: Kind
    device: Device
    dtype: str = "float32"
    facts: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class Accept:
    """Yes; with preferences, such as block_sizes (best first) or alignment, and why."""

    preferences: Mapping[str, Any] = field(default_factory=dict)
    reason: str = ""


@dataclass(frozen=True, slots=True)
class Reject:
    """No, because of `reason`: a sentence that names the need that cannot be met and its value."""

    reason: str


def always(needs: Needs, options: Any) -> Accept | Reject:
    """The `accepts` of a part that runs anywhere."""
    return Accept()


@dataclass(frozen=True, slots=True)
class Provider:
    """One implementation of one kind of part.

    name: unique per kind. load: "module:Class", imported only when chosen, and called as
    ``cls(options, parts)``. accepts: pure and cheap; must not import anything heavy.
    priority: among those that accept, `auto` takes the highest (core's own are 0 to 10).
    """

    name: str
    kind: Kind
    load: str
    api: int = CONTRACT
    priority: int = 0
    accepts: Callable[[Needs, Any], Accept | Reject] = always
    options: type[Options] = Options
    summary: str = ""
