"""A weight matrix out of the Linear that knows its format, for layers that must multiply by it in another way."""

from __future__ import annotations

import torch
from octavo.interfaces import Linear, ModelParts
from octavo.model.linear import torch_device
from torch import Tensor


class UnitMatrix:
    """What a Linear makes of the unit vectors: its matrix, transposed, whatever format the checkpoint keeps it in. The Linear
    is dropped once it has said so."""

    def __init__(self, linear: Linear, in_features: int, parts: ModelParts) -> None:
        self._linear: Linear | None = linear
        self._size, self._dtype, self._device = in_features, getattr(torch, parts.dtype), torch_device(parts.device)

    def finish(self) -> Tensor:
        """[in_features, out_features], once the Linear's weights are filled."""
        assert self._linear is not None
        self._linear.finish()
        matrix = self._linear(torch.eye(self._size, dtype=self._dtype, device=self._device))
        self._linear = None
        return matrix
