"""The provider: its name, its options, and what it accepts. Imports nothing heavy: torch and triton load with the backend."""

from __future__ import annotations

from typing import Any, Literal

from octavo.catalog import Accept, Needs, Options, Provider, Reject
from pydantic import Field

from octavo_attention_triton.tuning import hopper_prefill_fits

DTYPES = ("bfloat16", "float16", "float32")
FP8 = ("float8_e4m3fn", "float8_e5m2")
MAX_DIM, MAX_GROUP = 256, 64


class TritonOptions(Options):
    """Options of the Triton attention backend (config key ``plugins.attention.triton``)."""

    row_align: int = Field(16, ge=16, le=256, multiple_of=16, description="Bytes that cache rows are rounded up to.")
    ctas_per_sm: int | None = Field(None, ge=1, le=16, description="Decode programs a multiprocessor that rows are split for.")
    merge: Literal["auto", "fused", "kernel"] = Field("auto", description="Who adds up the splits of a row.")
    fp8_v_transposed: bool = Field(
        True, description="Keep V of an FP8 cache as [head, dim, slot] (blocks of 64 tokens or a multiple)."
    )
    prefill: Literal["auto", "portable", "hopper"] = Field(
        "auto",
        description="Prefill kernel; hopper is warp-specialised, for dim 64 or 128 on capability 9; pages of an FP8 cache are widened for it, by auto only "
        "where a step has enough tokens.",
    )
    fp8_products: bool = Field(
        False,
        description="Multiply long prompts over an e4m3 cache in FP8 (capability 9, dim 128, no window): faster, and queries and weights are "
        "rounded to e4m3, too.",
    )
    shared_prefix_bytes: int = Field(
        64 << 20,
        ge=0,
        description="Bytes of a layer's cache that a decode step must save by reading shared prefixes once; the extra kernels take 10 to 20 us.",
    )


def accepts(needs: Needs, options: Any) -> Accept | Reject:
    """CUDA of capability 8.0 or later, and every shape of `layers`; else the first need that cannot be met."""
    device, facts = needs.device, needs.facts
    other = next((spec.kind for spec in facts.get("kv_specs") or () if spec.kind not in ("full", "window")), None)
    if other:
        return Reject(f"a layer has a KV cache of kind {other!r}; this backend keeps full and window caches")
    if device.type != "cuda":
        return Reject(f"device is {device.type}: Triton attention needs CUDA")
    if device.capability < (8, 0):
        return Reject(f"CUDA capability {device.capability[0]}.{device.capability[1]} of {device.name!r} is below 8.0")
    if needs.dtype not in DTYPES:
        return Reject(f"dtype {needs.dtype}: queries must be one of {', '.join(DTYPES)}")
    kv = facts.get("kv_dtype") or needs.dtype
    if kv not in (*DTYPES, *FP8):
        return Reject(f"kv_dtype {kv}: the cache must be one of {', '.join((*DTYPES, *FP8))}")
    if kv == "float8_e4m3fn" and device.capability < (8, 9):
        return Reject(f"kv_dtype {kv} needs CUDA capability 8.9, the device has {device.capability[0]}.{device.capability[1]}")
    if kv not in FP8 and kv != needs.dtype and needs.dtype != "float32":
        return Reject(f"kv_dtype {kv} with {needs.dtype} queries: use {needs.dtype} or an FP8 cache")
    block = facts.get("block_size")
    if block is not None and not (8 <= block <= 256 and block % 8 == 0):
        return Reject(f"block_size {block}: it must be a multiple of 8 from 8 to 256")
    for layer in facts.get("layers") or ():
        reason = _layer(layer)
        if reason:
            return Reject(reason)
    return Accept(
        {"block_sizes": (64, 128, 32, 16), "alignment": 16},
        f"a page of 64 tokens is one tile of the decode kernel, found by one look-up; prefill by the {_prefill(needs, kv, options)} kernel",
    )


def _prefill(needs: Needs, kv: str, options: Any) -> str:
    """Which prefill kernel the layers will get, for explain."""
    choice = getattr(options, "prefill", "auto")
    if choice == "portable" or needs.device.capability[0] != 9:
        return "portable"
    fits = {
        hopper_prefill_fits(
            k_dim=layer.k_dim,
            v_dim=layer.v_dim,
            page=needs.facts.get("block_size") or 64,
            group=layer.num_heads // layer.num_kv_heads,
            dtype=needs.dtype,
            kv_dtype=needs.dtype if kv in FP8 else kv,
            row_align=getattr(options, "row_align", 16),
        )
        for layer in needs.facts.get("layers") or ()
    }
    return "Hopper" if fits == {True} else "portable" if True not in fits else "Hopper or portable, by layer,"


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
    name="triton",
    kind="attention",
    load="octavo_attention_triton.backend:TritonAttention",
    priority=20,
    accepts=accepts,
    options=TritonOptions,
    summary="Triton paged attention: split-KV decode, chunked prefill, FP8 KV (CUDA 8.0 and later)",
)
