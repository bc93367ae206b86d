"""MXFP4 experts (OCP Microscaling Formats 1.0: e2m1 values in blocks of 32 with a power-of-two scale), dequantised at load.

Owns the two forms in which checkpoints keep them. Two values are a byte, the low nibble first; a scale s stands for 2^(s - 127).

- gpt-oss: for each of gate_up_proj and down_proj, `NAME_blocks` uint8 [experts, out, in / 32, 16] and `NAME_scales` uint8
  [experts, out, in / 32]. Everything else of such a checkpoint is unquantised.
- DeepSeek V4: for each matrix of each expert, `NAME.weight` int8 [out, in / 2] and its scales [out, in / 32]. The rest is FP8.

Served weights have the model's dtype: four times the bytes of the file, in which every value is exact.
"""

from __future__ import annotations

import logging
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.errors import LoadError
from octavo.interfaces import ExpertsSpec, Weights
from octavo.model.experts import PlainExperts, Stack, deinterleave
from octavo.model.linear import PlainQuantizer

log = logging.getLogger(__name__)

BLOCK = 32
"""Values that share a scale."""
VALUES = (0.0, 0.5, 1.0, 1.5, 2.0, 3.0, 4.0, 6.0, -0.0, -0.5, -1.0, -1.5, -2.0, -3.0, -4.0, -6.0)
"""e2m1, by its four bits: sign, two of exponent, one of mantissa."""


def dequantise(blocks: Tensor, scales: Tensor, dtype: torch.dtype) -> Tensor:
    """blocks uint8 [..., n, 16] and scales uint8 [..., n] -> [..., n * 32] in dtype. The scale 255, which is no number, gives
    values that are none either."""
    table = torch.tensor(VALUES, dtype=torch.float32, device=blocks.device)
    nibbles = torch.stack((blocks & 15, blocks >> 4), -1).flatten(-2)
    values = torch.ldexp(table[nibbles.int()], scales.int().unsqueeze(-1) - 127)
    return values.flatten(-2).to(dtype)


class Mxfp4Experts(PlainExperts):
    """As PlainExperts, filled from packed matrices."""

    def _declare_stacked(self, prefix: str, spec: ExpertsSpec, weights: Weights) -> None:
        for width in (spec.hidden, spec.inner):
            if width % BLOCK:
                raise LoadError(f"{prefix}: mxfp4 keeps blocks of {BLOCK} values, and a matrix has rows of {width}")
        rows = 2 * spec.inner
        Packed(f"{prefix}.gate_up_proj", (spec.count, rows, spec.hidden), self._gate_up, weights, deinterleave)
        Packed(f"{prefix}.down_proj", (spec.count, spec.hidden, spec.inner), self._down, weights, lambda tensor: tensor)
        if spec.bias:
            self._declare_biases(prefix, weights)


class SingleMxfp4Experts(PlainExperts):
    """As PlainExperts, filled from one packed matrix for each expert and projection; scales are named as FP8's are."""

    def _declare_each(self, prefix: str, spec: ExpertsSpec, weights: Weights) -> None:
        if spec.bias:
            raise LoadError(f"{prefix}: MXFP4 experts of one matrix each with biases are not read")
        gate, up, down = spec.names
        for e in range(spec.count):
            for name, stack, rows in (
                (gate, self._gate_up, slice(0, spec.inner)),
                (up, self._gate_up, slice(spec.inner, 2 * spec.inner)),
                (down, self._down, slice(0, spec.hidden)),
            ):
                width = spec.inner if name == down else spec.hidden
                Single(f"{prefix}.{e}.{name}", (e, rows), width, stack, weights)


class Single:
    """One packed matrix [rows, width]: waits for its weight and its scales, then fills its part of `stack`."""

    def __init__(self, name: str, at: tuple[int, slice], width: int, stack: Stack, weights: Weights) -> None:
        rows = at[1].stop - at[1].start
        if width % BLOCK:
            raise LoadError(f"{name}: mxfp4 keeps blocks of {BLOCK} values, and the matrix has rows of {width}")
        self._name, self._at, self._stack = name, at, stack
        self._found: dict[str, Tensor] = {}
        scale = ("uint8", "float8_e8m0fnu")
        for part, size, dtypes in (("weight", width // 2, ("int8", "uint8")), ("weight_scale_inv", width // BLOCK, scale)):
            weights.declare(f"{name}.{part}", (rows, size), self._receiver(part), dtypes=dtypes)
        stack.expect(name)

    def _receiver(self, part: str) -> Callable[[Tensor], None]:
        def fill(tensor: Tensor) -> None:
            self._found[part] = tensor.view(torch.uint8).to(self._stack.device, copy=True)  # it may be a view of a mapped file
            if len(self._found) == 2:
                blocks, scales = self._found.pop("weight"), self._found.pop("weight_scale_inv")
                if bool((scales == 255).any()):
                    raise LoadError(f"{self._name}.weight_scale_inv has the byte 255, which is no number")
                values = dequantise(blocks.view(*scales.shape, BLOCK // 2), scales, self._stack.dtype)
                self._stack.fill(self._name, self._at, values)

        return fill


class Packed:
    """One packed matrix per expert, [experts, out, in]: waits for blocks and scales, then fills `stack`, one expert at a
    time so that what is unpacked never takes much more than one."""

    def __init__(
        self, name: str, shape: tuple[int, int, int], stack: Stack, weights: Weights, order: Callable[[Tensor], Tensor]
    ) -> None:
        experts, out, width = shape
        self._name, self._stack, self._order = name, stack, order
        self._found: dict[str, Tensor] = {}
        for part, size in (("blocks", (experts, out, width // BLOCK, 16)), ("scales", (experts, out, width // BLOCK))):
            weights.declare(f"{name}_{part}", size, self._receiver(part), dtypes=("uint8",))
        stack.expect(name)

    def _receiver(self, part: str) -> Callable[[Tensor], None]:
        def fill(tensor: Tensor) -> None:
            self._found[part] = tensor.clone()  # it may be a view of a mapped file
            if len(self._found) == 2:
                blocks, scales = self._found.pop("blocks"), self._found.pop("scales")
                for expert in range(len(blocks)):
                    here = slice(expert, expert + 1)
                    self._stack.fill(
                        self._name, (here,), self._unpack(blocks[here], scales[here]), last=expert + 1 == len(blocks)
                    )

        return fill

    def _unpack(self, blocks: Tensor, scales: Tensor) -> Tensor:
        device, dtype = self._stack.device, self._stack.dtype
        return self._order(dequantise(blocks.to(device), scales.to(device), dtype))


class Mxfp4Quantizer(PlainQuantizer):
    """interfaces.Quantizer of gpt-oss checkpoints: experts are MXFP4, the rest is unquantised."""

    def experts(self, prefix: str, spec: ExpertsSpec) -> PlainExperts:
        if not spec.stacked:
            raise LoadError(f"{prefix}: quant_method 'mxfp4' is read in gpt-oss's form only, where experts are stacked")
        log.debug("%s: MXFP4, dequantised to %s", prefix, self._dtype)
        return Mxfp4Experts(
            prefix, spec, weights=self._weights, device=self._device, dtype=self._dtype, run=self._operator(prefix)
        )
