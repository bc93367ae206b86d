"""The Triton kernels of quant_awq without a GPU: products and dequantised weights under Triton's interpreter, against torch.

Small shapes only: the interpreter runs every program in numpy.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from importlib.util import find_spec
from pathlib import Path

import pytest

from tests.plugins.interpreter import PRELUDE

SOURCE = Path(__file__).parents[2] / "plugins" / "quant_awq" / "src"

if find_spec("triton") is None:
    pytest.skip("triton is not installed: the kernels cannot be interpreted", allow_module_level=True)

SCRIPT = (
    PRELUDE
    + '''
import json, traceback
import torch
torch.manual_seed(1)
from octavo_quant_awq.gpu import GpuMatrix
from octavo_quant_awq.packing import Grouped

def case(inputs, rows, group, zeros, bias, tokens=5):
    """A matrix filled in two portions; a product, and the weights from two rows on."""
    q = torch.randint(0, 16, (rows, inputs), dtype=torch.uint8)
    s = (torch.rand(rows, inputs // group) * 0.1).half()
    z = torch.randint(0, 16, s.shape, dtype=torch.uint8) if zeros else None
    w = Grouped(q, s, z, group).dequantised()
    m = GpuMatrix(rows, inputs, group, zeros=zeros, bias=bias, dtype=torch.float32, device=torch.device("cpu"), kernel="triton")
    b = torch.randn(rows)
    for part in (slice(0, 8), slice(8, rows)):
        if part.start < rows:
            m.put_q(part.start, q[part])
            m.put_scales(part.start, s[part])
            if zeros: m.put_zeros(part.start, z[part])
            if bias: m.put_bias(part.start, b[part])
    m.finish()
    x = torch.randn(tokens, inputs)
    torch.testing.assert_close(m(x), x @ w.T + (b if bias else 0), rtol=1e-5, atol=1e-5)
    assert torch.equal(m.weights(0, rows), w) and torch.equal(m.weights(3, rows), w[3:])

CASES = {
    "blocks": lambda: case(256, 40, 128, True, False),
    "smaller groups": lambda: case(192, 24, 64, True, True),
    "smallest groups, no zero points": lambda: case(160, 24, 32, False, False),
    "one group": lambda: case(264, 16, 264, True, False),
    "less than a block": lambda: case(96, 8, 96, False, True),
    "split K": lambda: case(1024, 16, 128, True, True, tokens=1),
    "no rows": lambda: case(128, 16, 128, True, False, tokens=0),
}
results = {}
for name, run in CASES.items():
    try:
        run()
        results[name] = ""
    except Exception:
        results[name] = traceback.format_exc()
print(json.dumps(results))
'''
)

NAMES = ("blocks", "smaller groups", "smallest groups, no zero points", "one group", "less than a block", "split K", "no rows")


@pytest.fixture(scope="module")
def results() -> dict[str, str]:
    """All cases in one process: triton decides at import whether it interprets."""
    env = os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": os.pathsep.join([str(SOURCE), os.environ.get("PYTHONPATH", "")])}
    done = subprocess.run([sys.executable, "-W", "ignore", "-c", SCRIPT], capture_output=True, text=True, env=env, timeout=240)
    assert done.returncode == 0, done.stderr
    found: dict[str, str] = json.loads(done.stdout)
    return found


@pytest.mark.parametrize("name", NAMES)
def test_products_and_weights(results: dict[str, str], name: str) -> None:
    assert not results[name], results[name]
