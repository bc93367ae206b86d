"""The provider: its name, its options, and what it accepts. Imports nothing heavy: torch and cupy load with the backend."""

from __future__ import annotations

import ctypes
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any, Literal

from octavo.catalog import Accept, Needs, Options, Provider, Reject
from pydantic import Field

DRIVER = "nvcuda.dll" if sys.platform == "win32" else "libcuda.so.1"
DTYPES = ("bfloat16", "float16")
FP8 = ("float8_e4m3fn", "float8_e5m2")
MAX_DIM, MAX_GROUP = 256, 64


class CupyOptions(Options):
    """Options of the CUDA attention backend (config key ``plugins.attention.cupy``)."""

    prefill: Literal["auto", "portable", "hopper"] = Field(
        "auto",
        description="Prefill kernel; auto takes wgmma on capability 9.0 for dims 64 and 128, over an FP8 cache where chunks are long enough "
        "to widen its pages first; hopper widens for short ones too, and is an error for other dims and chips.",
    )
    cache_dir: Path | None = Field(
        None, description="Where compiled kernels are kept; default: octavo/cupy under XDG_CACHE_HOME."
    )


def missing() -> str:
    """What this machine lacks, for the inventory; empty where kernels can be compiled and launched. Initialises no device."""
    if find_spec("cupy") is None:
        return "cupy is not installed"
    try:
        ctypes.CDLL(DRIVER)
    except OSError:
        return f"there is no CUDA driver ({DRIVER})"
    return ""


def accepts(needs: Needs, options: Any) -> Accept | Reject:
    """CUDA of capability 8.0 or later (8.9 for FP8 caches), and every shape of `layers`; else the first need that cannot be met."""
    device, facts = needs.device, needs.facts
    if device.type != "cuda":
        return Reject(f"device is {device.type}: raw CUDA attention needs a CUDA device")
    if device.capability < (8, 0):
        return Reject(f"CUDA capability {device.capability[0]}.{device.capability[1]} of {device.name!r} is below 8.0")
    if find_spec("cupy") is None:
        return Reject("cupy is not installed: the kernels are compiled and loaded through it (pip install cupy-cuda13x)")
    if needs.dtype not in DTYPES:
        return Reject(f"dtype {needs.dtype}: queries must be one of {', '.join(DTYPES)}")
    kv = facts.get("kv_dtype") or needs.dtype
    if kv in FP8 and device.capability < (8, 9):
        return Reject(f"kv_dtype {kv} needs CUDA capability 8.9, the device has {device.capability[0]}.{device.capability[1]}")
    if kv not in FP8 and kv != needs.dtype:
        return Reject(f"kv_dtype {kv} with {needs.dtype} queries: the cache must be {needs.dtype} or one of {', '.join(FP8)}")
    block = facts.get("block_size")
    if block is not None and not (8 <= block <= 256 and block % 8 == 0):
        return Reject(f"block_size {block}: it must be a multiple of 8 from 8 to 256")
    for spec in facts.get("kv_specs") or ():
        if spec.kind not in ("full", "window") or spec.tokens_per_entry != 1:
            return Reject(
                f"a layer has a KV cache of kind {spec.kind} with {spec.tokens_per_entry} tokens an entry: this backend holds K and V of "
                "every token"
            )
    for layer in facts.get("layers") or ():
        reason = _layer(layer)
        if reason:
            return Reject(reason)
    copies = "bulk copies" if device.capability >= (9, 0) else "16-byte asynchronous copies"
    return Accept(
        {"block_sizes": (64, 128, 32, 16), "alignment": 16}, f"decode through {copies}, one run of memory a page and head"
    )


def _layer(layer: Any) -> str:
    for name in ("k_dim", "v_dim"):
        dim = getattr(layer, name)
        if dim > MAX_DIM or dim % 16 or dim < 16:
            return f"layer {layer.index}: {name} {dim} is not a multiple of 16 from 16 to {MAX_DIM}"
    if layer.num_heads % layer.num_kv_heads:
        return f"layer {layer.index}: {layer.num_heads} query heads are not a multiple of {layer.num_kv_heads} KV heads"
    if layer.num_heads // layer.num_kv_heads > MAX_GROUP:
        return f"layer {layer.index}: {layer.num_heads // layer.num_kv_heads} query heads a KV head, at most {MAX_GROUP}"
    if layer.window is not None and layer.window < 1:
        return f"layer {layer.index}: window {layer.window} is not positive"
    return ""


provider = Provider(
    name="cupy",
    kind="attention",
    load="octavo_attention_cupy.backend:CupyAttention",
    priority=15,
    accepts=accepts,
    options=CupyOptions,
    summary="Paged attention in CUDA C++ through CuPy: persistent split-KV decode, prefill, FP8 KV (CUDA 8.0 and later)",
)
