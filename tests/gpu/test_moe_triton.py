"""A mixture of experts in Triton on a GPU: routing and experts against core's operators, in float64 where there are sums, in
captured graphs, and with every output and intermediate poisoned before it is written.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "ops_triton" / "src"))

from octavo.bench.kernel import cuda_device
from octavo.interfaces import Gate, OperatorParts, Routing
from octavo.model import operators as oracle
from octavo_ops_triton.operators import TritonOperators
from octavo_ops_triton.provider import TritonOptions

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
CLAMPED = Gate(1.702, 7.0, 1.0)


@pytest.fixture(scope="module")
def ops() -> dict[str, Callable[..., Any]]:
    made = TritonOperators(TritonOptions(), OperatorParts(cuda_device(), "bfloat16"))
    return {name: op for (name, _), op in made.ops.items()}


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    """Random inputs; memory that is handed out anew holds NaN."""
    torch.manual_seed(1)
    was = torch.utils.deterministic.fill_uninitialized_memory
    torch.use_deterministic_algorithms(True, warn_only=True)
    torch.utils.deterministic.fill_uninitialized_memory = True
    with torch.device("cuda"):
        yield
    torch.use_deterministic_algorithms(False)
    torch.utils.deterministic.fill_uninitialized_memory = was


def dense(weights: Tensor, ids: Tensor, count: int) -> Tensor:
    return torch.zeros(len(ids), count).scatter_add_(1, ids.long(), weights)


ROUTINGS = {
    "v3": (256, Routing(8, "sigmoid", groups=8, kept_groups=4, group_score="sum2", renormalise=True, scale=2.5)),
    "v2": (160, Routing(6, "softmax", groups=8, kept_groups=3, scale=16.0)),
    "v4": (256, Routing(6, "sqrtsoftplus", renormalise=True, scale=1.5)),
    "qwen3": (128, Routing(8, renormalise=True)),
    "gpt-oss": (32, Routing(4, "softmax_chosen")),
    "odd": (60, Routing(5)),
}


@pytest.mark.parametrize("name", ROUTINGS)
@pytest.mark.parametrize("corrected", [False, True])
def test_routing(ops: dict[str, Any], name: str, corrected: bool) -> None:
    count, routing = ROUTINGS[name]
    logits = torch.randn(333, count) * 3
    bias = torch.randn(count) * 0.2 if corrected else None
    want, chosen = oracle.route(logits.double(), routing, None if bias is None else bias.double())
    got, ids = ops["route"](logits, routing, bias)
    assert int(ids.min()) >= 0 and int(ids.max()) < count
    torch.testing.assert_close(dense(got, ids, count), dense(want.float(), chosen, count), rtol=1e-5, atol=1e-6)
    given = torch.randint(count, (333, routing.top_k))
    torch.testing.assert_close(
        ops["route"](logits, routing, bias, given), oracle.route(logits, routing, bias, given), rtol=1e-5, atol=1e-6
    )


def test_logits_that_are_not_finite_choose_experts_that_exist(ops: dict[str, Any]) -> None:
    logits = torch.full((3, 64), float("nan"))
    logits[1], logits[2] = float("-inf"), float("inf")
    for score in ("softmax", "sigmoid", "softmax_chosen"):
        _, ids = ops["route"](logits, Routing(6, score))
        assert int(ids.min()) >= 0 and int(ids.max()) < 64


def exact(x: Tensor, weights: Tensor, ids: Tensor, gate_up: Tensor, down: Tensor, gate: Gate, **kw: Any) -> Tensor:
    """float64 over values as they are, but for the middle, which is rounded as the operator says."""
    total = torch.zeros_like(x, dtype=torch.float64) if kw.get("base") is None else kw["base"].double()
    for expert in ids.unique().tolist():
        token, place = (ids == expert).nonzero(as_tuple=True)
        both = x[token].double() @ gate_up[expert].double().T
        if kw.get("gate_up_bias") is not None:
            both += kw["gate_up_bias"][expert].double()
        inner = oracle.gated(*both.chunk(2, -1), gate).to(x.dtype).double()
        y = inner @ down[expert].double().T
        if kw.get("down_bias") is not None:
            y += kw["down_bias"][expert].double()
        total.index_add_(0, token, y * weights[token, place, None].double())
    return total


@pytest.mark.parametrize(
    ("tokens", "count", "top", "hidden", "inner", "dtype", "gate", "bias"),
    [
        (1, 256, 8, 1024, 512, BF16, Gate(), False),
        (7, 60, 5, 1000, 200, BF16, Gate(limit=10.0), False),
        (31, 8, 2, 512, 1408, FP16, Gate(), False),
        (64, 32, 4, 2880, 720, BF16, CLAMPED, True),
        (64, 256, 8, 512, 256, BF16, Gate(), False),
        (128, 4, 4, 512, 256, BF16, Gate(), False),
        (129, 32, 4, 360, 200, BF16, CLAMPED, True),
        (600, 16, 3, 512, 384, BF16, Gate(), True),
        (2000, 32, 4, 1024, 512, FP16, Gate(), False),
        (4000, 8, 8, 512, 256, BF16, Gate(), False),
        (33, 16, 4, 128, 72, FP32, CLAMPED, True),
        (700, 16, 2, 128, 72, FP32, Gate(), False),
    ],
)
def test_experts(
    ops: dict[str, Any], tokens: int, count: int, top: int, hidden: int, inner: int, dtype: torch.dtype, gate: Gate, bias: bool
) -> None:
    x = torch.randn(tokens, hidden + 8)[:, :hidden].to(dtype)
    gate_up = (torch.randn(count, 2 * inner, hidden) * 2 / hidden**0.5).to(dtype)
    down = (torch.randn(count, hidden, inner) / inner**0.5).to(dtype)
    extra: dict[str, Any] = {}
    if bias:
        extra = {"gate_up_bias": torch.randn(count, 2 * inner).to(dtype), "down_bias": torch.randn(count, hidden).to(dtype)}
        extra["base"] = torch.randn(tokens, hidden).to(dtype)
    ids = torch.rand(tokens, count).topk(top).indices.int()
    ids[: tokens // 3, 0] = count - 1  # a crowd for one expert, and twice for some tokens
    weights = torch.rand(tokens, top)
    want = exact(x, weights, ids, gate_up, down, gate, **extra)
    got = ops["experts"](x, weights, ids, gate_up, down, gate, **extra)
    assert got.dtype == dtype and not got.isnan().any()
    error = float((got.double() - want).norm() / want.norm())
    assert error < {BF16: 4e-3, FP16: 5e-4, FP32: 1e-6}[dtype], error


def widened(weight: Tensor, scale: Tensor) -> Tensor:
    """float64 weights of e4m3 ones: scale is one a row, or one a block of 128 x 128."""
    if scale.ndim == weight.ndim - 1:
        return weight.double() * scale.double()[..., None]
    rows, columns = weight.shape[-2:]
    return weight.double() * scale.double().repeat_interleave(128, -2)[..., :rows, :].repeat_interleave(128, -1)[..., :columns]


@pytest.mark.parametrize("kind", ["blocks", "rows"])
@pytest.mark.parametrize(
    ("tokens", "count", "top", "hidden", "inner", "dtype"),
    [
        (1, 64, 8, 1024, 512, BF16),
        (40, 64, 8, 1000, 400, BF16),
        (700, 16, 4, 512, 384, BF16),
        (3000, 8, 4, 520, 264, FP16),
        (5, 4, 2, 256, 144, FP32),
    ],
)
def test_experts_of_e4m3_weights(
    ops: dict[str, Any], kind: str, tokens: int, count: int, top: int, hidden: int, inner: int, dtype: torch.dtype
) -> None:
    x = torch.randn(tokens, hidden).to(dtype)
    gate_up = torch.randn(count, 2, inner, hidden).to(torch.float8_e4m3fn)
    down = torch.randn(count, hidden, inner).to(torch.float8_e4m3fn)
    if kind == "blocks":
        first = (torch.rand(count, 2, -(-inner // 128), -(-hidden // 128)) + 0.5) / hidden**0.5
        second = (torch.rand(count, -(-hidden // 128), -(-inner // 128)) + 0.5) / inner**0.5
    else:
        first, second = (torch.rand(count, 2, inner) + 0.5) / hidden**0.5, (torch.rand(count, hidden) + 0.5) / inner**0.5
    ids, weights = torch.rand(tokens, count).topk(top).indices.int(), torch.rand(tokens, top)
    want = exact(x, weights, ids, widened(gate_up, first).flatten(1, 2), widened(down, second), Gate(limit=5.0))
    scales = (first if kind == "blocks" else first.flatten(1), second)
    got = ops["experts_fp8"](x, weights, ids, gate_up.flatten(1, 2), down, Gate(limit=5.0), scales=scales)
    assert got.dtype == dtype and not got.isnan().any()
    error = float((got.double() - want).norm() / want.norm())
    assert error < {BF16: 4e-3, FP16: 5e-4, FP32: 1e-6}[dtype], error


@pytest.mark.parametrize("tokens", [4, 300])
def test_a_captured_mixture_follows_its_inputs(ops: dict[str, Any], tokens: int) -> None:
    """Other tokens, other experts, the same graph; and no call waits for the device."""
    count, hidden, inner, routing = 64, 512, 128, Routing(4, renormalise=True)
    gate_up = (torch.randn(count, 2 * inner, hidden) / hidden**0.5).to(BF16)
    down = (torch.randn(count, hidden, inner) / inner**0.5).to(BF16)
    x, logits = torch.randn(tokens, hidden).to(BF16), torch.randn(tokens, count)

    def run() -> Tensor:
        weights, ids = ops["route"](logits, routing)
        return ops["experts"](x, weights, ids, gate_up, down, Gate(), base=x)  # type: ignore[no-any-return]

    run()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        run()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        out = run()
    for _ in range(4):
        x.copy_(torch.randn(tokens, hidden))
        logits.copy_(torch.randn(tokens, count) * 3)
        graph.replay()
        weights, ids = oracle.route(logits, routing)
        want = exact(x, weights, ids, gate_up, down, Gate(), base=x)
        assert float((out.double() - want).norm() / want.norm()) < 4e-3


def test_a_row_does_not_depend_on_who_shares_the_step(ops: dict[str, Any]) -> None:
    """Among the same number of rows, whatever they are: bit for bit."""
    count, hidden, inner = 16, 256, 128
    gate_up, down = torch.randn(count, 2 * inner, hidden).to(BF16), torch.randn(count, hidden, inner).to(BF16)
    for tokens in (16, 700):
        x, weights = torch.randn(tokens, hidden).to(BF16), torch.rand(tokens, 2)
        ids = torch.rand(tokens, count).topk(2).indices.int()
        first = ops["experts"](x, weights, ids, gate_up, down, Gate())
        order = torch.randperm(tokens)
        assert torch.equal(ops["experts"](x[order], weights[order], ids[order], gate_up, down, Gate()), first[order])


def test_shapes_that_do_not_fit_are_refused(ops: dict[str, Any]) -> None:
    x, ids, weights = torch.randn(2, 64).to(BF16), torch.zeros(2, 2, dtype=torch.int32), torch.rand(2, 2)
    gate_up, down = torch.randn(4, 32, 64).to(BF16), torch.randn(4, 64, 24).to(BF16)
    with pytest.raises(ValueError, match="do not fit"):
        ops["experts"](x, weights, ids, gate_up, down, Gate())
