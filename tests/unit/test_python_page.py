"""docs/python.md: every block runs, in the order in which it is read, and says what the demo model says."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

PAGE = (Path(__file__).parents[2] / "docs" / "python.md").read_text()
BLOCKS = re.findall(r"^```python\n(.*?)^```", PAGE, re.MULTILINE | re.DOTALL)


def run(code: str) -> str:
    env = {k: v for k, v in os.environ.items() if not k.startswith("OCTAVO_")}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=200, env=env)
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.mark.usefixtures("demo_path")
def test_llm() -> None:
    lines = run(BLOCKS[0]).splitlines()
    assert lines[0].startswith("The capital of France is -> ") and "Paris" in lines[0]
    assert lines[-1] == "The capital of France is Paris. stop"


@pytest.mark.slow
@pytest.mark.usefixtures("demo_path")
def test_async_llm_and_a_second_model() -> None:
    lines = run("\n\n".join(BLOCKS[1:])).splitlines()
    assert "Paris" in lines[0]
    assert re.search(r"^\['demo', 'v2'\] .*three", lines[-1])


def test_every_block_is_one_of_these() -> None:
    assert len(BLOCKS) == 3
