"""Sparse attention in plain torch: choosing keys by an index, attending to chosen keys or to the first, compressing windows of
tokens into entries.

Owns the formulas, row by row in portions that bound memory: the oracle of faster ones. Where entries lie is the
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
"""Positions int64 [n, m] of one row -> their keys [n, m, k_dim]."""


def choose(q: Tensor, weights: Tensor, keys: Tensor, seen: Tensor, count: int, scale: float) -> Tensor:
    """int32 [n, count]: for each of n tokens the positions, among the first seen[n] keys, with the highest sum over heads of
    weight * relu(scale * q . k) (DeepSeek V3.2's index). -1 where it sees fewer than count.

    q [n, heads, dim], weights float32 [n, heads], keys [length, dim]; scores are float32. Which of two equal scores is taken
    is unspecified.
    """
    tokens, heads = weights.shape
    length, wanted = len(keys), min(count, len(keys))
    chosen = torch.full((tokens, count), -1, dtype=torch.int32, device=q.device)
    columns = torch.arange(length, device=q.device)
    for part in _portions(tokens, heads * length):
        scores = torch.einsum("nhd,ld->nhl", q[part].float(), keys.float()).mul_(scale).relu_()
        total = torch.einsum("nhl,nh->nl", scores, weights[part].float())
        total.masked_fill_(columns >= seen[part].unsqueeze(1), -math.inf)
        best = total.topk(wanted, -1)
        chosen[part, :wanted] = best.indices.int().masked_fill_(best.values == -math.inf, -1)
    return chosen


def attend(q: Tensor, select: Tensor, read: Read, out: Tensor, scale: float, lse: Tensor | None) -> None:
    """Attention of q [n, heads, k_dim] over the one shared head's entries at positions select int [n, m] of its row (-1:
    none), whose values are the first v_dim of their keys: fills out [n, heads, v_dim], and lse float32 [n, heads] if given.
    Softmax in float32; a token that sees nothing gets zeros and an lse of -inf."""
    for part in _portions(len(q), select.shape[1] * q.shape[-1]):
        none = select[part] < 0
        # In the place of no key the first one is read, which a row may not have written yet: it must not reach a sum.
        keys = read(select[part].long().clamp_(min=0)).to(q.dtype).masked_fill_(none.unsqueeze(-1), 0.0)
        scores = torch.einsum("nhd,nmd->nhm", q[part], keys).float().mul_(scale)
        scores.masked_fill_(none.unsqueeze(1), -math.inf)
        out[part] = torch.einsum("nhm,nmd->nhd", _softmax(scores, q.dtype), keys[..., : out.shape[-1]]).to(out.dtype)
        if lse is not None:
            lse[part] = scores.logsumexp(-1)


def attend_first(q: Tensor, keys: Tensor, seen: Tensor, out: Tensor, scale: float, lse: Tensor | None) -> None:
    """As `attend`, over the first seen[n] of keys [length, k_dim]."""
    keys = keys.to(q.dtype)
    columns = torch.arange(len(keys), device=q.device)
    for part in _portions(len(q), q.shape[1] * max(1, len(keys))):
        scores = torch.einsum("nhd,md->nhm", q[part], keys).float().mul_(scale)
        scores.masked_fill_((columns >= seen[part].unsqueeze(1)).unsqueeze(1), -math.inf)
        out[part] = torch.einsum("nhm,md->nhd", _softmax(scores, q.dtype), keys[:, : out.shape[-1]]).to(out.dtype)
        if lse is not None:
            lse[part] = scores.logsumexp(-1) if len(keys) else torch.full_like(lse[part], -math.inf)


def compress(values: Tensor, gates: Tensor, held: Tensor, places: Tensor, *, overlapping: bool) -> Tensor:
    """One entry for each of n windows of s tokens: float32 [n, dim] of values and gates float32 [n, s, width], held bool [n, s]
    (a token before the sequence's first counts for nothing) and what each place in a window adds to its gates, float32
    [m, width]. overlapping: s = 2 m and width = 2 dim, the first m tokens give the first half of their channels, the last m the
    second."""
    rate, width = places.shape
    gates = gates + (places.repeat(2, 1) if overlapping else places)
    if overlapping:
        half = width // 2
        values, gates = (torch.cat((x[:, :rate, :half], x[:, rate:, half:]), 1) for x in (values, gates))
    weights = gates.masked_fill(~held.unsqueeze(-1), -math.inf).softmax(1)
    return (values * weights).sum(1)


def _softmax(scores: Tensor, dtype: torch.dtype) -> Tensor:
    """softmax over the last axis, zeros where every score is -inf. (A NaN stays one.)"""
    nothing = (scores == -math.inf).all(-1, keepdim=True)
    return scores.softmax(-1).masked_fill_(nothing, 0.0).to(dtype)


def _portions(tokens: int, elements: int) -> list[slice]:
    """Slices of [0, tokens) whose tokens have at most PORTION elements together, `elements` each; at least one token a slice."""
    size = max(1, PORTION // max(1, elements))
    return [slice(at, min(at + size, tokens)) for at in range(0, tokens, size)]
