"""A model that runs calibration text, its weights read when they are needed: memory for one layer, or for all where there is room.

Owns the run. The adapter's own model is built with Linears that read their matrices at each call, and with attention over the texts
at hand; all texts of a pass go through side by side, in copies: copy 0 computes the model as it is, every other one the model with
one candidate for the scales. Where a block that a candidate changes ends, its output is compared with copy 0's and replaced by
it, so that what comes after sees what the unquantised model computes. Must never change the model.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Protocol

import numpy as np
import torch
import torch.nn.functional as F
from octavo.decision import OperatorSet
from octavo.errors import QuantizeError
from octavo.interfaces import (
    AttentionLayer,
    Experts,
    ExpertsSpec,
    Limits,
    Linear,
    ModelParts,
    OperatorParts,
    QuantizeTask,
    Step,
    StepHost,
)
from octavo.model.checkpoint import Header, checkpoint_headers
from octavo.model.linear import torch_device
from octavo.model.loader import WeightTable, load_weights
from octavo.model.operators import TorchOperators, gated
from octavo.model.readers import read_gguf, read_safetensors
from torch import Tensor

from octavo_quant_awq.make.structure import Module


class Visitor(Protocol):
    """Who computes a Linear: called with its modules, their input [copies, tokens, in] and the product with the plain
    weights, it returns the output [copies, tokens, out]."""

    def __call__(self, modules: tuple[Module, ...], x: Tensor, plain: Callable[[Tensor], Tensor]) -> Tensor: ...


class Tensors:
    """Tensors of the source by name, on the device and in the dtype of the task. Kept while they fit into `budget` bytes."""

    def __init__(self, task: QuantizeTask, budget: int) -> None:
        self._task, self._device, self._budget = task, torch_device(task.device), budget
        self._headers: dict[str, Header] = checkpoint_headers(task.source)
        self._kept: OrderedDict[str, Tensor] = OrderedDict()
        self._size = 0

    def names(self) -> Iterator[str]:
        return iter(self._headers)

    def read(self, name: str) -> Tensor:
        """As it is stored (dequantised to the task's dtype where it is GGUF), on the CPU."""
        header, source = self._headers[name], self._task.source
        found = (
            read_gguf(source.path, [header], getattr(torch, self._task.dtype))
            if source.kind == "gguf"
            else read_safetensors([header])
        )
        return next(iter(found))[1]

    def __call__(self, name: str) -> Tensor:
        if name in self._kept:
            return self._kept[name]
        if name not in self._headers:
            raise QuantizeError(f"{self._task.source.path}: has no tensor {name!r}")
        tensor = self.read(name).to(self._device, getattr(torch, self._task.dtype))
        if self._size + tensor.nbytes <= self._budget:
            self._kept[name], self._size = tensor, self._size + tensor.nbytes
        return tensor


class WatchedModel:
    """The task's model. `linears` are its Linears that may be quantised, in order; `mixtures` the modules that hold experts."""

    def __init__(self, task: QuantizeTask, length: int, budget: int) -> None:
        """length: tokens of a text. QuantizeError for experts that are stacked in one tensor."""
        self.tensors = Tensors(task, budget)
        self.linears: list[tuple[Module, ...]] = []
        self.mixtures: list[str] = []
        self._device, self._length, self._copies = torch_device(task.device), length, 1
        self._visit: Visitor | None = None
        self._task = task
        self._table = WeightTable()
        operators = OperatorSet(TorchOperators(None, OperatorParts(task.device, task.dtype)).ops, {})
        self._model = task.adapter.build(
            task.source.config,
            ModelParts(
                device=task.device,
                dtype=task.dtype,
                limits=Limits(1, length, length),
                weights=self._table,
                linear=self._linear,
                tied=lambda embedding, out_features: _Unused(out_features),
                attention=lambda layer: _Texts(layer, length, operators("qk_norm_rope")),
                op=operators,
                experts=self._experts,
            ),
        )
        self._loaded = False

    def _experts(self, prefix: str, spec: ExpertsSpec) -> Experts:
        if spec.stacked:
            raise QuantizeError(
                f"{prefix}: {spec.count} experts stacked in one tensor; AWQ checkpoints have a matrix for each expert"
            )
        gate, up, down = spec.names
        pairs = []
        for e in range(spec.count):
            both = self._linear(f"{prefix}.{e}", spec.hidden, {gate: spec.inner, up: spec.inner}, bias=spec.bias)
            pairs.append((both, self._linear(f"{prefix}.{e}", spec.inner, {down: spec.hidden}, bias=spec.bias)))
        self.mixtures.append(prefix.rpartition(".")[0])
        return _WatchedExperts(self, pairs, spec)

    def routers(self) -> list[str]:
        """What the routers of the mixtures are called, such as "gate": matrices of the model that stay plain."""
        inside = [name for name in self.tensors.names() if name.endswith(".weight") and self.other(name)]
        owners = {name.removesuffix(".weight") for name in inside if name.rpartition(".")[0].rpartition(".")[0] in self.mixtures}
        return sorted({owner.rpartition(".")[2] for owner in owners})

    @property
    def copies(self) -> int:
        """Of the texts, in the pass that runs."""
        return self._copies

    def other(self, name: str) -> bool:
        """Whether it is a tensor of the model outside its Linears, such as a norm."""
        return name in self._table

    def _linear(
        self, prefix: str, in_features: int, parts: Mapping[str, int], *, bias: bool = False, head: bool = False
    ) -> Linear:
        if head:
            return _Unused(sum(parts.values()))
        modules = tuple(Module(f"{prefix}.{part}" if prefix else part, rows, in_features) for part, rows in parts.items())
        self.linears.append(modules)
        return _Watched(self, modules, bias)

    def _load(self) -> None:
        """What is not in a Linear: embedding and norms."""
        prefixes = tuple(f"{m.name}." for modules in self.linears for m in modules)
        ignored = self._task.adapter.ignored
        load_weights(
            self._task.source,
            self._table,
            self._task.dtype,
            ignored=lambda name: name.startswith((*prefixes, "lm_head.")) or ignored(name),
            device=self._device,
        )
        self._model.finish()
        self._loaded = True

    def run(self, texts: list[list[int]], copies: int, visit: Visitor) -> None:
        """One pass: `texts` of `length` tokens each, side by side, `copies` times."""
        if not self._loaded:
            self._load()
        self._visit, self._copies = visit, copies
        ids = torch.tensor(texts, device=self._device).flatten().repeat(copies)
        count, rows = len(ids), len(ids) // self._length
        at = torch.arange(self._length, device=self._device).repeat(rows)
        lengths = np.full(rows, self._length)
        step = Step(
            token_ids=ids,
            positions=at,
            query_start=torch.arange(0, count + 1, self._length, dtype=torch.int32, device=self._device),
            seq_lens=torch.full((rows,), self._length, dtype=torch.int32, device=self._device),
            rows=torch.arange(rows, device=self._device),
            tables=(),
            slot_mapping=(),
            token_rows=torch.arange(rows, device=self._device).repeat_interleave(self._length),
            logit_index=torch.zeros(1, dtype=torch.int64, device=self._device),
            host=StepHost(lengths, lengths, np.arange(rows), count, self._length, self._length),
            rope_tokens=torch.full_like(at, self._length),
        )
        with torch.inference_mode():
            self._model.forward(step)
        self._visit = None

    def compute(self, modules: tuple[Module, ...], bias: bool, x: Tensor) -> Tensor:
        """A Linear's output, as the visitor of the pass computes it."""
        assert self._visit is not None
        weight = torch.cat([self.tensors(f"{m.name}.weight") for m in modules])
        offset = torch.cat([self.tensors(f"{m.name}.bias") for m in modules]) if bias else None
        y = self._visit(modules, x.view(self._copies, -1, x.shape[-1]), lambda part: F.linear(part, weight, offset))
        return y.flatten(0, 1)


class _Watched:
    """interfaces.Linear whose matrices are read at each call."""

    activation = "plain"

    def __init__(self, model: WatchedModel, modules: tuple[Module, ...], bias: bool) -> None:
        self._model, self._modules, self._bias = model, modules, bias
        self.out_features = sum(m.rows for m in modules)

    def finish(self) -> None:
        pass

    def __call__(self, x: Tensor) -> Tensor:
        return self._model.compute(self._modules, self._bias, x)


class _WatchedExperts:
    """interfaces.Experts whose matrices are read at each call. Every copy takes the choice and the shares of copy 0, so that the copies of a token meet in each Linear."""

    def __init__(self, model: WatchedModel, pairs: Sequence[tuple[Linear, Linear]], spec: ExpertsSpec) -> None:
        self._model, self._pairs, self._gate = model, pairs, spec.gate

    def finish(self) -> None:
        pass

    def __call__(self, x: Tensor, weights: Tensor, ids: Tensor, base: Tensor | None = None) -> Tensor:
        """x [copies * tokens, hidden] -> the same shape: see interfaces.Experts."""
        copies = self._model.copies
        texts = x.unflatten(0, (copies, -1))
        ids, weights = (t.unflatten(0, (copies, -1))[0] for t in (ids, weights))
        total = torch.zeros_like(texts, dtype=torch.float32) if base is None else base.float().view_as(texts).clone()
        for expert in torch.unique(ids).tolist():
            tokens, places = torch.where(ids == expert)
            both, down = self._pairs[expert]
            left, right = both(texts[:, tokens].flatten(0, 1)).chunk(2, -1)
            y = down(gated(left, right, self._gate)).unflatten(0, (copies, -1))
            total.index_add_(1, tokens, y.float() * weights[tokens, places, None])
        return total.flatten(0, 1).to(x.dtype)


class _Unused:
    """interfaces.Linear of a head: calibration asks for no logits."""

    activation = "plain"

    def __init__(self, out_features: int) -> None:
        self.out_features = out_features

    def finish(self) -> None:
        pass

    def __call__(self, x: Tensor) -> Tensor:
        raise AssertionError("calibration asks for no logits")


class _Texts:
    """interfaces.Attention without a cache: every text over itself."""

    def __init__(self, layer: AttentionLayer, length: int, norm_rope: Callable[..., Tensor]) -> None:
        self._layer, self._length, self._norm_rope = layer, length, norm_rope

    def __call__(self, step: Step, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
        return attend(self._layer, self._length, q, k, v)

    def turned(self, step: Step, qkv: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
        heads, kv_heads = self._layer.num_heads, self._layer.num_kv_heads
        qk, v = qkv.split_with_sizes((heads + kv_heads, kv_heads), 1)
        q, k = self._norm_rope(qk, weight, eps, cos, sin).split_with_sizes((heads, kv_heads), 1)
        return self(step, q, k, v)


def attend(layer: AttentionLayer, length: int, q: Tensor, k: Tensor, v: Tensor) -> Tensor:
    """Causal attention within texts of `length` tokens: q [T, heads, D], k and v [T, kv_heads, D] -> [T, heads, D]."""
    group = layer.num_heads // layer.num_kv_heads
    q, k, v = (t.unflatten(0, (-1, length)).transpose(1, 2) for t in (q, k, v))  # [texts, heads, length, D]
    at = torch.arange(length, device=q.device)
    seen = at <= at[:, None]
    if layer.window is not None:
        seen &= at > at[:, None] - layer.window
    if layer.sinks is None and not layer.softcap:
        mask = None if layer.window is None or layer.window >= length else seen
        out = F.scaled_dot_product_attention(
            q, k, v, attn_mask=mask, is_causal=mask is None, scale=layer.scale, enable_gqa=group > 1
        )
        return out.transpose(1, 2).flatten(0, 1)
    found = []
    for one_q, one_k, one_v in zip(q, k.repeat_interleave(group, 1), v.repeat_interleave(group, 1), strict=True):
        scores = (one_q @ one_k.transpose(1, 2)).float() * layer.scale
        if layer.softcap:
            scores = torch.tanh(scores / layer.softcap) * layer.softcap
        scores.masked_fill_(~seen, -math.inf)
        if layer.sinks is not None:
            scores = torch.cat((scores, layer.sinks.float().view(-1, 1, 1).expand(-1, length, 1)), -1)
        found.append((torch.softmax(scores, -1)[..., :length].to(v.dtype) @ one_v).transpose(0, 1))
    return torch.cat(found)
