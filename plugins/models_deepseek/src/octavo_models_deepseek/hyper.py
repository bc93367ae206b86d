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


class HyperConnection:
    """Around one block: `open` gives its input, `close` the lanes after it. Weights: `name`_fn, _base, _scale."""

    def __init__(self, name: str, config: V4Config, parts: ModelParts) -> None:
        lanes = config.lanes
        width = (2 + lanes) * lanes
        shapes = {"fn": (width, lanes * config.hidden_size), "base": (width,), "scale": (3,)}
        self._parameters = [Parameter(f"{name}_{kind}", shape, parts, torch.float32) for kind, shape in shapes.items()]
        self._lanes, self._turns = lanes, config.sinkhorn
        self._eps, self._norm_eps = config.lane_eps, config.norm_eps

    def finish(self) -> None:
        self._fn, base, scale = (parameter.get() for parameter in self._parameters)
        sizes = [self._lanes, self._lanes, self._lanes**2]
        self._sizes, self._bases, self._scales = sizes, base.split(sizes), scale.unbind()

    def open(self, lanes: Tensor) -> tuple[Tensor, Tensor, Tensor]:
        """float32 lanes [T, n, H] -> (the block's input [T, H], shares [T, n] of its output, mixing matrix [T, n, n])."""
        weights = F.linear(flat_norm(lanes, self._norm_eps), self._fn).split(self._sizes, -1)
        into, back, mix = (w * s + b for w, s, b in zip(weights, self._scales, self._bases, strict=True))
        into = torch.sigmoid(into) + self._eps
        mix = mix.view(-1, self._lanes, self._lanes).softmax(-1) + self._eps
        mix = mix / (mix.sum(-2, keepdim=True) + self._eps)
        for _ in range(self._turns - 1):
            mix = mix / (mix.sum(-1, keepdim=True) + self._eps)
            mix = mix / (mix.sum(-2, keepdim=True) + self._eps)
        return (into.unsqueeze(-1) * lanes).sum(1), 2 * torch.sigmoid(back), mix

    def close(self, lanes: Tensor, out: Tensor, back: Tensor, mix: Tensor) -> Tensor:
        """The lanes [T, n, H] after the block's output [T, H]."""
        return back.unsqueeze(-1) * out.float().unsqueeze(1) + mix.transpose(1, 2) @ lanes


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
