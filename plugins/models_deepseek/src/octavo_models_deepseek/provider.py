"""The provider: its name and what it accepts. Imports nothing heavy: torch loads when a model is built."""

from __future__ import annotations

from typing import Any

from octavo.catalog import Accept, Needs, Provider, Reject
from octavo.errors import LoadError

from octavo_models_deepseek.config import FAMILIES, read_deepseek


def accepts(needs: Needs, options: Any) -> Accept | Reject:
    """Architectures of FAMILIES whose config says nothing that is unknown here."""
    name = needs.facts.get("architecture", "")
    if name not in FAMILIES:
        return Reject(f"architecture {name!r} is not one of {', '.join(FAMILIES)}")
    try:
        config = read_deepseek(needs.facts["config"])
    except LoadError as error:
        return Reject(str(error))
    entry = config.latent + config.rope.dim
    return Accept(reason=f"{name}: a latent cache of {entry} values a token and layer, whatever the {config.num_heads} heads")


provider = Provider(
    name="deepseek",
    kind="model",
    load="octavo_models_deepseek.adapter:DeepseekAdapter",
    priority=20,
    accepts=accepts,
    summary="DeepSeek: latent attention and mixture of experts: " + ", ".join(FAMILIES),
)


def accepts_triton(needs: Needs, options: Any) -> Accept | Reject:
    """Triton's devices: CUDA from 8.0."""
    device = needs.device
    if device.type != "cuda" or device.capability < (8, 0):
        return Reject(f"device is {device.type} {device.capability}: Triton operators need CUDA 8.0 or later")
    return Accept({}, "V4's hyper-connections, norms and rotations of heads")


OPERATORS = Provider(
    name="deepseek-triton",
    kind="operators",
    load="octavo_models_deepseek.kernels:TritonOperators",
    priority=22,
    accepts=accepts_triton,
    summary="Hyper-connections, norms and rotations of DeepSeek V4, a Triton kernel each (CUDA 8.0 and later)",
)
