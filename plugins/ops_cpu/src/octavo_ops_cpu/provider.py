"""The two providers, and what they accept. Imports nothing heavy: torch and llvmlite load with the parts."""

from __future__ import annotations

import platform
from importlib.util import find_spec
from typing import Any

from octavo.catalog import Accept, Device, Needs, Provider, Reject

DTYPES = ("bfloat16", "float32")
MACHINES = ("x86_64", "AMD64")
MAX_WIDTH, MAX_GROUP = 256, 64
LANES = 16
"""float32 lanes of the widest vector that a kernel uses: rows of activations are whole numbers of them."""


def accepts_operators(needs: Needs, options: Any) -> Accept | Reject:
    """An x86 CPU with AVX2, in bfloat16 or float32; else the first need that cannot be met."""
    reason = unfit(needs.device, needs.dtype)
    if reason:
        return Reject(reason)
    hidden = needs.facts.get("hidden_size", LANES)
    if hidden % LANES:
        return Reject(f"hidden_size {hidden} is not a multiple of {LANES}")
    return Accept({}, f"each operator is one kernel; products: {_products(needs.device, needs.dtype)}")


def multiplies(device: Device, dtype: str) -> bool:
    """Whether products are this plugin's: in bfloat16, with AVX512_BF16, and not where oneDNN, which core and torch multiply
    with, has the faster AMX."""
    return dtype == "bfloat16" and "avx512_bf16" in device.features and "amx_bf16" not in device.features


def _products(device: Device, dtype: str) -> str:
    """Whose the products are, for explain."""
    if multiplies(device, dtype):
        return "this plugin's, with AVX512_BF16"
    if dtype != "bfloat16":
        return f"torch's, for {dtype}"
    return "torch's, for the CPU has " + ("AMX" if "amx_bf16" in device.features else "no AVX512_BF16")


def accepts_attention(needs: Needs, options: Any) -> Accept | Reject:
    """Every layer a full or windowed one of equal K and V width, with a cache of the model's dtype; else the first need that
    cannot be met."""
    reason = unfit(needs.device, needs.dtype)
    if reason:
        return Reject(reason)
    facts = needs.facts
    other = next((spec.kind for spec in facts.get("kv_specs") or () if spec.kind not in ("full", "window")), None)
    if other:
        return Reject(f"a layer has a KV cache of kind {other!r}; this backend keeps full and window caches")
    kv = facts.get("kv_dtype") or needs.dtype
    if kv != needs.dtype:
        return Reject(f"kv_dtype {kv} with {needs.dtype} queries: the cache must have the model's dtype")
    block = facts.get("block_size")
    if block is not None and block > LANES and block % LANES:
        return Reject(f"block_size {block}: it must be at most {LANES} or a multiple of it")
    reason = next(filter(None, map(_layer, facts.get("layers") or ())), "")
    if reason:
        return Reject(reason)
    prompts = f"{'this plugin' if multiplies(needs.device, needs.dtype) else 'core'}'s attention"
    return Accept(
        {"block_sizes": (16, 32, 64, 128, 8)}, f"rows with one new token read the cache where it lies; prompts: {prompts}"
    )


def _layer(layer: Any) -> str:
    if layer.k_dim != layer.v_dim:
        return f"layer {layer.index}: K is {layer.k_dim} wide and V {layer.v_dim}; they must be equal"
    if layer.k_dim % LANES or not LANES <= layer.k_dim <= MAX_WIDTH:
        return f"layer {layer.index}: heads are {layer.k_dim} wide, not a multiple of {LANES} from {LANES} to {MAX_WIDTH}"
    if layer.num_heads % layer.num_kv_heads or layer.num_heads // layer.num_kv_heads > MAX_GROUP:
        return (
            f"layer {layer.index}: {layer.num_heads} query heads for {layer.num_kv_heads} KV heads; at most {MAX_GROUP} for each"
        )
    return ""


def unfit(device: Device, dtype: str) -> str:
    """Why no kernel of this plugin can run, or ""."""
    if device.type != "cpu":
        return f"device is {device.type}: these kernels are for a CPU"
    if platform.system() != "Linux" or platform.machine() not in MACHINES:
        return f"{platform.system()} on {platform.machine()}: these kernels are for Linux on x86-64"
    if "avx2" not in device.features:
        return "the CPU has no AVX2"
    if dtype not in DTYPES:
        return f"dtype {dtype}: activations must be one of {', '.join(DTYPES)}"
    if find_spec("llvmlite") is None:
        return "llvmlite is not installed"
    return ""


operators_provider = Provider(
    name="cpu",
    kind="operators",
    load="octavo_ops_cpu.operators:CpuOperators",
    priority=15,
    accepts=accepts_operators,
    summary="Norms, SwiGLU, sampling, and bfloat16 products (x86-64 with AVX2; products with AVX512_BF16)",
)
attention_provider = Provider(
    name="cpu",
    kind="attention",
    load="octavo_ops_cpu.attention:CpuAttention",
    priority=15,
    accepts=accepts_attention,
    summary="Paged attention on x86-64 with AVX2; prompts too where products are this plugin's",
)
