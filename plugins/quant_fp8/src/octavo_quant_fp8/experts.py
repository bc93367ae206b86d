"""The experts of a layer with FP8 weights, stored so or quantised while they load.

Owns the gathering of every expert's matrices and scales into four tensors, and the torch operator that computes with them. Inputs
are not quantised: a decoding step reads weights and little else, and each expert sees few rows. Knows no kernel.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

import torch
from octavo.errors import LoadError
from octavo.interfaces import ExpertsSpec, Gate, Weights
from octavo.model import operators as core
from octavo.model.experts import Stack
from torch import Tensor

from octavo_quant_fp8.numerics import E4M3, quantise_rows, spread_blocks
from octavo_quant_fp8.scheme import Scheme
from octavo_quant_fp8.weights import BLOCK_SCALE_DTYPES, SCALE_DTYPES, checked, grid

Scales = tuple[Tensor, Tensor]
"""Of gate_up and down, float32: one a row, [E, 2 I] and [E, H], or one a block of 128 x 128, [E, 2, ceil(I / 128),
ceil(H / 128)] and [E, ceil(H / 128), ceil(I / 128)]."""


class Fp8Experts:
    """interfaces.Experts: gate_up e4m3 [E, 2 I, H] (gate's rows, then up's), down e4m3 [E, H, I], and their Scales."""

    def __init__(
        self,
        prefix: str,
        spec: ExpertsSpec,
        scheme: Scheme,
        *,
        weights: Weights,
        device: torch.device,
        run: Callable[..., Tensor],
    ) -> None:
        """run is the operator ("experts_fp8", "plain")."""
        if spec.stacked or spec.bias:
            raise LoadError(f"{prefix}: FP8 experts that are stacked or have biases are not read")
        self._run, self._gate, self._scheme, self._weights = run, spec.gate, scheme, weights
        count, hidden, inner = spec.count, spec.hidden, spec.inner
        self._data = Stack((count, 2 * inner, hidden), device, E4M3), Stack((count, hidden, inner), device, E4M3)
        block = scheme.weight == "block"
        sizes = ((2, grid(inner), grid(hidden)), (grid(hidden), grid(inner))) if block else ((2 * inner,), (hidden,))
        self._scale = [Stack((count, *size), device, torch.float32) for size in sizes]
        gate, up, down = spec.names
        for e in range(count):
            for half, name in enumerate((gate, up)):
                rows = slice(half * inner, (half + 1) * inner)
                self._declare(f"{prefix}.{e}.{name}", 0, (e, rows), (e, half) if block else (e, rows), (inner, hidden))
            self._declare(f"{prefix}.{e}.{down}", 1, (e,), (e,), (hidden, inner))

    def _declare(
        self, name: str, which: int, at: tuple[int | slice, ...], scale_at: tuple[int | slice, ...], shape: tuple[int, int]
    ) -> None:
        """The matrix `name` of `shape` and its scales."""
        data, scale, weight = self._data[which], self._scale[which], f"{name}.weight"
        if not self._scheme.stored:
            data.expect(weight)
            scale.expect(weight)
            self._weights.declare(weight, shape, lambda tensor: self._quantise(weight, tensor, which, at))
            return
        data.declare(self._weights, weight, at, dtypes=("float8_e4m3fn",))
        scale_name = f"{name}.{self._scheme.scale_name}"
        check = partial(checked, scale_name)
        if self._scheme.weight == "block":
            scale.declare(self._weights, scale_name, scale_at, prepare=check, dtypes=BLOCK_SCALE_DTYPES)
        elif self._scheme.weight == "channel":
            shape = (shape[0], 1)
            scale.declare(self._weights, scale_name, scale_at, shape, lambda tensor: check(tensor).view(-1), SCALE_DTYPES)
        else:
            scale.expect(scale_name)
            self._weights.declare(
                scale_name, None, lambda t: scale.fill(scale_name, scale_at, _single(scale_name, t)), dtypes=SCALE_DTYPES
            )
        if self._scheme.input_scales:
            self._weights.declare(f"{name}.{self._scheme.input_scale_name}", None, _unused, dtypes=SCALE_DTYPES)

    def _quantise(self, name: str, tensor: Tensor, which: int, at: tuple[int | slice, ...]) -> None:
        data, scale = quantise_rows(tensor.to(self._data[which].device))
        if not bool(scale.isfinite().all()):
            raise LoadError(f"{name} has a value that is not finite: it cannot be quantised")
        self._data[which].fill(name, at, data)
        self._scale[which].fill(name, at, scale.view(-1))

    def finish(self) -> None:
        self._matrices = tuple(stack.get() for stack in self._data)
        self._scales = tuple(stack.get() for stack in self._scale)

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, base: Tensor | None = None) -> Tensor:
        """[T, hidden] -> [T, hidden]: see octavo.interfaces.Experts."""
        return self._run(x, weights, ids, *self._matrices, self._gate, base=base, scales=self._scales)


def _single(name: str, tensor: Tensor) -> Tensor:
    if tensor.numel() != 1:
        raise LoadError(f"{name} has the shape {list(tensor.shape)}; one scale for the matrix is expected")
    return checked(name, tensor).view(1)


def _unused(tensor: Tensor) -> None:
    """Experts take inputs as they are, so the scale of a static quantisation says nothing to them."""


def experts_fp8(
    x: Tensor,
    weights: Tensor,
    ids: Tensor,
    gate_up: Tensor,
    down: Tensor,
    gate: Gate,
    *,
    scales: Scales,
    base: Tensor | None = None,
) -> Tensor:
    """core's operator "experts" over the weights that e4m3 gate_up and down stand for. The oracle of the kernel, and what a
    CPU runs: one expert is widened at a time. On a device that runs ahead of the host every expert takes every token, as in core."""
    used = range(len(gate_up)) if x.is_cuda else sorted(set(ids.flatten().tolist()))
    wide = torch.float32 if x.dtype == torch.float16 else x.dtype
    total = torch.zeros_like(x, dtype=torch.float32) if base is None else base.float()
    first = ids.new_zeros(len(x), 1)
    for expert in used:
        share = (weights * (ids == expert)).sum(1, keepdim=True)
        if scales[0].ndim == 2:
            both, one = (w[expert].float() * s[expert, :, None] for w, s in ((gate_up, scales[0]), (down, scales[1])))
        else:
            inner = gate_up.shape[1] // 2
            halves = zip(gate_up[expert].float().split(inner), scales[0][expert], strict=True)
            both = torch.cat([half * spread_blocks(scale, *half.shape) for half, scale in halves])
            one = down[expert].float() * spread_blocks(scales[1][expert], *down.shape[1:])
        part = core.experts(x.to(wide), share, first, both[None].to(wide), one[None].to(wide), gate)
        total = total + part.float()
    return total.to(x.dtype)
