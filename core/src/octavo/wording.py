"""Wording of errors about names and options: the nearest known name, and pydantic's complaints with their place."""

from __future__ import annotations

from collections.abc import Iterable
from difflib import get_close_matches
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pydantic import BaseModel, ValidationError


def normalise(distribution: str) -> str:
    """A distribution's name as indexes compare it: lower case, runs of - _ . as one dash."""
    return "-".join(part for part in distribution.lower().replace("_", "-").replace(".", "-").split("-") if part)


def hint(name: str, names: Iterable[str]) -> str:
    """The tail of an error about an unknown name: the nearest known one, or all there are."""
    names = sorted(set(names))
    near = get_close_matches(name, names, n=1)
    if near:
        return f"; did you mean {near[0]!r}?"
    return f"; there are: {', '.join(names)}" if names else "; there are none"


def on_one_line(error: Exception) -> str:
    """A parser's error that spreads over several lines, as one."""
    return " ".join(str(error).split())


def unreadable(error: OSError | UnicodeDecodeError) -> str:
    """Why a text file could not be read, without its path, which the error's own place has named."""
    if isinstance(error, UnicodeDecodeError):
        return f"is not UTF-8 text: {error.reason} at byte {error.start}"
    return f"cannot be read: {error.strerror}"


def complaints(where: str, model: type[BaseModel], error: ValidationError) -> str:
    """One line for a pydantic error: where (in front of the option's name as it stands), what, the value seen, and the nearest option."""
    lines = []
    for item in error.errors(include_url=False):
        key = ".".join(str(part) for part in item["loc"])
        if item["type"] == "extra_forbidden":
            lines.append(f"{where}{key}: unknown option{hint(key, model.model_fields)}")
        else:
            said = item["msg"].removeprefix("Value error, ").replace("Input should be", "must be", 1)
            lines.append(f"{where}{key}: {said}, got {item['input']!r}")
    return "; ".join(lines)
