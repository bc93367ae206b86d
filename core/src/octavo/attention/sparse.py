"""Sparse attention in plain torch: choosing keys by an index, and attending to chosen keys only.

Owns the two formulas, row by row in portions that bound memory: the oracle of faster ones. Where entries lie is the
caller's: `read` gives the keys of positions. Must never read a position that the row does not hold.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

PORTION = 1 << 24
"""Elements of the largest intermediate tensor of a portion of tokens."""

Read = Callable[[Tensor], Tensor]
"""Positions int64 [n] or [n, m] of one row -> their keys [..., k_dim]."""


def choose(q: Tensor, weights: Tensor, keys: Tensor, first: int, count: int, scale: float) -> Tensor:
    """int32 [n, count]: for each of n tokens at positions first, first + 1, ... the positions, among those up to its own,
    with the highest sum over heads of weight * relu(scale * q . k) (DeepSeek V3.2's index). -1 where it sees fewer than count.

    q [n, heads, dim], weights float32 [n, heads], keys [length, dim]; scores are float32. Which of two equal scores is taken
    is unspecified.
    """
    tokens, heads = weights.shape
    length, wanted = len(keys), min(count, len(keys))
    chosen = torch.full((tokens, count), -1, dtype=torch.int32, device=q.device)
    columns = torch.arange(length, device=q.device)
    portion = max(1, PORTION // (heads * length))
    for at in range(0, tokens, portion):
        part = slice(at, min(at + portion, tokens))
        scores = torch.einsum("nhd,ld->nhl", q[part].float(), keys.float()).mul_(scale).relu_()
        total = torch.einsum("nhl,nh->nl", scores, weights[part].float())
        own = torch.arange(first + part.start, first + part.stop, device=q.device)
        total.masked_fill_(columns > own.unsqueeze(1), -math.inf)
        best = total.topk(wanted, -1)
        chosen[part, :wanted] = best.indices.int().masked_fill_(best.values == -math.inf, -1)
    return chosen


def attend(q: Tensor, select: Tensor, read: Read, out: Tensor, scale: float, lse: Tensor | None) -> None:
    """Attention of q [n, heads, k_dim] over the one shared head's entries at positions select int [n, m] of its row (-1:
    none), whose values are the first v_dim of their keys: fills out [n, heads, v_dim], and lse float32 [n, heads] if given.
    Softmax in float32."""
    v_dim = out.shape[-1]
    portion = max(1, PORTION // (select.shape[1] * q.shape[-1]))
    for at in range(0, len(q), portion):
        part = slice(at, at + portion)
        keys = read(select[part].long().clamp_(min=0)).to(q.dtype)
        scores = torch.einsum("nhd,nmd->nhm", q[part], keys).float().mul_(scale)
        scores.masked_fill_((select[part] < 0).unsqueeze(1), -math.inf)
        out[part] = torch.einsum("nhm,nmd->nhd", scores.softmax(-1).to(q.dtype), keys[..., :v_dim]).to(out.dtype)
        if lse is not None:
            lse[part] = scores.logsumexp(-1)
