"""The pages hold together: links lead somewhere, and a table is one table."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
FOLDERS = ("docs", "plugins", "examples", "benchmarks", "deploy")
PAGES = [*ROOT.glob("*.md"), *(page for folder in FOLDERS for page in (ROOT / folder).rglob("*.md"))]


def prose(page: Path) -> str:
    return re.sub(r"^```.*?^```", "", page.read_text(encoding="utf-8"), flags=re.DOTALL | re.MULTILINE)


def anchors(page: Path) -> set[str]:
    """Of headings, as GitHub makes them."""
    titles = re.findall(r"^#+ (.*)$", prose(page), re.MULTILINE)
    return {re.sub(r"[^\w\- ]", "", re.sub(r"[`*]", "", title).lower()).strip().replace(" ", "-") for title in titles}


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_to_files_and_headings_that_there_are(page: Path) -> None:
    for target in re.findall(r"\[[^\]]*\]\(([^)\s]+)\)", prose(page)):
        path, _, anchor = target.partition("#")
        if path.startswith(("http:", "https:", "mailto:")):
            continue
        found = page.parent / path if path else page
        assert found.exists(), target
        assert not anchor or anchor in anchors(found), target


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_every_table_has_a_head_and_rows_of_its_width(page: Path) -> None:
    lines = prose(page).splitlines()
    width = 0
    for number, line in enumerate(lines):
        cells = re.sub(r"`[^`]*`|\\\|", "", line).count("|") if line.startswith("|") else 0
        if cells and not width:
            rule = lines[number + 1] if number + 1 < len(lines) else ""
            assert re.fullmatch(r"\|[\s:|-]+", rule), f"a table without a head: {line[:80]}"
        assert not (cells and width) or cells == width, f"{cells} instead of {width}: {line[:80]}"
        width = cells
