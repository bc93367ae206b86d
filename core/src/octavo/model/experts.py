"""The experts of a layer with weights as the checkpoint has them: float32, bfloat16 or float16.

Owns the gathering of every expert's checkpoint matrices into the two that the operator "experts" takes. Must never
know which tokens go to which expert: the operator does.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from octavo.interfaces import ExpertsSpec, Weights


class PlainExperts:
    """interfaces.Experts: gate_up [count, 2 inner, hidden] (gate's rows, then up's) and down [count, hidden, inner]."""

    def __init__(
        self,
        prefix: str,
        spec: ExpertsSpec,
        *,
        weights: Weights,
        device: torch.device,
        dtype: torch.dtype,
        run: Callable[..., Tensor],
    ) -> None:
        """run is the operator ("experts", "plain")."""
        self._run, self._gate = run, spec.gate
        self._device, self._dtype = device, dtype
        self._gate_up = Stack((spec.count, 2 * spec.inner, spec.hidden), device, dtype)
        self._down = Stack((spec.count, spec.hidden, spec.inner), device, dtype)
        self._biases: dict[str, Stack] = {}
        if spec.bias:
            self._biases["gate_up_bias"] = Stack((spec.count, 2 * spec.inner), device, dtype)
            self._biases["down_bias"] = Stack((spec.count, spec.hidden), device, dtype)
        if spec.stacked:
            self._declare_stacked(prefix, spec, weights)
        else:
            self._declare_each(prefix, spec, weights)

    def _declare_each(self, prefix: str, spec: ExpertsSpec, weights: Weights) -> None:
        gate, up, down = spec.names
        n = spec.inner
        for e in range(spec.count):
            for name, stack, bias, rows in (
                (gate, self._gate_up, "gate_up_bias", slice(0, n)),
                (up, self._gate_up, "gate_up_bias", slice(n, 2 * n)),
                (down, self._down, "down_bias", slice(None)),
            ):
                stack.declare(weights, f"{prefix}.{e}.{name}.weight", (e, rows))
                if spec.bias:
                    self._biases[bias].declare(weights, f"{prefix}.{e}.{name}.bias", (e, rows))

    def _declare_stacked(self, prefix: str, spec: ExpertsSpec, weights: Weights) -> None:
        count, hidden, inner = spec.count, spec.hidden, spec.inner
        every = (slice(None),)
        self._gate_up.declare(
            weights, f"{prefix}.gate_up_proj", every, (count, hidden, 2 * inner), lambda t: deinterleave(t.transpose(1, 2))
        )
        self._down.declare(weights, f"{prefix}.down_proj", every, (count, inner, hidden), lambda t: t.transpose(1, 2))
        if spec.bias:
            self._declare_biases(prefix, weights)

    def _declare_biases(self, prefix: str, weights: Weights) -> None:
        every = (slice(None),)
        self._biases["gate_up_bias"].declare(weights, f"{prefix}.gate_up_proj_bias", every, prepare=deinterleave)
        self._biases["down_bias"].declare(weights, f"{prefix}.down_proj_bias", every)

    def finish(self) -> None:
        self._weights = self._gate_up.get(), self._down.get()
        self._extra = {name: stack.get() for name, stack in self._biases.items()}

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, base: Tensor | None = None) -> Tensor:
        """[T, hidden] -> [T, hidden]: see interfaces.Experts."""
        return self._run(x, weights, ids, *self._weights, self._gate, base=base, **self._extra)


class Stack:
    """One tensor [count, ...] on `device`, made of checkpoint tensors that each fill a part of it."""

    def __init__(self, shape: tuple[int, ...], device: torch.device, dtype: torch.dtype) -> None:
        self.device, self.dtype = device, dtype
        self._shape = shape
        self._value: Tensor | None = None
        self._waiting: set[str] = set()

    def declare(
        self,
        weights: Weights,
        name: str,
        at: tuple[Any, ...],
        shape: tuple[int, ...] | None = None,
        prepare: Callable[[Tensor], Tensor] = lambda tensor: tensor,
        dtypes: tuple[str, ...] = (),
    ) -> None:
        """The checkpoint tensor `name`, of `shape` (default: that of the part) and one of `dtypes` (default: an
        unquantised float), goes through `prepare` to the part `at`."""
        self.expect(name)
        part = torch.empty(self._shape, device="meta")[at]
        weights.declare(name, shape or tuple(part.shape), lambda tensor: self.fill(name, at, prepare(tensor)), dtypes=dtypes)

    def expect(self, name: str) -> None:
        """`get` refuses until `fill` has been called for this name, with `last`."""
        self._waiting.add(name)

    def fill(self, name: str, at: tuple[Any, ...], tensor: Tensor, *, last: bool = True) -> None:
        """Copy tensor, cast, to the part `at`."""
        if self._value is None:
            self._value = torch.empty(self._shape, device=self.device, dtype=self.dtype)
        self._value[at].copy_(tensor)
        if last:
            self._waiting.discard(name)

    def get(self) -> Tensor:
        if self._value is None or self._waiting:
            some = ", ".join(sorted(self._waiting)[:3])
            raise RuntimeError(f"experts are used before they are filled; {len(self._waiting)} tensors are missing: {some}")
        return self._value


def deinterleave(tensor: Tensor) -> Tensor:
    """[count, 2 n, ...] with gate and up rows alternating -> the same rows, gate's first, then up's."""
    return torch.cat((tensor[:, ::2], tensor[:, 1::2]), 1)
