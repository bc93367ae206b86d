"""The operators that this plugin offers, bound to one launcher.

Owns which (name, format) there are; arithmetic is in kernels/, signatures are those of
`octavo.model.operators` (`draw` and `small_linear` have no counterpart there: their functions say what
they compute; those of `decode_inputs` and `matrix` are in `octavo.engine.inputs` and `octavo.model.matrix`). Holds no state but compiled kernels.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from typing import Any

from octavo.interfaces import OperatorParts

from octavo_ops_triton.ahead import compile_ahead, usable
from octavo_ops_triton.kernels import activation, angles, draw, embedding, inputs, linear, norm, rope, spread
from octavo_ops_triton.launch import Launcher
from octavo_ops_triton.matrix import HopperMatrices
from octavo_ops_triton.moe import GroupedExperts, route
from octavo_ops_triton.provider import TritonOptions


class TritonOperators:
    """interfaces.Operators on Triton kernels. Nothing here waits for the device, and all of it may be captured."""

    def __init__(self, options: TritonOptions, parts: OperatorParts) -> None:
        launcher = Launcher(pdl=options.pdl and parts.device.type == "cuda" and parts.device.capability >= (9, 0))
        functions: dict[str, Callable[..., Any]] = {
            "embedding": embedding.embedding,
            "rms_norm": norm.rms_norm,
            "add_rms_norm": norm.add_rms_norm,
            "qk_norm_rope": rope.qk_norm_rope,
            "qk_norm_rope_spread": spread.qk_norm_rope_spread,
            "spread": spread.spread,
            "silu_mul": activation.silu_mul,
            "gelu_tanh_mul": activation.gelu_tanh_mul,
            "draw": draw.draw,
            "rope_angles": angles.rope_angles,
            "decode_inputs": inputs.decode_inputs,
        }
        grouped, small = GroupedExperts(launcher), linear.SmallLinear(launcher)
        self.ops: Mapping[tuple[str, str], Callable[..., Any]] = {
            ("small_linear", "plain"): small,
            **({("matrix", "plain"): HopperMatrices(small, launcher)} if _is_hopper(parts) else {}),
            ("route", "plain"): partial(route, launcher),
            ("experts", "plain"): grouped,
            **({("compile_ahead", "plain"): compile_ahead} if parts.device.type == "cuda" and usable() else {}),
            **({("experts_fp8", "plain"): grouped} if _has_e4m3(parts) else {}),
            **{(name, "plain"): partial(function, launcher) for name, function in functions.items()},
        }


def _is_hopper(parts: OperatorParts) -> bool:
    """Whether the device has the matrix units and the copy engine that `kernels.hopper_product` is written for."""
    return parts.device.type == "cuda" and parts.device.capability[0] == 9


def _has_e4m3(parts: OperatorParts) -> bool:
    """Whether Triton converts e4m3 on this device: from capability 8.9 on."""
    return parts.device.type != "cuda" or parts.device.capability >= (8, 9)
