"""Norm and rotation of V4's heads in plain torch: RoPE of pairs (2j, 2j + 1) of the trailing channels, before and after attention.

Owns the formulas of the operators "pair_turn" and "pair_join", for whoever offers nothing faster, and as its oracle.
"""

from __future__ import annotations

import torch
from octavo.interfaces import ModelParts
from octavo.model.linear import torch_device
from octavo.model.rope import RopeConfig
from octavo.model.rotary import inverse_frequencies
from torch import Tensor

Angles = tuple[Tensor, Tensor]
"""cos and sin float32 [T, rotated / 2]."""


class PairRotary:
    """RoPE of pairs (2j, 2j + 1) of the trailing dims. Turns are counted in float64: a million positions of a fast pair are
    more than float32 can tell apart."""

    def __init__(self, rope: RopeConfig, parts: ModelParts) -> None:
        self._frequencies = inverse_frequencies(rope).double().to(torch_device(parts.device))
        self._factor = rope.attention_factor

    def angles(self, positions: Tensor) -> Angles:
        turns = positions.double().unsqueeze(1) * self._frequencies
        return turns.cos().float() * self._factor, turns.sin().float() * self._factor


def rms(x: Tensor, eps: float, weight: Tensor | None = None) -> Tensor:
    """x over its last axis' root mean square, times weight if there is one; float32 within, x's dtype."""
    wide = x.float()
    wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + eps)
    return (wide if weight is None else wide * weight).to(x.dtype)


def pair_turn(
    x: Tensor,
    cos: Tensor,
    sin: Tensor,
    dtype: torch.dtype,
    *,
    eps: float | None = None,
    weight: Tensor | None = None,
    back: bool = False,
) -> Tensor:
    """x [T, heads, D], with eps first over its root mean square (times weight float32 [D] if there is one), its trailing pairs
    turned by the angles float32 [T, pairs], or turned back: in dtype, dense."""
    if eps is not None:
        x = rms(x, eps, weight)
    x = x.to(dtype)
    cos, sin = cos.unsqueeze(1), (-sin if back else sin).unsqueeze(1)
    width = 2 * cos.shape[-1]
    tail = x[..., -width:].float()
    even, odd = tail[..., 0::2], tail[..., 1::2]
    turned = torch.stack((even * cos - odd * sin, odd * cos + even * sin), -1).flatten(-2)
    return torch.cat((x[..., :-width], turned.to(dtype)), -1)


def pair_join(first: tuple[Tensor, Tensor], second: tuple[Tensor, Tensor], cos: Tensor, sin: Tensor) -> Tensor:
    """Attention over two sets of keys from the attention over each, [T, heads, D], and its log-sum-exp [T, heads], turned back
    by the angles. The second may have seen nothing (-inf)."""
    total = torch.logaddexp(first[1], second[1])
    shares = [(out.float() * (lse - total).exp().unsqueeze(-1)) for out, lse in (first, second)]
    dtype = first[0].dtype
    return pair_turn((shares[0] + shares[1]).to(dtype), cos, sin, dtype, back=True)
