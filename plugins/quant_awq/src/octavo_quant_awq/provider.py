"""The providers: their names, options, and what they accept. Imports nothing heavy: torch and kernels load with the quantizer."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from importlib.util import find_spec
from typing import Any, Literal

from octavo.catalog import Accept, Device, Needs, Options, Provider, Reject
from octavo.errors import LoadError
from pydantic import Field, field_validator

from octavo_quant_awq.kernels.limits import NARROW_ROWS, OTHER_ROWS, RING_ROWS, SPLIT_ROWS, STATIONARY_ROWS, WARPGROUP_ROWS
from octavo_quant_awq.settings import GROUPS, Scheme, is_pack_quantized, read_awq, read_gptq, read_pack_quantized

DTYPES = ("bfloat16", "float16", "float32")


class FourBitOptions(Options):
    """Options of the 4-bit quantizers (config keys ``plugins.quantizer.awq``, ``.gptq`` and ``.pack-quantized``)."""

    kernel: Literal["auto", "cuda", "triton"] = Field(
        "auto", description="Kernel for few rows on a GPU; auto is cuda where CuPy is installed, else triton."
    )


class AwqMakeOptions(Options):
    """What `octavo quantize awq` takes (`--set KEY=VALUE`)."""

    group_size: int = Field(128, description="Inputs that share a scale: 32, 64, 128, or -1 for all.")
    zero_point: bool = Field(True, description="Store the zero point that fits; false keeps it at 8 (symmetric weights).")
    skip: tuple[str, ...] = Field((), description="Modules that stay plain, such as mlp.down_proj (commas between them).")
    search: bool = Field(True, description="Search scales and clips by activations; false is plain rounding.")
    samples: int = Field(128, ge=1, description="Windows of calibration text, at most.")
    window: int = Field(512, ge=16, description="Tokens of a window.")

    @field_validator("group_size")
    @classmethod
    def _known(cls, value: int) -> int:
        if value not in GROUPS:
            raise ValueError(f"must be one of {', '.join(map(str, GROUPS))}")
        return value

    @field_validator("skip", mode="before")
    @classmethod
    def _listed(cls, value: Any) -> Any:
        return tuple(part.strip() for part in value.split(",") if part.strip()) if isinstance(value, str) else value


def accepter(method: str, title: str, read: Callable[[Mapping[str, Any]], Scheme]) -> Callable[[Needs, Any], Accept | Reject]:
    """`accepts` of the provider of one dialect: its quant_method, settings that `read` takes, a device with a product."""

    def accepts(needs: Needs, options: Any) -> Accept | Reject:
        config, asked = needs.facts.get("config") or {}, needs.facts.get("method", "")
        if asked != method:
            return Reject(
                f"the weights' format is {asked!r}, this provider reads {method!r}" if asked else "the weights are plain"
            )
        dummy = bool(needs.facts.get("dummy"))
        if not config and not dummy:
            return Reject(
                f"the checkpoint's weights are plain, and {title} needs one that is quantised: give it as the model or with "
                "--awq-ckpt-path, or make one with `octavo quantize awq MODEL --out DIR`"
            )
        if needs.dtype not in DTYPES:
            return Reject(f"dtype {needs.dtype}: activations must be one of {', '.join(DTYPES)}")
        device = needs.device
        if device.type == "cuda" and (device.capability < (8, 0) or needs.dtype == "float32"):
            return Reject(
                f"on CUDA it takes capability 8.0 or later and bfloat16 or float16 activations, not {device.name!r} "
                f"({device.capability[0]}.{device.capability[1]}) and {needs.dtype}"
            )
        by = _served_by(device, options.kernel)
        if not config:
            return Accept(reason=f"random weights, as {title} of groups of 128 would store them; {by}")
        if method == "compressed-tensors" and not is_pack_quantized(config):
            return Reject(f"compressed-tensors of the format {config.get('format')!r}; this provider reads pack-quantized")
        try:
            scheme = read(config)
        except LoadError as error:
            return Reject(str(error))
        groups = "one group a row" if scheme.group == -1 else f"groups of {scheme.group}"
        return Accept(reason=f"{title}, {groups}, {'with' if scheme.zeros else 'without'} zero points; {by}")

    return accepts


def _served_by(device: Device, kernel: str) -> str:
    """Which kernel takes a step of how many rows."""
    if device.type != "cuda":
        return "torch's int4 operator for few rows of bfloat16, more are dequantised"
    if kernel == "triton" or (kernel == "auto" and find_spec("cupy") is None):
        return f"the Triton kernel up to {OTHER_ROWS} rows of a step, more are dequantised for cuBLAS"
    if device.capability[0] == 9:
        return (
            f"narrow.cu up to {NARROW_ROWS} rows of a step, stationary.cu or split.cu up to {max(STATIONARY_ROWS[1], SPLIT_ROWS[1])}, "
            f"ring.cu or warpgroup.cu up to {RING_ROWS}, warpgroup.cu up to {WARPGROUP_ROWS}, "
            "more are dequantised for cuBLAS"
        )
    return f"w4a16.cu up to {OTHER_ROWS} rows of a step, more are dequantised for cuBLAS"


PRIORITY = 20

awq = Provider(
    name="awq",
    kind="quantizer",
    load="octavo_quant_awq.quantizer:AwqQuantizer",
    priority=PRIORITY,
    accepts=accepter("awq", "AWQ", read_awq),
    options=FourBitOptions,
    summary="4-bit AWQ checkpoints (AutoAWQ gemm and gemv), and making them",
    quantize="octavo_quant_awq.make.command:quantize",
    quantize_options=AwqMakeOptions,
)

gptq = Provider(
    name="gptq",
    kind="quantizer",
    load="octavo_quant_awq.quantizer:GptqQuantizer",
    priority=PRIORITY,
    accepts=accepter("gptq", "GPTQ", read_gptq),
    options=FourBitOptions,
    summary="4-bit GPTQ checkpoints: symmetric, without act-order",
)

pack_quantized = Provider(
    name="pack-quantized",
    kind="quantizer",
    load="octavo_quant_awq.quantizer:PackQuantizer",
    priority=PRIORITY,
    accepts=accepter("compressed-tensors", "compressed-tensors pack-quantized", read_pack_quantized),
    options=FourBitOptions,
    summary="4-bit compressed-tensors checkpoints (pack-quantized), symmetric or not",
)
