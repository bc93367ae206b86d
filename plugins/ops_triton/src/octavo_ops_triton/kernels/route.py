"""Routing: of a token's logits over the experts, the chosen ones and their weights, in one pass. float32 throughout."""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_ops_triton.launch import begin

SCORES = {"softmax": 0, "sigmoid": 1, "sqrtsoftplus": 2, "softmax_chosen": 3}


@triton.jit
def _first(value, index, END: tl.constexpr):
    """(largest value, its lowest index) of a block; a NaN never wins, and END where there is nothing else."""
    best = tl.max(tl.max(value, axis=1), axis=0)
    at = tl.min(tl.min(tl.where(value == best, index, END), axis=1), axis=0)
    return best, at


@triton.jit
def route_kernel(
    logits_ptr, bias_ptr, given_ptr, weights_ptr, ids_ptr,
    SCORE: tl.constexpr, TOP: tl.constexpr, GROUPS: tl.constexpr, KEPT: tl.constexpr, SUM2: tl.constexpr,
    RENORMALISE: tl.constexpr, SCALE: tl.constexpr, BIAS: tl.constexpr, GIVEN: tl.constexpr,
    E: tl.constexpr, STRIDE: tl.constexpr, GIVEN_STRIDE: tl.constexpr,
    G_BLOCK: tl.constexpr, SIZE: tl.constexpr, S_BLOCK: tl.constexpr, T_BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One token. Experts lie in a block [groups, experts of a group]."""
    token = tl.program_id(0).to(tl.int64)
    g, s, j = tl.arange(0, G_BLOCK), tl.arange(0, S_BLOCK), tl.arange(0, T_BLOCK)
    e = g[:, None] * SIZE + s[None, :]
    real = (g < GROUPS)[:, None] & (s < SIZE)[None, :]
    begin(PDL)
    logits = tl.load(logits_ptr + token * STRIDE + e, mask=real, other=-float("inf"))
    if SCORE == 0:
        exps = tl.exp(logits - tl.max(tl.max(logits, axis=1), axis=0))
        score = exps / tl.sum(tl.sum(exps, axis=1), axis=0)
    elif SCORE == 1:
        score = 1.0 / (1.0 + tl.exp(-logits))
    elif SCORE == 2:  # log(1 + e^x) without overflow
        score = tl.sqrt(tl.maximum(logits, 0.0) + tl.log(1.0 + tl.exp(-tl.abs(logits))))
    else:
        score = logits
    choice = score
    if BIAS:
        choice += tl.load(bias_ptr + e, mask=real, other=0.0)
    choice = tl.where(real, choice, -float("inf"))
    if KEPT < GROUPS:
        rank = tl.max(choice, axis=1)
        if SUM2:
            at = tl.min(tl.where(choice == rank[:, None], s[None, :], S_BLOCK), axis=1)
            rank += tl.max(tl.where(s[None, :] == at[:, None], -float("inf"), choice), axis=1)
        rank = tl.where(g < GROUPS, rank, -float("inf"))
        kept = g < 0
        for _ in tl.static_range(KEPT):
            best = tl.max(tl.where(kept, -float("inf"), rank), axis=0)
            kept = kept | (g == tl.min(tl.where((rank == best) & (kept == 0), g, G_BLOCK), axis=0))
        choice = tl.where(kept[:, None], choice, -float("inf"))
    weights = tl.where(j < TOP, 0.0, -float("inf"))
    ids = tl.zeros((T_BLOCK,), tl.int32)
    taken = e < 0
    for place in tl.static_range(TOP):
        if GIVEN:
            at = tl.load(given_ptr + token * GIVEN_STRIDE + place).to(tl.int32)
        else:
            at = _first(tl.where(taken, -float("inf"), choice), tl.where(taken, E, e), E)[1]
            at = tl.minimum(at, E - 1)  # logits that are NaN choose nothing: the last expert, whose weight is NaN
            taken = taken | (e == at)
        ids = tl.where(j == place, at, ids)
        weights = tl.where(j == place, tl.sum(tl.sum(tl.where(e == at, score, 0.0), axis=1), axis=0), weights)
    if SCORE == 3:
        weights = tl.exp(weights - tl.max(weights, axis=0))
        weights = weights / tl.sum(weights, axis=0)
    weights = tl.where(j < TOP, weights, 0.0)
    if RENORMALISE:
        weights = weights / (tl.sum(weights, axis=0) + 1e-20)
    tl.store(weights_ptr + token * TOP + j, weights * SCALE, mask=j < TOP)
    tl.store(ids_ptr + token * TOP + j, ids, mask=j < TOP)
