"""Fp8Quantizer: the Linears of a model whose weights are FP8, stored so or quantised while they load.

Owns which matrices become one Linear and which product computes it on this device. Modules that the checkpoint left
alone, and tied heads, are core's plain Linears.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from dataclasses import replace
from itertools import groupby
from typing import Any, cast

import torch
from octavo.errors import LoadError, PluginError
from octavo.interfaces import Activation, Experts, ExpertsSpec, Linear, QuantizerParts, Weights
from octavo.model.linear import PlainQuantizer, SideBySide, torch_device
from torch import Tensor

from octavo_quant_fp8.experts import Fp8Experts
from octavo_quant_fp8.provider import Fp8Options, has_units
from octavo_quant_fp8.reference import Product, ReferenceProduct, input_format
from octavo_quant_fp8.scheme import Scheme, read_scheme
from octavo_quant_fp8.weights import GatheredWeights

log = logging.getLogger(__name__)


class Fp8Linear:
    """interfaces.Linear of FP8 weights: gathers them, then computes with what `make` gives for them."""

    def __init__(self, weights: GatheredWeights, activation: str, make: Callable[[GatheredWeights], Product]) -> None:
        self.activation, self.out_features = activation, weights.rows
        self._weights: GatheredWeights | None = weights
        self._make = make

    def finish(self) -> None:
        weights, self._weights = self._weights, None
        if weights is None or weights.missing:
            names = "it was finished before" if weights is None else ", ".join(sorted(weights.missing))
            raise RuntimeError(f"a Linear is used before it is filled; missing: {names}")
        weights.check()
        self._product = self._make(weights)

    def __call__(self, x: Tensor | Activation) -> Tensor:
        """x [T, in_features], plain or of `activation` -> [T, out_features]."""
        return self._product(x)

    def gated(self, activation: str) -> Callable[[Any], Tensor | Activation] | None:
        """interfaces.GatedLinear, where the product has such a kernel."""
        fused = getattr(self._product, "gated", None)
        return None if fused is None else cast("Callable[[Any], Tensor | Activation] | None", fused(activation))


class OneTensor:
    """interfaces.Weights of a single tensor, which is there already."""

    def declare(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        fill: Callable[[Tensor], None],
        *,
        optional: bool = False,
        dtypes: tuple[str, ...] = (),
    ) -> None:
        self.fill = fill


class TiedFp8Linear:
    """interfaces.Linear of an output head that is the input embedding: an FP8 copy, since the embedding needs its rows as they are."""

    activation = "plain"

    def __init__(
        self,
        embedding: Callable[[], Tensor],
        out_features: int,
        gather: Callable[[dict[str, int], int, Weights], GatheredWeights],
        make: Callable[[GatheredWeights], Product],
    ) -> None:
        self.out_features = out_features
        self._embedding, self._gather, self._make = embedding, gather, make

    def finish(self) -> None:
        weight, source = self._embedding(), OneTensor()
        if weight.shape[0] != self.out_features:
            raise RuntimeError(f"the tied head has {self.out_features} rows, the embedding {weight.shape[0]}")
        weights = self._gather({"the tied head": self.out_features}, weight.shape[1], source)
        source.fill(weight)
        self._product = self._make(weights)

    def __call__(self, x: Tensor) -> Tensor:
        """x [S, hidden] -> float32 [S, vocab]."""
        return self._product(x)


class Fp8Quantizer:
    """interfaces.Quantizer of FP8 weights."""

    def __init__(self, options: Fp8Options, parts: QuantizerParts) -> None:
        scheme = read_scheme("fp8" if not parts.config else str(parts.config.get("quant_method", "")), parts.config)
        if options.activations == "none" or (parts.device.type == "cuda" and not has_units(parts.device)):
            scheme = replace(scheme, activation="none")
        self._scheme, self._parts = scheme, parts
        self._device, self._dtype = torch_device(parts.device), getattr(torch, parts.dtype)
        self._plain = PlainQuantizer(None, parts)
        self._with_head = scheme.stored or options.head
        log.info("FP8 linear layers: %s, weights by %s, inputs by %s", scheme.source, scheme.weight, scheme.activation)

    def linear(
        self, prefix: str, in_features: int, parts: Mapping[str, int], *, bias: bool = False, head: bool = False
    ) -> Linear:
        """The parts side by side, quantised or not as the checkpoint has each. Weights that are quantised while they
        load leave an output head as it is, unless the options say otherwise: it is a tenth of the bytes and a good part of the error."""
        names = {f"{prefix}.{part}" if prefix else part: rows for part, rows in parts.items()}
        kinds = {name: self._scheme.quantises(name) and (self._with_head or not head) for name in names}
        if not any(kinds.values()):
            return self._plain.linear(prefix, in_features, parts, bias=bias, head=head)
        if all(kinds.values()):
            return self._quantised(names, in_features, bias=bias, head=head)
        found: list[Linear] = []
        for quantised, group in groupby(names, kinds.__getitem__):
            some = {name: names[name] for name in group}
            if quantised:
                found.append(self._quantised(some, in_features, bias=bias, head=head))
            else:
                found.append(self._plain.linear("", in_features, some, bias=bias, head=head))
        return SideBySide(found)

    def tied(self, embedding: Callable[[], Tensor], out_features: int) -> Linear:
        """An output head that is the embedding: as it is, or where the options say so a quantised copy."""
        if self._scheme.stored or not self._with_head:
            return self._plain.tied(embedding, out_features)
        return TiedFp8Linear(
            embedding, out_features, lambda names, size, source: self._gather(names, size, weights=source), self._head
        )

    def experts(self, prefix: str, spec: ExpertsSpec) -> Experts:
        """The routed experts of a layer, quantised or not as the checkpoint has them. LoadError where it has both."""
        kinds = {self._scheme.quantises(f"{prefix}.{e}.{name}") for e in range(spec.count) for name in spec.names}
        if kinds == {False}:
            return self._plain.experts(prefix, spec)
        if len(kinds) > 1:
            raise LoadError(f"{prefix}: some experts are FP8 and others are not; they would be of one kind")
        run = self._parts.find("experts_fp8")
        if run is None:
            raise PluginError(f'{prefix}: no provider offers the operator "experts_fp8", which FP8 experts need')
        return Fp8Experts(prefix, spec, self._scheme, weights=self._parts.weights, device=self._device, run=run)

    def _quantised(self, names: dict[str, int], in_features: int, *, bias: bool, head: bool) -> Fp8Linear:
        weights = self._gather(names, in_features, weights=self._parts.weights, bias=bias)
        activation = "plain" if head else input_format(self._scheme)
        return Fp8Linear(weights, activation, lambda w: self._product(w, head=head))

    def _gather(self, names: dict[str, int], in_features: int, *, weights: Weights, bias: bool = False) -> GatheredWeights:
        return GatheredWeights(
            names, in_features, self._scheme, bias=bias, weights=weights, device=self._device, dtype=self._dtype
        )

    def _head(self, weights: GatheredWeights) -> Product:
        return self._product(weights, head=True)

    def _product(self, weights: GatheredWeights, *, head: bool) -> Product:
        if self._device.type == "cuda":
            from octavo_quant_fp8.products import cuda_product

            return cuda_product(weights, self._parts.device, self._dtype, head=head)
        return ReferenceProduct(weights, self._dtype, head=head)


__all__ = ["Fp8Linear", "Fp8Quantizer", "Scheme"]
