"""The provider of latent attention (MLA): its name and what it accepts. Imports nothing heavy."""

from __future__ import annotations

from typing import Any, Literal

from octavo.catalog import Accept, Needs, Options, Provider, Reject
from pydantic import Field

DTYPES = ("bfloat16", "float16", "float32")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
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


def shares_keys(layer: Any, tokens_per_entry: int) -> bool:
    """Whether every token of the layer sees all keys before it, a prefix of which is common to all: what tiles are shared for."""
    plain = layer.window is None and layer.sinks is None and not layer.has_sinks and tokens_per_entry == 1
    return bool(layer.num_heads and plain and layer.k_dim > layer.v_dim)


def accepts(needs: Needs, options: Any) -> Accept | Reject:
    """Models whose every cache is latent, on CUDA of capability 8.0 or later; else the first need that cannot be met."""
    device, facts = needs.device, needs.facts
    specs = facts.get("kv_specs") or ()
    kinds = {spec.kind for spec in specs}
    if kinds != {"latent"}:
        return Reject(f"the model's KV caches are {', '.join(sorted(kinds)) or 'unknown'}: this backend keeps latent ones only")
    if device.type != "cuda":
        return Reject(f"device is {device.type}: Triton attention needs CUDA")
    if device.capability < (8, 0):
        return Reject(f"CUDA capability {device.capability[0]}.{device.capability[1]} of {device.name!r} is below 8.0")
    if needs.dtype not in DTYPES:
        return Reject(f"dtype {needs.dtype}: queries must be one of {', '.join(DTYPES)}")
    kv = facts.get("kv_dtype") or needs.dtype
    if kv in FLOAT8 and device.capability < (8, 9):
        return Reject(f"kv_dtype {kv} needs CUDA capability 8.9, the device has {device.capability[0]}.{device.capability[1]}")
    if kv != needs.dtype and kv not in FLOAT8:
        return Reject(
            f"kv_dtype {kv} with {needs.dtype} queries: a latent cache has the queries' dtype here, or is one of {', '.join(FLOAT8)}"
        )
    block = facts.get("block_size")
    if block is not None and not (8 <= block <= 256 and block % 8 == 0):
        return Reject(f"block_size {block}: it must be a multiple of 8 from 8 to 256")
    layers = facts.get("layers") or ()
    for layer in layers:
        reason = _layer(layer)
        if reason:
            return Reject(reason)
    dense = [layer for layer, spec in zip(layers, specs, strict=True) if shares_keys(layer, spec.tokens_per_entry)]
    fits = device.capability[0] == 9 and all(
        hopper_fits(k_dim=layer.k_dim, v_dim=layer.v_dim, page=block or 64, dtype=needs.dtype, kv_dtype=kv) for layer in dense
    )
    which = "Hopper" if fits and dense and getattr(options, "kernel", "auto") != "portable" else "portable"
    rest = f", {len(layers) - len(dense)} of {len(layers)} token by token" if len(dense) < len(layers) else ""
    return Accept({"block_sizes": (64, 128, 32, 16, 8), "alignment": 16}, f"latent caches by the {which} kernel{rest}")


def _layer(layer: Any) -> str:
    rope = layer.k_dim - layer.v_dim
    if layer.num_kv_heads != 1:
        return f"layer {layer.index}: {layer.num_kv_heads} KV heads, a latent cache has one"
    if not layer.num_heads:
        return ""  # stored and read alone
    if layer.v_dim % 16 or not 16 <= layer.v_dim <= MAX_LATENT:
        return f"layer {layer.index}: v_dim {layer.v_dim} is not a multiple of 16 from 16 to {MAX_LATENT}"
    if rope and (rope % 16 or not 16 <= rope <= MAX_ROPE):
        return f"layer {layer.index}: k_dim - v_dim is {rope}, not 0 and not a multiple of 16 from 16 to {MAX_ROPE}"
    if layer.softcap:
        return f"layer {layer.index}: a soft-cap over a latent cache"
    return ""


provider = Provider(
    name="triton_latent",
    kind="attention",
    load="octavo_attention_triton.latent:TritonLatent",
    priority=20,
    accepts=accepts,
    options=LatentOptions,
    summary="Triton attention over latent caches (MLA): split-KV decode, absorbed prefill, chosen keys (CUDA 8.0 and later)",
)
