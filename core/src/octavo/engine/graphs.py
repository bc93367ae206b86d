"""StepGraphs: steps of one token a row through captured graphs, one per size (and per kind of step, where the attention
backend has several).

Such a step launched kernel by kernel takes the host longer than the device. `octavo.engine.rows` says which steps qualify: all that
decode, and the short ends of prompts whose beginning was cached.

Owns the static buffers that a captured forward pass reads and writes. A size is captured when it
is first needed. Padded rows belong to a state-table row of their own whose tables name only the
pool's scratch page: they write there, attend to one token, and touch no block of a sequence.
"""

from __future__ import annotations

import logging
import time
from bisect import bisect_left
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from octavo.engine.inputs import StateTable
from octavo.engine.rows import MOST_READ_AGAIN, MOST_TOKENS, TokenRows
from octavo.interfaces import AttentionBackend, Limits, Model, Step, StepHost
from octavo.sampling.sampler import Sampler
from octavo.transfer import staged

log = logging.getLogger(__name__)

COLUMNS = 5

ROOM = 32 << 20
"""Bytes that the graphs' memory begins with beside the logits of the largest size: for what a forward pass holds while it makes them."""


def bucket_sizes(max_num_seqs: int) -> list[int]:
    """1, 2, 4, then every 8 up to max_num_seqs, which is always the last."""
    sizes = [s for s in (1, 2, 4, *range(8, max_num_seqs, 8)) if s < max_num_seqs]
    return [*sizes, max_num_seqs]


def prompt_sizes(max_num_seqs: int) -> list[int]:
    """Those of bucket_sizes that steps with prompt tokens are padded to: 16, 32, 64 and so on. Such a step is rare beside
    one that decodes, so a few more padded rows cost less than a few more graphs."""
    sizes = [1 << i for i in range(4, MOST_TOKENS.bit_length())]
    return [s for s in sizes if s < max_num_seqs] + ([max_num_seqs] if max_num_seqs <= MOST_TOKENS else [])


class _Bucket:
    """Static buffers for `size` rows, and the graph once it is captured."""

    def __init__(self, size: int, state: StateTable, device: torch.device) -> None:
        self.size = size
        # All that the host sends for a step: rows, positions, seeds, temperatures (float32, in the first half), and the row that
        # a drawn token is written to: the scratch row where nothing is sampled.
        self.columns = torch.zeros((COLUMNS, size), dtype=torch.int64, device=device)
        self.columns[0] = self.columns[4] = state.scratch_row
        self.query_start = torch.arange(size + 1, dtype=torch.int32, device=device)
        self.index = torch.arange(size, device=device)
        self.graph: torch.cuda.CUDAGraph | None = None
        self.step: Step | None = None  # the one that was captured: its tensors are what replays read
        self.answer: Answer | None = None


@dataclass(frozen=True, slots=True)
class Answer:
    """logits float32 [rows, vocab]. With a fused draw also tokens int32 [rows], already in the state table, and
    failed bool [rows], as they are right for rows that ask for no more than a temperature."""

    logits: Tensor
    tokens: Tensor | None = None
    failed: Tensor | None = None

    def first(self, rows: int) -> Answer:
        """Without the padding."""
        return Answer(*(None if t is None else t[:rows] for t in (self.logits, self.tokens, self.failed)))  # type: ignore[arg-type]


class StepGraphs:
    """`run` answers a step of one token a row, or says None where it is none for a graph.

    capture False runs the same padded step eagerly: what a graph computes, on any device, for tests.
    """

    def __init__(
        self,
        model: Model,
        attention: AttentionBackend,
        sampler: Sampler,
        state: StateTable,
        limits: Limits,
        device: torch.device,
        *,
        capture: bool = True,
    ) -> None:
        self._model, self._attention, self._sampler, self._state = model, attention, sampler, state
        self._device, self._capture = device, capture
        self._sizes, self._prompt_sizes = bucket_sizes(limits.max_num_seqs), prompt_sizes(limits.max_num_seqs)
        self._variant = getattr(attention, "variant", None)  # interfaces.StepVariants
        self._buckets: dict[tuple[int, str], _Bucket] = {}  # by rows and the backend's kind of step
        self._memory = torch.cuda.graph_pool_handle() if capture else None
        # One stream for all captures: libraries keep a workspace for each that they have seen.
        self._side = torch.cuda.Stream(device) if capture else None  # type: ignore[no-untyped-call]
        self._recorded = False
        self.seconds = 0.0  # spent capturing, in all

    def run(self, step: TokenRows) -> Answer | None:
        """The answer to the rows that are sampled from. None: more rows than the largest size has, or more of the cache
        read again than is gained."""
        sizes = self._prompt_sizes if step.prompts else self._sizes
        if len(step) > sizes[-1]:
            return None
        size = sizes[bisect_left(sizes, len(step))]
        host = _host_lengths(step, size, self._state.scratch_row)
        key, again = (size, ""), step.again
        if self._variant is not None:
            host.shared = self._state.sharing.find(step.slots, step.positions)
            key = size, self._variant(host)
            if key[1]:
                again -= sum((len(shared.rows) - 1) * shared.tokens for shared in host.shared)
        if again > MOST_READ_AGAIN:
            return None
        bucket = self._buckets.get(key)
        if bucket is None:
            bucket = self._buckets[key] = _Bucket(size, self._state, self._device)
        self._fill(bucket, step)
        if self._capture and bucket.graph is None:
            self._record(bucket, host)
        if bucket.graph is None:
            return self._forward(bucket, host).first(step.sampled)
        assert bucket.step is not None and bucket.answer is not None
        bucket.step.host = host
        self._attention.prepare(bucket.step)
        bucket.graph.replay()
        return bucket.answer.first(step.sampled)

    def rehearse(self, rows: int, position: int) -> None:
        """The step of so many rows with their last token at `position` as it is captured, but launched, and of the scratch row alone."""
        size = self._sizes[bisect_left(self._sizes, rows)]
        slots, positions = np.full(size, self._state.scratch_row), np.full(size, position)
        host = _host_lengths(TokenRows(slots, positions, size), size, self._state.scratch_row)
        if self._variant is not None:
            host.shared = self._state.sharing.find(slots, positions)
        self._forward(_Bucket(size, self._state, self._device), host)

    def _fill(self, bucket: _Bucket, step: TokenRows) -> None:
        """One copy of everything that the host knows of the step, padding included."""
        tensor, columns = staged((COLUMNS, bucket.size), np.int64, self._device)
        columns[:] = 0
        columns[0] = columns[4] = self._state.scratch_row
        columns[0, : len(step)], columns[1, : len(step)] = step.slots, step.positions
        if self._sampler.draw is not None:
            sampled = step.slots[: step.sampled]
            temperature, columns[2, : step.sampled] = self._sampler.columns(sampled)
            columns[3].view(np.float32)[: step.sampled] = temperature
            columns[4, : step.sampled] = sampled
        bucket.columns.copy_(tensor, non_blocking=True)

    def _step(self, bucket: _Bucket, host: StepHost) -> tuple[Step, Tensor]:
        rows, positions = bucket.columns[0], bucket.columns[1]
        return self._state.decode_step(rows, positions, bucket.query_start, bucket.index, host)

    def _forward(self, bucket: _Bucket, host: StepHost) -> Answer:
        step, after = self._step(bucket, host)
        bucket.step = step
        self._attention.prepare(step)
        self._attention.plan(step)
        logits = self._model.logits(self._model.forward(step))
        if self._sampler.draw is None:
            return Answer(logits)
        _, _, seed, warmth, kept = bucket.columns.unbind()
        temperature = warmth.view(torch.float32)[: bucket.size]
        keep = (self._state.tokens, kept)
        return Answer(logits, *self._sampler.draw(logits, temperature, seed, after, self._sampler.vocab, keep))

    def _record(self, bucket: _Bucket, host: StepHost) -> None:
        """Run once outside the graph (kernels compile, libraries allocate), then capture."""
        began = time.perf_counter()
        assert self._side is not None
        self._side.wait_stream(torch.cuda.current_stream(self._device))
        with torch.cuda.stream(self._side):
            width = self._forward(bucket, host).logits.shape[1]
        torch.cuda.current_stream(self._device).wait_stream(self._side)
        graph = torch.cuda.CUDAGraph()
        with torch.cuda.graph(graph, pool=self._memory, stream=self._side):
            if not self._recorded:
                # The first piece of that memory, free again at once: sizes are captured in ascending order, and the logits of none
                # would fit where those of a smaller one were.
                torch.empty(4 * self._sizes[-1] * width + ROOM, dtype=torch.uint8, device=self._device)
            answer = self._forward(bucket, host)
        # Logits are read before anything else is replayed, so all sizes may have theirs in one place: not owned, it is free for the
        # next capture. Owned, those of a large vocabulary would add up to gigabytes.
        bucket.answer = replace(answer, logits=_borrowed(answer.logits))
        bucket.graph, self._recorded = graph, True
        self.seconds += time.perf_counter() - began
        kind = (
            f" with {', '.join(f'{len(s.rows)} rows over {s.tokens} shared tokens' for s in host.shared)}" if host.shared else ""
        )
        log.info("captured the graph of %d rows%s in %.2f s", bucket.size, kind, time.perf_counter() - began)


class _Memory:
    """A float32 tensor's memory by its address alone."""

    def __init__(self, tensor: Tensor) -> None:
        self.__cuda_array_interface__ = {
            "data": (tensor.data_ptr(), False),
            "shape": tuple(tensor.shape),
            "strides": tuple(stride * tensor.itemsize for stride in tensor.stride()),
            "typestr": "<f4",
            "version": 3,
        }


def _borrowed(logits: Tensor) -> Tensor:
    """The same float32 values in the memory pool of the graphs, which outlives them, without keeping them there."""
    assert logits.dtype == torch.float32
    return torch.as_tensor(_Memory(logits), device=logits.device)


def _host_lengths(step: TokenRows, size: int, scratch_row: int) -> StepHost:
    """Lengths as a host-planning backend wants them; padded rows hold one token."""
    ones = np.ones(size, np.int64)
    lengths, rows = ones.copy(), np.full(size, scratch_row, np.int64)
    lengths[: len(step)] = step.positions + 1
    rows[: len(step)] = step.slots
    return StepHost(ones, lengths, rows, size, 1, int(lengths.max()))
