"""Core's torch operators: every operation of a decoder that is neither a Linear nor attention.

Owns the signatures, which are the contract of `octavo.interfaces.Operators`: an operator of the same
name by another provider takes the same arguments and gives the same values, and is tested against
these. Must never keep state between calls.

All take the activation format "plain" (tensors of the model's dtype); the residual stream and norm
weights are float32. T is the step's tokens, H the hidden size, D a head's width. Reductions are
float32 whatever the dtype.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.interfaces import OperatorParts


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight [vocab, H] for token_ids int64 [T], as the start of the residual stream: a new
    float32 tensor [T, H]."""
    return torch.embedding(weight, token_ids).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), x float32 [T, H], weight float32 [H]:
    a new tensor [T, H] of `dtype`."""
    return _normalised(x, weight, eps).to(dtype)


def add_rms_norm(x: Tensor, residual: Tensor, weight: Tensor, eps: float) -> tuple[Tensor, Tensor]:
    """(rms_norm(x + residual) in x's dtype, x + residual float32), each [T, H]. May overwrite residual: the
    caller uses only what is returned. The stream is float32 because it is a sum over all layers: in
    bfloat16 a logit near 25 is good to 0.1, which is enough to change a greedy answer."""
    residual = residual.add_(x)
    return _normalised(residual, weight, eps).to(x.dtype), residual


def _normalised(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """The RMS norm of float32 x [T, H], float32. On a CPU torch's own is made of eleven small operators;
    these five save 1 to 2% of a decoding step."""
    if x.is_cuda:
        return torch.rms_norm(x, weight.shape, weight, eps)
    scale = torch.linalg.vector_norm(x, 2, -1, True)
    scale = torch.addcmul(_scalar(eps), scale, scale, value=1 / x.shape[-1]).rsqrt_()
    return (x * scale).mul_(weight)


@cache
def _scalar(value: float) -> Tensor:
    return torch.tensor(value, dtype=torch.float32)


def qk_norm_rope(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """RoPE of x [T, heads, D] (q heads, then k heads), after an RMS norm of every head on its own by weight
    [heads, D] where there is one. cos and sin are those of `rope`. Returns [T, heads, D]; may overwrite x."""
    return rope(x if weight is None else qk_norm(x, weight, eps), cos, sin)


def qk_norm(x: Tensor, weight: Tensor, eps: float) -> Tensor:
    """rms_norm of every head on its own: x [T, heads, D], weight [heads, D] (q heads, then k heads)."""
    return torch.rms_norm(x, weight.shape[1:], None, eps).mul_(weight)


def rope(x: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """Rotate the first d dimensions of every head of x [T, heads, D], pairs (j, j + d/2), by the angles of
    `octavo.model.rotary`: cos and sin [T, 1, d], sin's first half negated. Returns [T, heads, D]; may
    overwrite x."""
    dim = cos.shape[-1]
    if dim == x.shape[-1]:
        return torch.addcmul(x * cos, x.roll(dim // 2, -1), sin)
    front = x[..., :dim]
    front.copy_(torch.addcmul(front * cos, front.roll(dim // 2, -1), sin))
    return x


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [T, 2 I] = gate [T, I] beside up [T, I] (SwiGLU): a new tensor [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


OPERATORS: dict[tuple[str, str], Callable[..., Any]] = {
    ("embedding", "plain"): embedding,
    ("rms_norm", "plain"): rms_norm,
    ("add_rms_norm", "plain"): add_rms_norm,
    ("qk_norm_rope", "plain"): qk_norm_rope,
    ("silu_mul", "plain"): silu_mul,
}


class TorchOperators:
    """interfaces.Operators: runs on any device, in any dtype."""

    def __init__(self, options: Any, parts: OperatorParts) -> None:
        self.ops: Mapping[tuple[str, str], Callable[..., Any]] = OPERATORS
