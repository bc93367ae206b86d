"""How a model writes calls of functions in its text. Part of the contract, see `octavo.interfaces`."""

from __future__ import annotations

from collections.abc import Collection, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from octavo.grammar import Calls


@dataclass(frozen=True, slots=True)
class Tool:
    """A function that a client offers. parameters: the JSON schema of its arguments, None for any object."""

    name: str
    parameters: dict[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class CallPiece:
    """News of call number `index` of an answer: its name, with its first piece and no other, and the next part of its arguments,
    which joined are JSON text as the model wrote it."""

    index: int
    name: str | None
    arguments: str


Said = tuple[str, list[CallPiece]]
"""Text of the answer that is no call's, and news of calls. Text comes before calls of the same piece."""


class ToolParser(Protocol):
    """Reads one answer. What it makes of a text must not depend on how the text is cut, and its work must be linear in it: models
    write anything. What is no call, however it begins, is text."""

    def feed(self, text: str) -> Said:
        """The next piece of the answer."""

    def end(self) -> Said:
        """The answer is complete, or cut off: what was held back."""


class ToolFormat(Protocol):
    """Called as cls(options, None), in the server's process: must not import torch. control: whether calls are marked by control tokens, whose
    text the parser must then see."""

    control: bool

    def parser(self, names: Collection[str], *, most: int | None) -> ToolParser:
        """names: the functions on offer; a call of another is text. most: calls after so many are text too."""

    def grammar(self, tools: Sequence[Tool], *, many: bool, free: bool) -> Calls:
        """What a constrained answer must be: calls of these tools (one, or with `many` one or more), or with `free` any text that may
        have calls in it."""
