"""ConstrainedRows: rows whose next token a grammar has a say in.

Owns the state of each such row, and how far it has been told what was sampled. A token stays on the device between steps, so a row's
state learns of the last one when the next mask is needed: by then the device has that step's forward pass to do, and the host works
on masks meanwhile. Rows without a grammar are never looked at. Never touches a logit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass

import numpy as np
import torch
from torch import Tensor

from octavo.errors import OctavoError
from octavo.grammar import Grammar
from octavo.interfaces import Constraint
from octavo.request import SamplingParams
from octavo.transfer import to_host

Start = Callable[[Grammar], Constraint]
Fill = Callable[[Sequence[Constraint], np.ndarray], None]


class _Tokens:
    """Tokens of some rows on their way to the host."""

    def __init__(self, tokens: Tensor) -> None:
        self._tokens = to_host(tokens)
        self._event: torch.cuda.Event | None = None
        if tokens.is_cuda:
            self._event = torch.cuda.Event()  # type: ignore[no-untyped-call]
            self._event.record()

    def __getitem__(self, at: int) -> int:
        """Waits for the device where it has to."""
        if self._event is not None:
            self._event.synchronize()
            self._event = None
        return int(self._tokens[at])


@dataclass(slots=True)
class _Row:
    """state None: there never was one. ends: bits of the ids that end the row, which are not allowed before position `least` while
    something else is; eos: those of them that are never, while something else is. news: where the token lies that the state has not
    been told of. error: why the state is of no use any more."""

    state: Constraint | None
    ends: np.ndarray
    eos: np.ndarray
    least: int
    news: tuple[_Tokens, int] | None = None
    error: str = ""


class ConstrainedRows:
    """By slots of the state table. vocab: ids that may be sampled. start gives the state of an answer that has not begun, fill is
    GrammarCompiler's."""

    def __init__(self, vocab: int, start: Start, fill: Fill) -> None:
        self.words = -(-vocab // 32)
        self._vocab, self._start, self._fill = vocab, start, fill
        self._rows: dict[int, _Row] = {}

    def admit(self, slot: int, params: SamplingParams, eos_ids: Sequence[int], num_prompt: int, output: Sequence[int]) -> None:
        """A sequence with a grammar enters the slot, or comes back to it with the tokens that it has sampled so far."""
        assert params.grammar is not None
        row = _Row(
            None,
            ends=self._bits([*eos_ids, *(params.stop_token_ids or ())]),
            eos=self._bits(eos_ids if params.ignore_eos else ()),
            least=num_prompt + params.min_tokens,
        )
        self._rows[slot] = row
        try:
            row.state = self._start(params.grammar).copy()
        except OctavoError as error:
            row.error = str(error)
        self._accept(row, output)

    def drop(self, slot: int) -> None:
        """A sequence without a grammar enters the slot."""
        self._rows.pop(slot, None)

    def masks(self, slots: np.ndarray, positions: np.ndarray) -> tuple[np.ndarray, dict[int, str]]:
        """What may come at positions[i] of the sequence in slots[i]: int32 [C, words] as GrammarCompiler.fill gives it, and why a row
        can have no token, by row. Waits for tokens that the device is still sampling."""
        rows = [self._rows[slot] for slot in slots.tolist()]
        for row in rows:
            if row.news is not None:
                tokens, at = row.news
                row.news = None
                self._accept(row, [tokens[at]])
        masks = np.zeros((len(rows), self.words), np.int32)
        states = {i: row.state for i, row in enumerate(rows) if row.state is not None and not row.error}
        if states:
            part = np.zeros((len(states), self.words), np.int32)
            self._fill(list(states.values()), part)
            masks[list(states)] = part
        for i in states:
            if not masks[i].any():
                rows[i].error = "the grammar cannot go on from here: it allows no token"
        self._hold_ends(rows, positions, masks)
        return masks, {i: row.error for i, row in enumerate(rows) if row.error}

    def sampled(self, slots: np.ndarray, tokens: Tensor) -> None:
        """The rows in these slots were given these tokens, int64 [C]. Waits for nothing."""
        news = _Tokens(tokens)
        for at, slot in enumerate(slots.tolist()):
            self._rows[slot].news = news, at

    def _hold_ends(self, rows: list[_Row], positions: np.ndarray, masks: np.ndarray) -> None:
        for row, position, mask in zip(rows, positions.tolist(), masks, strict=True):
            held = row.ends if position < row.least else row.eos
            rest = mask & ~held
            if rest.any():
                mask[:] = rest

    def _accept(self, row: _Row, tokens: Sequence[int]) -> None:
        """The state of one row is nobody else's trouble."""
        try:
            if tokens and row.state is not None:
                row.state.accept(tokens)
        except Exception as error:
            row.error = str(error) if isinstance(error, OctavoError) else f"the grammar failed: {type(error).__name__}: {error}"

    def _bits(self, ids: Sequence[int]) -> np.ndarray:
        bits = np.zeros(self.words * 32, np.uint8)
        bits[[token for token in ids if 0 <= token < self._vocab]] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)
