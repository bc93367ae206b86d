"""Compressed entries (DeepSeek V4): a window of tokens becomes one entry of the cache when it closes.

Owns the order of things and an entry's norm and rotation: a step's projections are stored beside those of windows that earlier
steps left open, and every window that closes in this step is made into an entry from there (`SparseBackend.compress`). So an entry
does not depend on which steps its tokens came in. Stateless between steps.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from octavo.interfaces import ModelParts, Step
from octavo.model.parameter import Parameter
from torch import Tensor

from octavo_models_deepseek.turn import Angles, PairRotary, pair_turn
from octavo_models_deepseek.v4_config import Cache, V4Config


class Compressor:
    """x -> the entries of all windows that close in the step. `overlapping`: an entry is made of two windows' tokens, the
    first half of the one before and the second half of its own. Its projections are never quantised."""

    def __init__(
        self, name: str, config: V4Config, cache: Cache, rate: int, dim: int, rotary: PairRotary, parts: ModelParts
    ) -> None:
        width = cache.layer.v_dim
        self._rate, self._overlapping = rate, width == 2 * dim
        hidden = config.hidden_size
        self._parameters = (
            Parameter(f"{name}.wkv.weight", (width, hidden), parts),
            Parameter(f"{name}.wgate.weight", (width, hidden), parts),
            Parameter(f"{name}.ape", (rate, width), parts, torch.float32),
            Parameter(f"{name}.norm.weight", (dim,), parts, torch.float32),
        )
        self._eps, self._rotary = config.norm_eps, rotary
        self._turn = parts.find("pair_turn") or pair_turn
        self._parts = parts.attention(cache.layer)

    def finish(self) -> None:
        key, gate, self._places, self._norm = (parameter.get() for parameter in self._parameters)
        self._matrix = torch.cat((key, gate))

    def __call__(self, step: Step, x: Tensor) -> Tensor:
        """x [T, H] -> [T, 1, dim]: of every token that closes a window its entry, of all others anything."""
        both = F.linear(x, self._matrix).unsqueeze(1)
        self._parts.store(step, both, both[..., : both.shape[-1] // 2])  # type: ignore[attr-defined]
        made = self._parts.compress(step, self._places, overlapping=self._overlapping)  # type: ignore[attr-defined]
        entries: Tensor = self._turn(made.unsqueeze(1), *self._angles(step), x.dtype, eps=self._eps, weight=self._norm)
        return entries

    def _angles(self, step: Step) -> Angles:
        """Those of every token's window if it closes with the token: of the window's first token. Once a step for all layers."""
        key = f"deepseek_v4.angles.{self._rate}"
        if key not in step.scratch:
            step.scratch[key] = self._rotary.angles((step.positions + 1 - self._rate).clamp_(min=0))
        angles: Angles = step.scratch[key]
        return angles
