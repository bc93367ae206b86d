"""In which precision an engine computes and keeps K and V, and whether keys are spread before they are rounded.

Owns the meaning of --dtype, --kv-cache-dtype and --kv-cache-spread. Part of the plan: allocates nothing.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from octavo.catalog import Device
from octavo.engine.device import BF16_UNITS
from octavo.errors import ConfigError
from octavo.interfaces import AttentionBackend, AttentionLayer

if TYPE_CHECKING:
    from octavo.model.source import ModelSource

DTYPES = {"float": "float32", "half": "float16"}
"""Flags' other names for torch's."""

KV_DTYPES = {
    "fp8": "float8_e4m3fn",
    "fp8_e4m3": "float8_e4m3fn",
    "fp8_e5m2": "float8_e5m2",
    "float8_e4m3fn": "float8_e4m3fn",
    "float8_e5m2": "float8_e5m2",
    "float32": "float32",
    "bfloat16": "bfloat16",
    "float16": "float16",
}


def model_dtype(asked: str, source: ModelSource, device: Device) -> tuple[str, str]:
    """(torch dtype name, why): the one asked for, or the checkpoint's."""
    name, reason = DTYPES.get(asked, asked), "named in the configuration"
    if asked == "auto" and source.kind == "gguf":
        units = sorted(BF16_UNITS & device.features)
        if device.type == "cpu":
            name = "bfloat16" if units else "float32"
            reason = (
                f"the file is GGUF and this CPU has {units[0]}"
                if units
                else "the file is GGUF and this CPU has no bfloat16 units"
            )
        else:
            name = "bfloat16" if "bf16" in device.features else "float16"
            reason = f"the file is GGUF and {device.name} {'has' if name == 'bfloat16' else 'lacks'} bfloat16"
    elif asked == "auto":
        given = source.dtype
        name = given or "float32"
        reason = "the checkpoint's" if given else "the checkpoint names no dtype, which stands for float32"
    if name not in ("float32", "bfloat16", "float16"):
        raise ConfigError(f"the checkpoint's dtype {name!r} is none that Octavo computes in; choose one with --dtype")
    if name == "bfloat16" and device.type == "cuda" and "bf16" not in device.features:
        raise ConfigError(
            f"{device.name} (capability {device.capability}) cannot compute in bfloat16 ({reason}); use --dtype float16"
        )
    if name == "bfloat16" and device.type == "cpu" and not BF16_UNITS & device.features:
        reason += "; this CPU has no bfloat16 units, --dtype float32 may be faster"
    return name, reason


def cache_dtype(asked: str, dtype: str, stored: str | None = None) -> tuple[str, str]:
    """(torch dtype name, why): the one asked for, else the one that the checkpoint has scales for, else the model's."""
    if asked == "auto":
        return (stored, "the checkpoint was made for it and has its scales") if stored else (dtype, "the model's")
    try:
        return KV_DTYPES[asked], "named in the configuration"
    except KeyError:
        raise ConfigError(f"--kv-cache-dtype {asked}: must be auto or one of {', '.join(KV_DTYPES)}") from None


def spread_keys(asked: str, kv_dtype: str, *, latent: bool) -> tuple[bool, str]:
    """Whether keys are spread before the cache rounds them, and why. latent: every layer's cache is."""
    if not kv_dtype.startswith("float8"):
        if asked == "always":
            raise ConfigError(
                f"--kv-cache-spread always: the KV cache is {kv_dtype}, whose rounding needs no help; give --kv-cache-dtype fp8_e4m3 or fp8_e5m2"
            )
        return False, f"nothing to gain in {kv_dtype}"
    if latent:
        if asked == "always":
            raise ConfigError(
                "--kv-cache-spread always: the model's caches are latent, whose keys are their values too; leave the flag out"
            )
        return False, "latent caches are not spread: their keys are their values too"
    if asked != "auto":
        return asked == "always", "named in the configuration"
    bits = "two" if kv_dtype == "float8_e5m2" else "three"
    return True, f"keys have {bits} bits of mantissa: spread, they give scores less than half the error"


def spreader(name: str, backend: AttentionBackend, layers: Sequence[AttentionLayer]) -> str:
    """What spreads the heads of these layers under a backend of this name."""
    from octavo.attention.layer import prologue_spreads

    left = [layer for layer in layers if not prologue_spreads(backend, layer)]
    if not left:
        return f"the kernel of {name} that stores keys"
    widths = ", ".join(str(width) for width in sorted({layer.k_dim for layer in left}))
    fused = hasattr(backend, "prologue")
    lacks = f"stores heads of {widths} channels as they are" if fused else "has no kernel that turns keys as it stores them"
    return f"a kernel a layer of its own: {name} {lacks}"
