"""docs/writing-a-kernel.md quotes plugins/attention_cupy, and keeps quoting it as it is."""

from __future__ import annotations

import re
import shlex
import shutil
import subprocess
import sys
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


def test_the_copy_that_the_page_starts_from_is_a_plugin_of_its_own(tmp_path: Path) -> None:
    """The page's first block, word for word, and what the copy then registers."""
    (script,) = re.findall(r"(?ms)^```sh\n(.*?)^```", DOC)
    (tmp_path / "plugins").symlink_to(ROOT / "plugins")
    subprocess.run(["sh", "-euc", script], cwd=tmp_path, check=True, capture_output=True)
    package = tmp_path / "octavo-attention-mine"
    code = (
        "from octavo_attention_mine import register_attention_backends as hook; (p,) = hook(); print(p.name, p.load);"
        "import octavo_attention_mine.compiler as c; print(len(c.source('decode.cu')) > 0)"
    )
    found = subprocess.run([sys.executable, "-c", code], env={"PYTHONPATH": str(package / "src")}, capture_output=True, text=True)
    assert found.stdout.split() == ["mine", "octavo_attention_mine.backend:CupyAttention", "True"], found.stderr
    assert not [path for path in package.rglob("*") if path.is_file() and b"attention_cupy" in path.read_bytes()]


def test_the_compiler_s_command_works_as_it_stands(tmp_path: Path) -> None:
    if shutil.which("nvcc") is None:
        pytest.skip("nvcc is not installed")
    (command,) = re.findall(r"(?m)^    (nvcc .*)$", DOC)
    done = subprocess.run(shlex.split(command.replace("/tmp", str(tmp_path))), cwd=PACKAGE, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert "0 bytes spill stores" in done.stderr
