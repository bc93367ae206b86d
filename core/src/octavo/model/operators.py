"""Core's torch operators: every operation of a decoder that is neither a Linear nor attention.

Owns the signatures, which are the contract of `octavo.interfaces.Operators`: an operator of the same
name by another provider takes the same arguments and gives the same values, and is tested against
these. Must never keep state between calls.

All take the activation format "plain" (tensors of the model's dtype); the residual stream and norm
weights are float32. T is the step's tokens, H the hidden size, D a head's width. Reductions are
float32 whatever the dtype.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from functools import cache
from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo.interfaces import Gate, OperatorParts, Routing
from octavo.model.spread import spread_matrix


def embedding(token_ids: Tensor, weight: Tensor) -> Tensor:
    """Rows of weight [vocab, H] for token_ids int64 [T], as the start of the residual stream: a new
    float32 tensor [T, H]."""
    return torch.embedding(weight, token_ids).float()


def rms_norm(x: Tensor, weight: Tensor, eps: float, dtype: torch.dtype) -> Tensor:
    """x / sqrt(mean(x^2) + eps) * weight (Zhang and Sennrich 2019), x [T, H] float32 or, for a norm inside a block, of the
    model's dtype, its rows dense and any distance apart; weight float32 [H]: a new tensor [T, H] of `dtype`."""
    return _normalised(x.float(), weight, eps).to(dtype)


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


def spread(x: Tensor) -> Tensor:
    """Every head of x [T, heads, D] times the fixed orthogonal matrix of `octavo.model.spread`: a new tensor [T, heads, D]. Summed in
    float32, rounded once."""
    return (x.float() @ spread_matrix(x.shape[-1], x.device)).to(x.dtype)


def qk_norm_rope_spread(x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """`spread` of what `qk_norm_rope` gives, which takes the same."""
    return spread(qk_norm_rope(x, weight, eps, cos, sin))


def rope_angles(positions: Tensor, frequencies: Tensor, factor: float, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
    """(cos, sin), each [T, 1, d] in `dtype` and times factor, of positions int64 [T] turned by frequencies float32
    [1 or T, d / 2] radians a position: both halves filled, the sign in sin's first half, as `rope` takes them. The
    angle is a float64 product, see `octavo.model.rotary`."""
    turns = positions.double().unsqueeze(1) * frequencies
    cos, sin = turns.cos(), turns.sin()
    if factor != 1.0:
        cos, sin = cos * factor, sin * factor
    cos, sin = cos.to(dtype), sin.to(dtype)
    return torch.cat((cos, cos), -1).unsqueeze(1), torch.cat((-sin, sin), -1).unsqueeze(1)


def silu_mul(gate_up: Tensor) -> Tensor:
    """silu(gate) * up of gate_up [T, 2 I] = gate [T, I] beside up [T, I] (SwiGLU): a new tensor [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.silu(gate).mul_(up)


def gelu_tanh_mul(gate_up: Tensor) -> Tensor:
    """gelu(gate) * up, with the tanh form of GELU, of gate_up [T, 2 I] as in `silu_mul`: a new tensor [T, I]."""
    gate, up = gate_up.chunk(2, -1)
    return F.gelu(gate, approximate="tanh").mul_(up)


def route(logits: Tensor, routing: Routing, bias: Tensor | None = None, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
    """Which experts each token takes: (weights float32, ids int32), each [T, top_k], for logits float32 [T, experts].
    bias float32 [experts] corrects the choice and nothing else; ids int [T, top_k], if given, are the choice."""
    scores = _scores(logits, routing)
    if ids is None:
        choice = scores if bias is None else scores + bias
        if routing.kept_groups < routing.groups:
            choice = _keep_groups(choice, routing)
        ids = choice.topk(routing.top_k, -1).indices
    weights = scores.gather(-1, ids.long())
    if routing.score == "softmax_chosen":
        weights = weights.softmax(-1)
    if routing.renormalise:
        weights = weights / (weights.sum(-1, keepdim=True) + 1e-20)
    return weights * routing.scale, ids.int()


def _scores(logits: Tensor, routing: Routing) -> Tensor:
    if routing.score == "softmax":
        return logits.softmax(-1)
    if routing.score == "sigmoid":
        return logits.sigmoid()
    return F.softplus(logits).sqrt() if routing.score == "sqrtsoftplus" else logits


def _keep_groups(choice: Tensor, routing: Routing) -> Tensor:
    """choice with every expert outside the best groups at minus infinity."""
    grouped = choice.view(len(choice), routing.groups, -1)
    rank = grouped.amax(-1) if routing.group_score == "max" else grouped.topk(2, -1).values.sum(-1)
    kept = torch.zeros_like(rank, dtype=torch.bool).scatter_(-1, rank.topk(routing.kept_groups, -1).indices, True)
    return grouped.masked_fill(~kept.unsqueeze(-1), -math.inf).view_as(choice)


def gated(gate: Tensor, up: Tensor, form: Gate) -> Tensor:
    """Gate of `octavo.interfaces`, element by element: a new tensor."""
    if math.isfinite(form.limit):
        gate, up = gate.clamp(max=form.limit), up.clamp(-form.limit, form.limit)
    if form.alpha == 1.0:
        return F.silu(gate).mul_(up + form.offset if form.offset else up)
    return (gate * torch.sigmoid(form.alpha * gate)).mul_(up + form.offset if form.offset else up)


def experts(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate,
    *,
    gate_up_bias: Tensor | None = None,
    down_bias: Tensor | None = None,
    base: Tensor | None = None,
) -> Tensor:
    """A mixture of gated MLPs: for token t of x [T, H], the sum over j of weights[t, j] * MLP[ids[t, j]](x[t]), plus
    base[t]: a new tensor [T, H] of x's dtype, summed in float32.

    gate_up [E, 2 I, H] (gate's rows, then up's), down [E, H, I], biases [E, 2 I] and [E, H]; weights float32 and ids
    int32 [T, k]. On a CPU only the experts in use run, on their tokens. On a device
    that runs ahead of the host every expert takes every token, because to ask which are in use would wait for it: correct
    anywhere, and slow there."""

    def run(expert: int, rows: Tensor) -> Tensor:
        both = F.linear(rows, gate_up[expert], None if gate_up_bias is None else gate_up_bias[expert])
        left, right = both.chunk(2, -1)
        inner = gated(left, right, gate)
        return F.linear(inner, down[expert], None if down_bias is None else down_bias[expert])

    total = torch.zeros_like(x, dtype=torch.float32) if base is None else base.float()
    if x.is_cuda:
        shares = weights.new_zeros(len(x), len(gate_up)).scatter_add_(1, ids.long(), weights)
        for expert in range(len(gate_up)):
            total = total + run(expert, x) * shares[:, expert, None]
        return total.to(x.dtype)
    total = total.clone() if base is not None else total
    chosen = ids.flatten()
    order = chosen.argsort(stable=True)  # pairs (token, place), by expert
    found, counts = torch.unique_consecutive(chosen[order], return_counts=True)
    tokens, shares = order // ids.shape[1], weights.flatten()[order].unsqueeze(1)
    start = 0
    for expert, count in zip(found.tolist(), counts.tolist(), strict=True):
        rows = tokens[start : start + count]
        total.index_add_(0, rows, run(expert, x[rows]).float() * shares[start : start + count])
        start += count
    return total.to(x.dtype)


OPERATORS: dict[tuple[str, str], Callable[..., Any]] = {
    ("embedding", "plain"): embedding,
    ("rms_norm", "plain"): rms_norm,
    ("add_rms_norm", "plain"): add_rms_norm,
    ("qk_norm_rope", "plain"): qk_norm_rope,
    ("qk_norm_rope_spread", "plain"): qk_norm_rope_spread,
    ("spread", "plain"): spread,
    ("rope_angles", "plain"): rope_angles,
    ("silu_mul", "plain"): silu_mul,
    ("gelu_tanh_mul", "plain"): gelu_tanh_mul,
    ("route", "plain"): route,
    ("experts", "plain"): experts,
}


class TorchOperators:
    """interfaces.Operators: runs on any device, in any dtype."""

    def __init__(self, options: Any, parts: OperatorParts) -> None:
        self.ops: Mapping[tuple[str, str], Callable[..., Any]] = OPERATORS
