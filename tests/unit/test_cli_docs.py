"""What the documents tell people to type exists: every `octavo ...` line parses, every flag and page is real."""

from __future__ import annotations

import re
import shlex
from pathlib import Path

import pytest
from octavo.cli.flags import MODELS
from octavo.cli.main import build_parser
from octavo.cli.options import options_of

ROOT = Path(__file__).parents[2]
PAGES = sorted([ROOT / "README.md", *(ROOT / "docs").glob("*.md")])


def commands() -> list[tuple[str, str]]:
    """(page, command line) of every line in a fenced block that runs octavo."""
    found = []
    for page in PAGES:
        for block in re.findall(r"^```\w*\n(.*?)^```", page.read_text(), re.MULTILINE | re.DOTALL):
            for line in block.replace("\\\n", " ").splitlines():
                if match := re.match(r"(?:\.venv/bin/)?octavo (.*)", line.strip()):
                    found.append((page.name, match[1].split("  #")[0]))
    return found


@pytest.mark.parametrize(("page", "line"), commands(), ids=lambda v: v[:60])
def test_a_command_of_the_documents_parses(page: str, line: str) -> None:
    words = [word.replace("MODEL", "demo") for word in shlex.split(line)]
    args = build_parser(words).parse_args(words)
    assert callable(args.func), f"{page}: octavo {line}"


@pytest.mark.parametrize("page", PAGES, ids=lambda p: p.name)
def test_links_between_documents_lead_somewhere(page: Path) -> None:
    links = re.findall(r"\]\(([^)#:\s]+)(?:#[^)]*)?\)", page.read_text())
    assert [link for link in links if not (page.parent / link).exists()] == []


@pytest.mark.parametrize("page", [ROOT / "README.md", ROOT / "docs" / "operating.md"], ids=lambda p: p.name)
def test_a_setting_that_a_page_names_exists(page: Path) -> None:
    settings = {option.flag for model in MODELS for option in options_of(model)}
    settings |= {f"--no-{flag[2:]}" for flag in settings}
    text = re.sub(r"^```.*?^```", "", page.read_text(), flags=re.MULTILINE | re.DOTALL)
    named = set(re.findall(r"`(--[a-z][a-z-]+)", text))
    assert named - settings - {"--config", "--json"} == set()


def test_a_variable_that_a_page_names_exists() -> None:
    known = {option.env for model in MODELS for option in options_of(model)} | {
        "OCTAVO_CONFIG",
        "OCTAVO_TRACEBACK",
        "OCTAVO_SERVICE_HOST",
    }
    named = {name for page in PAGES for name in re.findall(r"\bOCTAVO_[A-Z_]+", page.read_text())}
    assert named - known == set()
