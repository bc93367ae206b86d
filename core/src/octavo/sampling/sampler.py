"""Sampler: logits of a step in, one token a row out. Batched, and without waiting for the device.

Owns the order of operations, which is vLLM's: logprobs are of the raw logits; then the grammar's mask, logit_bias,
the min_tokens mask, penalties, temperature, min_p, top_k, top_p, draw. Only rows that ask for a stage pay
for it. Never knows a request: what a row wants is in SamplerState, what it has said in the token
table. A row's token is a function of its own logits, tokens, parameters, seed and position.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

import numpy as np
import torch
from torch import Tensor

from octavo.request import MAX_LOGPROBS, SamplingParams, TokenLogprobs
from octavo.sampling.constrained import ConstrainedRows
from octavo.sampling.penalties import apply_ban, apply_bias, apply_mask, apply_penalties
from octavo.sampling.rng import uniforms
from octavo.sampling.state import SamplerState
from octavo.sampling.truncation import BLOCK, draw, truncate
from octavo.transfer import to_device, to_host

Ids = np.ndarray | Tensor


@dataclass(frozen=True, slots=True)
class Logprobs:
    """Of L rows: value and rank (1 is best) of the chosen token, and the best ids with their values [L, k]."""

    chosen: Tensor
    ranks: Tensor
    top_ids: Tensor
    top_values: Tensor

    def to_host(self) -> Logprobs:
        return Logprobs(to_host(self.chosen), to_host(self.ranks), to_host(self.top_ids), to_host(self.top_values))

    def rows(self, tokens: np.ndarray, keep: np.ndarray) -> list[TokenLogprobs]:
        """As messages; row i gets its keep[i] best. On the host only."""
        columns = (self.chosen.tolist(), self.ranks.tolist(), self.top_ids.tolist(), self.top_values.tolist())
        return [
            TokenLogprobs(token, value, rank, ids[:k], values[:k])
            for token, k, value, rank, ids, values in zip(tokens.tolist(), keep.tolist(), *columns, strict=True)
        ]


@dataclass(frozen=True, slots=True)
class Sampled:
    """tokens int32 [S]; failed bool [S]: the row has no token (its logits were not finite, or every token was
    excluded; `reasons` has another reason by row). `rows` are those with logprobs and `keep` how many best each of them wants."""

    tokens: Tensor
    failed: Tensor
    rows: np.ndarray
    keep: np.ndarray
    values: Logprobs | None
    reasons: dict[int, str] = field(default_factory=dict)

    @classmethod
    def plain(cls, tokens: Tensor, failed: Tensor) -> Sampled:
        """Of rows of which none wants logprobs."""
        none = np.zeros(0, np.int64)
        return cls(tokens, failed, none, none, None)

    def to_host(self) -> Sampled:
        """A copy on the host; started, not waited for, where it comes from a GPU."""
        values = None if self.values is None else self.values.to_host()
        return replace(self, tokens=to_host(self.tokens), failed=to_host(self.failed), values=values)

    def logprobs(self) -> dict[int, TokenLogprobs]:
        """By row, of the rows that asked and did not fail. On the host only."""
        if self.values is None:
            return {}
        entries = self.values.rows(self.tokens.numpy()[self.rows], self.keep)
        failed = self.failed.numpy()
        return {int(row): entry for row, entry in zip(self.rows, entries, strict=True) if not failed[row]}


DrawOperator = Callable[..., tuple[Tensor, Tensor]]
"""The operator ("draw", "plain"): (logits float32 [S, width], temperature float32 [S] (0: greedy), seed int64 [S],
position int64 [S], vocab, keep=None) -> (tokens int32 [S], failed bool [S]). A row's token depends on its own row only.
keep: (token table int32 [rows, length], slots int64 [S]), whose row slots[i] gets the token at position[i]."""


class Sampler:
    """Built once for a model. `vocab` is the width of its logits; only ids below valid_vocab (those that the
    tokenizer knows; default all) are ever chosen. draw: a fused operator that replaces the draw of this
    module for every row (the noise must not depend on who else is in the batch). constrained: who knows what grammars
    allow; without it no row may have one."""

    def __init__(
        self,
        max_rows: int,
        vocab: int,
        device: torch.device | str = "cpu",
        *,
        valid_vocab: int | None = None,
        draw: DrawOperator | None = None,
        constrained: ConstrainedRows | None = None,
    ) -> None:
        self.vocab = min(vocab, valid_vocab or vocab)
        self.state = SamplerState(max_rows, self.vocab)
        self.draw = draw
        self._constrained = constrained
        self._device = torch.device(device)

    def admit(
        self,
        slot: int,
        params: SamplingParams,
        seed: int,
        eos_ids: tuple[int, ...],
        num_prompt: int,
        output: Sequence[int] = (),
    ) -> None:
        """Remember what the sequence that enters `slot` asks for. output: what it has sampled before it came (back) here."""
        self.state.set(slot, params, seed, eos_ids, num_prompt)
        if self._constrained is None:
            assert params.grammar is None
        elif params.grammar is not None:
            self._constrained.admit(slot, params, eos_ids, num_prompt, output)
        else:
            self._constrained.drop(slot)

    def plain(self, slots: np.ndarray, positions: np.ndarray) -> bool:
        """Whether none of these rows asks for more than a temperature: `draw` alone then answers the step."""
        state = self.state
        special = state.edited[slots] | state.truncated[slots] | (state.logprobs[slots] >= 0)
        return not (special | (positions - state.num_prompt[slots] < state.min_tokens[slots])).any()

    def columns(self, slots: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
        """What `draw` needs of these rows: temperature float64 (0 for greedy rows) and seed int64."""
        state = self.state
        return np.where(state.greedy[slots], 0.0, state.temperature[slots]), state.seed[slots].view(np.int64)

    def sample(self, logits: Tensor, slots: Ids, positions: Ids, tokens: Tensor) -> Sampled:
        """Choose the token at positions[i] of the sequence in slots[i] from logits[i].

        logits float32 [S, width >= vocab], left as they were. slots and positions: integers [S], best as
        numpy arrays (device tensors are fetched). tokens: integer [max_rows, length], the token table, of
        which row slots[i] is known up to positions[i].
        """
        slots, positions = _host(slots), _host(positions)
        logits = logits[:, : self.vocab]
        state = self.state
        failed = ~torch.isfinite(logits.sum(-1))
        delayed = positions - state.num_prompt[slots] < state.min_tokens[slots]
        edited = state.edited[slots] | delayed
        reasons: dict[int, str] = {}
        if not edited.any():
            chosen, empty = self._choose(logits, slots, positions)
        else:
            chosen = torch.zeros(len(slots), dtype=torch.int64, device=logits.device)
            empty = torch.zeros_like(failed)
            for part in (np.flatnonzero(~edited), np.flatnonzero(edited)):
                if not len(part):
                    continue
                index = self._send(part)
                mine = logits.index_select(0, index)
                if edited[part[0]]:
                    held = self._constrain(mine, slots[part], positions[part])
                    reasons = {int(part[row]): reason for row, reason in held.items()}
                    self._edit(mine, slots[part], positions[part], delayed[part], tokens)
                chosen[index], empty[index] = self._choose(mine, slots[part], positions[part])
            self._tell(slots, chosen)
        failed |= empty
        chosen.masked_fill_(failed, 0)
        keep = state.logprobs[slots]
        rows = np.flatnonzero(keep >= 0)
        values = None
        if len(rows):
            index = self._send(rows)
            raw = logits if len(rows) == len(slots) else logits.index_select(0, index)
            values = logprobs_of(raw, chosen[index])
        return Sampled(chosen.int(), failed, rows, keep[rows], values, reasons)

    def _constrain(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> dict[int, str]:
        """Mask what grammars forbid, in place on rows that are copies; rows that can have no token, with the reason: all of theirs is
        masked."""
        rows = np.flatnonzero(self.state.constrained[slots])
        if not len(rows):
            return {}
        assert self._constrained is not None
        masks, reasons = self._constrained.masks(slots[rows], positions[rows])
        apply_mask(logits, self._send(rows), self._send(masks))
        return {int(rows[row]): reason for row, reason in reasons.items()}

    def _tell(self, slots: np.ndarray, chosen: Tensor) -> None:
        rows = np.flatnonzero(self.state.constrained[slots])
        if len(rows):
            assert self._constrained is not None
            self._constrained.sampled(slots[rows], chosen.index_select(0, self._send(rows)))

    def _edit(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray, delayed: np.ndarray, tokens: Tensor) -> None:
        """Bias, min_tokens mask and penalties, in place on rows that are copies."""
        state = self.state
        found = [(row, *state.bias[slot]) for row, slot in enumerate(slots.tolist()) if slot in state.bias]
        if found:
            rows = np.concatenate([np.full(len(ids), row) for row, ids, _ in found])
            values = to_device(np.concatenate([v for _, _, v in found]), logits.device)
            apply_bias(logits, self._send(rows), self._send(np.concatenate([ids for _, ids, _ in found])), values)
        banned = [(row, state.stops[int(slots[row])]) for row in np.flatnonzero(delayed)]
        if banned:
            rows = np.concatenate([np.full(len(ids), row) for row, ids in banned])
            apply_ban(logits, self._send(rows), self._send(np.concatenate([ids for _, ids in banned])))
        rows = np.flatnonzero(state.penalised[slots])
        if len(rows):
            mine, index = slots[rows], self._send(rows)
            known = tokens[:, : int(positions[rows].max())].index_select(0, self._send(mine))
            part = logits.index_select(0, index)
            apply_penalties(
                part,
                known,
                self._send(positions[rows]),
                self._send(state.num_prompt[mine]),
                *(self._send(column[mine]) for column in (state.repetition, state.presence, state.frequency)),
            )
            logits.index_copy_(0, index, part)

    def _choose(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        """(int64 [S] tokens, bool [S] rows in which every token is excluded)."""
        if self.draw is not None:
            return self._choose_fused(self.draw, logits, slots, positions)
        greedy = self.state.greedy[slots]
        if greedy.all():
            best, at = logits.max(-1)
            return at, best == float("-inf")
        if not greedy.any():
            return self._draw(logits, slots, positions)
        tokens = torch.empty(len(slots), dtype=torch.int64, device=logits.device)
        empty = torch.empty(len(slots), dtype=torch.bool, device=logits.device)
        for part in (np.flatnonzero(greedy), np.flatnonzero(~greedy)):
            index = self._send(part)
            tokens[index], empty[index] = self._choose(logits.index_select(0, index), slots[part], positions[part])
        return tokens, empty

    def _choose_fused(
        self, fused: DrawOperator, logits: Tensor, slots: np.ndarray, positions: np.ndarray
    ) -> tuple[Tensor, Tensor]:
        """The same through a fused draw; truncated rows are cut first and then drawn at temperature 1."""
        temperature, seed = self.columns(slots)
        cut = np.flatnonzero(self.state.truncated[slots] & (temperature > 0))
        if len(cut):
            logits = logits.clone()
            index = self._send(cut)
            logits[index] = self._truncated(logits.index_select(0, index), slots[cut])[0][:, : self.vocab]
            temperature[cut] = 1.0
        warmth = self._send(temperature.astype(np.float32))
        tokens, failed = fused(logits, warmth, self._send(seed), self._send(positions.astype(np.int64)), self.vocab)
        return tokens.long(), failed

    def _draw(self, logits: Tensor, slots: np.ndarray, positions: np.ndarray) -> tuple[Tensor, Tensor]:
        x, best = self._truncated(logits, slots)
        tokens = draw(x, self._send(uniforms(self.state.seed[slots], positions)))
        return tokens.clamp_(max=self.vocab - 1), best.squeeze(1) == float("-inf")

    def _truncated(self, logits: Tensor, slots: np.ndarray) -> tuple[Tensor, Tensor]:
        """(logits minus their maximum, over the temperature, -inf where truncated [S, whole blocks]; the maximum)."""
        state = self.state
        best = logits.amax(-1, keepdim=True)
        x = logits.new_full((len(slots), -(-self.vocab // BLOCK) * BLOCK), float("-inf"))
        torch.sub(logits, best, out=x[:, : self.vocab])
        temperature = state.temperature[slots]
        if (temperature != 1.0).any():
            x /= self._send(temperature.astype(np.float32))[:, None]
        cut = np.flatnonzero(state.truncated[slots])
        if len(cut):
            mine = slots[cut]
            if len(cut) == len(slots):
                truncate(x, state.min_p[mine], state.top_k[mine], state.top_p[mine])
            else:
                part = x.index_select(0, self._send(cut))
                truncate(part, state.min_p[mine], state.top_k[mine], state.top_p[mine])
                x.index_copy_(0, self._send(cut), part)
        return x, best

    def _send(self, values: np.ndarray) -> Tensor:
        return to_device(values, self._device)


def logprobs_of(logits: Tensor, tokens: Tensor) -> Logprobs:
    """Natural log-probabilities under softmax(logits), float32 [L, V], of tokens int64 [L], with ranks (ties do
    not push a token down) and the MAX_LOGPROBS best. A fixed number, so that neighbours' wishes change nothing."""
    best = logits.amax(-1, keepdim=True)
    # log sum exp from the largest probability: softmax is computed row by row, so this is the same in any batch.
    norm = best - torch.softmax(logits, dim=-1).amax(-1, keepdim=True).log()
    mine = logits.gather(1, tokens[:, None])
    top, ids = logits.topk(min(MAX_LOGPROBS, logits.shape[1]), dim=-1)
    return Logprobs((mine - norm).squeeze(1), (logits > mine).sum(-1) + 1, ids, top - norm)


def prompt_logprobs(logits: Tensor, targets: Tensor, k: int) -> list[TokenLogprobs]:
    """Values of prompt tokens: logits float32 [T, V] at the positions before targets, int64 [T]; the k best each.
    Waits for the device."""
    values = logprobs_of(logits, targets).to_host()
    if logits.is_cuda:
        torch.cuda.current_stream(logits.device).synchronize()
    tokens = targets.cpu().numpy()
    return values.rows(tokens, np.full(len(tokens), k))


def _host(values: Ids) -> np.ndarray:
    return values.cpu().numpy() if isinstance(values, Tensor) else values
