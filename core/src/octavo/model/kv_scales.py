"""Scales of a float8 KV cache, as checkpoints carry them.

Owns the names under which they are stored, what they may be, and the one warning where there are none. A scale
multiplies what the cache holds; where it is applied is the attention backend's affair.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from torch import Tensor

from octavo.errors import LoadError
from octavo.interfaces import AttentionLayer, Weights

log = logging.getLogger(__name__)

NAMES: Mapping[str, tuple[str, ...]] = {
    "k_scale": ("k",),  # compressed-tensors, Quark
    "v_scale": ("v",),
    "k_proj.k_scale": ("k",),  # ModelOpt
    "v_proj.v_scale": ("v",),
    "k_proj.output_scale": ("k",),  # older compressed-tensors
    "v_proj.output_scale": ("v",),
    "kv_scale": ("k", "v"),  # AutoFP8; deprecated, one scale for both
}
"""Tensor name under the attention module -> which scales it is."""

SCALE_DTYPES = ("float32", "bfloat16", "float16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")


class KVScales:
    """The scales that the checkpoint has for these layers. Declares them, all optional: whether a float8 cache is asked
    for is not the checkpoint's decision, so they are read, and checked, in any case."""

    def __init__(self, weights: Weights, layers: Iterable[AttentionLayer]) -> None:
        self._found: dict[tuple[int, str], tuple[str, float]] = {}  # (layer, "k" or "v") -> (tensor name, scale)
        for layer in layers:
            if layer.module:
                for name, kinds in NAMES.items():
                    full = f"{layer.module}.{name}"
                    weights.declare(full, None, self._filler(full, layer, kinds), optional=True, dtypes=SCALE_DTYPES)

    def _filler(self, name: str, layer: AttentionLayer, kinds: tuple[str, ...]) -> Callable[[Tensor], None]:
        def fill(tensor: Tensor) -> None:
            value = _scale(name, tensor, layer.num_kv_heads)
            for kind in kinds:
                other = self._found.setdefault((layer.index, kind), (name, value))
                if other[1] != value:
                    raise LoadError(f"{name} is {value:g}, and {other[0]} says {other[1]:g} for the same cache; keep one of them")

        return fill

    def applied(self, layers: Mapping[int, AttentionLayer], kv_dtype: str) -> dict[int, AttentionLayer]:
        """The layers with their scales, where the cache is of `kv_dtype` (a torch dtype name) float8; as they are
        otherwise. Warns once of layers that have none: theirs stay 1."""
        if kv_dtype not in FLOAT8:
            return dict(layers)
        out = {}
        for index, layer in layers.items():
            k, v = (self._found.get((index, kind), ("", None))[1] for kind in ("k", "v"))
            out[index] = replace(layer, k_scale=layer.k_scale if k is None else k, v_scale=layer.v_scale if v is None else v)
        missing = [i for i in layers if (i, "k") not in self._found or (i, "v") not in self._found]
        if missing:
            which = "no KV scales" if len(missing) == len(layers) else f"no KV scales for {len(missing)} of {len(layers)} layers"
            log.warning(
                "the KV cache is %s and the checkpoint has %s: 1.0 is used; values past the format's range saturate "
                "(`octavo quantize fp8 MODEL --out DIR --calibrate FILE` makes a checkpoint that has them)",
                kv_dtype,
                which,
            )
        return out


def _scale(name: str, tensor: Tensor, heads: int) -> float:
    """One scale of a tensor that holds one, or one for each kv head, of which the largest covers all. LoadError, with the
    values, for another count and for what is not positive and finite."""
    values = tensor.float().flatten()
    if values.numel() not in (1, heads):
        raise LoadError(f"{name} has {values.numel()} values; one, or one for each of {heads} kv heads, is expected")
    if not bool((values.isfinite() & (values > 0)).all()):
        raise LoadError(f"{name} is {values.tolist()}; a scale must be positive and finite")
    return float(values.max())
