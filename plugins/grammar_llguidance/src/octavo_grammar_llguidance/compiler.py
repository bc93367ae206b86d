"""Compiler: Octavo's grammars in llguidance's terms, and its masks.

Owns one llguidance tokenizer and the pool of threads that fills masks. How a grammar is written for llguidance is in `sources`.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cached_property

import numpy as np
from llguidance import LLExecutor, LLMatcher, LLParserLimits, LLTokenizer
from llguidance.numpy import fill_next_token_bitmask_par
from octavo.grammar import Grammar, GrammarError
from octavo.interfaces import GrammarParts

from octavo_grammar_llguidance.provider import Limits
from octavo_grammar_llguidance.sources import source_of

LONGEST = 600
"""Characters of an error that a client is told: llguidance shows where in a grammar it is."""


class Vocabulary:
    """A tokenizer as llguidance asks for one. Where only one text is possible it is written as the model would write it."""

    is_tokenizer_wrapper = True

    def __init__(self, parts: GrammarParts) -> None:
        self.tokens = list(parts.tokens)
        self.special_token_ids = sorted(parts.control)
        self.eos_token_id = parts.ends[0]
        self.bos_token_id = None
        self._encode = parts.encode
        self._text = {token: piece for token, piece in enumerate(self.tokens) if piece and token not in parts.control}

    def __call__(self, text: str | bytes) -> list[int]:
        """A tokenizer may put something of its own before a text (a space), or take part of it for a control token. Then the longest
        tokens are taken, from left to right."""
        data = text if isinstance(text, bytes) else text.encode()
        ids = list(self._encode(data.decode(errors="ignore")))
        if b"".join(self._text.get(token, b"\xff") for token in ids) == data:
            return ids
        return self._longest(data)

    @cached_property
    def _by_piece(self) -> tuple[dict[bytes, int], int]:
        known = {piece: token for token, piece in self._text.items()}
        return known, max(map(len, known))

    def _longest(self, data: bytes) -> list[int]:
        known, most = self._by_piece
        ids, at = [], 0
        while at < len(data):
            size = next((n for n in range(min(most, len(data) - at), 0, -1) if data[at : at + n] in known), 0)
            if not size:
                raise GrammarError(f"no token of this model is the byte {data[at]:#x}")
            ids.append(known[data[at : at + size]])
            at += size
        return ids


class State:
    """octavo.interfaces.Constraint over an llguidance matcher."""

    def __init__(self, matcher: LLMatcher) -> None:
        self.matcher = matcher

    def copy(self) -> State:
        return State(self.matcher.deep_copy())

    def accept(self, tokens: Sequence[int]) -> None:
        if not self.matcher.consume_tokens(list(tokens)):
            raise GrammarError(f"the grammar does not go on from here: {short(self.matcher.get_error())}")


class Compiler:
    """octavo.interfaces.GrammarCompiler."""

    def __init__(self, options: Limits, parts: GrammarParts) -> None:
        if not parts.ends:
            raise GrammarError("the model names no token that ends an answer, so no answer could be complete")
        self._control = {text: token for token, text in parts.control.items()}
        self._tokenizer = LLTokenizer(Vocabulary(parts), n_vocab=len(parts.tokens), eos_token=list(parts.ends))
        self._executor = LLExecutor()
        self._limits = LLParserLimits(
            initial_lexer_fuel=options.lexer_fuel,
            step_lexer_fuel=options.step_lexer_fuel,
            step_max_items=options.step_items,
            max_lexer_states=options.lexer_states,
            max_grammar_size=options.grammar_size,
            verbose_errors=False,
        )

    def compile(self, grammar: Grammar) -> State:
        try:
            source = source_of(grammar, self._control)
        except RecursionError:
            raise GrammarError("it is nested too deeply") from None
        except ValueError as error:
            raise GrammarError(short(str(error))) from error
        matcher = LLMatcher(self._tokenizer, source, log_level=0, limits=self._limits)
        trial = matcher.deep_copy()
        trial.compute_bitmask()  # some faults show only when a first mask is asked for
        if trial.is_error():
            raise GrammarError(short(trial.get_error()))
        return State(matcher)

    def fill(self, states: Sequence[State], masks: np.ndarray) -> None:
        fill_next_token_bitmask_par(self._executor, [(state.matcher, i) for i, state in enumerate(states)], masks)
        for state, mask in zip(states, masks, strict=True):
            if state.matcher.is_error():  # llguidance then allows an end, which would look like an answer that is complete
                mask[:] = 0


IN_OTHER_WORDS = {
    "NoExtensionBias": "no text satisfies it",
    "oneOf constraints are not supported. Enable 'coerce_one_of' option to approximate oneOf with anyOf": (
        "oneOf is enforced only where its alternatives exclude each other; use anyOf"
    ),
}


def short(message: str) -> str:
    """The part of llguidance's message that is about the grammar."""
    found = message.partition("\n<")[0].strip()
    return IN_OTHER_WORDS.get(found, found)[:LONGEST]
