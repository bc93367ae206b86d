"""Parameter and Buffer: one checkpoint tensor that a part of a model uses as it is, such as a norm's weight.

Owns its copy on the device. Must never be used for what a quantizer may pack: those are Linears and Experts.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo.interfaces import ModelParts
from octavo.model.linear import torch_device


class Parameter:
    """One checkpoint tensor on the model's device, in `dtype` (default: the model's); `get` once it is filled."""

    def __init__(self, name: str, shape: tuple[int, ...], parts: ModelParts, dtype: torch.dtype | None = None) -> None:
        self._name = name
        self._value: Tensor | None = None
        self._dtype, self._device = dtype or getattr(torch, parts.dtype), torch_device(parts.device)
        parts.weights.declare(name, shape, self._fill)

    def _fill(self, tensor: Tensor) -> None:
        # A copy even where nothing is cast: the tensor may be a view of a mapped file.
        self._value = tensor.to(device=self._device, dtype=self._dtype, copy=True)

    def get(self) -> Tensor:
        if self._value is None:
            raise RuntimeError(f"{self._name} is used before it is filled")
        return self._value


class Buffer:
    """As Parameter, for a tensor that others must hold before it is filled: its memory is taken when it is declared,
    and holds NaN until then."""

    def __init__(self, name: str, shape: tuple[int, ...], parts: ModelParts, dtype: torch.dtype) -> None:
        self.value = torch.full(shape, float("nan"), dtype=dtype, device=torch_device(parts.device))
        parts.weights.declare(name, shape, self._fill)

    def _fill(self, tensor: Tensor) -> None:
        self.value.copy_(tensor)
