"""Grammars that decide which token may come next. Part of the contract, see `octavo.interfaces`."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

import numpy as np

from octavo.grammar import Grammar


@dataclass(frozen=True, slots=True)
class GrammarParts:
    """What a compiler is built from: the vocabulary.

    tokens: the bytes of every id below the width of the masks, b"" where there is none. control: ids of control tokens with their text;
    those are no text of an answer, so a grammar matches them only where it names them. ends: the ids that end an answer. encode: the
    model's own way to write a text as ids; a control token's text may become that token.
    """

    tokens: Sequence[bytes]
    control: Mapping[int, str]
    ends: Sequence[int]
    encode: Callable[[str], Sequence[int]]


class Constraint(Protocol):
    """The state of one answer under a grammar. Used by one thread at a time."""

    def copy(self) -> Constraint:
        """The same state, which goes its own way from here."""

    def accept(self, tokens: Sequence[int]) -> None:
        """These tokens came next. Raises GrammarError if the grammar does not allow them."""


class GrammarCompiler(Protocol):
    """Called as cls(options, parts). `compile` is called on threads, several at once perhaps; it must come to an end, and let other
    threads run meanwhile."""

    def compile(self, grammar: Grammar) -> Constraint:
        """The state of an answer that has not begun. Raises GrammarError for a grammar that means nothing, that needs what this compiler
        does not have, that no text satisfies, or that is too large."""

    def fill(self, states: Sequence[Any], masks: np.ndarray) -> None:
        """Write which tokens may come next: bit t % 32 of masks[i, t // 32] (int32 [len(states), words]) is set where state i allows
        token t. The ends of an answer are allowed exactly where its text is complete, and they alone where nothing may follow; bits of
        ids that do not exist are 0. A state that cannot go on has a row of zeros."""
