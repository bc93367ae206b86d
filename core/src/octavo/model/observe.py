"""A model that runs whole texts while somebody watches: how quantisers calibrate.

Owns a run without engine, cache or quantised weights: the adapter's own model, plain weights, attention over
the text at hand. An Observer sees the input of every Linear and the keys and values of every attention layer.
Must never change what it shows, nor keep it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from typing import Any, Protocol, cast

import numpy as np
import torch
from torch import Tensor

from octavo.attention.layer import PagedAttention
from octavo.decision import OperatorSet
from octavo.errors import QuantizeError
from octavo.interfaces import (
    AttentionBackend,
    AttentionLayer,
    Experts,
    ExpertsSpec,
    Limits,
    Linear,
    ModelParts,
    OperatorParts,
    QuantizerParts,
    QuantizeTask,
    Step,
    StepHost,
)
from octavo.model.linear import PlainQuantizer, torch_device
from octavo.model.loader import WeightTable, load_weights, match_checkpoint
from octavo.model.operators import TorchOperators
from octavo.model.tokenizer_files import load_tokenizer_files


class Observer(Protocol):
    """Who watches. Tensors are the model's own, in its dtype and on its device: read, never kept or changed."""

    def linear(self, names: tuple[str, ...], x: Tensor) -> None:
        """x [T, in] is about to enter the Linear made of these checkpoint modules, such as ("model.layers.0.self_attn.q_proj",
        "...k_proj", "...v_proj") or ("lm_head",)."""

    def attention(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> None:
        """k [T, kv_heads, k_dim] (after RoPE) and v [T, kv_heads, v_dim] as they would enter the cache."""


class ObservedModel:
    """The task's model with its weights loaded, in the task's dtype on its device."""

    def __init__(self, task: QuantizeTask, observer: Observer, *, max_len: int) -> None:
        """max_len: tokens of the longest text. LoadError if the checkpoint does not fit."""
        self._device = torch_device(task.device)
        table = WeightTable()
        plain = _plain(task, table)
        facts = task.adapter.facts(task.source.config, task.dtype, task.dtype)

        def linear(prefix: str, in_features: int, parts: Mapping[str, int], *, bias: bool = False, head: bool = False) -> Linear:
            names = tuple(f"{prefix}.{part}" if prefix else part for part in parts)
            return _Watched(plain.linear(prefix, in_features, parts, bias=bias, head=head), names, observer)

        self._model = task.adapter.build(
            task.source.config,
            _parts(task, table, plain, linear, observer, plain.experts, max_len),
        )
        load_weights(
            task.source,
            table,
            task.dtype,
            tied=facts.tied_head,
            ignored=task.adapter.ignored,
            device=self._device,
            progress=lambda done, total: task.tell("loading", done, total),
        )
        self._model.finish()

    def run(self, token_ids: list[int]) -> Tensor:
        """One forward pass over one text: the hidden states after the final norm, [T, H]."""
        count = len(token_ids)
        at, empty = torch.arange(count, device=self._device), torch.zeros(1, dtype=torch.int64, device=self._device)
        lengths = np.array([count])
        step = Step(
            token_ids=torch.tensor(token_ids, device=self._device),
            positions=at,
            query_start=torch.tensor([0, count], dtype=torch.int32, device=self._device),
            seq_lens=torch.tensor([count], dtype=torch.int32, device=self._device),
            rows=empty,
            tables=(),
            slot_mapping=(),
            token_rows=torch.zeros_like(at),
            logit_index=empty + (count - 1),
            host=StepHost(lengths, lengths, np.zeros(1, np.int64), count, count, count),
            rope_tokens=torch.full_like(at, count),
        )
        with torch.inference_mode():
            return self._model.forward(step)


class _Nobody:
    """An Observer who does not look."""

    def linear(self, names: tuple[str, ...], x: Tensor) -> None:
        pass

    def attention(self, layer: AttentionLayer, k: Tensor, v: Tensor) -> None:
        pass


class _Watched:
    """interfaces.Linear that shows its input first."""

    activation = "plain"

    def __init__(self, linear: Linear, names: tuple[str, ...], observer: Observer) -> None:
        self._linear, self._names, self._see = linear, names, observer.linear
        self.out_features = linear.out_features

    def finish(self) -> None:
        self._linear.finish()

    def __call__(self, x: Tensor) -> Tensor:
        self._see(self._names, x)
        return self._linear(x)


class _WholeText:
    """As much of interfaces.AttentionBackend as PagedAttention calls, for one layer and one text at a time: causal attention
    of the text over itself; window, softcap and sinks as `octavo.interfaces.AttentionLayer` says."""

    graphs = "none"

    def __init__(self, layer: AttentionLayer, observer: Observer) -> None:
        self._layer, self._see = layer, observer.attention

    def write(self, layer: int, step: Step, k: Tensor, v: Tensor) -> None:
        self._see(self._layer, k, v)
        self._k, self._v = k, v

    def gather(self, layer: int, row: int, length: int) -> tuple[Tensor, Tensor]:
        return self._k[:length], self._v[:length]

    def run(self, layer: int, step: Step, q: Tensor, out: Tensor) -> Tensor:
        facts, k, v, count = self._layer, self._k, self._v, q.shape[0]
        group = facts.num_heads // facts.num_kv_heads
        queries = q.view(count, facts.num_kv_heads, group, -1).permute(1, 2, 0, 3)
        scores = (queries @ k.permute(1, 2, 0).unsqueeze(1)).float() * facts.scale  # [kv_heads, group, T, T]
        if facts.softcap:
            scores = torch.tanh(scores / facts.softcap) * facts.softcap
        at = step.positions
        hidden = at > at[:, None]
        if facts.window is not None:
            hidden |= at <= at[:, None] - facts.window
        scores.masked_fill_(hidden, -math.inf)
        if facts.sinks is not None:
            sinks = facts.sinks.float().view(facts.num_kv_heads, group, 1, 1).expand(-1, -1, count, 1)
            scores = torch.cat((scores, sinks), -1)
        weights = torch.softmax(scores, -1)[..., :count].to(v.dtype)
        found = weights @ v.transpose(0, 1).unsqueeze(1)  # [kv_heads, group, T, v_dim]
        return out.copy_(found.permute(2, 0, 1, 3).reshape(out.shape))


def calibration_windows(task: QuantizeTask, length: int, count: int | None = None) -> list[list[int]]:
    """The task's text as token ids in windows of `length`, or of the model's context where that is shorter (the last window may be
    shorter still), at most `count` of them; each starts with the model's bos where it has one. QuantizeError without a text."""
    if task.calibration is None:
        raise QuantizeError("this needs a text to calibrate on: give --calibrate FILE (or --data FILE, which is the same)")
    longest = task.adapter.facts(task.source.config, task.dtype, task.dtype).max_position
    length = min(length, longest) if longest else length
    files = load_tokenizer_files(task.source)
    ids = files.tokenizer.encode(task.calibration, add_special_tokens=False).ids
    start = [files.bos_id] if files.add_bos and files.bos_id is not None else []
    body = length - len(start)
    windows = [start + ids[at : at + body] for at in range(0, len(ids), body)]
    return windows[:count]


def linear_modules(task: QuantizeTask) -> tuple[str, ...]:
    """Checkpoint modules whose matrices a quantizer may take, in the order of the model: Linears, output heads left out, and
    every expert's. Reads no weights. QuantizeError for experts that a checkpoint keeps in one tensor."""
    table = WeightTable()
    plain = _plain(task, table)
    found: list[str] = []

    def linear(prefix: str, in_features: int, parts: Mapping[str, int], *, bias: bool = False, head: bool = False) -> Linear:
        if not head:
            found.extend(f"{prefix}.{part}" if prefix else part for part in parts)
        return plain.linear(prefix, in_features, parts, bias=bias, head=head)

    def experts(prefix: str, spec: ExpertsSpec) -> Experts:
        if spec.stacked:
            raise QuantizeError(
                f"{prefix}: the checkpoint keeps its {spec.count} experts in one tensor; that form is not quantised"
            )
        found.extend(f"{prefix}.{expert}.{name}" for expert in range(spec.count) for name in spec.names)
        return plain.experts(prefix, spec)

    task.adapter.build(task.source.config, _parts(task, table, plain, linear, _Nobody(), experts))
    return tuple(found)


def check_checkpoint(task: QuantizeTask) -> None:
    """LoadError unless the checkpoint has what the model loads and nothing that it has no place for. Reads no weights."""
    table = WeightTable()
    plain = _plain(task, table)
    task.adapter.build(task.source.config, _parts(task, table, plain, plain.linear, _Nobody(), plain.experts))
    facts = task.adapter.facts(task.source.config, task.dtype, task.dtype)
    canonical = getattr(task.adapter, "canonical", lambda name: name)
    match_checkpoint(task.source, table, tied=facts.tied_head, ignored=task.adapter.ignored, canonical=canonical)


def _operators(task: QuantizeTask) -> Mapping[tuple[str, str], Callable[..., Any]]:
    """core's, by name and format."""
    return TorchOperators(None, OperatorParts(task.device, task.dtype)).ops


def _plain(task: QuantizeTask, table: WeightTable) -> PlainQuantizer:
    """Weights as the checkpoint has them."""
    find = _operators(task).get
    return PlainQuantizer(None, QuantizerParts(task.device, task.dtype, {}, table, lambda name: find((name, "plain"))))


def _parts(
    task: QuantizeTask,
    table: WeightTable,
    plain: PlainQuantizer,
    linear: Callable[..., Linear],
    observer: Observer,
    experts: Callable[[str, ExpertsSpec], Experts],
    max_len: int = 1,
) -> ModelParts:
    """What the adapter builds from: core's operators, plain weights, one row of max_len tokens."""
    op = OperatorSet(_operators(task), {})

    def attention(layer: AttentionLayer) -> PagedAttention:
        return PagedAttention(layer, cast("AttentionBackend", _WholeText(layer, observer)), op("qk_norm_rope"))

    return ModelParts(
        device=task.device,
        dtype=task.dtype,
        limits=Limits(1, max_len, max_len),
        weights=table,
        linear=linear,
        tied=plain.tied,
        attention=attention,
        op=op,
        experts=experts,
    )
