"""Hyper-connections (DeepSeek V4): a residual of several lanes, mixed before and after every block.

Owns the three sets of weights that a block's lanes decide: how they become its input, how its output goes back to them, and
how they mix (a doubly stochastic matrix, by Sinkhorn and Knopp). All float32.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from octavo.interfaces import ModelParts
from octavo.model.parameter import Parameter
from torch import Tensor

from octavo_models_deepseek.v4_config import V4Config


def flat_norm(lanes: Tensor, eps: float) -> Tensor:
    """lanes [T, lanes, H] side by side, divided by their root mean square: [T, lanes * H]."""
    flat = lanes.flatten(1)
    return flat * torch.rsqrt(flat.square().mean(-1, keepdim=True) + eps)


def hyper_open(
    lanes: Tensor, weights: Tensor, base: Tensor, scale: Tensor, turns: int, eps: float, norm_eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """What a block is given of float32 lanes [T, n, H]: its input [T, H], the shares [T, n] in which its output goes back, and
    the mixing matrix [T, n, n]. weights float32 [T, (2 + n) n] is the product of the lanes, side by side and not normalised,
    with the connection's matrix; base [(2 + n) n] and scale [3] are the connection's."""
    count = lanes.shape[1]
    norm = torch.rsqrt(lanes.flatten(1).square().mean(-1, keepdim=True) + norm_eps)
    sizes = [count, count, count**2]
    parts = zip((weights * norm).split(sizes, -1), scale.unbind(), base.split(sizes), strict=True)
    into, back, mix = (w * s + b for w, s, b in parts)
    into = torch.sigmoid(into) + eps
    mix = mix.view(-1, count, count).softmax(-1) + eps
    mix = mix / (mix.sum(-2, keepdim=True) + eps)
    for _ in range(turns - 1):
        mix = mix / (mix.sum(-1, keepdim=True) + eps)
        mix = mix / (mix.sum(-2, keepdim=True) + eps)
    return (into.unsqueeze(-1) * lanes).sum(1), 2 * torch.sigmoid(back), mix


def hyper_close(lanes: Tensor, out: Tensor, back: Tensor, mix: Tensor) -> Tensor:
    """The lanes [T, n, H] after the block's output [T, H], which may be in the model's dtype."""
    return back.unsqueeze(-1) * out.float().unsqueeze(1) + mix.transpose(1, 2) @ lanes


class HyperConnection:
    """Around one block: `open` gives its input, `close` the lanes after it. Weights: `name`_fn, _base, _scale. Whoever offers the
    operators of these two names computes them."""

    def __init__(self, name: str, config: V4Config, parts: ModelParts) -> None:
        lanes = config.lanes
        width = (2 + lanes) * lanes
        shapes = {"fn": (width, lanes * config.hidden_size), "base": (width,), "scale": (3,)}
        self._parameters = [Parameter(f"{name}_{kind}", shape, parts, torch.float32) for kind, shape in shapes.items()]
        self._turns, self._eps, self._norm_eps = config.sinkhorn, config.lane_eps, config.norm_eps
        self._open = parts.find("hyper_open") or hyper_open
        self._close = parts.find("hyper_close") or hyper_close

    def finish(self) -> None:
        self._fn, self._base, self._scale = (parameter.get() for parameter in self._parameters)

    def open(self, lanes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """float32 lanes [T, n, H] -> (the block's input [T, H], shares [T, n] of its output, mixing matrix [T, n, n])."""
        weights = F.linear(lanes.flatten(1), self._fn)
        found: tuple[Tensor, Tensor, Tensor] = self._open(
            lanes, weights, self._base, self._scale, self._turns, self._eps, self._norm_eps
        )
        return found

    def close(self, lanes: Tensor, out: Tensor, back: Tensor, mix: Tensor) -> Tensor:
        """The lanes [T, n, H] after the block's output [T, H]."""
        after: Tensor = self._close(lanes, out, back, mix)
        return after


class HyperHead:
    """The lanes as one hidden state, after the last layer."""

    def __init__(self, config: V4Config, parts: ModelParts) -> None:
        n = config.lanes
        shapes = {"fn": (n, n * config.hidden_size), "base": (n,), "scale": (1,)}
        self._parameters = [Parameter(f"hc_head_{kind}", shape, parts, torch.float32) for kind, shape in shapes.items()]
        self._eps, self._norm_eps = config.lane_eps, config.norm_eps

    def finish(self) -> None:
        self._fn, self._base, self._scale = (parameter.get() for parameter in self._parameters)

    def __call__(self, lanes: Tensor) -> Tensor:
        """float32 [T, n, H] -> [T, H]."""
        share = torch.sigmoid(F.linear(flat_norm(lanes, self._norm_eps), self._fn) * self._scale + self._base) + self._eps
        return (share.unsqueeze(-1) * lanes).sum(1)
