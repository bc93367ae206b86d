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
from octavo.request import Batch, TableUpdate
from octavo.transfer import copy_into, to_device


class StateTable:
    """tokens int32 [max_num_seqs + 1, max_model_len + 1]; tables per group int32 [max_num_seqs + 1, columns];
    bound int64 [max_num_seqs + 1] (length bound of each sequence, for dynamic RoPE). The last row is
    `scratch_row`: it belongs to no sequence, and its tables name only the pool's scratch page. fused: the
    operator "decode_inputs", where somebody offers it."""

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
        self.tokens = torch.zeros((rows, limits.max_model_len + 1), dtype=torch.int32, device=device)
        self.bound = torch.zeros(rows, dtype=torch.int64, device=device)
        self.tables = tuple(
            torch.zeros((rows, -(-limits.max_model_len // g.block_size)), dtype=torch.int32, device=device) for g in groups
        )
        for table in self.tables:
            table[self.scratch_row] = scratch_page

    def apply(self, batch: Batch) -> None:
        """Take in admissions and block-table changes."""
        for admission in batch.admissions:
            copy_into(self.tokens[admission.slot, : len(admission.tokens)], admission.tokens)
            self.bound[admission.slot] = admission.rope_tokens
        self.update(batch.tables)

    def update(self, tables: Sequence[TableUpdate]) -> None:
        """Take in changes of the block tables alone."""
        self.sharing.update(tables)
        for update in tables:
            table, count = self.tables[update.group], len(update.rows)
            packed = np.empty(3 * count, np.int32)  # places as int64, then blocks: one copy
            packed[: 2 * count].view(np.int64)[:] = update.rows.astype(np.int64) * table.shape[1] + update.cols
            packed[2 * count :] = update.blocks
            sent = self.send(packed)
            table.view(-1).scatter_(0, sent[: 2 * count].view(torch.int64), sent[2 * count :])

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
