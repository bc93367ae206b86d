"""Grammar: what the text of an answer must be, as a request carries it.

Owns the few kinds that there are and the limit of their size. A grammar is text in some language; whether it means anything is for
the grammar provider to say, which compiles it (`octavo.interfaces.GrammarCompiler`). Must never import torch.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import Any, Literal

import msgspec

from octavo.errors import OctavoError

Kind = Literal["json_schema", "json_object", "regex", "choice", "grammar", "calls"]

MAX_CHARS = 1 << 19
"""Characters of a grammar: more is no answer's form, and compiling takes time."""


class GrammarError(OctavoError):
    """A grammar that cannot be compiled, or whose state cannot go on: what is wrong, and where in the text."""


class Grammar(msgspec.Struct, frozen=True, array_like=True):
    """kind says what text is: "json_schema" a JSON Schema, "json_object" nothing (any JSON object), "regex" a pattern for the whole
    answer, "choice" a JSON list of strings of which the answer is one, "grammar" a grammar in a language of the provider's (Lark or
    GBNF for llguidance), "calls" a `Calls` as JSON."""

    kind: Kind
    text: str = ""

    def __post_init__(self) -> None:
        if len(self.text) > MAX_CHARS:
            raise GrammarError(f"the grammar has {len(self.text)} characters; the limit is {MAX_CHARS}")

    @classmethod
    def json(cls, schema: Mapping[str, Any] | bool | str) -> Grammar:
        """Text that is JSON of this schema."""
        return cls("json_schema", schema if isinstance(schema, str) else json.dumps(schema))

    @classmethod
    def json_object(cls) -> Grammar:
        """Text that is any JSON object."""
        return cls("json_object")

    @classmethod
    def regex(cls, pattern: str) -> Grammar:
        return cls("regex", pattern)

    @classmethod
    def choice(cls, texts: Sequence[str]) -> Grammar:
        """Text that is one of these."""
        return cls("choice", json.dumps(list(texts)))

    @classmethod
    def lark(cls, text: str) -> Grammar:
        """Text of a context-free grammar, in the provider's language."""
        return cls("grammar", text)

    @classmethod
    def calls(cls, calls: Calls) -> Grammar:
        return cls("calls", msgspec.json.encode(calls).decode())


class Call(msgspec.Struct, frozen=True):
    """One function as a model calls it: `begin`, arguments of `schema` (None: any JSON object), `end`. Control tokens in begin and end
    are written as their text."""

    begin: str
    schema: dict[str, Any] | None
    end: str


class Calls(msgspec.Struct, frozen=True):
    """Text with calls of functions. before and after stand around all calls of an answer, separator between two of them.

    many: whether there may be more than one call. trigger: how `before` and the first call begin, as text that is no call's own; the
    answer may then begin with any other text, and may do without a call. None: the answer is a call, or several, and nothing else.
    """

    calls: list[Call]
    before: str = ""
    separator: str = ""
    after: str = ""
    many: bool = True
    trigger: str | None = None
