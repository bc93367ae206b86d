"""What the backend knows of a layer once it is bound: its cache, the constants of its kernels, and its work map."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from octavo.interfaces import AttentionLayer

from octavo_attention_triton.geometry import PageGeometry
from octavo_attention_triton.provider import FP8
from octavo_attention_triton.tuning import Crowd, DecodeChoice

LOG2E = 1.4426950408889634


@dataclass(slots=True)
class WorkMap:
    """One decode work map: rows of one block table, cut for layers of one window, tile and head count. How steps run, by their
    crowd (octavo_attention_triton.tuning)."""

    window: int | None
    block_n: int
    kv_heads: int
    choices: dict[Crowd, DecodeChoice]
    items: torch.Tensor  # int32 [largest budget + max rows, ITEM]
    cuts: torch.Tensor  # int32 [max rows, INFO]


@dataclass(slots=True)
class Bound:
    """One layer, ready to launch: cache, constants of its kernels, and its work map."""

    layer: AttentionLayer
    group: int
    cache: torch.Tensor
    geometry: PageGeometry
    work: WorkMap
    sinks: torch.Tensor | None
    shape: dict[str, Any]  # constexprs that decode and prefill share
    descriptor: Any = None  # of the cache, or of the workspace, where the Hopper prefill kernel serves this layer
    wide_pages: int = 0  # that the workspace holds of this layer, if its cache is FP8 and the Hopper kernel serves it
    constants: dict[Any, tuple[Any, ...]] = field(default_factory=dict)  # of kernels launched before, as the launcher takes them

    def numbers(self) -> tuple[float, float, float]:
        """Softmax scale and soft-cap for scores in base 2, and the factor of V: a cache's scales are folded into them."""
        layer = self.layer
        k_scale, v_scale = (layer.k_scale, layer.v_scale) if self.geometry.dtype in FP8 else (1.0, 1.0)
        return layer.scale * k_scale * LOG2E, layer.softcap * LOG2E, v_scale
