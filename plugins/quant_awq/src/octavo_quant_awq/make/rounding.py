"""The arithmetic of making 4-bit weights: rounding a group, scales by activations, clips by activations.

Owns the formulas of activation-aware weight quantisation (Lin et al. 2023, and AutoAWQ's choices where the paper leaves them open).
Pure functions of tensors, in float32; nothing here knows layers, files or models.
"""

from __future__ import annotations

import torch
from torch import Tensor

RATIOS = tuple(i / 20 for i in range(20))
"""Exponents of the activations that are tried for a scale."""
SHRINKS = tuple(i / 20 for i in range(10))
"""Shares of a group's range that are tried to be cut off, from both ends alike and from each end of its own."""


def round_groups(weight: Tensor, group: int, *, zero_point: bool) -> tuple[Tensor, Tensor, Tensor]:
    """weight [rows, inputs] -> q [rows, groups, group] in 0..15, z [rows, groups, 1], s [rows, groups, 1], all float32, for
    w = (q - z) * s. s is rounded to float16, as it is stored, before q is. zero_point: z fits the group's range; else it is 8."""
    w = weight.float().unflatten(1, (-1, group))
    if zero_point:
        low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
        s = stored((high - low).clamp_(min=1e-5) / 15)
        z = (low / s).round_().neg_().clamp_(0, 15)
    else:
        s = stored(w.abs().amax(-1, keepdim=True).clamp_(min=1e-5) / 7.5)
        z = torch.full_like(s, 8)
    return (w / s).round_().add_(z).clamp_(0, 15), z, s


def stored(scale: Tensor) -> Tensor:
    """The float32 value of a scale after float16, never 0."""
    return scale.to(torch.float16).float().clamp_(min=2.0**-24)


def rounded(weight: Tensor, group: int, *, zero_point: bool) -> Tensor:
    """float32 [rows, inputs]: what is left of a weight after `round_groups`."""
    q, z, s = round_groups(weight, group, zero_point=zero_point)
    return q.sub_(z).mul_(s).flatten(1)


def importance(weights: list[Tensor], group: int) -> Tensor:
    """float32 [inputs]: the mean over all rows of |w| / max|w| of its group."""
    total, rows = torch.zeros(weights[0].shape[1], device=weights[0].device), 0
    for weight in weights:
        w = weight.float().abs().unflatten(1, (-1, group))
        total += (w / (w.amax(-1, keepdim=True) + 1e-6)).flatten(1).sum(0)
        rows += len(weight)
    return total / rows


def scale_for(ratio: float, activation: Tensor, weight: Tensor) -> Tensor:
    """float32 [inputs]: what inputs are divided and columns multiplied by. activation: mean |x| of each input; weight: its
    `importance`."""
    s = (activation.float().pow(ratio) / (weight.pow(1 - ratio) + 1e-4)).clamp_(min=1e-4)
    s /= (s.max() * s.min()).sqrt()
    return torch.where(torch.isfinite(s), s, torch.ones_like(s))


def clip(weight: Tensor, x: Tensor, group: int, *, zero_point: bool) -> Tensor:
    """weight [rows, inputs] with each group clamped to the range whose rounding changes the group's part of the product
    with x [tokens, inputs] least, in the mean of squares."""
    inputs = x.float().unflatten(1, (-1, group))  # [tokens, groups, group]
    gram = None if group > len(x) else torch.einsum("tgi,tgj->gij", inputs, inputs)
    found = torch.empty_like(weight)
    step = max(1, (1 << 22) // weight.shape[1])
    for start in range(0, len(weight), step):
        part = weight[start : start + step].float()
        w = part.unflatten(1, (-1, group))
        low, high = w.amin(-1, keepdim=True), w.amax(-1, keepdim=True)
        top = torch.maximum(high, -low)
        best, bottom, ceiling = torch.full_like(top, float("inf")), low, high
        for shrink in SHRINKS:
            keep = 1 - shrink
            # the same limit on either side, and each side's own: the second cuts both ends of a lopsided group
            for least, most in ((-top * keep, top * keep), (low * keep, high * keep)) if shrink else ((low, high),):
                cut = torch.minimum(torch.maximum(w, least), most)
                change = rounded(cut.flatten(1), group, zero_point=zero_point).unflatten(1, (-1, group)) - w
                error = _error(change, inputs, gram)
                better = error < best
                best = torch.where(better, error, best)
                bottom, ceiling = torch.where(better, least, bottom), torch.where(better, most, ceiling)
        found[start : start + step] = torch.minimum(torch.maximum(w, bottom), ceiling).flatten(1)
    return found


def _error(change: Tensor, inputs: Tensor, gram: Tensor | None) -> Tensor:
    """Sum over tokens of (x . change)^2, for change [rows, groups, group]: [rows, groups, 1]."""
    by_group = change.transpose(0, 1)  # [groups, rows, group]
    if gram is None:
        return torch.bmm(by_group, inputs.permute(1, 2, 0)).pow_(2).sum(-1).T.unsqueeze(-1)
    return torch.bmm(by_group, gram).mul_(by_group).sum(-1).T.unsqueeze(-1)
