"""Penalties and edits of logits, before temperature. Never decides which row needs them.

All functions change `logits` in place and touch each row by its own values only, so a row's result
does not depend on its neighbours. What was generated is read off the token table each time and
never counted along: after a preemption with recompute the counts are right by construction.
"""

from __future__ import annotations

import torch
from torch import Tensor


def apply_penalties(
    logits: Tensor,
    tokens: Tensor,
    lengths: Tensor,
    num_prompt: Tensor,
    repetition: Tensor,
    presence: Tensor,
    frequency: Tensor,
) -> None:
    """logits float32 [P, V]; tokens integer [P, L], of which row i knows the first lengths[i], its
    prompt being the first num_prompt[i]; the strengths are float32 [P].

    Repetition (Keskar et al., 2019): a token of the prompt or the output has its logit divided by the
    strength where positive, multiplied where negative. Presence and frequency (OpenAI): output only,
    logit - presence * (count > 0) - frequency * count.
    """
    rows, width = tokens.shape
    vocab = logits.shape[1]
    index = torch.arange(width, device=tokens.device)
    known = index < lengths[:, None]
    # Columns that are not known yet, and ids past the logits, go to one spare column.
    ids = torch.where(known, tokens.long(), vocab).clamp_(max=vocab)
    output = (known & (index >= num_prompt[:, None])).float()
    counts = logits.new_zeros((rows, vocab + 1)).scatter_add_(1, ids, output).gather(1, ids)
    wide = torch.cat((logits, logits.new_zeros((rows, 1))), dim=1)
    values = wide.gather(1, ids)
    values = torch.where(values > 0, values / repetition[:, None], values * repetition[:, None])
    values = values - frequency[:, None] * counts - presence[:, None] * (counts > 0)
    # Equal ids carry equal values, so it does not matter which of them is written last; the spare column is dropped.
    logits.copy_(wide.scatter_(1, ids, values)[:, :vocab])


def apply_bias(logits: Tensor, rows: Tensor, ids: Tensor, values: Tensor) -> None:
    """logits[rows[i], ids[i]] += values[i]. Each (row, id) at most once; ids are in range."""
    logits[rows, ids] += values


def apply_mask(logits: Tensor, rows: Tensor, masks: Tensor) -> None:
    """logits[rows[i], t] = -inf where bit t % 32 of masks[i, t // 32], int32 [C, words], is 0."""
    bits = torch.arange(32, dtype=torch.int32, device=logits.device)
    allowed = (masks[:, :, None] >> bits & 1).view(len(masks), -1)[:, : logits.shape[1]]
    logits[rows] = logits[rows].masked_fill_(allowed == 0, float("-inf"))


def apply_ban(logits: Tensor, rows: Tensor, ids: Tensor) -> None:
    """logits[rows[i], ids[i]] = -inf; ids are in range."""
    logits[rows, ids] = float("-inf")
