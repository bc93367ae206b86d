"""The tables of docs/configuration.md, written from config.py: `python -m octavo.cli.reference FILE`.

Owns the text between the two markers of that page and nothing outside them.
"""

from __future__ import annotations

import sys
from pathlib import Path

from pydantic import BaseModel

from octavo.cli.options import Option, options_of
from octavo.config import EngineConfig, ServerConfig

BEGIN, END = "<!-- generated from config.py by `make docs`: begin -->", "<!-- generated: end -->"
TITLES = ((EngineConfig, "The engine"), (ServerConfig, "The server"))


def tables() -> str:
    """Markdown: one table per group of settings, in the order of config.py."""
    return "\n".join(line for model, title in TITLES for line in [f"## {title}", "", *_tables(model)])


def _tables(model: type[BaseModel]) -> list[str]:
    groups: dict[str, list[Option]] = {}
    for option in options_of(model):
        groups.setdefault(option.group, []).append(option)
    lines: list[str] = []
    for name, options in groups.items():
        lines += [f"### {name.capitalize()}", "", "| flag | values | default | meaning |", "|---|---|---|---|"]
        lines += [_row(option) for option in options] + [""]
    return lines


def _row(option: Option) -> str:
    flag = f"`{option.flag}`" + (f", `{option.short}`" if option.short else "")
    if bool in option.kinds:
        flag += f", `--no-{option.key}`"
    unset = option.default in (None, (), {}, "")
    default = "" if unset else f"`{option.default_text}`"
    cells = (flag, _values(option), default, option.help)
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _values(option: Option) -> str:
    if option.choices and len(option.kinds) == 1:
        return ", ".join(f"`{choice}`" for choice in option.choices)
    return "on or off" if bool in option.kinds else option.allowed.split(" (")[0]


def insert(page: str) -> str:
    """The page with what stands between the markers replaced by fresh tables."""
    before, rest = page.split(BEGIN, 1)
    _, after = rest.split(END, 1)
    return f"{before}{BEGIN}\n\n{tables()}\n{END}{after}"


if __name__ == "__main__":
    path = Path(sys.argv[1])
    path.write_text(insert(path.read_text(encoding="utf-8")), encoding="utf-8")
