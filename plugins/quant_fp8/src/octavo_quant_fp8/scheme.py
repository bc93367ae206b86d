"""What a checkpoint's quantization_config says about FP8, in one form for every family of checkpoints.

Owns the five dialects (compressed-tensors, AutoFP8, block FP8, FBGEMM, and none: plain weights quantised while they
are loaded) and which modules each leaves unquantised. Pure; must never import torch: `accepts` asks it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

BLOCK = 128
"""Rows and columns of a weight block, and channels of an activation group: the only size in use, and taken."""

METHODS = ("fp8", "fbgemm_fp8", "compressed-tensors")
"""quant_method of the checkpoints that may be FP8; "fp8" without a config is plain weights, quantised online."""


class Unsupported(Exception):
    """The config is none of FP8's, or one that this plugin does not read; the message says what and why."""


@dataclass(frozen=True)
class Scheme:
    """How every quantised Linear of a checkpoint is stored and computed.

    weight: one scale a "tensor", one a "channel" (output row), or one a 128 x 128 "block". activation: how inputs are
    quantised: "none", "tensor" (one static scale from the checkpoint), "token" (one a row, computed) or "block" (one
    a row and 128 channels, computed). scale_name, input_scale_name: the checkpoint's names. input_scales: whether it has
    them, used or not. bound: rows are quantised as if no value were larger (FBGEMM). stored: False where the checkpoint has plain weights. skipped: patterns
    of modules that are not quantised.
    """

    weight: Literal["tensor", "channel", "block"]
    activation: Literal["none", "tensor", "token", "block"]
    scale_name: str = "weight_scale"
    input_scale_name: str = "input_scale"
    input_scales: bool = False
    bound: float | None = None
    stored: bool = True
    skipped: tuple[str, ...] = ()
    kv_cache: bool = False
    source: str = field(default="", compare=False)

    def quantises(self, module: str) -> bool:
        """Whether the checkpoint module, such as "model.layers.0.mlp.down_proj", is quantised. A pattern is a module's
        name, a parent's, its last part, or, after "re:", a regular expression that matches from the start."""
        for pattern in self.skipped:
            if pattern.startswith("re:"):
                if re.match(pattern[3:], module):
                    return False
            elif module == pattern or module.startswith(f"{pattern}.") or module.endswith(f".{pattern}"):
                return False
        return True


def read_scheme(method: str, config: Mapping[str, Any]) -> Scheme:
    """The scheme of a quantization_config whose quant_method is `method` ({} for plain weights). Unsupported otherwise."""
    if method == "fp8":
        return _fp8(config) if config else Scheme("channel", "token", stored=False, source="plain weights")
    if method == "fbgemm_fp8":
        bound = float(config.get("activation_scale_ub", 1200.0))
        return Scheme("channel", "token", bound=bound, skipped=_names(config, "modules_to_not_convert"), source="FBGEMM FP8")
    if method == "compressed-tensors":
        return _compressed(config)
    raise Unsupported(
        f"reads {', '.join(METHODS)}, not {method!r}" if method else "the weights are not quantised, and nobody asked for FP8"
    )


def _fp8(config: Mapping[str, Any]) -> Scheme:
    fmt = config.get("fmt", "e4m3")
    if fmt not in ("e4m3", "float8_e4m3fn"):
        raise Unsupported(f"fmt {fmt!r}: weights must be e4m3")
    activation = config.get("activation_scheme", "dynamic")
    if activation not in ("dynamic", "static"):
        raise Unsupported(f"activation_scheme {activation!r} is neither 'dynamic' nor 'static'")
    skipped = _names(config, "modules_to_not_convert") + _names(config, "ignored_layers")
    block = config.get("weight_block_size")
    if block is None:
        kind: Literal["tensor", "token"] = "tensor" if activation == "static" else "token"
        return Scheme("tensor", kind, input_scales=activation == "static", skipped=skipped, source="AutoFP8")
    if list(block) != [BLOCK, BLOCK]:
        raise Unsupported(f"weight_block_size {block}: only [{BLOCK}, {BLOCK}] is read")
    if activation == "static":
        raise Unsupported("activation_scheme 'static' with weight_block_size: blocks have dynamic activations")
    # DeepSeek's own checkpoints leave the head alone and list nothing; transformers skips it without being told, too.
    return Scheme("block", "block", scale_name="weight_scale_inv", skipped=(*skipped, "lm_head", "head"), source="block FP8")


def _compressed(config: Mapping[str, Any]) -> Scheme:
    groups = config.get("config_groups") or {}
    if not isinstance(groups, Mapping) or not groups:
        raise Unsupported("compressed-tensors without config_groups: nothing says how weights are stored")
    found = {name: _group(name, group, str(config.get("format", ""))) for name, group in groups.items()}
    kinds = set(found.values())
    if len(kinds) > 1:
        raise Unsupported(f"compressed-tensors groups of different kinds: {', '.join(found)}; one kind for all Linears is read")
    weight, activation = kinds.pop()
    return Scheme(
        weight,
        activation,
        input_scales=activation == "tensor",
        skipped=_names(config, "ignore"),
        kv_cache=_float8(config.get("kv_cache_scheme")),
        source="compressed-tensors",
    )


def _group(
    name: str, group: Any, top: str
) -> tuple[Literal["tensor", "channel", "block"], Literal["none", "tensor", "token", "block"]]:
    """(weight, activation) of one config group."""
    weights, inputs = group.get("weights") or {}, group.get("input_activations")
    fmt = group.get("format") or top
    if fmt not in ("float-quantized", "naive-quantized"):
        raise Unsupported(f"{name}: format {fmt!r} is not FP8 (float-quantized)")
    if not _float8(weights):
        raise Unsupported(f"{name}: weights are {weights.get('num_bits')}-bit {weights.get('type')}, not 8-bit float")
    if group.get("targets") not in (["Linear"], "Linear"):
        raise Unsupported(f"{name}: targets {group.get('targets')}; only ['Linear'] is read, with exceptions under ignore")
    if group.get("output_activations"):
        raise Unsupported(f"{name}: quantised output_activations are not read")
    if weights.get("dynamic"):
        raise Unsupported(f"{name}: weights with dynamic scales are not stored in FP8")
    strategy = weights.get("strategy")
    if strategy not in ("tensor", "channel", "block"):
        raise Unsupported(f"{name}: weight strategy {strategy!r}; tensor, channel and block are read")
    if strategy == "block" and list(weights.get("block_structure") or ()) != [BLOCK, BLOCK]:
        raise Unsupported(f"{name}: block_structure {weights.get('block_structure')}; only [{BLOCK}, {BLOCK}] is read")
    if inputs is None:
        return strategy, "none"
    return strategy, _inputs(name, strategy, inputs)


def _inputs(name: str, strategy: str, inputs: Mapping[str, Any]) -> Literal["tensor", "token", "block"]:
    if not _float8(inputs):
        raise Unsupported(f"{name}: input_activations are {inputs.get('num_bits')}-bit {inputs.get('type')}, not 8-bit float")
    kind = inputs.get("strategy")
    if strategy == "block":
        if kind == "group" and inputs.get("group_size") == BLOCK and inputs.get("dynamic"):
            return "block"
        raise Unsupported(f"{name}: block weights need input_activations of dynamic groups of {BLOCK}, got {dict(inputs)}")
    if inputs.get("dynamic"):
        if kind in ("token", "tensor"):  # a scale a token is at least as good as a dynamic one over all tokens
            return "token"
    elif kind == "tensor":
        return "tensor"
    raise Unsupported(f"{name}: input_activations with strategy {kind!r}, dynamic {inputs.get('dynamic')!r} are not read")


def _float8(part: Any) -> bool:
    return isinstance(part, Mapping) and part.get("num_bits") == 8 and part.get("type") == "float"


def _names(config: Mapping[str, Any], key: str) -> tuple[str, ...]:
    value = config.get(key) or ()
    if not isinstance(value, Sequence) or isinstance(value, str) or not all(isinstance(v, str) for v in value):
        raise Unsupported(f"{key} is {value!r}; a list of module names is expected")
    for pattern in value:
        try:
            re.compile(pattern.removeprefix("re:") if pattern.startswith("re:") else "")
        except re.error as error:
            raise Unsupported(f"{key} {pattern!r} is not a regular expression: {error}") from error
    return tuple(value)
