"""The provider: its name, its options, and what it accepts. Imports nothing heavy: torch and triton load with the operators."""

from __future__ import annotations

from typing import Any

from octavo.catalog import Accept, Needs, Options, Provider, Reject
from pydantic import Field

DTYPES = ("bfloat16", "float16", "float32")


class TritonOptions(Options):
    """Options of the Triton operators (config key ``plugins.operators.triton``)."""

    pdl: bool = Field(
        True,
        description="Let a kernel start while its predecessor ends (programmatic dependent launch; capability 9.0 and later).",
    )


def accepts(needs: Needs, options: Any) -> Accept | Reject:
    """CUDA of capability 8.0 or later in a 16-bit dtype or float32; else the first need that cannot be met."""
    device = needs.device
    if device.type != "cuda":
        return Reject(f"device is {device.type}: Triton operators need CUDA")
    if device.capability < (8, 0):
        return Reject(f"CUDA capability {device.capability[0]}.{device.capability[1]} of {device.name!r} is below 8.0")
    if needs.dtype not in DTYPES:
        return Reject(f"dtype {needs.dtype}: activations must be one of {', '.join(DTYPES)}")
    return Accept({}, "each operator is one kernel, and sampling is one pass over the logits")


provider = Provider(
    name="triton",
    kind="operators",
    load="octavo_ops_triton.operators:TritonOperators",
    priority=20,
    accepts=accepts,
    options=TritonOptions,
    summary="Triton norms, QK-norm with RoPE, SwiGLU, embedding, sampling, one-row linear (CUDA 8.0 and later)",
)
