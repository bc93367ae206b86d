"""docs/writing-a-kernel.md quotes plugins/attention_cupy, and keeps quoting it as it is."""

from __future__ import annotations

import re
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]
PACKAGE = ROOT / "plugins" / "attention_cupy" / "src" / "octavo_attention_cupy"
DOC = (ROOT / "docs" / "writing-a-kernel.md").read_text()
QUOTES = re.findall(r"(?ms)^```(?:python|cpp) (\S+)\n(.*?)^```", DOC)


@pytest.mark.parametrize(("file", "text"), QUOTES, ids=[f"{file}-{i}" for i, (file, _) in enumerate(QUOTES)])
def test_every_quoted_block_is_the_package_s_own_text(file: str, text: str) -> None:
    assert text in (ROOT / file if file.startswith("tests/") else PACKAGE / file).read_text()


def test_every_block_says_which_file_it_quotes() -> None:
    assert len(re.findall(r"(?m)^```(?:python|cpp)", DOC)) == len(QUOTES) >= 6


def test_the_tree_that_the_page_shows_is_the_package_s() -> None:
    tree = re.search(r"(?ms)^```\n(octavo_attention_cupy/.*?)^```", DOC)
    assert tree
    assert set(re.findall(r"^  (\w+\.py)", tree[1], re.M)) == {p.name for p in PACKAGE.glob("*.py")}


def test_files_that_the_page_names_exist() -> None:
    for name in set(re.findall(r"`(\w+\.(?:cu|cuh))`", DOC)):
        assert (PACKAGE / "cuda" / name).exists(), name
