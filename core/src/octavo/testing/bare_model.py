"""A model that runs without an engine, for tests of model adapters, and transformers' model of the same config.

Owns BareModel: an adapter, plain weights in a dict, attention (core's torch backend unless another is asked for) over a cache
of NaN in random page order, and hand-made steps. The conformance suite that uses it is `octavo.testing.model`.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from copy import deepcopy
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.attention.layer import PagedAttention
from octavo.attention.torch_backend import TorchAttention
from octavo.cache.pool import plan_groups
from octavo.catalog import Device
from octavo.decision import OperatorSet
from octavo.interfaces import (
    AttentionBackend,
    AttentionLayer,
    AttentionParts,
    BoundGroup,
    Limits,
    ModelAdapter,
    ModelParts,
    OperatorParts,
    Quantizer,
    QuantizerParts,
    Step,
    StepHost,
)
from octavo.model.linear import PlainQuantizer, torch_device
from octavo.model.operators import TorchOperators


class DictWeights:
    """interfaces.Weights over tensors in memory: every declared tensor is filled exactly once, every
    tensor is declared, and shapes agree."""

    def __init__(self) -> None:
        self.declared: dict[str, tuple[tuple[int, ...] | None, Callable[[Tensor], None], bool]] = {}
        self.dtypes: dict[str, tuple[str, ...]] = {}

    def declare(
        self,
        name: str,
        shape: tuple[int, ...] | None,
        fill: Callable[[Tensor], None],
        *,
        optional: bool = False,
        dtypes: tuple[str, ...] = (),
    ) -> None:
        assert name not in self.declared, f"{name} is declared twice"
        self.dtypes[name] = dtypes
        self.declared[name] = (shape, fill, optional)

    def fill(self, tensors: Mapping[str, Tensor], ignored: Callable[[str], bool]) -> None:
        unknown = sorted(name for name in tensors if name not in self.declared and not ignored(name))
        missing = sorted(name for name, (_, _, optional) in self.declared.items() if name not in tensors and not optional)
        assert not unknown and not missing, f"not declared: {unknown}; not in the checkpoint: {missing}"
        for name, (shape, fill, _) in self.declared.items():
            if name in tensors:
                assert shape is None or tuple(tensors[name].shape) == shape, f"{name}: {tuple(tensors[name].shape)}, not {shape}"
                fill(tensors[name])


def torch_attention(parts: AttentionParts) -> AttentionBackend:
    """Core's own backend, which runs anywhere."""
    return TorchAttention(None, parts)


class BareModel:
    """A model with its cache, and rows that remember how far they are. Feed it tokens in any portions.

    tensors may lie anywhere; weights, cache and steps are on `device`. attention makes the backend that keeps every group."""

    def __init__(
        self,
        adapter: ModelAdapter,
        config: Mapping[str, Any],
        tensors: Mapping[str, Tensor],
        *,
        dtype: str = "float32",
        block_size: int = 8,
        max_rows: int = 4,
        max_len: int = 256,
        quantizer: Callable[[Any, QuantizerParts], Quantizer] = PlainQuantizer,
        device: Device | None = None,
        attention: Callable[[AttentionParts], AttentionBackend] = torch_attention,
    ) -> None:
        device, weights = device or Device(), DictWeights()
        self.device = where = torch_device(device)
        facts = adapter.facts(config, dtype, dtype)
        limits = Limits(max_rows, max_rows * max_len, max_len)
        self.attention = attention(AttentionParts(device, dtype))
        operators = OperatorSet(TorchOperators(None, OperatorParts(device, dtype)).ops, {})
        format = quantizer(None, QuantizerParts(device, dtype, {}, weights, operators.find))
        layers: dict[int, AttentionLayer] = {}

        def paged(layer: AttentionLayer) -> PagedAttention:
            layers[layer.index] = layer
            return PagedAttention(layer, self.attention, operators("qk_norm_rope"))

        self.model = adapter.build(
            config,
            ModelParts(
                device=device,
                dtype=dtype,
                limits=limits,
                weights=weights,
                linear=format.linear,
                tied=format.tied,
                attention=paged,
                op=operators,
                experts=format.experts,
            ),
        )
        canonical = getattr(adapter, "canonical", lambda name: name)
        weights.fill({canonical(name): tensor for name, tensor in tensors.items()}, adapter.ignored)
        self.model.finish()

        groups = plan_groups(facts.kv_specs, self.attention.layout, block_size)
        bound, self._tables, self._sizes = [], [], [group.block_size for group in groups]
        random = np.random.default_rng(0)
        for group in groups:
            layout = self.attention.layout(group.spec, group.block_size)
            columns = -(-max_len // group.block_size)
            order = random.permutation(max_rows * columns).astype(np.int32).reshape(max_rows, columns)
            self._tables.append(torch.from_numpy(order).to(where))
            shape, kind = (max_rows * columns, *layout.page_shape), getattr(torch, layout.dtype)
            caches = tuple(torch.full(shape, float("nan"), dtype=kind, device=where) for _ in group.layers)
            bound.append(BoundGroup(group, layout, tuple(layers[i] for i in group.layers), caches))
        self.attention.bind(bound, limits)
        self._computed = [0] * max_rows
        self.facts, self.layers, self.groups, self.declared = facts, layers, groups, weights.declared

    def run(self, work: Sequence[tuple[int, Sequence[int]]], *, bounds: Mapping[int, int] | None = None) -> list[Tensor]:
        """One step: for each (row, its next tokens), the logits of every one of these tokens, float32
        [count, vocab]. bounds: length bound of a row (default: max_len), for RoPE that depends on it."""
        rows = np.array([row for row, _ in work], np.int64)
        counts = np.array([len(tokens) for _, tokens in work], np.int64)
        starts = np.array([self._computed[row] for row in rows], np.int64)

        def sent(column: Any) -> Tensor:
            return torch.as_tensor(column).to(self.device)

        positions = sent(np.concatenate([np.arange(s, s + c) for s, c in zip(starts, counts, strict=True)]))
        token_rows = sent(np.repeat(rows, counts))
        ends = sent(np.concatenate([[0], np.cumsum(counts)]))
        limit = np.array([(bounds or {}).get(int(row), 1 << 20) for row in rows])
        step = Step(
            token_ids=sent([token for _, tokens in work for token in tokens]),
            positions=positions,
            query_start=ends.int(),
            seq_lens=sent(starts + counts).int(),
            rows=sent(rows),
            tables=tuple(self._tables),
            slot_mapping=tuple(
                table[token_rows, positions // size].long() * size + positions % size
                for table, size in zip(self._tables, self._sizes, strict=True)
            ),
            token_rows=token_rows,
            logit_index=ends[1:] - 1,
            host=StepHost(counts, starts + counts, rows, int(counts.sum()), int(counts.max()), int((starts + counts).max())),
            rope_tokens=sent(np.repeat(limit, counts)),
        )
        with torch.inference_mode():
            self.attention.prepare(step)
            self.attention.plan(step)
            logits = self.model.logits(self.model.forward(step))
        for row, count in zip(rows, counts, strict=True):
            self._computed[int(row)] += int(count)
        return list(torch.split(logits, counts.tolist()))

    def hit(self, row: int, child: int, tokens: int) -> None:
        """The empty row `child` starts as a prefix-cache hit on the first `tokens` of `row` would let it: with the blocks
        that hold them, shared. tokens must fill whole blocks of every group."""
        assert self._computed[child] == 0 and tokens <= self._computed[row]
        for table, size in zip(self._tables, self._sizes, strict=True):
            assert tokens % size == 0, f"{tokens} tokens do not fill blocks of {size}"
            table[child, : tokens // size] = table[row, : tokens // size]
        self._computed[child] = tokens

    def feed(self, row: int, tokens: Sequence[int], portions: Sequence[int], **kw: Any) -> Tensor:
        """The tokens of one row in portions of these sizes: logits of all of them, [len(tokens), vocab]."""
        assert sum(portions) == len(tokens)
        parts, at = [], 0
        for size in portions:
            parts += self.run([(row, tokens[at : at + size])], **kw)
            at += size
        return torch.cat(parts)


def random_tensors(adapter: ModelAdapter, config: Mapping[str, Any], *, seed: int = 0, spread: float = 0.2) -> dict[str, Tensor]:
    """A checkpoint of a config without a model to make it: everything that the adapter declares and needs, under its own
    names, float32. Norms are near one, all else has standard deviation `spread`; tables of whole numbers are zero, for what
    they may hold is the model's to know."""
    weights, device = DictWeights(), Device()
    operators = OperatorSet(TorchOperators(None, OperatorParts(device, "float32")).ops, {})
    format = PlainQuantizer(None, QuantizerParts(device, "float32", {}, weights, operators.find))
    adapter.build(
        config,
        ModelParts(
            device=device,
            dtype="float32",
            limits=Limits(1, 1, 1),
            weights=weights,
            linear=format.linear,
            tied=format.tied,
            attention=lambda layer: PagedAttention(
                layer, torch_attention(AttentionParts(device, "float32")), operators("qk_norm_rope")
            ),
            op=operators,
            experts=format.experts,
        ),
    )
    random, made = torch.Generator().manual_seed(seed), {}
    for name, (shape, _, optional) in weights.declared.items():
        if optional:  # such as the second copy of a tied head
            continue
        assert shape is not None, f"{name} has no shape of its own"
        noise = torch.randn(shape, generator=random)
        whole = bool(weights.dtypes[name]) and all("int" in kind for kind in weights.dtypes[name])
        made[name] = torch.zeros(shape, dtype=torch.int64) if whole else 1 + 0.1 * noise if "norm" in name else spread * noise
    return made


def transformers_model(config: Mapping[str, Any], *, seed: int = 0, spread: float = 0.3) -> Any:
    """transformers' eager model of a config dict, float32, with random weights: norms near one, everything
    else, biases too, of standard deviation `spread`."""
    from transformers import AutoConfig, AutoModelForCausalLM

    parsed = AutoConfig.for_model(**deepcopy(dict(config)))  # it writes into the dicts that it is given
    torch.manual_seed(seed)
    model = AutoModelForCausalLM.from_config(parsed, attn_implementation="eager", dtype=torch.float32).eval()
    random = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            noise = torch.randn(parameter.shape, generator=random)
            parameter.copy_(1 + 0.1 * noise if "norm" in name else spread * noise)
    return model


def checkpoint(model: Any, config: Mapping[str, Any]) -> dict[str, Tensor]:
    """The tensors that this transformers model would save, by their names in a checkpoint."""
    from transformers.core_model_loading import revert_weight_conversion

    tensors = {name: tensor.detach().clone() for name, tensor in revert_weight_conversion(model, model.state_dict()).items()}
    if config.get("tie_word_embeddings", False):
        tensors.pop("lm_head.weight", None)
    return tensors


def right_logits(model: Any, tokens: Sequence[int]) -> Tensor:
    """transformers' logits of every token, float32 [len(tokens), vocab]."""
    with torch.inference_mode():
        logits: Tensor = model(torch.tensor([list(tokens)]), use_cache=False).logits[0]
    return logits
