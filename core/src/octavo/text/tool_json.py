"""JSON as a model writes it, piece by piece: one value, and the object {"name": ..., "arguments": ...} that is a call.

Owns where a value ends, not whether it is right: arguments are handed on as they were written. Every character is looked at once. Must
never raise for a text.
"""

from __future__ import annotations

import json
import re

_SPACE = " \t\r\n"
_STRING_END = re.compile(r'["\\]')
_NESTED = re.compile(r'["{}\[\]]')
_SCALAR_END = re.compile(r"[,}\]\s]")


class Value:
    """One JSON value. feed(text, at) gives where it stopped reading; `done` says whether the value ended there."""

    __slots__ = ("_depth", "_escaped", "_kind", "_string", "done")

    def __init__(self) -> None:
        self._kind = ""  # of the value: its first character
        self._depth, self._string, self._escaped = 0, False, False
        self.done = False

    def feed(self, text: str, at: int) -> int:
        if not self._kind:
            self._kind = text[at]
            if self._kind not in '"{[':
                self._kind = "scalar"
        if self._kind == "scalar":
            found = _SCALAR_END.search(text, at)
            self.done = found is not None
            return found.start() if found else len(text)
        end = len(text)
        while at < end:
            if self._escaped:
                self._escaped = False
                at += 1
                continue
            found = (_STRING_END if self._string else _NESTED).search(text, at)
            if found is None:
                return end
            at = found.end()
            char = text[at - 1]
            if char == "\\":
                self._escaped = True
            elif char == '"':
                self._string = not self._string
            else:
                self._depth += 1 if char in "{[" else -1
            if self._depth <= 0 and not self._string:
                self.done = True
                return at
        return at


class JsonCall:
    """One object with a name and arguments, in either order; other keys are passed over. feed gives where it stopped: where it wants
    more, where the object is `done`, before the character with which it is `broken` (this is no such object), or where the call has just
    `begun`: from then on its name is known and arguments may be taken."""

    __slots__ = ("_args", "_key", "_keys", "_new", "_part", "_pieces", "_raw_string", "_value", "begun", "broken", "done", "name")

    def __init__(self, keys: tuple[str, ...] = ("arguments", "parameters")) -> None:
        self._keys = keys
        self._part = "start"
        self._key = ""
        self._pieces: list[str] = []  # of the key or value that is being read
        self._new: list[str] = []  # arguments that nobody has taken yet
        self._value = Value()
        self._args = False  # whether arguments have begun
        self._raw_string = False  # arguments are a string, which holds the JSON
        self.name: str | None = None
        self.done = self.broken = False
        self.begun = False

    def take(self) -> str:
        """New arguments, once begun."""
        new, self._new = "".join(self._new), []
        return new

    def feed(self, text: str, at: int) -> int:
        end, begun = len(text), self.begun
        while at < end and not (self.done or self.broken) and self.begun == begun:
            if self._part in ("key", "value"):
                at = self._read(text, at)
                continue
            char = text[at]
            if char in _SPACE:
                at += 1
                continue
            at = self._between(char, at)
        return at

    def _between(self, char: str, at: int) -> int:
        """A character that is no space between keys and values; where to go on from."""
        part = self._part
        if part == "start" and char == "{":
            self._part = "first"
        elif part in ("first", "next") and char == '"':
            self._part, self._value, self._pieces = "key", Value(), []
            return at
        elif part == "colon" and char == ":":
            self._part = "before"
        elif part == "before" and char not in ",:}]":
            self._part, self._value, self._pieces = "value", Value(), []
            if self._key in self._keys:
                if self._args:
                    self.broken = True
                self._args, self._raw_string = True, char == '"'
                self._begin()
            return at
        elif part == "after" and char == ",":
            self._part = "next"
        elif part in ("after", "first") and char == "}":
            self._close()
        else:
            self.broken = True
            return at
        return at + 1

    def _read(self, text: str, at: int) -> int:
        end = self._value.feed(text, at)
        piece = text[at:end]
        if self._part == "value" and self._key in self._keys and not self._raw_string:
            self._new.append(piece)
        else:
            self._pieces.append(piece)
        if self._value.done:
            if self._part == "key":
                self._key, self._part = self._string(), "colon"
            else:
                if self._key == "name":
                    self.name, self._part = self._string(), "after"
                    self._begin()
                elif self._key in self._keys and self._raw_string:
                    self._new.append(self._string())
                self._part = "after"
        return end

    def _string(self) -> str:
        """The string that has been read; breaks where it is none."""
        try:
            found = json.loads("".join(self._pieces))
        except (ValueError, RecursionError):
            found = None
        if not isinstance(found, str):
            self.broken = True
            return ""
        return found

    def _begin(self) -> None:
        self.begun = self.name is not None and self._args and not self.broken

    def _close(self) -> None:
        self.done = self.name is not None
        self.broken = not self.done
        if self.done and not self._args:
            self._new.append("{}")
        self.begun = self.done
