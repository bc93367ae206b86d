"""V4's hyper-connections in Triton, under its interpreter: what the torch formulas give, for lanes that fill a tile and that do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.plugins.interpreter import PRELUDE

PLUGIN = Path(__file__).parents[2] / "plugins" / "models_deepseek" / "src"
SCRIPT = (
    PRELUDE
    + """
import json, sys
from octavo_models_deepseek import hyper, hyper_kernels

errors = []
for tokens, count, hidden, turns in json.loads(sys.argv[1]):
    random = torch.Generator().manual_seed(tokens)
    draw = lambda *shape: torch.randn(*shape, generator=random)
    lanes, base, scale = draw(tokens, count, hidden) * 3, draw((2 + count) * count), draw(3)
    weights = draw(tokens, (2 + count) * count) * 5
    given = lanes, weights, base, scale, turns, 1e-6, 1e-5
    right, found = hyper.hyper_open(*given), hyper_kernels.hyper_open(*given)
    out = draw(tokens, hidden)
    after = hyper.hyper_close(lanes, out, *right[1:]), hyper_kernels.hyper_close(lanes, out, *right[1:])
    pairs = [*zip(right, found, strict=True), after]
    errors.append(max(float((a - b).abs().max()) if a.shape == b.shape else float("inf") for a, b in pairs))
print(json.dumps(errors))
"""
)
CASES = [[5, 4, 1500, 20], [2, 4, 512, 1], [3, 3, 70, 5]]


def test_opening_and_closing_are_what_the_formulas_say() -> None:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: the kernels cannot be interpreted")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-c", SCRIPT, json.dumps(CASES)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    assert all(error < 2e-5 for error in json.loads(done.stdout)), dict(
        zip(map(str, CASES), json.loads(done.stdout), strict=True)
    )
