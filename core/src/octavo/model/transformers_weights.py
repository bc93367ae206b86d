"""Which checkpoint tensor goes to which rows of which parameter of a model of transformers.

Owns the map, found by running transformers' own conversion for saving over row numbers instead of weights: what
comes out under a checkpoint's name says where its rows lie. Modules that keep another form than their checkpoints (stacked
experts, fused projections) need no knowledge of their own here.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.interfaces import Weights

_ELEMENTWISE = 1 << 20
"""Vectors and matrices of up to this many values are numbered value by value, others row by row."""


@dataclass(frozen=True, slots=True)
class Place:
    """Rows [start, stop) of the checkpoint tensor are rows [at, at + stop - start) of parameter [rows, width]."""

    parameter: Tensor
    at: int
    start: int
    stop: int


class CheckpointMap:
    """Checkpoint names of a model's tensors, and where each goes."""

    def __init__(self, model: Any) -> None:
        self._prefix = f"{model.base_model_prefix}."
        self._name = type(model).__name__
        state = model.state_dict(keep_vars=True)
        owners: dict[int, str] = {}
        self._tied = {name for name, tensor in state.items() if owners.setdefault(tensor.data_ptr(), name) != name}
        own = {name: tensor.data for name, tensor in state.items() if name not in self._tied}
        self._ignored = [re.compile(pattern) for pattern in getattr(model, "_keys_to_ignore_on_load_unexpected", None) or ()]
        self.places = self._trace(model, own)

    def _trace(self, model: Any, own: dict[str, Tensor]) -> dict[str, tuple[tuple[int, ...], list[Place]]]:
        """By checkpoint name: (shape, places)."""
        from transformers.core_model_loading import revert_weight_conversion

        numbered, tables, first = {}, [], 0
        for name, tensor in own.items():
            whole = tensor.ndim > 2 or tensor.numel() > _ELEMENTWISE
            rows = tensor.view(-1, tensor.shape[-1]) if whole else tensor.view(-1, 1)
            shape = (*tensor.shape[:-1], 2) if whole else tensor.shape
            numbers = torch.arange(first, first + len(rows))
            numbered[name] = (numbers[:, None].expand(-1, 2) if whole else numbers).reshape(shape)
            tables.append((first, rows, whole))
            first += len(rows)
        found = {}
        for name, numbers in revert_weight_conversion(model, numbered).items():
            index = max(i for i, (start, _, _) in enumerate(tables) if start <= int(numbers.reshape(-1)[0]))
            _, rows, whole = tables[index]
            shape = (*numbers.shape[:-1], rows.shape[1]) if whole else tuple(numbers.shape)
            flat = numbers.reshape(-1, 2) if whole and numbers.shape[-1] == 2 else numbers.reshape(-1, 1)
            if whole and (flat.shape[1] != 2 or bool((flat[:, 0] != flat[:, 1]).any())):
                raise LoadError(
                    f"{self._name}: {name} lies across the rows of its parameter; only transformers' loader can fill it"
                )
            found[name] = (shape, list(self._runs(name, flat[:, 0], tables)))
        return found

    def _runs(self, name: str, numbers: Tensor, tables: list[tuple[int, Tensor, bool]]) -> list[Place]:
        """Consecutive rows, in as few places as possible."""
        cuts = (numbers.diff() != 1).nonzero().flatten() + 1
        starts = [0, *cuts.tolist()]
        places = []
        for start, stop in zip(starts, [*starts[1:], len(numbers)], strict=True):
            at = int(numbers[start])
            while start < stop:  # a run may go on into the next parameter
                first, rows, _ = max((t for t in tables if t[0] <= at), key=lambda t: t[0])
                count = min(stop - start, first + len(rows) - at)
                places.append(Place(rows, at - first, start, start + count))
                start, at = start + count, at + count
        if len(places) > 4096:
            raise LoadError(f"{self._name}: {name} is scattered over its parameter; only transformers' loader can fill it")
        return places

    def declare(self, weights: Weights) -> None:
        """Ask for every tensor."""
        for name, (shape, places) in self.places.items():
            weights.declare(name, shape, lambda tensor, places=places: _fill(places, tensor))  # type: ignore[misc]

    def canonical(self, name: str) -> str:
        return self._prefix + name if name not in self.places and self._prefix + name in self.places else name

    def ignored(self, name: str) -> bool:
        return name in self._tied or any(pattern.search(name) for pattern in self._ignored)


def _fill(places: list[Place], tensor: Tensor) -> None:
    for place in places:
        rows = tensor.reshape(-1, place.parameter.shape[1])
        place.parameter[place.at : place.at + place.stop - place.start].copy_(rows[place.start : place.stop])
