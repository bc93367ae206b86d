"""The mixture-of-experts block of a decoder layer: router, routed experts, shared experts.

Owns the order of things. Which experts a token takes is the operator "route"; how an expert's weights are kept is
the quantizer's (ModelParts.experts). Stateless between steps.
"""

from __future__ import annotations

from typing import Protocol, cast

import torch
from torch import Tensor

from octavo.interfaces import ExpertsSpec, ModelParts, Routing
from octavo.model.matrix import Matrix, Offers, SmallProduct, head_matrix
from octavo.model.parameter import Parameter


class Block(Protocol):
    """A part of a layer that maps [T, H] to [T, H]: an MLP, experts, shared experts. `activation` names the input
    format it wants, as a Linear's."""

    activation: str

    def __call__(self, x: Tensor) -> Tensor: ...

    def finish(self) -> None: ...


class Router:
    """Logits of x over the experts, and the choice: float32 throughout, and never quantised, because a choice that
    flips changes the token's whole output."""

    def __init__(
        self, name: str, hidden: int, count: int, routing: Routing, parts: ModelParts, *, bias: bool = False, correction: str = ""
    ) -> None:
        """`name`.weight [count, hidden], with `bias` also `name`.bias [count]. correction names the tensor [count]
        that corrects the choice (Routing); empty: there is none."""
        self._routing, self._route = routing, parts.op("route")
        self._offers = Offers(small=cast("SmallProduct | None", parts.find("small_linear")))
        self._weight = Parameter(f"{name}.weight", (count, hidden), parts)
        self._bias = Parameter(f"{name}.bias", (count,), parts) if bias else None
        self._correction = Parameter(correction, (count,), parts, torch.float32) if correction else None

    def finish(self) -> None:
        bias = None if self._bias is None else self._bias.get()
        self._matrix: Matrix = head_matrix(self._weight.get(), bias, self._offers)
        self._shift = None if self._correction is None else self._correction.get()

    def __call__(self, x: Tensor, ids: Tensor | None = None) -> tuple[Tensor, Tensor]:
        """(weights float32, ids int32), each [T, top_k], of x [T, H]; ids [T, top_k], if given, are the choice."""
        weights, chosen = self._route(self._matrix(x), self._routing, self._shift, ids)
        return weights, chosen


class MoE:
    """Router and experts; shared, if there is one, is a block that every token takes besides, at weight 1. The input
    is in the model's dtype, whatever the experts' format: the router reads it too."""

    activation = "plain"

    def __init__(self, router: Router, prefix: str, spec: ExpertsSpec, parts: ModelParts, shared: Block | None = None) -> None:
        """prefix is the checkpoint's name of the experts, such as "model.layers.0.mlp.experts"."""
        self.router, self.experts, self.shared = router, parts.experts(prefix, spec), shared

    def finish(self) -> None:
        self.router.finish()
        self.experts.finish()
        if self.shared is not None:
            self.shared.finish()

    def __call__(self, x: Tensor, ids: Tensor | None = None) -> Tensor:
        """[T, H] -> [T, H]. ids int32 [T, top_k] are the experts where the router does not choose them."""
        weights, ids = self.router(x, ids)
        return self.experts(x, weights, ids, None if self.shared is None else self.shared(x))
