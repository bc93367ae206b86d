"""min_p, top_k and top_p as one threshold per row, and the draw from what is left.

Owns the arithmetic of choosing; knows nothing of requests. Every truncation is "keep x >= t" with a
t that is a property of the row's values alone: ties are kept or cut together, no sort order enters,
and a row's choice cannot depend on its neighbours. Reductions run over blocks of BLOCK values, which
no thread split ever cuts, so they are bit-equal for any batch.

Shapes: x is float32 [R, W], W a multiple of BLOCK, each row's maximum subtracted and divided by the
temperature, so the largest value is 0 and exp(x) needs no care; -inf is impossible. Nothing here
waits for a GPU.
"""

from __future__ import annotations

import math

import numpy as np
import torch
from torch import Tensor

from octavo.transfer import to_device

BLOCK = 256
SHORT = 128
"""Most nuclei hold fewer tokens than this; on a CPU, taking the largest few is cheaper than the descent."""


def block_sums(weights: Tensor) -> Tensor:
    """float64 [R, W / BLOCK] of float32 [R, W]."""
    return weights.view(weights.shape[0], -1, BLOCK).sum(-1).double()


def truncate(x: Tensor, min_p: np.ndarray, top_k: np.ndarray, top_p: np.ndarray) -> None:
    """Set to -inf in place what min_p, then top_k, then top_p (of the mass that top_k left) exclude.

    Host arrays [R]; off is 0, 0 and 1. top_k keeps every value equal to the k-th largest.
    """
    for rows, threshold in (_min_p(x, min_p), _top_k(x, top_k)):
        _cut(x, rows, threshold)
    rows = np.flatnonzero(top_p < 1.0)
    if len(rows):
        index = _index(rows, x.device)
        part = x if len(rows) == len(x) else x.index_select(0, index)
        _cut(x, rows, nucleus(part, to_device(top_p[rows], x.device)))


def nucleus(x: Tensor, top_p: Tensor) -> Tensor:
    """float32 [R]: the largest t with mass(x >= t) >= top_p * mass: the smallest set of most likely
    tokens that reaches top_p (Holtzman et al., 2020), ties at its end included. top_p is float64 [R].
    """
    mass = x.exp()
    wanted = block_sums(mass).sum(-1) * top_p
    if x.is_cuda:
        return _descend(x, mass, wanted)
    largest = torch.topk(x, min(SHORT, x.shape[1])).values
    before = (largest.double().exp().cumsum(-1) < wanted[:, None]).sum(-1, keepdim=True)
    threshold = largest.gather(1, before.clamp(max=largest.shape[1] - 1)).squeeze(1)
    open_rows = (before.squeeze(1) == largest.shape[1]).nonzero().squeeze(1)
    if len(open_rows):
        threshold[open_rows] = _descend(x[open_rows], mass[open_rows], wanted[open_rows])
    return threshold


def _descend(x: Tensor, mass: Tensor, wanted: Tensor) -> Tensor:
    """-x is not negative, so its float bits, read as an integer, are ordered like -x, and a radix descent
    over them (11, 10 and 10 bits, a histogram of mass each) ends at one exact value, without a sort."""
    mass64 = mass.double()
    keys = x.abs().view(torch.int32)
    found = torch.zeros(len(x), dtype=torch.int32, device=x.device)
    for shift, bits in ((20, 11), (10, 10), (0, 10)):
        digits = keys >> shift
        if shift < 20:  # values outside the bucket found so far go to a spare one, past all others
            digits = torch.where((digits >> bits) == found[:, None], digits & ((1 << bits) - 1), 1 << bits)
        histogram = mass64.new_zeros((len(x), (1 << bits) + 1)).scatter_add_(1, digits.long(), mass64)[:, :-1]
        reached = histogram.cumsum(-1)
        digit = (reached < wanted[:, None]).sum(-1, keepdim=True).clamp_(max=(1 << bits) - 1)
        wanted = wanted - (reached - histogram).gather(1, digit).squeeze(1)
        found = (found << bits) | digit.squeeze(1).int()
    return -found.view(torch.float32)


def draw(x: Tensor, uniform: Tensor) -> Tensor:
    """int64 [R]: the token where the running sum of softmax(x), in vocabulary order, passes uniform
    (float64 [R] in [0, 1)). Never one of probability 0, never out of range.

    Two levels: the block, then the value in it, each with sums of its own, so rounding between the
    levels cannot point outside. A row of NaN gives some index in range: the caller knows it failed.
    """
    weights = torch.softmax(x, dim=-1)
    sums = block_sums(weights)
    ends = sums.cumsum(-1)
    block, rest = locate(ends, uniform * ends[:, -1], sums)
    inside = weights.view(len(x), -1, BLOCK)[torch.arange(len(x), device=x.device), block].double()
    ends = inside.cumsum(-1)
    offset, _ = locate(ends, rest * ends[:, -1], inside)
    return block * BLOCK + offset


def locate(ends: Tensor, target: Tensor, parts: Tensor) -> tuple[Tensor, Tensor]:
    """The first place whose running sum is above target, and how far into it target lies, in [0, 1].

    `target` is pressed below the total: then the place has a part above 0."""
    target = torch.minimum(target, torch.nextafter(ends[:, -1], torch.zeros_like(target)))
    place = (ends <= target[:, None]).sum(-1).clamp_(max=ends.shape[1] - 1)
    part = parts.gather(1, place[:, None]).squeeze(1)
    rest = (target - (ends.gather(1, place[:, None]).squeeze(1) - part)) / part
    return place, rest.clamp_(0.0, 1.0)


def _min_p(x: Tensor, min_p: np.ndarray) -> tuple[np.ndarray, Tensor | None]:
    """p >= min_p * p_max is x >= ln min_p, because the largest x is 0."""
    rows = np.flatnonzero(min_p > 0.0)
    if not len(rows):
        return rows, None
    threshold = np.array([math.log(p) for p in min_p[rows]], np.float32)
    return rows, to_device(threshold, x.device)


def _top_k(x: Tensor, top_k: np.ndarray) -> tuple[np.ndarray, Tensor | None]:
    rows = np.flatnonzero((top_k > 0) & (top_k < x.shape[1]))
    if not len(rows):
        return rows, None
    index = _index(rows, x.device)
    part = x if len(rows) == len(x) else x.index_select(0, index)
    largest = torch.topk(part, int(top_k[rows].max())).values
    return rows, largest.gather(1, _index(top_k[rows] - 1, x.device)[:, None]).squeeze(1)


def _cut(x: Tensor, rows: np.ndarray, threshold: Tensor | None) -> None:
    if threshold is None:
        return
    if len(rows) == len(x):
        x.masked_fill_(x < threshold[:, None], float("-inf"))
        return
    index = _index(rows, x.device)
    part = x.index_select(0, index)
    x.index_copy_(0, index, part.masked_fill_(part < threshold[:, None], float("-inf")))


def _index(values: np.ndarray, device: torch.device) -> Tensor:
    return to_device(values.astype(np.int64), device)
