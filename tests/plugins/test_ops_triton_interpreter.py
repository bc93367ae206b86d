"""The Triton operators without a GPU: arithmetic, masks and addresses under Triton's interpreter.

Small shapes only: the interpreter runs every program in numpy. The oracle is `octavo.model.operators`; of `draw`, which has no
counterpart there, it is the same noise computed by numpy, and the softmax.
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
    + '''
import json, traceback
import numpy as np, torch
torch.manual_seed(1)
from octavo.catalog import Device
from octavo.interfaces import OperatorParts
from octavo.engine.inputs import decode_inputs
from octavo.model import operators as oracle
from octavo_ops_triton.operators import TritonOperators
from octavo_ops_triton.provider import TritonOptions

ops = {name: op for (name, _), op in TritonOperators(TritonOptions(), OperatorParts(Device("cpu"), "float32")).ops.items()}
near = lambda got, want: torch.testing.assert_close(got, want, rtol=2e-6, atol=2e-6)

def norms():
    for size in (64, 100):
        x, residual, weight = torch.randn(3, size), torch.randn(3, size), torch.randn(size)
        near(ops["rms_norm"](residual, weight, 1e-5, torch.float32), oracle.rms_norm(residual, weight, 1e-5, torch.float32))
        want, total = oracle.add_rms_norm(x, residual.clone(), weight, 1e-5)
        got, mine = ops["add_rms_norm"](x, residual, weight, 1e-5)
        near(got, want)
        assert torch.equal(mine, total) and mine.data_ptr() == residual.data_ptr()

def rope():
    for heads, dim, rotary, normed in ((10, 16, 16, True), (3, 24, 8, True), (3, 24, 8, False), (9, 8, 8, False)):
        wide = torch.randn(2, heads + 2, dim)
        x, rest = wide[:, :heads], wide[:, heads:].clone()
        turn = torch.randn(2, 1, rotary // 2)
        cos, sin = torch.cat((turn.cos(),) * 2, -1), torch.cat((-turn.sin(), turn.sin()), -1)
        weight = torch.randn(heads, dim) if normed else None
        want = oracle.qk_norm_rope(x.clone(), weight, 1e-5, cos, sin)
        near(ops["qk_norm_rope"](x, weight, 1e-5, cos, sin), want)
        assert torch.equal(wide[:, heads:], rest), "the values beside q and k have changed"

def spreading():
    for heads, dim, rotary, normed in ((10, 16, 16, True), (3, 24, 8, True), (3, 24, 16, False), (9, 8, 8, False), (2, 96, 96, True)):
        wide = torch.randn(2, heads + 2, dim)
        x, before = wide[:, :heads], wide.clone()
        near(ops["spread"](x), oracle.spread(x))
        turn = torch.randn(2, 1, rotary // 2)
        cos, sin = torch.cat((turn.cos(),) * 2, -1), torch.cat((-turn.sin(), turn.sin()), -1)
        weight = torch.randn(heads, dim) if normed else None
        want = oracle.qk_norm_rope_spread(x.clone(), weight, 1e-5, cos, sin)
        near(ops["qk_norm_rope_spread"](x, weight, 1e-5, cos, sin), want)
        assert torch.equal(wide, before), "written in place"

def angles():
    positions = torch.tensor([0, 1, 257, 70001, 2**20 - 1, 5, 6, 7, 8])
    for frequencies in (torch.rand(1, 12), torch.rand(9, 12)):
        want = oracle.rope_angles(positions, frequencies, 1.25, torch.float32)
        for got, right in zip(ops["rope_angles"](positions, frequencies, 1.25, torch.float32), want):
            torch.testing.assert_close(got, right, rtol=0, atol=1e-6)

def inputs():
    tables = [torch.randint(0, 99, (5, 8), dtype=torch.int32) for _ in range(2)]
    tokens, bound = torch.randint(0, 9999, (5, 60), dtype=torch.int32), torch.arange(5) * 100
    rows, positions = torch.tensor([4, 0, 2]), torch.tensor([0, 31, 17])
    want = decode_inputs(rows, positions, tokens, bound, tables, [8, 16])
    got = ops["decode_inputs"](rows, positions, tokens, bound, tables, [8, 16])
    for a, b in zip((*got[:4], *got[4]), (*want[:4], *want[4])):
        assert a.dtype == b.dtype and torch.equal(a, b)

def activation():
    for size in (32, 1030):
        x = torch.randn(2, 2 * size)
        near(ops["silu_mul"](x), oracle.silu_mul(x))
        near(ops["gelu_tanh_mul"](4 * x), oracle.gelu_tanh_mul(4 * x))

def embedding():
    weight = torch.randn(7, 40)
    ids = torch.tensor([6, 0, 3])
    assert torch.equal(ops["embedding"](ids, weight), oracle.embedding(ids, weight))
    assert ops["embedding"](torch.tensor([7, -1, 2]), weight).isnan().all(1).tolist() == [True, True, False]

def linear():
    for m, n, k in ((1, 40, 64), (3, 17, 100), (5, 40, 1100), (17, 33, 700), (32, 16, 512), (9, 2100, 300)):
        x, weight = torch.randn(m, k), torch.randn(n, k)
        torch.testing.assert_close(ops["small_linear"](x, weight), x @ weight.T, rtol=1e-5, atol=1e-4)

def philox(seed, position, token):
    """Philox4x32-7 as the module describes it, in Python's integers."""
    c = [512 * (token // 2048) + token % 512, position % 2**32, position // 2**32 % 2**32, 0]
    k = [seed % 2**32, seed // 2**32 % 2**32]
    for _ in range(7):
        a, b = 0xD2511F53 * c[0], 0xCD9E8D57 * c[2]
        c = [b // 2**32 ^ c[1] ^ k[0], b % 2**32, a // 2**32 ^ c[3] ^ k[1], a % 2**32]
        k = [(k[0] + 0x9E3779B9) % 2**32, (k[1] + 0xBB67AE85) % 2**32]
    return c[token % 2048 // 512]

def draw_equals_the_definition():
    vocab = 4500
    logits = torch.randn(4, 4600)
    temperature = torch.tensor([1.0, 0.5, 1e-12, 3.0])
    seed, position = torch.tensor([-3, 2**62 + 5, 1, 2]), torch.tensor([0, 2**33 + 1, 5, 6])
    logits[:, vocab:] = float("nan")
    logits[1, 7:4000] = float("-inf")
    tokens, failed = ops["draw"](logits, temperature, seed, position, vocab)
    assert not failed.any()
    for row in range(4):
        words = np.array([philox(int(seed[row]), int(position[row]), t) for t in range(vocab)], np.float64)
        noise = -np.log(-np.log1p(-(words + 0.5) / 2**32))
        score = logits[row, :vocab].double().numpy() + float(temperature[row]) * noise
        assert int(tokens[row]) == score.argmax(), (row, int(tokens[row]), score.argmax())

def draw_greedy_and_failures():
    inf, nan = float("inf"), float("nan")
    logits = torch.randn(6, 2100)
    logits[0, [50, 600, 2060]] = 9.0  # a tie across quarters and tiles: the lowest id
    logits[1, 2099] = nan
    logits[2, 5] = inf
    logits[3] = -inf
    logits[4, :2099] = -inf  # one token is left
    logits[5, 3] = nan
    for t in (0.0, 1.0):
        temperature = torch.full((6,), t)
        tokens, failed = ops["draw"](logits, temperature, torch.arange(6), torch.arange(6), 2100)
        assert failed.tolist() == [False, True, True, True, False, True]
        assert tokens[failed].tolist() == [0] * 4 and tokens[4] == 2099
        assert t or tokens[0] == 50

def draw_follows_the_softmax():
    p = torch.tensor([0.5, 0.25, 0.125, 0.1, 0.025])
    count = 200
    logits = p.log().expand(count, -1)
    tokens, _ = ops["draw"](logits, torch.ones(count), torch.full((count,), 11), torch.arange(count), 5)
    seen = torch.bincount(tokens, minlength=5)
    chi = float(((seen - count * p) ** 2 / (count * p)).sum())
    assert chi < 18.5, (chi, seen)  # 4 degrees of freedom, 0.1%
    table, slots = torch.zeros(count, 300, dtype=torch.int32), torch.randperm(count)
    again, _ = ops["draw"](logits, torch.ones(count), torch.full((count,), 11), torch.arange(count), 5, (table, slots))
    assert torch.equal(again, tokens) and torch.equal(table[slots, torch.arange(count)], tokens)
    assert int((table != 0).sum()) == int((tokens != 0).sum()), "a draw has written beside its rows' places"
    alone = [int(ops["draw"](logits[:1], torch.ones(1), torch.tensor([11]), torch.tensor([i]), 5)[0]) for i in range(5)]
    assert alone == tokens[:5].tolist(), "a row's token depends on its batch"

def constants():
    from octavo_ops_triton.kernels.activation import gated_kernel
    from octavo_ops_triton.launch import constants_of
    assert constants_of(gated_kernel, GELU=True, BLOCK=8, SIZE=5, X_STRIDE=10) == (10, 5, 8, True), "not in the kernel's order"
    for names in ({"BLOCK": 8}, {"GELU": True, "BLOCK": 8, "SIZE": 5, "X_STRIDES": 10}, {"PDL": True}):
        try:
            constants_of(gated_kernel, **names)
        except TypeError as error:
            assert all(name in str(error) for name in names)
        else:
            raise AssertionError(f"{names} are taken for the kernel's constants")

found = {}
for check in (constants, norms, rope, spreading, angles, inputs, activation, embedding, linear, draw_equals_the_definition, draw_greedy_and_failures, draw_follows_the_softmax):
    try:
        check()
        found[check.__name__] = ""
    except Exception:
        found[check.__name__] = traceback.format_exc()
print(json.dumps(found))
'''
)

CHECKS = (
    "constants",
    "norms",
    "rope",
    "spreading",
    "angles",
    "inputs",
    "activation",
    "embedding",
    "linear",
    "draw_equals_the_definition",
    "draw_greedy_and_failures",
    "draw_follows_the_softmax",
)


@pytest.fixture(scope="module")
def complaints() -> dict[str, str]:
    """Of every check, what was wrong: all in one process, which has the interpreter on from its first import of triton."""
    found: dict[str, str] = json.loads(interpreted(SCRIPT, plugins=("ops_triton",)))
    return found


@pytest.mark.parametrize("check", CHECKS)
def test_the_kernels_compute_what_core_s_operators_do(check: str, complaints: dict[str, str]) -> None:
    assert not complaints[check], complaints[check]
