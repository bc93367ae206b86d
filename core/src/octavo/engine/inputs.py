"""StateTable: what the device keeps of every running sequence, and how a Batch becomes a Step.

Owns token ids and block tables by slot. A step sends only what changed: admissions, table entries
and three short columns; input ids, positions and cache slots are computed from the table, so a
sampled token never makes a round trip through the host.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

from octavo.engine.sharing import PrefixSharing
from octavo.interfaces import KVGroup, Limits, Step, StepHost
from octavo.request import Admission, Batch, TableUpdate
from octavo.transfer import staged, to_device

ALIGNED = 64
"""Each part of the state table begins at a multiple of so many words (256 bytes), as if it were allocated by itself."""


class StateTable:
    """tokens int32 [max_num_seqs + 1, max_model_len + 1]; tables per group int32 [max_num_seqs + 1, columns];
    bound int64 [max_num_seqs + 1] (length bound of each sequence, for dynamic RoPE). The last row is
    `scratch_row`: it belongs to no sequence, and its tables name only the pool's scratch page. fused: the
    operator "decode_inputs", where somebody offers it.

    Of the tokens of an admission only those are taken that somebody reads: steps read what is not computed, penalties
    read all of a sequence. What lies before them in a row is anybody's.

    All of them are views of one piece of memory, so that whatever a step changes in them, however many sequences it
    admits, goes to the device as one list of (place, value): a copy and a scatter."""

    def __init__(
        self,
        groups: Sequence[KVGroup],
        limits: Limits,
        device: torch.device,
        scratch_page: int,
        fused: DecodeInputs | None = None,
    ) -> None:
        rows = limits.max_num_seqs + 1
        self._decode_inputs = fused or decode_inputs
        self._device = device
        self._block_sizes = [g.block_size for g in groups]
        self.scratch_row = limits.max_num_seqs
        self.sharing = PrefixSharing(groups, rows, limits.max_model_len)
        widths = [limits.max_model_len + 1, 2, *(-(-limits.max_model_len // size) for size in self._block_sizes)]
        # Where tokens, bound (two words a row) and each table begin.
        starts = np.cumsum([0, *(-(-rows * width // ALIGNED) * ALIGNED for width in widths)]).tolist()
        self._words = torch.zeros(starts[-1], dtype=torch.int32, device=device)
        parts = [self._words[at : at + rows * width].view(rows, width) for at, width in zip(starts, widths, strict=False)]
        self.tokens, self.bound, self.tables = parts[0], parts[1].view(torch.int64).view(rows), tuple(parts[2:])
        self._widths, self._starts = widths, starts
        self._count = np.arange(widths[0])
        for table in self.tables:
            table[self.scratch_row] = scratch_page

    def apply(self, batch: Batch) -> None:
        """Take in admissions and block-table changes."""
        self._change(batch.admissions, batch.tables)

    def update(self, tables: Sequence[TableUpdate]) -> None:
        """Take in changes of the block tables alone."""
        self._change((), tables)

    def _change(self, admissions: Sequence[Admission], tables: Sequence[TableUpdate]) -> None:
        self.sharing.update(tables)
        firsts = [0 if a.params.counts_tokens else a.computed for a in admissions]
        count = sum(len(a.tokens) - first + 2 for a, first in zip(admissions, firsts, strict=True)) + sum(
            len(u.rows) for u in tables
        )
        if not count:
            return
        tensor, packed = staged(3 * count, np.int32, self._device)
        places, values = packed[: 2 * count].view(np.int64), packed[2 * count :]
        end = 0
        for admission, first in zip(admissions, firsts, strict=True):
            at, end = end, end + len(admission.tokens) - first
            np.add(self._count[first : first + end - at], admission.slot * self._widths[0], out=places[at:end])
            values[at:end] = admission.tokens[first:]
            at, end = end, end + 2
            places[at:end] = self._starts[1] + 2 * admission.slot + self._count[:2]
            values[at:end] = np.array([admission.rope_tokens]).view(np.int32)
        for update in tables:
            at, end = end, end + len(update.rows)
            np.multiply(update.rows, self._widths[2 + update.group], out=places[at:end], dtype=np.int64)
            places[at:end] += update.cols
            places[at:end] += self._starts[2 + update.group]
            values[at:end] = update.blocks
        sent = tensor.to(self._device, non_blocking=True)
        self._words.scatter_(0, sent[: 2 * count].view(torch.int64), sent[2 * count :])

    def decode_step(
        self, rows: Tensor, positions: Tensor, query_start: Tensor, index: Tensor, host: StepHost
    ) -> tuple[Step, Tensor]:
        """A step of one token per row, from tensors alone: it may run inside a captured graph; and where each
        row's next token goes (positions + 1)."""
        ids, after, lengths, bounds, slots = self._decode_inputs(
            rows, positions, self.tokens, self.bound, self.tables, self._block_sizes
        )
        step = Step(
            token_ids=ids,
            positions=positions,
            query_start=query_start,
            seq_lens=lengths,
            rows=rows,
            tables=self.tables,
            slot_mapping=slots,
            token_rows=rows,
            logit_index=index,
            host=host,
            rope_tokens=bounds,
        )
        return step, after

    def _slot_mapping(self, token_rows: Tensor, positions: Tensor) -> tuple[Tensor, ...]:
        return slot_mapping(token_rows, positions, self.tables, self._block_sizes)

    def step(self, batch: Batch) -> Step | None:
        """The rows of the batch that compute something, as flat token columns; None if there are none."""
        active = batch.num_new > 0
        if not active.any():
            return None
        slots, start = batch.slots[active].astype(np.int64), batch.start[active].astype(np.int64)
        counts = batch.num_new[active].astype(np.int64)
        total = int(counts.sum())
        ends = np.cumsum(counts)
        # Hidden state that a sampled row reads: its source's last new token.
        row_of = np.cumsum(active) - 1
        logit_index = ends[row_of[batch.source[batch.sample]]] - 1
        columns = self.send(np.concatenate([slots, start, counts, ends - counts, logit_index]))
        n = len(slots)
        rows, first, count, offset, index = torch.split(columns, [n, n, n, n, len(logit_index)])
        if total == n:
            token_rows, positions = rows, first
        else:
            token_rows = torch.repeat_interleave(rows, count, output_size=total)
            shift = torch.repeat_interleave(first - offset, count, output_size=total)
            positions = torch.arange(total, device=self._device) + shift
        query_start = torch.zeros(n + 1, dtype=torch.int32, device=self._device)
        query_start[1:] = offset + count
        return Step(
            token_ids=self.tokens[token_rows, positions].long(),
            positions=positions,
            query_start=query_start,
            seq_lens=(first + count).int(),
            rows=rows,
            tables=self.tables,
            slot_mapping=self._slot_mapping(token_rows, positions),
            token_rows=token_rows,
            logit_index=index,
            host=StepHost(counts, start + counts, slots, total, int(counts.max()), int((start + counts).max())),
            rope_tokens=self.bound[token_rows],
        )

    def send(self, array: np.ndarray) -> Tensor:
        """The array on the device, not waited for."""
        return to_device(array, self._device)


DecodeInputs = Callable[..., tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]]


def decode_inputs(
    rows: Tensor, positions: Tensor, tokens: Tensor, bound: Tensor, tables: Sequence[Tensor], block_sizes: Sequence[int]
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """What a step of one new token a row reads of the state table: rows and positions int64 [R]; tokens, bound and
    tables are the table's. The oracle of the operator ("decode_inputs", "plain").

    Returns token ids int64 [R], positions + 1 int64 [R], sequence lengths int32 [R], length bounds int64 [R] and,
    of each KV group, cache slots int64 [R]."""
    ids, after = tokens[rows, positions].long(), positions + 1
    return ids, after, after.int(), bound[rows], slot_mapping(rows, positions, tables, block_sizes)


def slot_mapping(
    token_rows: Tensor, positions: Tensor, tables: Sequence[Tensor], block_sizes: Sequence[int]
) -> tuple[Tensor, ...]:
    """Of each KV group, the cache slots int64 [T] of tokens at positions [T] of state-table rows [T]."""
    return tuple(
        table[token_rows, positions // size].long() * size + positions % size
        for table, size in zip(tables, block_sizes, strict=True)
    )
