"""The providers: names, options, and what they accept. Imports nothing heavy: torch and triton load with the parts."""

from __future__ import annotations

from typing import Any, Literal

from octavo.catalog import Accept, Device, Needs, Options, Provider, Reject
from pydantic import Field

from octavo_quant_fp8.scheme import Scheme, Unsupported, read_scheme

FP8_UNITS = (8, 9)
"""The least CUDA capability with FP8 matrix units (Ada; Hopper is 9.0)."""
LEAST = (8, 0)


class Fp8Options(Options):
    """Options of the FP8 quantizer (config key ``plugins.quantizer.fp8``)."""

    activations: Literal["auto", "none"] = Field(
        "auto",
        description="`none` leaves inputs in the model's dtype: weight-only FP8, slower for many rows and a little closer.",
    )
    head: bool = Field(
        False,
        description="Quantise the output head, too, of plain weights that are quantised while they load: half the bytes of what is a tenth of "
        "all, and a loss of its own.",
    )


class MakeOptions(Options):
    """Options of ``octavo quantize fp8``."""

    weights: Literal["channel", "tensor", "block"] = Field(
        "channel", description="One weight scale for each output channel, each matrix, or each 128 x 128 block."
    )
    activations: Literal["auto", "static", "dynamic", "none"] = Field(
        "auto",
        description="Input scales: measured once on the calibration text (static), computed for each token (dynamic), or none; "
        "auto is dynamic.",
    )
    kv_cache: bool = Field(True, description="Also write KV-cache scales; needs --calibrate, and is left out without it.")
    window: int = Field(1024, ge=16, description="Tokens of calibration text that are run at a time.")
    headroom: float = Field(
        1.0, gt=0, le=8, description="Calibrated scales are this much larger than the largest value seen needs."
    )


def has_units(device: Device) -> bool:
    """Whether the device multiplies FP8 matrices."""
    return device.type == "cuda" and device.capability >= FP8_UNITS


def accepts(needs: Needs, options: Any) -> Accept | Reject:
    """Every FP8 scheme that `read_scheme` knows, on a CPU (a reference, not for speed) and on CUDA from 8.0."""
    device = needs.device
    try:
        scheme = read_scheme(str(needs.facts.get("method", "")), needs.facts.get("config") or {})
    except Unsupported as reason:
        return Reject(str(reason))
    if device.type not in ("cpu", "cuda"):
        return Reject(f"device is {device.type}: FP8 runs on CUDA and, as a reference, on a CPU")
    if device.type == "cuda":
        if device.capability < LEAST:
            return Reject(f"CUDA capability {device.capability[0]}.{device.capability[1]} of {device.name!r} is below 8.0")
        if needs.dtype not in ("bfloat16", "float16"):
            return Reject(f"dtype {needs.dtype}: the kernels give bfloat16 or float16; choose one with --dtype")
    preferences: dict[str, Any] = {"linear_bytes": 1} if device.type == "cuda" else {}
    if scheme.kv_cache:
        preferences["kv_cache_dtype"] = "float8_e4m3fn"
    return Accept(preferences, _describe(scheme, device, options))


def _describe(scheme: Scheme, device: Device, options: Fp8Options) -> str:
    where = {"tensor": "each matrix", "channel": "each output channel", "block": "each 128 x 128 block"}[scheme.weight]
    text = f"{scheme.source}, a weight scale for {where}"
    if device.type == "cpu":
        return f"{text}; on a CPU the arithmetic is FP8's and the speed is not"
    if options.activations == "none" or scheme.activation == "none":
        return f"{text}; weights only"
    if not has_units(device):
        major, minor = device.capability
        return f"{text}; weights only, since capability {major}.{minor} has no FP8 units (8.9 and later)"
    inputs = {
        "tensor": "static inputs",
        "token": "inputs quantised by token",
        "block": "inputs quantised by token and 128 channels",
    }
    return f"{text}, {inputs[scheme.activation]}"


def accepts_torch(needs: Needs, options: Any) -> Accept | Reject:
    """Anywhere: these are what the fused ones are compared with."""
    return Accept({}, "operators that quantise their result")


def accepts_triton(needs: Needs, options: Any) -> Accept | Reject:
    """CUDA with FP8 units."""
    device = needs.device
    if device.type != "cuda":
        return Reject(f"device is {device.type}: Triton operators need CUDA")
    if not has_units(device):
        return Reject(f"CUDA capability {device.capability[0]}.{device.capability[1]} has no FP8 units: activations stay plain")
    if needs.dtype not in ("bfloat16", "float16"):
        return Reject(f"dtype {needs.dtype}: activations must be bfloat16 or float16")
    return Accept({}, "norm and SwiGLU write FP8")


QUANTIZER = Provider(
    name="fp8",
    kind="quantizer",
    load="octavo_quant_fp8.quantizer:Fp8Quantizer",
    priority=20,
    accepts=accepts,
    options=Fp8Options,
    summary="FP8 weights: compressed-tensors, AutoFP8, block FP8, FBGEMM, and plain weights quantised while they load",
    quantize="octavo_quant_fp8.make:make",
    quantize_options=MakeOptions,
)

OPERATORS = (
    Provider(
        name="fp8-torch",
        kind="operators",
        load="octavo_quant_fp8.operators:TorchOperators",
        priority=2,
        accepts=accepts_torch,
        summary="Norms and SwiGLU whose result is FP8, in plain torch",
    ),
    Provider(
        name="fp8-triton",
        kind="operators",
        load="octavo_quant_fp8.fused:TritonOperators",
        priority=21,
        accepts=accepts_triton,
        summary="Norms and SwiGLU whose result is FP8, one Triton kernel each (CUDA 8.9 and later)",
    ),
)
