"""Linear layers with weights as the checkpoint has them: float32, bfloat16 or float16.

Owns the gathering of a layer's checkpoint matrices into one; how that one lies in memory is
`octavo.model.matrix`. `PlainQuantizer.path` names the format of the layers, and the choice is logged.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping, Sequence
from typing import Any, cast

import torch
from torch import Tensor

from octavo.catalog import Device
from octavo.errors import PluginError
from octavo.interfaces import ExpertsSpec, Linear, QuantizerParts, Weights
from octavo.model.experts import PlainExperts
from octavo.model.matrix import (
    NOTHING,
    Matrix,
    MatrixMaker,
    Offers,
    PackedMatrix,
    PlainMatrix,
    SmallProduct,
    head_matrix,
    layer_matrix,
    packs,
)

log = logging.getLogger(__name__)


class PlainLinear:
    """interfaces.Linear of one or more checkpoint matrices side by side, built from the weights as they
    come: the moment the last part is filled the whole is packed and the plain copy dropped, so that
    loading never holds more than one layer twice."""

    activation = "plain"

    def __init__(
        self,
        names: Mapping[str, int],
        in_features: int,
        *,
        bias: bool,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        head: bool = False,
        offers: Offers = NOTHING,
    ) -> None:
        self.out_features = sum(names.values())
        self._make, self._offers = head_matrix if head else layer_matrix, offers
        self._shape, self._device, self._dtype = (self.out_features, in_features), device, dtype
        self._weight: Tensor | None = None
        self._bias: Tensor | None = None
        self._matrix: Matrix | None = None
        self._waiting: set[str] = set()
        offset = 0
        for name, rows in names.items():
            self._expect(weights, f"{name}.weight", offset, rows, (rows, in_features))
            if bias:
                self._expect(weights, f"{name}.bias", offset, rows, (rows,))
            offset += rows

    def _expect(self, weights: Weights, name: str, offset: int, rows: int, shape: tuple[int, ...]) -> None:
        self._waiting.add(name)
        weights.declare(name, shape, lambda tensor: self._fill(name, offset, rows, tensor))

    def _fill(self, name: str, offset: int, rows: int, tensor: Tensor) -> None:
        if self._weight is None:
            self._weight = torch.empty(self._shape, dtype=self._dtype, device=self._device)
        if name.endswith(".bias"):
            if self._bias is None:
                self._bias = torch.empty(self._shape[0], dtype=self._dtype, device=self._device)
            self._bias[offset : offset + rows].copy_(tensor)
        else:
            self._weight[offset : offset + rows].copy_(tensor)
        self._waiting.discard(name)
        if not self._waiting:
            self._matrix, self._weight = self._make(self._weight, self._bias, self._offers), None

    def finish(self) -> None:
        if self._matrix is None:
            raise RuntimeError(f"a Linear is used before it is filled; missing: {', '.join(sorted(self._waiting))}")

    def __call__(self, x: Tensor) -> Tensor:
        """x [T, in_features] -> [T, out_features]."""
        return self._matrix(x)  # type: ignore[misc]

    def gated(self, activation: str) -> Callable[[Tensor], Tensor] | None:
        """interfaces.GatedLinear, where the matrix's layout has such a product; after the weights are filled."""
        fused = getattr(self._matrix, "gated", None)
        return None if fused is None else fused(activation)


class TiedLinear:
    """interfaces.Linear of an output head that is the input embedding. Where weights are packed it holds
    a packed copy, because the embedding needs its rows as they are; elsewhere it holds the same tensor."""

    activation = "plain"

    def __init__(self, embedding: Callable[[], Tensor], out_features: int, offers: Offers = NOTHING) -> None:
        self.out_features, self._offers = out_features, offers
        self._embedding = embedding
        self._matrix: Matrix | None = None

    def finish(self) -> None:
        weight = self._embedding()
        if weight.shape[0] != self.out_features:
            raise RuntimeError(f"the tied head has {self.out_features} rows, the embedding {weight.shape[0]}")
        self._matrix = head_matrix(weight, None, self._offers)
        log.info("tied head: %s", self._matrix.name)

    def __call__(self, x: Tensor) -> Tensor:
        """x [S, hidden] -> float32 [S, vocab]."""
        return self._matrix(x)  # type: ignore[misc]


class SideBySide:
    """interfaces.Linear of Linears over one input whose results are one: the parts of a layer that a checkpoint keeps in different
    formats. Its input is plain, which every format takes."""

    activation = "plain"

    def __init__(self, linears: Sequence[Linear]) -> None:
        self._linears = tuple(linears)
        self.out_features = sum(linear.out_features for linear in linears)

    def finish(self) -> None:
        for linear in self._linears:
            linear.finish()

    def __call__(self, x: Tensor) -> Tensor:
        return torch.cat([linear(x) for linear in self._linears], -1)


class PlainQuantizer:
    """interfaces.Quantizer of unquantised weights. `path` is the layers' format: "onednn-packed" or "torch",
    behind that of the operator "matrix" where somebody offers it."""

    def __init__(self, options: Any, parts: QuantizerParts) -> None:
        self._device, self._dtype = torch_device(parts.device), getattr(torch, parts.dtype)
        self._weights = parts.weights
        matrix = cast("MatrixMaker | None", parts.find("matrix"))
        self._offers = Offers(cast("SmallProduct | None", parts.find("small_linear")), matrix)
        self._experts = parts.find("experts")
        core = PackedMatrix if packs(self._device.type, self._dtype) else PlainMatrix
        self.path = core.name if matrix is None else f"{matrix.name} or {core.name}"
        log.info("linear layers: %s, %s on %s", self.path, parts.dtype, self._device)

    def linear(
        self, prefix: str, in_features: int, parts: Mapping[str, int], *, bias: bool = False, head: bool = False
    ) -> PlainLinear:
        """The parts side by side. Checkpoint names are `prefix.part.weight` and `.bias`; an empty prefix is
        left out, as for {"lm_head": vocab}. A head's result is float32."""
        names = {f"{prefix}.{part}" if prefix else part: rows for part, rows in parts.items()}
        return PlainLinear(
            names,
            in_features,
            bias=bias,
            weights=self._weights,
            device=self._device,
            dtype=self._dtype,
            head=head,
            offers=self._offers,
        )

    def tied(self, embedding: Callable[[], Tensor], out_features: int) -> TiedLinear:
        return TiedLinear(embedding, out_features, self._offers)

    def experts(self, prefix: str, spec: ExpertsSpec) -> PlainExperts:
        """The routed experts of a layer. PluginError where nobody offers the operator "experts"."""
        return PlainExperts(
            prefix, spec, weights=self._weights, device=self._device, dtype=self._dtype, run=self._operator(prefix)
        )

    def _operator(self, prefix: str) -> Callable[..., Tensor]:
        if self._experts is None:
            raise PluginError(f'{prefix}: no provider offers the operator "experts", which a mixture of experts needs')
        return self._experts


def torch_device(device: Device) -> torch.device:
    """torch's name of a Device."""
    return torch.device(device.type, device.index) if device.type != "cpu" else torch.device("cpu")
