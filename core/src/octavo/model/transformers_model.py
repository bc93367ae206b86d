"""PagedTransformers: a causal model of transformers whose attention reads and writes Octavo's pages.

Owns the modules as transformers builds them, and the step that they are in: transformers passes its modules only what it
knows, so the step lies beside them while `forward` runs, and nothing of it stays.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from octavo.interfaces import Attention, AttentionLayer, ModelParts, Step
from octavo.model.linear import torch_device
from octavo.model.transformers_probe import Call, attach, base, create
from octavo.model.transformers_weights import CheckpointMap


class PagedTransformers:
    """interfaces.Model. `capturable`: transformers' modules may ask the device for values, so steps are not captured."""

    capturable = False

    def __init__(self, parsed: Any, calls: Sequence[Call], layers: Sequence[AttentionLayer], parts: ModelParts) -> None:
        device = torch_device(parts.device)
        self._model = create(parsed, getattr(torch, parts.dtype), device)
        self._body = base(self._model)
        self.map = CheckpointMap(self._model)
        self.map.declare(parts.weights)
        self._step: Step | None = None
        for call, layer in zip(calls, layers, strict=True):
            module = self._model.get_submodule(call.module)
            if call.sinks:
                layer = replace(layer, sinks=module.sinks.data)
            attach(module, self._paged(parts.attention(layer)))
        # Four dimensions tell transformers that the mask is made; attention does not look at it.
        self._mask = torch.ones(1, 1, 1, 1, dtype=torch.bool, device=device)
        self._given = _Given(self._body)
        setattr(self._model, self._model.base_model_prefix, self._given)

    def _paged(self, attend: Attention) -> Any:
        def run(module: nn.Module, query: Tensor, key: Tensor, value: Tensor, mask: Any, **kwargs: Any) -> Tensor:
            assert self._step is not None
            q, k, v = (tensor[0].transpose(0, 1).contiguous() for tensor in (query, key, value))
            return attend(self._step, q, k, v).unsqueeze(0)

        return run

    def finish(self) -> None:
        pass

    def forward(self, step: Step) -> Tensor:
        """Hidden states [T, H] after the final norm."""
        self._step = step
        try:
            out = self._body(
                input_ids=step.token_ids.unsqueeze(0),
                position_ids=step.positions.unsqueeze(0),
                attention_mask=self._mask,
                use_cache=False,
            )
        finally:
            self._step = None
        hidden: Tensor = out.last_hidden_state[0]
        return hidden

    def logits(self, hidden: Tensor) -> Tensor:
        """float32 [S, vocab] of hidden [S, H], with whatever the causal model does after its head."""
        self._given.hidden = hidden.unsqueeze(0)
        try:
            found: Tensor = self._model(input_ids=None, use_cache=False).logits[0]
        finally:
            self._given.hidden = None
        return found.float()


class _Given(nn.Module):
    """Stands for the base model while the head runs: its result is given."""

    def __init__(self, body: nn.Module) -> None:
        super().__init__()
        object.__setattr__(self, "_body", body)
        self.hidden: Tensor | None = None

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        assert self.hidden is not None
        return _Result(self.hidden)

    def __getattr__(self, name: str) -> Any:
        """Whatever else a causal model asks of its base."""
        try:
            return super().__getattr__(name)
        except AttributeError:
            return getattr(self.__dict__["_body"], name)


class _Result:
    """A base model's output that has hidden states and nothing else: everything else is None, as transformers' is."""

    def __init__(self, hidden: Tensor) -> None:
        self.last_hidden_state = hidden

    def __getattr__(self, name: str) -> None:
        if name.startswith("_"):
            raise AttributeError(name)
        return None

    def __getitem__(self, index: int) -> Tensor:
        return (self.last_hidden_state,)[index]
