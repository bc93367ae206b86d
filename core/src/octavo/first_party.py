"""The distributions of this project, and which of them has a part or a weight format that is not installed.

For `auto`, which considers their providers without `plugins.enable`, and for the last words of an error. Names alone:
core imports no plugin.
"""

from __future__ import annotations

from collections.abc import Mapping
from importlib import metadata

PARTS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "octavo": {},
    "octavo-attention-triton": {"attention": ("triton", "triton_latent")},
    "octavo-attention-cupy": {"attention": ("cupy",)},
    "octavo-ops-cpu": {"attention": ("cpu",)},
    "octavo-ops-triton": {},
    "octavo-grammar-llguidance": {"grammar": ("llguidance",)},
    "octavo-quant-awq": {"quantizer": ("awq", "gptq", "pack-quantized")},
    "octavo-quant-fp8": {"quantizer": ("fp8",)},
    "octavo-models-deepseek": {"model": ("deepseek", "deepseek_v4", "deepseek_windowed")},
}
"""distribution -> kind -> the providers that can be named. Operators are never named."""

FORMATS: Mapping[str, tuple[str, ...]] = {
    "awq": ("octavo-quant-awq",),
    "gptq": ("octavo-quant-awq",),
    "pack-quantized": ("octavo-quant-awq",),
    "fp8": ("octavo-quant-fp8",),
    "fbgemm_fp8": ("octavo-quant-fp8",),
    "compressed-tensors": ("octavo-quant-fp8", "octavo-quant-awq"),
}
"""A checkpoint's quant_method, or a method that --quantization names -> the plugins that read it."""

FIRST_PARTY = frozenset(PARTS)


def owner(kind: str, name: str) -> str:
    """The tail of an error about a part that is not installed: who has one of this name, or nothing."""
    found = next((distribution for distribution, kinds in PARTS.items() if name in kinds.get(kind, ())), None)
    return f"; {found} has one of this name, and is not installed" if found else ""


def readers(method: str) -> str:
    """ "it is for octavo-quant-fp8, which is not installed": who reads a weight format, and whether any of them is here."""
    found = FORMATS.get(method)
    if found is None:
        return "no plugin of Octavo reads it"
    missing = not any(map(_installed, found))
    absent = "" if not missing else ", which is not installed" if len(found) == 1 else ", of which none is installed"
    return f"it is for {' or '.join(found)}{absent}"


def _installed(distribution: str) -> bool:
    return any(True for _ in metadata.distributions(name=distribution))
