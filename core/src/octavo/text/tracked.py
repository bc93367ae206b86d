"""Tracked text: strings that remember which of their characters came from the client.

Owns the arithmetic of those spans through everything a chat template does to a string. The rule that
makes it safe: a result whose spans are not known exactly is taken to be the client's as a whole.
Never decides what the spans mean.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from typing import Any, SupportsIndex

Spans = tuple[tuple[int, int], ...]


class Tracked(str):
    """A string with `spans`: sorted, disjoint, non-empty (start, end) ranges of the client's characters.

    Compares, hashes and searches like the plain string. Slicing, joining, splitting, stripping,
    replacing and adding keep the spans exact; what is not defined here returns a plain string, which
    the template environment marks as a whole (`claim`).
    """

    __slots__ = ("spans",)
    spans: Spans

    def __new__(cls, text: str, spans: Spans | None = None) -> Tracked:
        """Without spans, all of it is the client's."""
        self = super().__new__(cls, text)
        self.spans = (((0, len(text)),) if text else ()) if spans is None else spans
        return self

    def _cut(self, start: int, end: int) -> Tracked:
        text = str.__getitem__(self, slice(start, end))
        spans = tuple((max(a, start) - start, min(b, end) - start) for a, b in self.spans if a < end and b > start)
        return Tracked(text, tuple(span for span in spans if span[0] < span[1]))

    def _pieces(self, parts: Iterable[str]) -> list[str]:
        """`parts` are plain substrings in order; each is found at or after the end of the one before."""
        found: list[str] = []
        at = 0
        for part in parts:
            at = str.index(self, part, at)
            found.append(self._cut(at, at + len(part)))
            at += len(part)
        return found

    def __str__(self) -> str:
        return self

    def __getitem__(self, key: SupportsIndex | slice) -> str:
        if isinstance(key, slice):
            start, end, step = key.indices(len(self))
            return self._cut(start, max(start, end)) if step == 1 else Tracked(str.__getitem__(self, key))
        at = range(len(self))[key]
        return self._cut(at, at + 1)

    def __iter__(self) -> Iterator[str]:
        return (self._cut(at, at + 1) for at in range(len(self)))

    def __add__(self, other: str) -> str:
        return concat((self, other)) if isinstance(other, str) else NotImplemented

    def __radd__(self, other: str) -> str:
        return concat((other, self)) if isinstance(other, str) else NotImplemented

    def __mul__(self, count: SupportsIndex) -> str:
        return Tracked(str.__mul__(self, count))

    __rmul__ = __mul__

    def __mod__(self, values: Any) -> str:
        return Tracked(str.__mod__(self, values))

    def __rmod__(self, template: str) -> str:
        return Tracked(str.__mod__(template, self))

    def strip(self, chars: str | None = None, /) -> str:
        return self.lstrip(chars).rstrip(chars)

    def lstrip(self, chars: str | None = None, /) -> Tracked:
        return self._cut(len(self) - len(str.lstrip(self, chars)), len(self))

    def rstrip(self, chars: str | None = None, /) -> str:
        return self._cut(0, len(str.rstrip(self, chars)))

    def removeprefix(self, prefix: str, /) -> str:
        return self._cut(len(prefix), len(self)) if str.startswith(self, prefix) else self

    def removesuffix(self, suffix: str, /) -> str:
        return self._cut(0, len(self) - len(suffix)) if suffix and str.endswith(self, suffix) else self

    # A piece between separators starts right after one, so the first place where it is found is its own.
    def split(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._between(str.split(self, sep, maxsplit), sep)

    def rsplit(self, sep: str | None = None, maxsplit: SupportsIndex = -1) -> list[str]:
        return self._between(str.rsplit(self, sep, maxsplit), sep)

    def _between(self, parts: list[str], sep: str | None) -> list[str]:
        if sep is None:
            return self._pieces(parts)
        found: list[str] = []
        at = 0
        for part in parts:
            found.append(self._cut(at, at + len(part)))
            at += len(part) + len(sep)
        return found

    def splitlines(self, keepends: bool = False) -> list[str]:
        lines = self._pieces(str.splitlines(self, True))
        if keepends:
            return lines
        return [line[: len(plain)] for line, plain in zip(lines, str.splitlines(self), strict=True)]

    def partition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(str.find(self, sep), len(sep)) if sep in self else (self, "", "")

    def rpartition(self, sep: str, /) -> tuple[str, str, str]:
        return self._three(str.rfind(self, sep), len(sep)) if sep in self else ("", "", self)

    def _three(self, at: int, width: int) -> tuple[str, str, str]:
        return self._cut(0, at), self._cut(at, at + width), self._cut(at + width, len(self))

    def replace(self, old: str, new: str, count: SupportsIndex = -1, /) -> str:
        if not old:
            return Tracked(str.replace(self, old, new, count))
        return concat(self.split(old, count), new)

    def join(self, parts: Iterable[str], /) -> str:
        return concat(parts, self)


def concat(parts: Iterable[str], separator: str = "") -> str:
    """ "".join, or separator.join, with exact spans; a plain string if nothing in it is the client's."""
    texts: list[str] = []
    spans: list[tuple[int, int]] = []
    at = 0
    for number, part in enumerate(parts):
        for text in (separator, part) if number and separator else (part,):
            if isinstance(text, Tracked):
                spans += ((at + a, at + b) for a, b in text.spans)
            texts.append(text)
            at += len(text)
    whole = "".join(texts)
    return Tracked(whole, _merged(spans)) if spans else whole


def _merged(spans: Iterable[tuple[int, int]]) -> Spans:
    merged: list[tuple[int, int]] = []
    for start, end in spans:
        if merged and merged[-1][1] == start:
            merged[-1] = (merged[-1][0], end)
        else:
            merged.append((start, end))
    return tuple(merged)


def trusted_spans(text: str) -> list[tuple[int, int]]:
    """The ranges that are not the client's: all of a plain string."""
    edges = [0, *(edge for span in getattr(text, "spans", ()) for edge in span), len(text)]
    return [(a, b) for a, b in zip(edges[::2], edges[1::2], strict=True) if a < b]


def mark(value: Any, trusted: Callable[[str | None, str], bool], key: str | None = None) -> Any:
    """A deep copy of JSON-like `value` in which every string, keys included, is the client's, except
    values for which trusted(key, text) holds."""
    if isinstance(value, str):
        plain = "".join(value)
        return plain if trusted(key, plain) else Tracked(plain)
    if isinstance(value, dict):
        return {
            (Tracked(k) if isinstance(k, str) else k): mark(v, trusted, k if isinstance(k, str) else None)
            for k, v in value.items()
        }
    if isinstance(value, (list, tuple)):
        return [mark(item, trusted) for item in value]
    return value


def claim(value: Any) -> Any:
    """`value` with every plain string in it (itself, items of a list or of an iterator) taken to be the client's."""
    if isinstance(value, Tracked):
        return value
    if isinstance(value, str):
        return Tracked("".join(value))
    if isinstance(value, (list, tuple)):
        return type(value)([claim(item) for item in value]) if type(value) in (list, tuple) else value
    if isinstance(value, Iterator):
        return (claim(item) for item in value)
    return value


def is_clean(value: Any) -> bool:
    """Whether `value` certainly holds no character of the client's: a plain scalar."""
    return value is None or type(value) in (str, int, float, bool)
