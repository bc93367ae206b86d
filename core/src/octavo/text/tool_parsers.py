"""Parsers of calls in an answer: between markers, or from its first character on.

Owns what is a call and what is text. A parser is linear in its text: markers are looked for in what is new and in a tail shorter than a
marker, and what turns out to be no call is passed on as text, not read again. Must never raise for a text.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Collection
from typing import Protocol

from octavo.interfaces import CallPiece, Said
from octavo.text.tool_json import JsonCall, Value

SPACES = " \t\r\n"


class Reader(Protocol):
    """One call, without its markers; see JsonCall."""

    name: str | None
    begun: bool
    done: bool
    broken: bool

    def feed(self, text: str, at: int) -> int: ...
    def take(self) -> str: ...


class HeadedCall:
    """A call whose name stands before its arguments. head: what leads up to them, with the name as its group; last: how a head ends."""

    LIMIT = 400
    """Characters of a head: a longer one is none."""

    def __init__(self, head: re.Pattern[str], last: str) -> None:
        self._head, self._last = head, last
        self._text = ""
        self._value: Value | None = None
        self._new: list[str] = []
        self.name: str | None = None
        self.begun = self.done = self.broken = False

    def take(self) -> str:
        new, self._new = "".join(self._new), []
        return new

    def feed(self, text: str, at: int) -> int:
        if not self.begun:
            return self._read_head(text, at)
        if self._value is None:
            while at < len(text) and text[at] in SPACES:
                at += 1
            if at == len(text):
                return at
            self._value = Value()
        end = self._value.feed(text, at)
        self._new.append(text[at:end])
        self.done = self._value.done
        return end

    def _read_head(self, text: str, at: int) -> int:
        size = len(self._text)
        self._text += text[at : at + self.LIMIT - size]
        end = self._text.find(self._last, max(size - len(self._last) + 1, 0))
        if end < 0:
            self.broken = len(self._text) == self.LIMIT
            return at + len(self._text) - size
        end += len(self._last)
        found = self._head.fullmatch(self._text, 0, end)
        self.begun, self.broken, self.name = found is not None, found is None, found and found[1]
        return at + end - size


class CallParser:
    """octavo.interfaces.ToolParser. opening and closing stand around a call, hidden are further markers that are no text.

    opening None: an answer is calls from its first character on, or text. `between` may then stand before and between calls, and so may
    hidden markers.
    """

    def __init__(
        self,
        names: Collection[str],
        most: int | None,
        *,
        opening: str | None,
        closing: str = "",
        hidden: tuple[str, ...] = (),
        between: str = SPACES,
        reader: Callable[[], Reader] = JsonCall,
    ) -> None:
        self._names, self._most, self._make_reader = frozenset(names), most, reader
        self._opening, self._closing, self._between = opening, closing, between
        self._markers = hidden if opening is None else (opening, *hidden)
        self._firsts = frozenset(marker[0] for marker in self._markers)
        self._pattern = re.compile("|".join(map(re.escape, self._markers)) or "(?!)")
        self._longest = max(map(len, self._markers), default=1) - 1
        self._held = ""  # what may be the beginning of a marker
        self._raw: list[str] = []  # what is text if no call comes of it
        self._reader = reader()
        self._count = 0
        self._state = self._leading if opening is None else self._outside
        self._content: list[str] = []
        self._pieces: list[CallPiece] = []

    def feed(self, text: str) -> Said:
        while text:
            text = self._state(text)
        return self._said()

    def end(self) -> Said:
        if self._state == self._outside or (self._state == self._leading and not self._count):
            self._content += [*self._raw, self._held]
        elif self._state == self._inside and not self._reader.begun:
            self._content += self._raw
        self._state, self._held, self._raw = self._text, "", []
        return self._said()

    def _said(self) -> Said:
        content, pieces = self._content, self._pieces
        if not content and not pieces:
            return "", []
        self._content, self._pieces = [], []
        return "".join(content), pieces

    # ------------------------------------------------------------ states: each takes a text that is not empty, and leaves the rest of it

    def _text(self, text: str) -> str:
        self._content.append(text)
        return ""

    def _outside(self, text: str) -> str:
        """Text, up to a marker."""
        if not self._held and self._firsts.isdisjoint(text):
            return self._text(text)
        text, self._held = self._held + text, ""
        found = self._pattern.search(text)
        if found is None:
            free = len(text) - self._tail(text)
            self._held = text[free:]
            return self._text(text[:free])
        self._content.append(text[: found.start()])
        if found[0] == self._opening:
            self._open([found[0]])
        return text[found.end() :]

    def _tail(self, text: str) -> int:
        """Characters at its end with which a marker may begin."""
        for size in range(min(self._longest, len(text)), 0, -1):
            if text[-size] in self._firsts and any(marker.startswith(text[-size:]) for marker in self._markers):
                return size
        return 0

    def _leading(self, text: str) -> str:
        """Before a call that has no marker of its own."""
        text, self._held = self._held + text, ""
        rest = text.lstrip(self._between)
        self._raw.append(text[: len(text) - len(rest)])
        if rest.startswith("{"):
            self._open(self._raw)
            return rest
        if found := self._pattern.match(rest):
            self._raw.append(found[0])
            return rest[found.end() :]
        if any(marker.startswith(rest) for marker in self._markers):
            self._held = rest
            return ""
        if rest:
            self._content += self._raw
            self._raw, self._state = [], self._text
        return rest

    def _open(self, raw: list[str]) -> None:
        self._raw, self._reader, self._state = raw, self._make_reader(), self._inside

    def _inside(self, text: str) -> str:
        """A call; or what looked like one, which is text."""
        reader = self._reader
        known = reader.begun
        end = reader.feed(text, 0)
        if not known and (reader.broken or (reader.begun and not self._wanted(reader.name))):
            self._content += [*self._raw, text[:end]]
            self._leave()
            return text[end:]
        if not reader.begun:
            self._raw.append(text[:end])
        elif not known:
            self._pieces.append(CallPiece(self._count, reader.name, reader.take()))
            self._count += 1
            self._raw = []
        elif new := reader.take():
            self._pieces.append(CallPiece(self._count - 1, None, new))
        if reader.done:
            self._state = self._close if self._closing else self._leading
        elif reader.broken:
            self._leave()
        return text[end:]

    def _wanted(self, name: str | None) -> bool:
        return name in self._names and (self._most is None or self._count < self._most)

    def _leave(self) -> None:
        self._raw, self._state = [], self._text if self._opening is None else self._outside

    def _close(self, text: str) -> str:
        """Between a call and its closing marker, where only spaces belong."""
        text, self._held = (self._held + text).lstrip(SPACES), ""
        if text.startswith(self._closing):
            self._state = self._gap
            return text[len(self._closing) :]
        if self._closing.startswith(text):
            self._held = text
            return ""
        self._state = self._outside
        return text

    def _gap(self, text: str) -> str:
        """Spaces after a call are nobody's."""
        rest = text.lstrip(SPACES)
        if rest:
            self._state = self._outside
        return rest
