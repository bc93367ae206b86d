"""docs/troubleshooting.md quotes errors as they are: whoever searches for one finds it."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs" / "troubleshooting.md").read_text()
SOURCES = "\n".join(p.read_text() for p in [*ROOT.glob("core/src/**/*.py"), *ROOT.glob("plugins/*/src/**/*.py")])
ONE_LITERAL = re.sub(r"\"\s*\n\s*f?\"", "", SOURCES)  # a message may be written on several lines
ELSEWHERE = {"CUDA out of memory", "Address already in use"}  # torch's and the system's words


def quotes() -> list[str]:
    """Backticked words of the first columns of tables that say what a message or a log says, but names of flags and files."""
    found = []
    for table in re.findall(r"^\| (?:it says|last words) \|.*\n((?:\|.*\n)+)", PAGE, re.MULTILINE):
        for row in table.splitlines()[1:]:
            found += [q for q in re.findall(r"`([^`]+)`", row.split("|")[1]) if " " in q]
    return found


def test_there_is_something_to_look_for() -> None:
    assert len(quotes()) > 10


@pytest.mark.parametrize("quote", quotes())
def test_a_quoted_error_is_in_the_code(quote: str) -> None:
    for piece in re.split(r"\.\.\.|\bN\b|: (?=Address)|\((?=--)", quote):
        words = piece.strip(" :)")
        if words and words not in ELSEWHERE and not words.startswith("--"):
            assert words in ONE_LITERAL, f"no message has {words!r}"
