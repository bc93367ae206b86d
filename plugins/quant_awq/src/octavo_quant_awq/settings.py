"""What a checkpoint's quantization_config says, checked: one Scheme from three dialects.

Owns the reading of the keys and every refusal that they alone justify. Pure Python: `accepts` calls it before anything heavy is
imported. Must never look at a weight.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from octavo.errors import LoadError

Layout = Literal["gemm", "gemv", "gptq", "gptq_v2", "pack"]
GROUPS = (32, 64, 128, -1)
"""Inputs that share a scale; -1 is all of them."""


@dataclass(frozen=True, slots=True)
class Scheme:
    """How the weights are stored. group: inputs of a scale, -1 for all. zeros: whether zero points are stored (else q 8 is
    0). plain(name): whether the module of that name is not quantised."""

    layout: Layout
    group: int
    zeros: bool
    plain: Callable[[str], bool]


def nothing(name: str) -> bool:
    return False


DUMMY = Scheme("gemm", 128, True, nothing)
"""What random weights are taken to be (`--load-format dummy --quantization awq`)."""


def read_awq(config: Mapping[str, Any]) -> Scheme:
    """AutoAWQ: {"quant_method": "awq", "bits": 4, "group_size": 128, "zero_point": true, "version": "gemm",
    "modules_to_not_convert": null}; w_bit and q_group_size are the older names of two of them."""
    _need(config, "bits", 4, config.get("bits", config.get("w_bit")))
    version = str(config.get("version", "gemm")).lower()
    if version not in ("gemm", "gemv"):
        raise LoadError(f"AWQ: version {config.get('version')!r} is not one that is read: gemm or gemv")
    if config.get("zero_point", True) is not True:
        raise LoadError(f"AWQ: zero_point {config.get('zero_point')!r}: AWQ checkpoints always store zero points, set it to true")
    group = _group(config, config.get("group_size", config.get("q_group_size", 128)))
    names = config.get("modules_to_not_convert")
    return Scheme("gemm" if version == "gemm" else "gemv", group, True, _containing(names))


def read_gptq(config: Mapping[str, Any]) -> Scheme:
    """GPTQ: {"quant_method": "gptq", "bits": 4, "group_size": 128, "sym": true, "desc_act": false}."""
    _need(config, "bits", 4, config.get("bits"))
    if config.get("sym", True) is not True:
        raise LoadError(f"GPTQ: sym {config.get('sym')!r}: only symmetric weights are read")
    if config.get("desc_act", False):
        raise LoadError("GPTQ: desc_act true: weights in the order of activations (act-order) are not read")
    if config.get("lm_head"):
        raise LoadError("GPTQ: lm_head true: a quantised output head is not read")
    if config.get("dynamic"):
        raise LoadError(f"GPTQ: dynamic {config['dynamic']!r}: settings that differ between modules are not read")
    form = str(config.get("checkpoint_format", "gptq")).lower()
    if form not in ("gptq", "gptq_v2"):
        raise LoadError(f"GPTQ: checkpoint_format {form!r} is not one that is read: gptq or gptq_v2")
    group = _group(config, config.get("group_size", 128))
    return Scheme("gptq" if form == "gptq" else "gptq_v2", group, False, _containing(config.get("modules_to_not_convert")))


def read_pack_quantized(config: Mapping[str, Any]) -> Scheme:
    """compressed-tensors: one config group of 4-bit integer weights, without activations, in the format pack-quantized."""
    groups = config.get("config_groups") or {}
    if len(groups) != 1:
        raise LoadError(f"pack-quantized: config_groups has {len(groups)} entries ({', '.join(groups)}); exactly one is read")
    (settings,) = groups.values()
    form = settings.get("format") or config.get("format")
    if form != "pack-quantized":
        raise LoadError(f"compressed-tensors: format {form!r} is not pack-quantized")
    if settings.get("targets") != ["Linear"]:
        raise LoadError(f"pack-quantized: targets {settings.get('targets')!r}: only ['Linear'] with an ignore list is read")
    if settings.get("input_activations"):
        raise LoadError("pack-quantized: input_activations are set: only weights may be quantised")
    weights = settings.get("weights") or {}
    _need(weights, "num_bits", 4, weights.get("num_bits"))
    _need(weights, "type", "int", weights.get("type", "int"))
    if weights.get("actorder"):
        raise LoadError(f"pack-quantized: actorder {weights['actorder']!r}: weights in the order of activations are not read")
    strategy = weights.get("strategy", "group" if weights.get("group_size") else "channel")
    if strategy not in ("group", "channel"):
        raise LoadError(f"pack-quantized: strategy {strategy!r} is not one that is read: group or channel")
    group = _group(weights, weights.get("group_size")) if strategy == "group" else -1
    return Scheme("pack", group, not weights.get("symmetric", True), _ignored(config.get("ignore") or ()))


def is_pack_quantized(config: Mapping[str, Any]) -> bool:
    """Whether a compressed-tensors config is of the format pack-quantized, in the place of either generation."""
    forms = {group.get("format") for group in (config.get("config_groups") or {}).values() if isinstance(group, Mapping)}
    return "pack-quantized" in (forms - {None} or {config.get("format")})


def _need(config: Mapping[str, Any], key: str, right: Any, value: Any) -> None:
    if value != right:
        raise LoadError(f"quantization_config: {key} is {value!r}; only {right!r} is read")


def _group(config: Mapping[str, Any], value: Any) -> int:
    if isinstance(value, bool) or value not in GROUPS:
        raise LoadError(f"quantization_config: group_size {value!r} is not one of {', '.join(map(str, GROUPS))}")
    return int(value)


def _containing(names: Any) -> Callable[[str], bool]:
    """Modules whose dotted name contains one of `names` as a run of whole components: "mlp.down_proj" excludes
    model.layers.0.mlp.down_proj, and "layers.1" does not exclude layers.11."""
    listed = _names(names, "modules_to_not_convert")
    patterns = [re.compile(rf"(^|\.){re.escape(name.strip('.'))}(\.|$)") for name in listed if name.strip(".")]
    return lambda module: any(p.search(module) for p in patterns)


def _ignored(names: Any) -> Callable[[str], bool]:
    """compressed-tensors: exact names, or regular expressions after "re:"."""
    listed = _names(names, "ignore")
    exact = {name for name in listed if not name.startswith("re:")}
    patterns = []
    for name in listed:
        if name.startswith("re:"):
            try:
                patterns.append(re.compile(name[3:]))
            except re.error as error:
                raise LoadError(f"quantization_config: ignore {name!r} is not a regular expression: {error}") from error
    return lambda module: module in exact or any(p.match(module) for p in patterns)


def _names(value: Any, key: str) -> Sequence[str]:
    if value is None:
        return ()
    if isinstance(value, str):
        return (value,)
    if not isinstance(value, (list, tuple)) or not all(isinstance(name, str) for name in value):
        raise LoadError(f"quantization_config: {key} is {value!r}; a list of module names is expected")
    return tuple(value)
