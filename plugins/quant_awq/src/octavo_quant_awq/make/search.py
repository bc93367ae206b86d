"""The two kinds of passes over the calibration text: what enters each Linear, and how good each candidate scale is.

Owns what is gathered. `Statistics` sees the inputs once; `Scoring` lets every copy but the first of a pass try one exponent, in
all groups at once, because a candidate's effect ends with the block that it changes (see `watched`).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import Tensor

from octavo_quant_awq.make.rounding import RATIOS, importance, rounded, scale_for
from octavo_quant_awq.make.structure import Group, Module
from octavo_quant_awq.make.watched import Tensors

SAMPLES = 512
"""Tokens, evenly spread, whose inputs the clips are searched with."""


@dataclass(slots=True)
class Seen:
    """The input of one group: mean |x| float32 [inputs], and a sample of it [tokens, inputs] in the model's dtype."""

    mean: Tensor
    sample: Tensor


class Statistics:
    """A `watched.Visitor` that gathers a Seen of every group, on the CPU."""

    def __init__(self, groups: Mapping[str, Group], tokens: int) -> None:
        """tokens: of all passes together."""
        self._groups, self._stride = groups, max(1, tokens // SAMPLES)
        self._sums: dict[str, Tensor] = {}
        self._samples: dict[str, list[Tensor]] = {}
        self._counts: dict[str, int] = {}

    def __call__(self, modules: tuple[Module, ...], x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        group = self._groups.get(modules[0].name)
        if group is not None:
            key, rows = group.key, x[0]
            count = self._counts.get(key, 0)
            total = rows.abs().sum(0, dtype=torch.float32).double().cpu()
            self._sums[key] = self._sums[key] + total if key in self._sums else total
            self._samples.setdefault(key, []).append(rows[-count % self._stride :: self._stride].cpu())
            self._counts[key] = count + len(rows)
        return plain(x)

    def seen(self) -> dict[str, Seen]:
        return {
            key: Seen((total / self._counts[key]).float(), torch.cat(self._samples[key])[:SAMPLES])
            for key, total in self._sums.items()
        }


class Scoring:
    """A `watched.Visitor` that adds up the squared error of each candidate in `losses`, float64 [len(RATIOS)] a group."""

    def __init__(
        self, groups: Mapping[str, Group], seen: Mapping[str, Seen], tensors: Tensors, *, size: int, zero_point: bool
    ) -> None:
        """size: inputs of a scale, -1 for all."""
        self._groups, self._seen, self._tensors, self._size, self._zero_point = groups, seen, tensors, size, zero_point
        self.losses = {g.key: torch.zeros(len(RATIOS), dtype=torch.float64) for g in groups.values() if g.fold}
        self._judged = {g.judge: g.key for g in groups.values() if g.fold and g.judge != g.key}
        self.candidates: Sequence[int] = ()

    def __call__(self, modules: tuple[Module, ...], x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor:
        """Copy 1 + i of x tries candidates[i]."""
        name = modules[0].name
        group = self._groups.get(name)
        if group is not None and group.fold and group.judge != group.key:
            base = plain(x[0])
            return torch.stack((base, *(base + change for change in self._changes(group, x[0]))))
        y = plain(x)
        if group is not None and group.fold:
            self._add(group.key, self._changes(group, x[0]))
        if name in self._judged:
            self._add(self._judged[name], [y[1 + i] - y[0] for i in range(len(self.candidates))])
            y[1:] = y[0]
        return y

    def _add(self, key: str, changes: Sequence[Tensor]) -> None:
        for candidate, change in zip(self.candidates, changes, strict=True):
            self.losses[key][candidate] += float(change.float().pow_(2).sum())

    def _changes(self, group: Group, x: Tensor) -> list[Tensor]:
        """What each candidate adds to the group's output: x (Q(W s) / s - W)^T."""
        weights = [self._tensors(f"{m.name}.weight") for m in group.modules]
        size = group.inputs if self._size == -1 else self._size
        mean, heavy = group.tied(self._seen[group.key].mean.to(x.device)), group.tied(importance(weights, size))
        found = []
        for candidate in self.candidates:
            s = scale_for(RATIOS[candidate], mean, heavy)
            changes = [rounded(w.float() * s, size, zero_point=self._zero_point).div_(s).sub_(w.float()) for w in weights]
            found.append(F.linear(x, torch.cat(changes).to(x.dtype)))
        return found

    def best(self) -> dict[str, float]:
        """The exponent of each group with the least error; groups where nothing finite was seen are left out, such as those of an expert
        that no token took."""
        found = {}
        for key, losses in self.losses.items():
            if key not in self._seen:
                continue
            finite = torch.where(torch.isfinite(losses), losses, float("inf"))
            if bool(torch.isfinite(finite).any()):
                found[key] = RATIOS[int(finite.argmin())]
        return found
