"""What docs/ holds that is written by a program: `python -m octavo.cli.reference PAGE ...` (`make docs`).

The tables of settings come from config.py, the tree of modules from their docstrings. Owns the text
between a pair of markers and nothing outside them.
"""

from __future__ import annotations

import ast
import sys
from pathlib import Path

from pydantic import BaseModel

import octavo
from octavo.cli.options import Option, options_of
from octavo.config import EngineConfig, ServerConfig

BEGIN, END = "<!-- {}: written by `make docs` -->", "<!-- {}: end -->"
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


def tree() -> str:
    """Every module of the package with the first sentence of its docstring, by folder."""
    package = Path(octavo.__file__).parent
    modules = sorted(package.rglob("*.py"), key=lambda path: (path.parent != package, path))
    lines = [
        f"{path.relative_to(package).as_posix():<30}{_first_sentence(path)}" for path in modules if path.name != "__init__.py"
    ]
    return "\n".join(["```", *lines, "```"])


def _first_sentence(module: Path) -> str:
    paragraph = (ast.get_docstring(ast.parse(module.read_text(encoding="utf-8"))) or "").split("\n\n")[0]
    return " ".join(paragraph.split()).split(". ")[0].rstrip(".")


GENERATORS = {"settings": tables, "modules": tree}


def insert(page: str) -> str:
    """The page with what stands between each pair of markers written afresh."""
    for name, generate in GENERATORS.items():
        begin, end = BEGIN.format(name), END.format(name)
        if begin in page:
            before, rest = page.split(begin, 1)
            page = f"{before}{begin}\n\n{generate()}\n{end}{rest.split(end, 1)[1]}"
    return page


if __name__ == "__main__":
    for argument in sys.argv[1:]:
        path = Path(argument)
        path.write_text(insert(path.read_text(encoding="utf-8")), encoding="utf-8")
