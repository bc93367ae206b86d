"""`octavo quantize awq`: a checkpoint in the AutoAWQ gemm layout, made a Linear at a time.

Owns the order of things: refusals, statistics, scores, then for every Linear scaling, clipping, rounding and writing. What is
computed is in `rounding` and `search`.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from octavo.errors import LoadError, QuantizeError
from octavo.interfaces import Quantized, QuantizeTask
from octavo.model.families import DECODER_ARCHITECTURES, read_decoder
from octavo.model.observe import calibration_windows
from torch import Tensor

from octavo_quant_awq.formats import check_shape, fitting, gemm_tensors
from octavo_quant_awq.make.rounding import RATIOS, clip, importance, round_groups, scale_for
from octavo_quant_awq.make.search import Scoring, Seen, Statistics
from octavo_quant_awq.make.state import State
from octavo_quant_awq.make.structure import Group, Module, describe
from octavo_quant_awq.make.watched import WatchedModel
from octavo_quant_awq.provider import AwqMakeOptions
from octavo_quant_awq.settings import Scheme, read_awq

PASS_TOKENS = {"cpu": 1 << 15, "cuda": 1 << 16}
"""Tokens, copies included, that go through the model at once, where memory allows it."""


def quantize(options: AwqMakeOptions, task: QuantizeTask) -> Quantized:
    """`interfaces.Quantize`. QuantizeError, by name and numbers, for matrices whose inputs do not divide into groups, and for
    experts that are stacked in one tensor, before anything is read."""
    config: dict[str, Any] = {
        "quant_method": "awq",
        "bits": 4,
        "group_size": options.group_size,
        "zero_point": True,
        "version": "gemm",
    }
    texts = calibration_windows(task, options.window, options.samples) if options.search else []
    full = max(map(len, texts), default=0)
    whole = [text for text in texts if len(text) == full]
    model = WatchedModel(task, len(whole[0]) if whole else options.window, task.device.free_memory // 4)
    linears = [module.name for modules in model.linears for module in modules]
    _check_skipped(options.skip, config, linears, model.tensors.names())
    config["modules_to_not_convert"] = [*options.skip, *model.routers()] or None
    scheme = read_awq(config)
    layer = task.adapter.facts(task.source.config, task.dtype, task.dtype).layers[0]
    groups = _groups(model, scheme, (layer.num_kv_heads, layer.v_dim))
    making = _Making(options, task, model, groups, whole)
    making.run()
    weights = sum(m.rows * m.inputs for g in groups for m in g.modules)
    report: dict[str, Any] = {
        "matrices": sum(len(g.modules) for g in groups),
        "bits a weight": round(8 * making.nbytes / weights, 3),
        "calibration tokens": sum(map(len, whole)),
    }
    if making.ratios:
        report["mean exponent"] = round(sum(making.ratios.values()) / len(making.ratios), 3)
    return Quantized(config, report)


def _check_skipped(skip: Iterable[str], config: Mapping[str, Any], linears: Sequence[str], others: Iterable[str]) -> None:
    """QuantizeError for a name to skip that nothing in the model has: what was meant would be quantised."""
    names = ("lm_head", *linears, *others)  # a head that shares the embedding's matrix has no name of its own
    for name in skip:
        if not any(map(read_awq({**config, "modules_to_not_convert": [name]}).plain, names)):
            there = dict.fromkeys(".".join(linear.split(".")[-2:]) for linear in linears)
            raise QuantizeError(f"--skip {name}: no module of this model is called so; there are {', '.join(list(there)[:12])}")


def _groups(model: WatchedModel, scheme: Scheme, v: tuple[int, int]) -> tuple[Group, ...]:
    """What is quantised. A Linear of which a part stays plain has no scale, since the part would need it too."""
    wanted = []
    for modules in model.linears:
        kept = tuple(m for m in modules if not scheme.plain(m.name))
        for m in kept:
            if scheme.group != -1 and m.inputs % scheme.group:
                raise QuantizeError(
                    f"{m.name}: its {m.inputs} inputs do not divide into groups of {scheme.group}; give --group-size "
                    f"{fitting(m.inputs)}, or leave such modules plain (--skip {'.'.join(m.name.split('.')[-2:])})"
                )
            try:
                check_shape(m.name, scheme, m.rows, m.inputs)
            except LoadError as error:
                raise QuantizeError(str(error)) from error
        if kept:
            wanted.append((kept, len(kept) == len(modules)))
    if not wanted:
        raise QuantizeError("nothing is left to quantise: every matrix is skipped")
    norms = {name for name in model.tensors.names() if model.other(name)}
    described = describe([kept for kept, _ in wanted], norms, v)
    return tuple(g if whole else Group(g.modules) for g, (_, whole) in zip(described, wanted, strict=True))


class _Making:
    """One run. ratios: the exponent of each group's scale; nbytes: of the quantised matrices."""

    def __init__(
        self, options: AwqMakeOptions, task: QuantizeTask, model: WatchedModel, groups: tuple[Group, ...], texts: list[list[int]]
    ) -> None:
        self._options, self._task, self._model, self._groups, self._texts = options, task, model, groups, texts
        self._by_key = {g.key: g for g in groups}
        asked = {
            "options": options.model_dump(mode="json"),
            "model": str(task.source.path),
            "dtype": task.dtype,
            "text": hashlib.sha256(repr(texts).encode()).hexdigest(),
        }
        self._state = State(task.writer.out, asked)
        self.ratios: dict[str, float] = {}
        self.nbytes = 0

    def run(self) -> None:
        seen = self._statistics() if self._texts else {}
        if seen:
            self.ratios = self._score(seen)
        scales = {key: self._scale(self._by_key[key], ratio, seen[key]) for key, ratio in self.ratios.items()}
        self._write_linears(scales, seen)
        self._write_others(scales)
        self._state.remove()

    def _statistics(self) -> dict[str, Seen]:
        found = self._state.statistics()
        if found is not None:
            return found
        count = self._at_once(1)
        visitor = Statistics(self._by_key, sum(map(len, self._texts)))
        for start in range(0, len(self._texts), count):
            self._task.tell("observing", start, len(self._texts))
            self._model.run(self._texts[start : start + count], 1, visitor)
        found = visitor.seen()
        self._state.keep_statistics(found)
        return found

    def _score(self, seen: Mapping[str, Seen]) -> dict[str, float]:
        scoring = Scoring(
            self._by_key, seen, self._model.tensors, size=self._options.group_size, zero_point=self._options.zero_point
        )
        done, losses = self._state.losses()
        scoring.losses |= losses
        texts = min(len(self._texts), self._at_once(2))
        together = max(1, min(len(RATIOS), self._at_once(texts) - 1))
        passes = [
            (start, range(first, min(first + together, len(RATIOS))))
            for start in range(0, len(self._texts), texts)
            for first in range(0, len(RATIOS), together)
        ]
        for number, (start, candidates) in enumerate(passes):
            if number < done:
                continue
            self._task.tell("searching scales", number, len(passes))
            scoring.candidates = candidates
            self._model.run(self._texts[start : start + texts], 1 + len(candidates), scoring)
            self._state.keep_losses(number + 1, scoring.losses)
        return scoring.best()

    def _at_once(self, copies: int) -> int:
        """Texts that fit into one pass with that many copies of each; at least one."""
        widest = max(sum(m.rows for m in g.modules) for g in self._groups)
        room = self._task.device.free_memory // 4 // (8 * 4 * widest)
        tokens = min(PASS_TOKENS[self._task.device.type], room)
        return max(1, tokens // len(self._texts[0]) // copies)

    def _scale(self, group: Group, ratio: float, seen: Seen) -> Tensor:
        """The chosen scale of a group's inputs, float32."""
        weights = [self._model.tensors(f"{m.name}.weight") for m in group.modules]
        heavy = importance(weights, self._size(group))
        return scale_for(ratio, group.tied(seen.mean.to(heavy.device)), group.tied(heavy))

    def _size(self, group: Group) -> int:
        return group.inputs if self._options.group_size == -1 else self._options.group_size

    def _write_linears(self, scales: Mapping[str, Tensor], seen: Mapping[str, Seen]) -> None:
        rows = self._row_scales(scales)
        for index, group in enumerate(self._groups):
            self._task.tell("rounding", index, len(self._groups))
            tensors = self._state.linear(index)
            if tensors is None:
                tensors = {}
                for module in group.modules:
                    tensors |= self._module(group, module, scales.get(group.key), rows.get(module.name), seen.get(group.key))
                self._state.keep_linear(index, tensors)
            for name, tensor in tensors.items():
                self.nbytes += tensor.nbytes if not name.endswith(".bias") else 0
                self._task.writer.add(name, tensor)

    def _module(
        self, group: Group, module: Module, columns: Tensor | None, rows: Tensor | None, seen: Seen | None
    ) -> dict[str, Tensor]:
        """The new tensors of one matrix: columns times the group's scale, last rows over the next one's, clipped, rounded."""
        weight = self._model.tensors(f"{module.name}.weight").float()
        if columns is not None:
            weight = weight * columns
        if rows is not None:
            weight = _divide_rows(weight, rows)
        if seen is not None and module in group.clipped:
            x = seen.sample.to(weight.device).float()
            weight = clip(weight, x if columns is None else x / columns, self._size(group), zero_point=self._options.zero_point)
        q, z, s = round_groups(weight, self._size(group), zero_point=self._options.zero_point)
        made = gemm_tensors(q.flatten(1).to(torch.uint8), s.squeeze(-1), z.squeeze(-1).to(torch.uint8))
        tensors = {f"{module.name}.{end}": tensor.cpu() for end, tensor in made.items()}
        bias = f"{module.name}.bias"
        if bias in set(self._model.tensors.names()):
            stored = self._model.tensors.read(bias)
            if rows is not None:
                stored = _divide_rows(stored.float(), rows.cpu()).to(stored.dtype)
            tensors[bias] = stored
        return tensors

    def _write_others(self, scales: Mapping[str, Tensor]) -> None:
        """Everything that is not quantised, with the scales that are folded into it."""
        quantised = {f"{m.name}.{end}" for g in self._groups for m in g.modules for end in ("weight", "bias")}
        norms = {g.source: scales[g.key].cpu() for g in self._groups if g.fold == "norm" and g.key in scales}
        rows = {name: scale.cpu() for name, scale in self._row_scales(scales).items()}
        offset = self._norm_offset()
        for name in self._model.tensors.names():
            if name in quantised or self._task.adapter.ignored(name):
                continue
            tensor = self._model.tensors.read(name)
            owner = name.rpartition(".")[0]
            if name in norms:
                tensor = ((tensor.float() + offset) / norms[name] - offset).to(tensor.dtype)
            elif owner in rows:
                tensor = _divide_rows(tensor.float(), rows[owner]).to(tensor.dtype)
            self._task.writer.add(name, tensor)

    def _row_scales(self, scales: Mapping[str, Tensor]) -> dict[str, Tensor]:
        """By module: what its last rows are divided by."""
        return {g.source: g.of_rows(scales[g.key]) for g in self._groups if g.fold == "rows" and g.key in scales}

    def _norm_offset(self) -> float:
        """What the model adds to the stored weights of its norms: 1 for Gemma."""
        source = self._task.source
        return read_decoder(source.config).norm_offset if source.architecture in DECODER_ARCHITECTURES else 0.0


def _divide_rows(tensor: Tensor, scale: Tensor) -> Tensor:
    """The last len(scale) rows of a matrix or entries of a bias, divided by it: the up half of a fused gate_up, or all."""
    divided = tensor.clone()
    tail = divided[len(tensor) - len(scale) :]
    tail /= scale.unsqueeze(1) if tensor.ndim == 2 else scale
    return divided
