"""V4's own kernels under Triton's interpreter: what the torch formulas give, for sizes that fill a tile and that do not."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import pytest

from tests.plugins.interpreter import PRELUDE

PLUGIN = Path(__file__).parents[2] / "plugins" / "models_deepseek" / "src"
SCRIPT = (
    PRELUDE
    + """
import json, sys
from octavo_models_deepseek import hyper, kernels

errors = []
for tokens, count, hidden, turns in json.loads(sys.argv[1]):
    random = torch.Generator().manual_seed(tokens)
    draw = lambda *shape: torch.randn(*shape, generator=random)
    lanes, base, scale = draw(tokens, count, hidden) * 3, draw((2 + count) * count), draw(3)
    weights = draw(tokens, (2 + count) * count) * 5
    given = lanes, weights, base, scale, turns, 1e-6, 1e-5
    right, found = hyper.hyper_open(*given), kernels.hyper_open(*given)
    out = draw(tokens, hidden)
    after = hyper.hyper_close(lanes, out, *right[1:]), kernels.hyper_close(lanes, out, *right[1:])
    pairs = [*zip(right, found, strict=True), after]
    errors.append(max(float((a - b).abs().max()) if a.shape == b.shape else float("inf") for a, b in pairs))
print(json.dumps(errors))
"""
)
TURNS = (
    PRELUDE
    + """
import json, sys
from octavo_models_deepseek import kernels, turn

errors = []
for tokens, heads, dim, pairs, dtype in json.loads(sys.argv[1]):
    random = torch.Generator().manual_seed(dim)
    draw = lambda *shape: torch.randn(*shape, generator=random)
    kind, angle, weight = getattr(torch, dtype), draw(tokens, pairs) * 3, 1 + 0.1 * draw(dim)
    wide = draw(tokens, heads + 2, dim + 16).to(kind)
    x, cos, sin = wide[:, 1:-1, :dim], angle.cos(), angle.sin()  # heads in a wider tensor
    given = [dict(), dict(eps=1e-5), dict(eps=1e-5, weight=weight), dict(back=True)]
    both = [[m.pair_turn(x, cos, sin, kind, **each) for each in given] for m in (turn, kernels)]
    first, second = ((draw(tokens, heads, dim).to(kind), draw(tokens, heads)) for _ in range(2))
    second[1][0] = -float("inf")
    for found, m in zip(both, (turn, kernels), strict=True):
        found.append(m.pair_join(first, second, cos, sin))
    errors.append(max(float((a.float() - b.float()).abs().max()) for a, b in zip(*both, strict=True)))
print(json.dumps(errors))
"""
)
TURN_CASES = [[3, 4, 64, 16, "float32"], [2, 3, 96, 48, "float32"], [3, 2, 32, 4, "bfloat16"]]
CASES = [[5, 4, 1500, 20], [2, 4, 512, 1], [3, 3, 70, 5]]


def interpreted(script: str, cases: Any) -> list[float]:
    if find_spec("triton") is None:
        pytest.skip("triton is not installed: the kernels cannot be interpreted")
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(PLUGIN), os.environ.get("PYTHONPATH", "")])}
    command = [sys.executable, "-W", "ignore", "-c", script, json.dumps(cases)]
    done = subprocess.run(command, capture_output=True, text=True, env=env, timeout=120)
    assert done.returncode == 0, done.stderr[-4000:]
    found: list[float] = json.loads(done.stdout)
    return found


def test_opening_and_closing_are_what_the_formulas_say() -> None:
    errors = interpreted(SCRIPT, CASES)
    assert all(error < 2e-5 for error in errors), dict(zip(map(str, CASES), errors, strict=True))


def test_turning_and_joining_are_what_the_formulas_say() -> None:
    errors = interpreted(TURNS, TURN_CASES)
    limits = {"float32": 2e-6, "bfloat16": 2**-6}
    assert all(e <= limits[case[-1]] for case, e in zip(TURN_CASES, errors, strict=True)), errors
