"""The Triton mixture of experts without a GPU: arithmetic, masks and addresses under Triton's interpreter, against core's operators.

Small shapes only: the interpreter runs every program in numpy.
"""

from __future__ import annotations

import json
from importlib.util import find_spec

import pytest

from tests.plugins.interpreter import PRELUDE, interpreted

if find_spec("triton") is None:
    pytest.skip("triton is not installed: the kernels cannot be interpreted", allow_module_level=True)

SCRIPT = (
    PRELUDE
    + """
import json, traceback
import torch
torch.manual_seed(1)
from octavo.catalog import Device
from octavo.interfaces import Gate, OperatorParts, Routing
from octavo.model import operators as oracle
from octavo_ops_triton import moe
from octavo_ops_triton.operators import TritonOperators
from octavo_ops_triton.provider import TritonOptions

ops = {name: op for (name, _), op in TritonOperators(TritonOptions(), OperatorParts(Device("cpu"), "float32")).ops.items()}

def dense(weights, ids, count):
    return torch.zeros(len(ids), count).scatter_add_(1, ids.long(), weights)

def routing():
    for count, way in (
        (16, Routing(3)),
        (40, Routing(5, "sigmoid", groups=4, kept_groups=2, group_score="sum2", renormalise=True, scale=2.5)),
        (24, Routing(4, groups=3, kept_groups=1)),
        (16, Routing(6, "sqrtsoftplus", renormalise=True)),
        (32, Routing(4, "softmax_chosen")),
    ):
        logits, bias, given = torch.randn(9, count) * 2, torch.randn(count) * 0.3, torch.randint(0, count, (9, way.top_k))
        for correction in (None, bias):
            want, got = oracle.route(logits, way, correction), ops["route"](logits, way, correction)
            torch.testing.assert_close(dense(*got, count), dense(*want, count), rtol=1e-5, atol=1e-6)
        torch.testing.assert_close(ops["route"](logits, way, None, given), oracle.route(logits, way, None, given), rtol=1e-5, atol=1e-6)
    ids = ops["route"](torch.full((2, 16), float("nan")), Routing(3))[1]
    assert 0 <= int(ids.min()) and int(ids.max()) < 16

def mixture(few, group):
    moe.FEW = few
    moe.tiles = lambda *_: (moe.Tile(16, 16, 16, 4, 3, group), moe.Tile(16, 32, 16, 4, 3, group))
    for tokens, count, top, hidden, inner, odd in ((1, 8, 2, 40, 24, False), (3, 4, 2, 32, 20, True), (11, 6, 3, 33, 17, True)):
        x, gate_up, down = torch.randn(tokens, hidden), torch.randn(count, 2 * inner, hidden), torch.randn(count, hidden, inner)
        extra = {"gate_up_bias": torch.randn(count, 2 * inner), "down_bias": torch.randn(count, hidden)} if odd else {}
        base, gate = (torch.randn(tokens, hidden), Gate(1.702, 7.0, 1.0)) if odd else (None, Gate())
        ids = torch.stack([torch.randperm(count)[:top] for _ in range(tokens)]).int()
        if tokens > 3:
            ids[0] = 2
        weights = torch.rand(tokens, top)
        want = oracle.experts(x, weights, ids, gate_up, down, gate, base=base, **extra)
        got = ops["experts"](x, weights, ids, gate_up, down, gate, base=base, **extra)
        torch.testing.assert_close(got, want, rtol=1e-5, atol=1e-4)

def few_pairs():
    mixture(512, 1)

def sorted_pairs():
    mixture(0, 1)

def sorted_pairs_in_groups():
    mixture(0, 3)

def spread(scale, rows, columns):  # one a block -> one a weight
    return scale.repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]

def scaled_weights():
    # scales of both kinds, over matrices that do not fill their blocks
    e4m3, hidden, inner, count = torch.float8_e4m3fn, 150, 140, 3
    moe.tiles = lambda *_: (moe.Tile(16, 32, 64, 4, 3), moe.Tile(16, 64, 64, 4, 3))
    for few in (512, 0):
        moe.FEW = few
        x, ids, weights = torch.randn(4, hidden), torch.randint(0, count, (4, 2)).int(), torch.rand(4, 2)
        gate_up, down = torch.randn(count, 2 * inner, hidden).to(e4m3), torch.randn(count, hidden, inner).to(e4m3)
        blocks = torch.rand(count, 2, 2, 2) + 0.5, torch.rand(count, 2, 2) + 0.5
        whole = torch.cat([spread(half, inner, hidden) for half in blocks[0].unbind(1)], 1), spread(blocks[1], hidden, inner)
        rows = torch.rand(count, 2 * inner) + 0.5, torch.rand(count, hidden) + 0.5
        for scales, factors in ((blocks, whole), (rows, (rows[0][..., None], rows[1][..., None]))):
            want = oracle.experts(x, weights, ids, gate_up.float() * factors[0], down.float() * factors[1], Gate())
            got = ops["experts_fp8"](x, weights, ids, gate_up, down, Gate(), scales=scales)
            # outputs that cancel are off by what float32 rounds of the largest terms, not of themselves
            torch.testing.assert_close(got, want, rtol=1e-5, atol=2e-6 * float(want.abs().max()))

found = {}
for check in (routing, few_pairs, sorted_pairs, sorted_pairs_in_groups, scaled_weights):
    try:
        check()
        found[check.__name__] = ""
    except Exception:
        found[check.__name__] = traceback.format_exc()
print(json.dumps(found))
"""
)


@pytest.fixture(scope="module")
def complaints() -> dict[str, str]:
    """Of every check, what was wrong: all in one process, which has the interpreter on from its first import of triton."""
    found: dict[str, str] = json.loads(interpreted(SCRIPT, plugins=("ops_triton",)))
    return found


@pytest.mark.parametrize("check", ["routing", "few_pairs", "sorted_pairs", "sorted_pairs_in_groups", "scaled_weights"])
def test_the_kernels_compute_what_core_s_operators_do(check: str, complaints: dict[str, str]) -> None:
    assert not complaints[check], complaints[check]
