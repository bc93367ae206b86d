"""A step as rows of one new token each, the form in which steps are captured.

Owns which steps have that form. A decoding step is made of such rows. The short end of a prompt whose beginning was
cached can be: each of its tokens becomes a row of the same sequence. Every layer stores all keys and values of a step
before it attends, and a row at position p sees p + 1 tokens, which is causal attention. Rows are independent, so their order
is free: those that a token is sampled from come first.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np

from octavo.interfaces import KVGroup
from octavo.request import Batch

MOST_TOKENS = 256
"""Tokens of a step with prompt tokens beyond which it is better computed as prompts are: the device is then busy for
longer than the host needs to launch it, and every token would read its sequence's cache for itself."""

MOST_READ_AGAIN = 1 << 17
"""Cached tokens that such a step may read more often than if its prompts were computed as prompts. At 4 KiB a token and layer
half a gigabyte a layer, mostly from the L2: about what is gained by not launching kernels one by one."""


@dataclass(frozen=True, slots=True)
class TokenRows:
    """slots and positions int64 [T]: of each token the state-table row, which may occur several times, and its place in the
    sequence. sampled: of so many, the first ones, the hidden states are sampled from, in the order of the batch's rows
    that sample. prompts: some row is (part of) a prompt. again: tokens in the cache that are read more often than if rows
    of one sequence were computed together."""

    slots: np.ndarray
    positions: np.ndarray
    sampled: int
    prompts: bool = False
    again: int = 0

    def __len__(self) -> int:
        return len(self.slots)


def may_split(groups: Sequence[KVGroup]) -> bool:
    """Whether tokens of one sequence may be rows of their own: not where several tokens share an entry of the cache, or where
    a sequence has a state that its tokens advance one after the other."""
    return all(group.spec.kind != "state" and group.spec.tokens_per_entry == 1 for group in groups)


def token_rows(batch: Batch, *, split: bool) -> TokenRows | None:
    """The batch as rows of one token; None where it is none: a fork that computes nothing, or, of rows with several new
    tokens, too many for it to pay. split False: rows with several tokens are not split."""
    new = batch.num_new
    if (new == 1).all() and batch.sample.all():
        return TokenRows(batch.slots.astype(np.int64), batch.start.astype(np.int64), len(new))
    if not split or (new < 1).any() or batch.num_tokens > MOST_TOKENS:
        return None
    if len(new) == 1 and batch.sample[0]:  # a request that comes alone is waited for: without what several rows need
        count, end = int(new[0]), int(batch.start[0] + new[0])
        positions = np.arange(end - count - 1, end - 1)
        positions[0] = end - 1
        return TokenRows(np.full(count, batch.slots[0], np.int64), positions, 1, True, (count - 1) * end)
    start, new = batch.start.astype(np.int64), new.astype(np.int64)
    ends = new.cumsum()
    last = ends[batch.sample] - 1
    others = np.ones(batch.num_tokens, bool)
    others[last] = False
    order = np.concatenate([last, others.nonzero()[0]])
    row = np.arange(len(new)).repeat(new)[order]
    # A row with n new tokens up to position e reads about e tokens n times instead of once.
    again = int(((new - 1) * (start + new)).sum())
    return TokenRows(batch.slots.astype(np.int64)[row], order + (start + new - ends)[row], len(last), True, again)
