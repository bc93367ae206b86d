"""ModelRunner: one device's part of the engine. Batch in, Result out.

Owns the state table, the model, the bound attention backend and the sampler. The only place where
a step touches tensors. `submit` never waits for the device.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.cache.swap import SwapSpace
from octavo.engine.graphs import Answer, StepGraphs
from octavo.engine.inputs import DecodeInputs, StateTable
from octavo.engine.rows import may_split, token_rows
from octavo.interfaces import AttentionBackend, KVGroup, Limits, Model
from octavo.request import Batch, Result, SamplingParams, TableUpdate, TokenLogprobs
from octavo.sampling.sampler import Sampled, Sampler, prompt_logprobs
from octavo.transfer import to_device

LOGITS_AT_ONCE = 256
"""Prompt positions whose logits are held at a time while prompt logprobs are computed."""

Copies = tuple[int, np.ndarray, np.ndarray]
"""An entry of Batch.copies."""


class StepHandle:
    """A step on its way. `finish` turns device tensors into a Result; called once, by wait."""

    def __init__(self, finish: Callable[[], Result], event: torch.cuda.Event | None) -> None:
        self._finish, self._event = finish, event

    def done(self) -> bool:
        return self._event is None or bool(self._event.query())  # type: ignore[no-untyped-call]

    def wait(self) -> Result:
        if self._event is not None:
            self._event.synchronize()
        return self._finish()


class ModelRunner:
    """interfaces.Runner. groups, limits, device and the pool's scratch page fix every buffer; nothing grows later.
    before_step is called between steps (on a CPU: the thread governor). swap does the copies that are not the
    attention backend's: to and from host memory, and within the pool when it changes its size."""

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        groups: tuple[KVGroup, ...],
        limits: Limits,
        device: torch.device,
        sampler: Sampler,
        scratch_page: int,
        before_step: Callable[[], None] = lambda: None,
        swap: SwapSpace | None = None,
        decode_inputs: DecodeInputs | None = None,
    ) -> None:
        self._model, self._attention, self._sampler = model, attention, sampler
        self._limits, self._device = limits, device
        self._state = StateTable(groups, limits, device, scratch_page, decode_inputs)
        self._prompts: dict[int, tuple[SamplingParams, np.ndarray]] = {}  # slots that want prompt logprobs
        self._graphs: StepGraphs | None = None
        self._before_step = before_step
        self._selects = bool(getattr(model, "selects", False))
        self._swap = swap
        self._splits = may_split(groups)

    def use_graphs(self, *, capture: bool = True) -> None:
        """Run steps of few tokens padded to certain sizes, from captured graphs (or, for tests, the same eagerly)."""
        self._graphs = StepGraphs(
            self._model, self._attention, self._sampler, self._state, self._limits, self._device, capture=capture
        )

    @torch.inference_mode()
    def rehearse(self, rows: int, position: int) -> None:
        """octavo.engine.rehearsal: a step of rows that decode. Needs `use_graphs`."""
        assert self._graphs is not None
        self._graphs.rehearse(rows, position)

    @torch.inference_mode()
    def rehearse_prompt(self, tokens: int) -> None:
        """octavo.engine.rehearsal: a step of a row that decodes and a prompt of so many tokens."""
        new = np.array([1, tokens], np.int32)
        slots = np.full(2, self._state.scratch_row, np.int32)
        self._eager(Batch(0, slots, np.zeros(2, np.int32), new, np.ones(2, bool), np.arange(2, dtype=np.int32)))

    @torch.inference_mode()
    def submit(self, batch: Batch) -> StepHandle:
        self._before_step()
        self._copy(batch.copies)
        self._admit(batch)
        self._state.apply(batch)
        rows = np.flatnonzero(batch.sample)
        answer = self._replay(batch)
        if answer is None:
            logits, prompts = self._eager(batch)
        else:
            logits, prompts = answer.logits, {}
        if not len(rows):
            return self._handle(batch, rows, None, prompts)
        slots, positions = batch.slots[rows], batch.start[rows] + batch.num_new[rows]
        if answer is not None and answer.tokens is not None and self._sampler.plain(slots, positions):
            assert answer.failed is not None
            return self._handle(batch, rows, Sampled.plain(answer.tokens, answer.failed), prompts)
        sampled = self._sampler.sample(logits, slots, positions, self._state.tokens)
        at = self._ids(np.stack([slots, positions]))
        self._state.tokens[at[0], at[1]] = sampled.tokens
        return self._handle(batch, rows, sampled, prompts)

    @torch.inference_mode()
    def resize(self, num_blocks: int, tables: Sequence[TableUpdate], copies: Sequence[Copies]) -> None:
        """Change the pool's size after these copies and table changes. A tail is given back only when the device
        has done all that was submitted. MemoryError, with nothing changed, where it has none for a growth."""
        if self._swap is None:
            raise RuntimeError("this runner was built for a pool that keeps its size")
        pool = self._swap.pool
        if num_blocks > pool.num_blocks:
            pool.resize(num_blocks)
        self._copy(copies)
        self._state.update(tables)
        if num_blocks < pool.num_blocks:
            pool.resize(num_blocks)

    def _copy(self, copies: Sequence[Copies]) -> None:
        """Whole entry after whole entry: a block may be read by one and overwritten by the next."""
        for kind, source, target in copies:
            if kind >= 0:
                self._attention.copy_blocks(kind, self._ids(source), self._ids(target))
            elif self._swap is None:
                raise RuntimeError("a step copies to or from host memory, and this runner was built without a swap space")
            else:
                self._swap.copy(kind, source, target)

    def _replay(self, batch: Batch) -> Answer | None:
        """The step from a captured graph, if it is one for it."""
        if self._graphs is None:
            return None
        step = token_rows(batch, split=self._splits)
        if step is None or (step.prompts and self._wants_prompts(batch)):
            return None
        return self._graphs.run(step)

    def _eager(self, batch: Batch) -> tuple[Tensor, dict[int, list[TokenLogprobs]]]:
        """Logits of the sampled rows, and prompt logprobs of those that want them."""
        step = self._state.step(batch)
        if step is None:
            raise RuntimeError(f"step {batch.step} computes nothing: every row is a fork without its source")
        self._attention.prepare(step)
        self._attention.plan(step)
        count = len(step.logit_index)
        if self._selects and 0 < count < step.host.num_tokens and not self._wants_prompts(batch):
            step.wanted = step.logit_index
            return self._model.logits(self._model.forward(step)), {}
        hidden = self._model.forward(step)
        return self._model.logits(hidden[step.logit_index]), self._prompt_logprobs(batch, hidden)

    def _wants_prompts(self, batch: Batch) -> bool:
        return bool(self._prompts) and any(int(slot) in self._prompts for slot in batch.slots)

    def _ids(self, array: np.ndarray) -> Tensor:
        return to_device(array.astype(np.int64), self._device)

    def _admit(self, batch: Batch) -> None:
        for admission in batch.admissions:
            params = admission.params
            output = admission.tokens[admission.num_prompt :].tolist()
            self._sampler.admit(admission.slot, params, admission.seed, admission.eos_token_ids, admission.num_prompt, output)
            self._prompts.pop(admission.slot, None)
            if params.prompt_logprobs is not None:
                self._prompts[admission.slot] = (params, admission.tokens[: admission.num_prompt])

    def _prompt_logprobs(self, batch: Batch, hidden: Tensor) -> dict[int, list[TokenLogprobs]]:
        """For rows that want them: the values of prompt tokens start + 1 .. start + num_new."""
        found: dict[int, list[TokenLogprobs]] = {}
        if not self._prompts:
            return found
        ends = np.cumsum(batch.num_new)
        for row in np.flatnonzero(batch.num_new):
            wanted = self._prompts.get(int(batch.slots[row]))
            if wanted is None:
                continue
            params, prompt = wanted
            start = int(batch.start[row])
            count = min(int(batch.num_new[row]), len(prompt) - 1 - start)
            first = int(ends[row] - batch.num_new[row])
            values: list[TokenLogprobs] = []
            for at in range(0, count, LOGITS_AT_ONCE):
                size = min(LOGITS_AT_ONCE, count - at)
                logits = self._model.logits(hidden[first + at : first + at + size])
                targets = self._ids(prompt[start + at + 1 : start + at + 1 + size])
                values += prompt_logprobs(logits, targets, params.prompt_logprobs or 0)
            if values:
                found[int(row)] = values
        return found

    def _handle(
        self, batch: Batch, rows: np.ndarray, sampled: Sampled | None, prompts: dict[int, list[TokenLogprobs]]
    ) -> StepHandle:
        event = None
        if self._device.type == "cuda":
            event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            if sampled is not None:
                sampled = sampled.to_host()
            event.record()

        def finish() -> Result:
            count = len(batch.slots)
            result = Result(
                tokens=np.zeros((count, 1), np.int32),
                counts=np.zeros(count, np.int32),
                failed=np.zeros(count, bool),
                prompt_logprobs=prompts,
            )
            if sampled is not None:
                result.tokens[rows, 0] = sampled.tokens.numpy()
                result.counts[rows] = 1
                result.failed[rows] = sampled.failed.numpy()
                result.reasons = {int(rows[i]): reason for i, reason in sampled.reasons.items()}
                result.logprobs = {int(rows[i]): [value] for i, value in sampled.logprobs().items()}
            return result

        return StepHandle(finish, event)
