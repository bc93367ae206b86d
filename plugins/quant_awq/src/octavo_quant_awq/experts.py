"""The experts of a layer with 4-bit weights: each one's matrices by themselves, as Linears of the format.

Owns who multiplies what, and the sum. On a CPU an expert multiplies the rows of its own tokens; on a device that runs ahead of the host
every expert takes every token, because to ask which are in use would wait for it: correct in captured graphs, and slow where experts are many.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from octavo.errors import LoadError
from octavo.interfaces import ExpertsSpec, Linear
from octavo.model.operators import gated
from torch import Tensor


class FourBitExperts:
    """interfaces.Experts: per expert a Linear of gate and up side by side, and one of down."""

    def __init__(self, linears: Sequence[tuple[Linear, Linear]], spec: ExpertsSpec) -> None:
        self._linears, self._gate = linears, spec.gate

    def finish(self) -> None:
        for both, down in self._linears:
            both.finish()
            down.finish()

    def _run(self, expert: int, rows: Tensor) -> Tensor:
        both, down = self._linears[expert]
        left, right = both(rows).chunk(2, -1)
        return down(gated(left, right, self._gate))

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, base: Tensor | None = None) -> Tensor:
        """x [T, hidden], weights float32 and ids int32 [T, top_k], base [T, hidden] -> [T, hidden], summed in float32."""
        total = torch.zeros_like(x, dtype=torch.float32) if base is None else base.float().clone()
        if x.is_cuda:
            shares = weights.new_zeros(len(x), len(self._linears)).scatter_add_(1, ids.long(), weights)
            for expert in range(len(self._linears)):
                total.addcmul_(self._run(expert, x).float(), shares[:, expert, None])
            return total.to(x.dtype)
        for expert in torch.unique(ids).tolist():
            tokens, places = torch.where(ids == expert)
            total.index_add_(0, tokens, self._run(expert, x[tokens]).float() * weights[tokens, places, None])
        return total.to(x.dtype)


def check_experts(prefix: str, spec: ExpertsSpec) -> None:
    """LoadError for a form of checkpoint that 4-bit layouts do not have."""
    if spec.stacked:
        raise LoadError(f"{prefix}: 4-bit experts are read one matrix an expert; this model's are stacked in one tensor")
