"""The quantizers: which Linear each module of a checkpoint gets.

Owns no format and no kernel. Heads, tied heads and modules that the checkpoint excludes are core's plain Linear.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Mapping
from typing import Any

import torch
from octavo.errors import LoadError
from octavo.interfaces import ExpertsSpec, Linear, QuantizerParts
from octavo.model.linear import PlainQuantizer, SideBySide, torch_device
from torch import Tensor

from octavo_quant_awq.experts import FourBitExperts, check_experts
from octavo_quant_awq.formats import format_of
from octavo_quant_awq.linear import FourBitLinear, Matrix
from octavo_quant_awq.provider import FourBitOptions
from octavo_quant_awq.settings import DUMMY, Scheme, read_awq, read_gptq, read_pack_quantized

log = logging.getLogger(__name__)


class FourBitQuantizer:
    """interfaces.Quantizer of 4-bit weights, but for the dialect that `read` reads."""

    def __init__(self, options: FourBitOptions, parts: QuantizerParts) -> None:
        self._device, self._dtype = torch_device(parts.device), getattr(torch, parts.dtype)
        self._weights, self._kernel = parts.weights, options.kernel
        self._scheme = self.read(parts.config) if parts.config else DUMMY
        self._format = format_of(self._scheme)
        self._plain = PlainQuantizer(None, parts)
        log.info("4-bit weights: %s, group %d", self._scheme.layout, self._scheme.group)

    def read(self, config: Mapping[str, Any]) -> Scheme:
        """The Scheme that a checkpoint's quantization_config describes. LoadError for what is not read."""
        raise NotImplementedError

    def linear(
        self, prefix: str, in_features: int, parts: Mapping[str, int], *, bias: bool = False, head: bool = False
    ) -> Linear:
        """The parts side by side, quantised but for those that the checkpoint excludes; a head is plain."""
        if head:
            return self._plain.linear(prefix, in_features, parts, bias=bias, head=True)
        names = {part: f"{prefix}.{part}" if prefix else part for part in parts}
        plain = {part: self._scheme.plain(names[part]) for part in parts}
        if all(plain.values()):
            return self._plain.linear(prefix, in_features, parts, bias=bias)
        if not any(plain.values()):
            return self._quantised({names[part]: rows for part, rows in parts.items()}, in_features, bias)
        return SideBySide(
            tuple(
                self._plain.linear(prefix, in_features, {part: rows}, bias=bias)
                if plain[part]
                else self._quantised({names[part]: rows}, in_features, bias)
                for part, rows in parts.items()
            )
        )

    def experts(self, prefix: str, spec: ExpertsSpec) -> FourBitExperts:
        """Every expert's matrices as `linear` has them. LoadError for experts that are stacked in one tensor."""
        check_experts(prefix, spec)
        gate, up, down = spec.names
        return FourBitExperts(
            [
                (
                    self.linear(f"{prefix}.{e}", spec.hidden, {gate: spec.inner, up: spec.inner}, bias=spec.bias),
                    self.linear(f"{prefix}.{e}", spec.inner, {down: spec.hidden}, bias=spec.bias),
                )
                for e in range(spec.count)
            ],
            spec,
        )

    def _quantised(self, parts: Mapping[str, int], inputs: int, bias: bool) -> FourBitLinear:
        return FourBitLinear(
            parts,
            inputs,
            bias=bias,
            scheme=self._scheme,
            form=self._format,
            weights=self._weights,
            device=self._device,
            make=lambda rows, group: self._matrix(rows, inputs, group, bias),
        )

    def _matrix(self, rows: int, inputs: int, group: int, bias: bool) -> Matrix:
        stores_zeros = self._scheme.zeros
        if self._device.type == "cpu":
            from octavo_quant_awq.cpu import CpuMatrix

            return CpuMatrix(rows, inputs, group, zeros=stores_zeros, bias=bias, dtype=self._dtype)
        from octavo_quant_awq.gpu import GpuMatrix

        return GpuMatrix(
            rows, inputs, group, zeros=stores_zeros, bias=bias, dtype=self._dtype, device=self._device, kernel=self._kernel
        )

    def tied(self, embedding: Callable[[], Tensor], out_features: int) -> Linear:
        return self._plain.tied(embedding, out_features)


class AwqQuantizer(FourBitQuantizer):
    """AutoAWQ checkpoints."""

    def read(self, config: Mapping[str, Any]) -> Scheme:
        return read_awq(config)


class GptqQuantizer(FourBitQuantizer):
    """GPTQ checkpoints."""

    def read(self, config: Mapping[str, Any]) -> Scheme:
        return read_gptq(config)


class PackQuantizer(FourBitQuantizer):
    """compressed-tensors pack-quantized checkpoints. The head must be in the ignore list."""

    def read(self, config: Mapping[str, Any]) -> Scheme:
        return read_pack_quantized(config)

    def linear(
        self, prefix: str, in_features: int, parts: Mapping[str, int], *, bias: bool = False, head: bool = False
    ) -> Linear:
        if head:
            for name in (f"{prefix}.{part}" if prefix else part for part in parts):
                if not self._scheme.plain(name):
                    raise LoadError(f"{name}: is not in the checkpoint's ignore list, and a quantised output head is not read")
        return super().linear(prefix, in_features, parts, bias=bias, head=head)
