"""One setting: its flag, environment variable and file key, and how text becomes its value.

Owns the spelling and the error texts of a single field of a config model. Knows no file, no
environment and no command.
"""

from __future__ import annotations

import argparse
import difflib
import json
import re
import types
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any, Literal, Union, get_args, get_origin

from pydantic import BaseModel

TRUE, FALSE = ("true", "1", "yes", "on"), ("false", "0", "no", "off")
SUFFIXES = {"": 1, "k": 10**3, "m": 10**6, "g": 10**9, "t": 10**12, "K": 2**10, "M": 2**20, "G": 2**30, "T": 2**40}

_EMPTY = "a value is empty; leave it out or give it a value"


@dataclass(frozen=True, slots=True)
class Option:
    """A field of a config model, seen from outside. `bounds` holds ge / gt / le / lt where they exist."""

    name: str
    annotation: Any
    default: Any
    help: str
    group: str
    short: str | None = None
    secret: bool = False
    bounds: Mapping[str, float] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return self.name.replace("_", "-")

    @property
    def flag(self) -> str:
        return f"--{self.key}"

    @property
    def env(self) -> str:
        return f"OCTAVO_{self.name.upper()}"

    @property
    def kinds(self) -> tuple[Any, ...]:
        """The members of the annotation, None left out: (int,), (int, Literal["auto"]), (tuple,), ..."""
        parts = get_args(self.annotation) if get_origin(self.annotation) in (Union, types.UnionType) else (self.annotation,)
        return tuple(get_origin(p) if get_origin(p) in (tuple, list, dict) else p for p in parts if p is not type(None))

    @property
    def choices(self) -> tuple[str, ...]:
        return tuple(str(a) for kind in self.kinds if get_origin(kind) is Literal for a in get_args(kind))

    def add_to(self, group: argparse._ArgumentGroup, *, dest: str | None = None) -> None:
        """Add the flag to an argparse group; an absent flag leaves nothing in the namespace."""
        names = [self.flag, *([self.short] if self.short else [])]
        shown = self.help + ("" if self.default in (None, (), {}, "", "auto") else f" [default: {self.default_text}]")
        kw: dict[str, Any] = {"dest": dest or self.name, "default": argparse.SUPPRESS, "help": shown.replace("%", "%%")}
        if bool in self.kinds:
            group.add_argument(*names, action=argparse.BooleanOptionalAction, **kw)
        elif tuple in self.kinds or list in self.kinds:
            group.add_argument(*names, action="append", metavar=self.metavar, **kw)
        else:
            group.add_argument(*names, metavar=self.metavar, **kw)

    @property
    def metavar(self) -> str:
        if self.choices and len(self.kinds) == 1:
            return "{" + ",".join(self.choices) + "}"
        if dict in self.kinds:
            return "JSON"
        if int in self.kinds:
            return "|".join(["N", *self.choices])
        return "X" if float in self.kinds else "TEXT"

    @property
    def default_text(self) -> str:
        if isinstance(self.default, bool):
            return "on" if self.default else "off"
        return str(self.default)

    def from_env(self, text: str) -> Any:
        """What an environment variable's text stands for: several values are a JSON list or split at commas."""
        if (tuple in self.kinds or list in self.kinds) and not text.lstrip().startswith("["):
            return [part.strip() for part in text.split(",") if part.strip()]
        return text

    def parse(self, value: Any) -> Any:
        """Turn text (flag, environment) or a YAML value into what the model validates. Raises ValueError."""
        if bool in self.kinds:
            if isinstance(value, str) and value.lower() in TRUE + FALSE:
                return value.lower() in TRUE
            if not isinstance(value, bool):
                raise ValueError(self.complain(value))
            return value
        if isinstance(value, bool):  # pydantic would read YAML's `yes` as the number 1
            raise ValueError(self.complain(value))
        if dict in self.kinds:
            return self._object(value)
        if tuple in self.kinds or list in self.kinds:
            return self._several(value)
        if int in self.kinds and isinstance(value, str):
            return self._integer(value)
        if value == "" != self.default:  # an empty host would be every address, an empty path the current folder
            raise ValueError(_EMPTY)
        return value

    def _object(self, value: Any) -> Any:
        found = value
        if isinstance(value, str):
            try:
                found = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"not valid JSON: {error}; got {value!r}") from None
        if not isinstance(found, dict):
            raise ValueError(self.complain(value))
        return found

    def _several(self, value: Any) -> tuple[Any, ...]:
        if isinstance(value, str) and value.lstrip().startswith("["):
            try:
                value = json.loads(value)
            except json.JSONDecodeError as error:
                raise ValueError(f"not a valid JSON list: {error}" + ("" if self.secret else f"; got {value!r}")) from None
        items = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if str in self._items() and not all(isinstance(item, str) for item in items):
            raise ValueError(self.complain(value))
        if any(item == "" for item in items):
            raise ValueError(_EMPTY)
        return items

    def _items(self) -> tuple[Any, ...]:
        for part in (self.annotation, *get_args(self.annotation)):
            if get_origin(part) in (tuple, list):
                return get_args(part)
        return ()

    def _integer(self, text: str) -> Any:
        match = re.fullmatch(r"([+-]?\d+(?:\.\d+)?)([kmgtKMGT]?)(?:iB|B)?", text.strip())
        if not match:
            return text  # a word such as "auto", or an error that the model finds
        number = float(match[1]) * SUFFIXES[match[2]] if "." in match[1] else int(match[1]) * SUFFIXES[match[2]]
        if number != int(number):
            raise ValueError(self.complain(text))
        return int(number)

    def complain(self, value: Any, reason: str = "") -> str:
        """A sentence that names the value (unless secret) and what is allowed."""
        shown = "the value (not shown)" if self.secret else repr(value)
        own = reason.removeprefix("Value error, ") if reason.startswith("Value error, ") else self.allowed
        own = own if own.startswith("must") else f"must be {own}"
        hint = closest(value, self.choices) if isinstance(value, str) and self.choices else ""
        if int in self.kinds and isinstance(value, str) and re.match(r"\d.*[^\d.]", value.strip()):
            hint = "; a suffix is one of k, m, g, t (powers of 1000) or K, M, G, T (of 1024), as in 512M"
        return f"{shown} is not allowed; it {own}{hint}"

    @property
    def allowed(self) -> str:
        """In words: "one of fcfs, priority", "an integer of at least 1"."""
        words = []
        low = next(
            (f"at least {v:g}" if k == "ge" else f"greater than {v:g}" for k, v in self.bounds.items() if k in ("ge", "gt")), ""
        )
        high = next(
            (f"at most {v:g}" if k == "le" else f"less than {v:g}" for k, v in self.bounds.items() if k in ("le", "lt")), ""
        )
        limit = " and ".join(filter(None, (low, high)))
        if bool in self.kinds:
            words.append("true or false")
        elif int in self.kinds:
            words.append("an integer" + (f" of {limit}" if limit else ""))
        elif float in self.kinds:
            words.append("a number" + (f" {limit}" if limit else ""))
        elif dict in self.kinds:
            words.append("a JSON object")
        elif tuple in self.kinds or list in self.kinds:
            words.append(
                "an integer, or a list of them" if int in self._items() else "text, or a list of texts (numbers in quotes)"
            )
        elif str in self.kinds:
            words.append("text (numbers in quotes)")
        if self.choices:
            words.append(("one of " if len(self.choices) > 1 else "") + ", ".join(self.choices))
        return ", or ".join(words)


@cache
def options_of(model: type[BaseModel]) -> tuple[Option, ...]:
    """Every field of a config model, in order."""
    found = []
    for name, info in model.model_fields.items():
        extra = info.json_schema_extra if isinstance(info.json_schema_extra, dict) else {}
        bounds = {k: getattr(m, k) for m in info.metadata for k in ("ge", "gt", "le", "lt") if getattr(m, k, None) is not None}
        short = extra.get("short")
        found.append(
            Option(
                name=name,
                annotation=info.annotation,
                default=info.get_default(call_default_factory=True),
                help=info.description or "",
                group=str(extra.get("group", "other")),
                short=str(short) if short else None,
                secret=bool(extra.get("secret")),
                bounds=bounds,
            )
        )
    return tuple(found)


def closest(word: str, known: Iterable[str]) -> str:
    """ "; did you mean X?" for the known words near `word`, or nothing."""
    near = difflib.get_close_matches(word, list(known), n=2, cutoff=0.6)
    return f"; did you mean {' or '.join(near)}?" if near else ""
