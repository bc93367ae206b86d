"""The provider of latent attention (MLA): its name and what it accepts. Imports nothing heavy."""

from __future__ import annotations

from typing import Any, Literal

from octavo.catalog import Accept, Needs, Options, Provider, Reject
from pydantic import Field

DTYPES = ("bfloat16", "float16", "float32")
MAX_LATENT, MAX_ROPE = 512, 128


class LatentOptions(Options):
    """Options of the Triton latent attention (config key ``plugins.attention.triton_latent``)."""

    kernel: Literal["auto", "portable", "hopper"] = Field(
        "auto", description="Kernel; hopper is warp-specialised, for a 16-bit cache of 512 + 64 on capability 9."
    )


def hopper_fits(*, k_dim: int, v_dim: int, page: int, dtype: str, kv_dtype: str) -> bool:
    """Whether the warp-specialised kernel can read such a cache: 16-bit entries of 512 + 64, pages that tile 64 tokens or
    are tiled by them."""
    whole = page % 64 == 0 or 64 % page == 0
    return (k_dim, v_dim) == (576, 512) and whole and page >= 8 and dtype == kv_dtype and dtype in ("bfloat16", "float16")


def accepts(needs: Needs, options: Any) -> Accept | Reject:
    """Models whose every cache is latent, on CUDA of capability 8.0 or later; else the first need that cannot be met."""
    device, facts = needs.device, needs.facts
    kinds = {spec.kind for spec in facts.get("kv_specs") or ()}
    if kinds != {"latent"}:
        return Reject(f"the model's KV caches are {', '.join(sorted(kinds)) or 'unknown'}: this backend keeps latent ones only")
    several = next((spec.tokens_per_entry for spec in facts["kv_specs"] if spec.tokens_per_entry != 1), None)
    if several:
        return Reject(f"a latent entry stands for {several} tokens: this backend keeps one for each")
    if device.type != "cuda":
        return Reject(f"device is {device.type}: Triton attention needs CUDA")
    if device.capability < (8, 0):
        return Reject(f"CUDA capability {device.capability[0]}.{device.capability[1]} of {device.name!r} is below 8.0")
    if needs.dtype not in DTYPES:
        return Reject(f"dtype {needs.dtype}: queries must be one of {', '.join(DTYPES)}")
    kv = facts.get("kv_dtype") or needs.dtype
    if kv != needs.dtype:
        return Reject(f"kv_dtype {kv} with {needs.dtype} queries: a latent cache has the queries' dtype here")
    block = facts.get("block_size")
    if block is not None and not (8 <= block <= 256 and block % 8 == 0):
        return Reject(f"block_size {block}: it must be a multiple of 8 from 8 to 256")
    for layer in facts.get("layers") or ():
        reason = _layer(layer)
        if reason:
            return Reject(reason)
    fits = needs.device.capability[0] == 9 and all(
        hopper_fits(k_dim=layer.k_dim, v_dim=layer.v_dim, page=block or 64, dtype=needs.dtype, kv_dtype=kv)
        for layer in facts.get("layers") or ()
    )
    which = "Hopper" if fits and getattr(options, "kernel", "auto") != "portable" else "portable"
    return Accept({"block_sizes": (64, 128, 32, 16), "alignment": 16}, f"latent caches by the {which} kernel")


def _layer(layer: Any) -> str:
    rope = layer.k_dim - layer.v_dim
    if layer.num_kv_heads != 1:
        return f"layer {layer.index}: {layer.num_kv_heads} KV heads, a latent cache has one"
    if layer.v_dim % 16 or not 16 <= layer.v_dim <= MAX_LATENT:
        return f"layer {layer.index}: v_dim {layer.v_dim} is not a multiple of 16 from 16 to {MAX_LATENT}"
    if rope % 16 or not 16 <= rope <= MAX_ROPE:
        return f"layer {layer.index}: k_dim - v_dim is {rope}, not a multiple of 16 from 16 to {MAX_ROPE}"
    if layer.window is not None or layer.softcap or layer.sinks is not None:
        return f"layer {layer.index}: a window, soft-cap or sinks over a latent cache"
    return ""


provider = Provider(
    name="triton_latent",
    kind="attention",
    load="octavo_attention_triton.latent:TritonLatent",
    priority=20,
    accepts=accepts,
    options=LatentOptions,
    summary="Triton attention over a latent cache (MLA): split-KV decode and absorbed prefill (CUDA 8.0 and later)",
)
