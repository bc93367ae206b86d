"""A grammar provider in plain Python, as a plugin: name this module in `discover(extra_modules=...)` and choose grammar "choices".

It knows one kind of grammar, a choice of texts, and nothing of how to be fast: tests of an engine need a grammar that is there wherever
core is.
"""

from __future__ import annotations

import json
from collections.abc import Sequence

import numpy as np

from octavo.catalog import Options, Provider
from octavo.grammar import Grammar, GrammarError
from octavo.hookspecs import hookimpl
from octavo.interfaces import GrammarParts


class Rest:
    """interfaces.Constraint: what is left of each text that the answer may still become."""

    def __init__(self, tokens: Sequence[bytes], ends: Sequence[int], texts: frozenset[bytes]) -> None:
        self._tokens, self._ends, self.texts = tokens, ends, texts

    def copy(self) -> Rest:
        return Rest(self._tokens, self._ends, self.texts)

    def accept(self, tokens: Sequence[int]) -> None:
        for token in tokens:
            if token in self._ends and b"" in self.texts:
                self.texts = frozenset([b""])
                continue
            piece = self._tokens[token]
            self.texts = frozenset(text[len(piece) :] for text in self.texts if piece and text.startswith(piece))
            if not self.texts:
                raise GrammarError(f"token {token} ({piece!r}) begins none of the texts")


class Choices:
    """interfaces.GrammarCompiler."""

    def __init__(self, options: Options, parts: GrammarParts) -> None:
        self._tokens = [b"" if token in parts.control else piece for token, piece in enumerate(parts.tokens)]
        self._ends = tuple(parts.ends)
        self._known: dict[frozenset[bytes], np.ndarray] = {}

    def compile(self, grammar: Grammar) -> Rest:
        if grammar.kind != "choice":
            raise GrammarError(f"this provider knows choices, and no {grammar.kind}")
        texts = frozenset(text.encode() for text in json.loads(grammar.text))
        if not texts:
            raise GrammarError("there is nothing to choose from")
        return Rest(self._tokens, self._ends, texts)

    def fill(self, states: Sequence[Rest], masks: np.ndarray) -> None:
        for state, mask in zip(states, masks, strict=True):
            found = self._known.get(state.texts)
            if found is None:
                found = self._known[state.texts] = self._mask(state.texts, len(mask))
            mask[:] = found

    def _mask(self, texts: frozenset[bytes], words: int) -> np.ndarray:
        bits = np.zeros(32 * words, np.uint8)
        for token, piece in enumerate(self._tokens):
            bits[token] = bool(piece) and any(text.startswith(piece) for text in texts)
        if b"" in texts:
            bits[list(self._ends)] = 1
        return np.packbits(bits, bitorder="little").view(np.int32)


@hookimpl
def register_grammars() -> list[Provider]:
    return [Provider("choices", "grammar", "octavo.testing.choices:Choices", priority=-1, summary="choices of texts: for tests")]
