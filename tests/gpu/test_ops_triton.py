"""ops_triton on a GPU: every operator against core's in float64, the draw against the softmax, all of it in captured graphs.

The draw is judged as a random variable (chi-square), as a function (of a row's own values, whatever shares its batch) and by
its failures: a row that is not finite must say so and must not touch its neighbours.
"""

from __future__ import annotations

import math
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

import triton
from octavo.bench.kernel import cuda_device
from octavo.interfaces import OperatorParts
from octavo.model import operators as oracle
from octavo_ops_triton.operators import TritonOperators
from octavo_ops_triton.provider import TritonOptions

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = torch.bfloat16, torch.float16, torch.float32
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11, FP32: 2.0**-20}
INF, NAN = float("inf"), float("nan")


def operators(pdl: bool) -> dict[str, Callable[..., Any]]:
    made = TritonOperators(TritonOptions(pdl=pdl), OperatorParts(cuda_device(), "bfloat16"))
    return {name: op for (name, _), op in made.ops.items()}


@pytest.fixture(scope="module")
def ops() -> dict[str, Callable[..., Any]]:
    return operators(pdl=True)


@pytest.fixture(autouse=True)
def seeded() -> Iterator[None]:
    torch.manual_seed(1)
    with torch.device("cuda"):
        yield


def near(got: Tensor, want: Tensor, slack: float = 1.0) -> None:
    """got is want (float64), rounded once or a little worse."""
    error = (got.double() - want).abs()
    bound = slack * ROUNDING[got.dtype] * (want.abs() + want.abs().mean())
    assert not got.isnan().any() and bool((error <= bound).all()), float((error / bound).max())


@pytest.mark.parametrize(("dtype", "size"), [(BF16, 1024), (BF16, 5000), (FP16, 16384), (FP32, 576)])
@pytest.mark.parametrize("tokens", [1, 33])
def test_norms_of_the_residual_stream(ops: dict[str, Any], dtype: torch.dtype, size: int, tokens: int) -> None:
    x, residual, weight = torch.randn(tokens, size).to(dtype), torch.randn(tokens, size) * 9, torch.randn(size)
    near(ops["rms_norm"](residual, weight, 1e-5, dtype), oracle.rms_norm(residual.double(), weight.double(), 1e-5, torch.float64))
    want, total = oracle.add_rms_norm(x.double(), residual.double(), weight.double(), 1e-5)
    got, stream = ops["add_rms_norm"](x, residual, weight, 1e-5)
    near(got, want)
    near(stream, total)
    assert got.dtype == dtype and stream.dtype == FP32


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "rotary", "normed"),
    [(BF16, 24, 128, 128, True), (BF16, 40, 128, 128, False), (FP16, 9, 96, 40, True), (FP32, 3, 80, 32, False)],
)
def test_qk_norm_and_rope_in_place_beside_v(
    ops: dict[str, Any], dtype: torch.dtype, heads: int, dim: int, rotary: int, normed: bool
) -> None:
    wide = torch.randn(37, heads + 3, dim).to(dtype)
    x, v = wide[:, :heads], wide[:, heads:].clone()
    turn = torch.randn(37, 1, rotary // 2) * 9
    cos, sin = torch.cat((turn.cos(),) * 2, -1).to(dtype), torch.cat((-turn.sin(), turn.sin()), -1).to(dtype)
    weight = torch.randn(heads, dim).to(dtype) if normed else None
    want = oracle.qk_norm_rope(x.double(), None if weight is None else weight.double(), 1e-6, cos.double(), sin.double())
    near(ops["qk_norm_rope"](x, weight, 1e-6, cos, sin), want)
    assert torch.equal(wide[:, heads:], v)


@pytest.mark.parametrize(
    ("dtype", "heads", "dim", "rotary", "normed"),
    [
        (BF16, 24, 128, 128, True),
        (BF16, 40, 128, 128, False),
        (BF16, 12, 64, 64, False),
        (FP16, 9, 96, 40, True),
        (FP32, 3, 80, 32, False),
        (FP32, 3, 112, 112, True),
        (BF16, 5, 192, 64, False),
        (BF16, 10, 256, 256, True),
    ],
)
@pytest.mark.parametrize("tokens", [1, 37, 700])
def test_heads_are_spread_alone_and_behind_norm_and_rope(
    ops: dict[str, Any], dtype: torch.dtype, heads: int, dim: int, rotary: int, normed: bool, tokens: int
) -> None:
    wide = torch.randn(tokens, heads + 3, dim).to(dtype)
    x, before = wide[:, :heads], wide.clone()

    def close(got: Tensor, want: Tensor) -> None:
        """Within rounding of the head, not of the channel: each is a sum of all."""
        slack = 2 * ROUNDING[dtype] * (want.abs() + want.abs().amax(-1, keepdim=True))
        assert got.dtype == dtype and bool(((got.double() - want).abs() <= slack).all())

    close(ops["spread"](x), oracle.spread(x.double()).double())
    turn = torch.randn(tokens, 1, rotary // 2) * 9
    cos, sin = torch.cat((turn.cos(),) * 2, -1).to(dtype), torch.cat((-turn.sin(), turn.sin()), -1).to(dtype)
    weight = torch.randn(heads, dim).to(dtype) if normed else None
    want = oracle.qk_norm_rope_spread(x.double(), None if weight is None else weight.double(), 1e-6, cos.double(), sin.double())
    close(ops["qk_norm_rope_spread"](x, weight, 1e-6, cos, sin), want.double())
    assert torch.equal(wide, before)


@pytest.mark.parametrize(("dtype", "size"), [(BF16, 3072), (FP16, 1000), (FP32, 1536)])
def test_silu_mul(ops: dict[str, Any], dtype: torch.dtype, size: int) -> None:
    x = (torch.randn(9, 2 * size) * 4).to(dtype)
    near(ops["silu_mul"](x), oracle.silu_mul(x.double()))
    near(ops["gelu_tanh_mul"](x), oracle.gelu_tanh_mul(x.double()))
    assert float(ops["silu_mul"](torch.full((1, 2 * size), -300.0, dtype=dtype)).abs().max()) == 0.0


def test_embedding_widens_rows_and_marks_unknown_ids(ops: dict[str, Any]) -> None:
    weight = torch.randn(1000, 1500).to(BF16)
    ids = torch.randint(1000, (50,))
    assert torch.equal(ops["embedding"](ids, weight), oracle.embedding(ids, weight))
    assert ops["embedding"](torch.tensor([1000, 3, -1]), weight).isnan().any(1).tolist() == [True, False, True]


@pytest.mark.parametrize(
    ("m", "n", "k"),
    [(1, 4096, 1024), (1, 1000, 3072), (4, 513, 4096), (2, 64, 100), (5, 1000, 2048), (17, 4096, 4096), (32, 700, 14336)],
)
def test_a_linear_of_few_rows(ops: dict[str, Any], m: int, n: int, k: int) -> None:
    x, weight = torch.randn(m, k).to(BF16), (torch.randn(n, k) / math.sqrt(k)).to(BF16)
    torch.cuda.synchronize()
    want = x.double() @ weight.double().T
    near(ops["small_linear"](x, weight), want, slack=2.0)
    wide = ops["small_linear"](x, weight, FP32)
    # Up to four rows are summed by ordinary float32 additions, more by tensor cores, whose sums keep fewer bits.
    assert wide.dtype == FP32 and float((wide.double() - want).abs().max()) < (1e-5 if m <= 4 else 2e-4)


def test_no_number_of_rows_up_to_32_needs_a_kernel_of_its_own(ops: dict[str, Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """Prompts bring any number of rows to the last layer's products, and everybody waits for a step that compiles."""
    small, compiled = ops["small_linear"], []
    n, k = 136, 2064  # sizes that no other test has
    monkeypatch.setattr(triton.knobs.compilation, "listener", lambda *, src, **_: compiled.append(src.name))
    x, weight = torch.randn(32, k).to(BF16), torch.randn(n, k).to(BF16)
    for m in range(3, 33):
        if small.wins(m, n, k):
            near(small(x[:m], weight), x[:m].double() @ weight.double().T, slack=2.0)
    assert sorted(compiled) == ["linear_kernel", *["skinny_kernel"] * 4], compiled  # for 4, and for 8, 16, 24 and 32


def test_an_address_off_the_alignment_finds_a_kernel_of_its_own(ops: dict[str, Any]) -> None:
    """Kernels are kept by what they were compiled for: one for aligned pointers must not serve the others."""
    flat = torch.randn(2 * 2 * 512 + 8).to(BF16)
    for offset in (0, 1, 0, 3, 8):
        x = flat[offset : offset + 2048].view(2, 1024)
        near(ops["silu_mul"](x), oracle.silu_mul(x.double()))


def test_what_a_small_linear_claims_to_win_it_takes(ops: dict[str, Any]) -> None:
    """Also the widest: all of `wins` must be within what the kernel accepts."""
    small = ops["small_linear"]
    for m in (*range(6), 17, 32, 33):
        for n, k in ((1024, 1024), (4096, 14336), (600, 16384), (600, 16385)):
            if small.wins(m, n, k):
                assert small(torch.ones(m, k, dtype=BF16), torch.ones(n, k, dtype=BF16), FP32).eq(k).all()
    assert small.wins(1, 4096, 14336) and not small.wins(5, 1024, 1024) and not small.wins(1, 600, 16385)


# ---------------------------------------------------------------- draw


def call(
    ops: dict[str, Any], logits: Tensor, temperature: float | Tensor, seed: Any, position: Any, vocab: int | None = None
) -> Any:
    count = len(logits)
    columns = [torch.as_tensor(c).to("cuda", torch.int64).expand(count).contiguous() for c in (seed, position)]
    heat = torch.as_tensor(temperature).to("cuda", FP32).expand(count).contiguous()
    return ops["draw"](logits, heat, *columns, vocab or logits.shape[1])


def unlikely(tokens: Tensor, p: Tensor) -> float:
    """How many standard deviations chi-square is above its mean; tokens expected fewer than five times are one bin."""
    want = p.double() * len(tokens)
    seen = torch.bincount(tokens.long(), minlength=len(p)).double()
    rare = want < 5
    want, seen = (torch.cat((c[~rare], c[rare].sum()[None])) for c in (want, seen))
    want, seen = want[want > 0], seen[want > 0]
    chi, freedom = float(((seen - want) ** 2 / want).sum()), len(want) - 1
    return (chi - freedom) / math.sqrt(2 * freedom)


@pytest.mark.parametrize("temperature", [0.5, 1.0, 3.0, 1e38])
@pytest.mark.parametrize("vary", ["seed", "position"])
def test_tokens_are_distributed_as_the_softmax(ops: dict[str, Any], temperature: float, vary: str) -> None:
    """Over neighbouring positions of one seed, and over neighbouring seeds at one position."""
    count, vocab = 300_000, 2500
    logits = torch.randn(vocab) * 2
    numbers = torch.arange(count)
    seed, position = (numbers, 7) if vary == "seed" else (7, numbers)
    tokens, failed = call(ops, logits.expand(count, -1), temperature, seed, position)
    assert not failed.any()
    assert unlikely(tokens, torch.softmax(logits.double() / temperature, -1)) < 5


def test_rare_tokens_of_a_wide_vocabulary_get_their_share(ops: dict[str, Any]) -> None:
    """One token has half of the mass, 150,000 share the rest: noise must keep its resolution where it is largest."""
    count, vocab = 4000, 150_001
    logits = torch.zeros(vocab)
    logits[70_000] = math.log(vocab - 1)
    tokens, _ = call(ops, logits.expand(count, -1), 1.0, 3, torch.arange(count))
    assert abs(int((tokens == 70_000).sum()) - count / 2) < 5 * math.sqrt(count / 4)
    others = tokens[tokens != 70_000]
    assert unlikely(others * 50 // vocab, torch.full((50,), 0.02)) < 5


@pytest.mark.parametrize(("vocab", "width"), [(151_936, 151_936), (128_003, 128_256), (50_257, 50_257), (300, 300)])
def test_a_row_s_token_does_not_depend_on_its_batch(ops: dict[str, Any], vocab: int, width: int) -> None:
    """Alone, among others, in another order: other splits, other neighbours, the same tokens."""
    count = 130
    logits = torch.randn(count, width) * 3
    logits[:, vocab:] = NAN  # never looked at
    heat, seed, position = torch.rand(count) + 0.3, torch.randint(-(2**62), 2**62, (count,)), torch.arange(count) * 1000
    tokens, failed = call(ops, logits, heat, seed, position, vocab)
    assert not failed.any() and int(tokens.max()) < vocab and int(tokens.min()) >= 0
    assert len(tokens.unique()) > 20
    order = torch.randperm(count)[:77]
    shuffled, _ = call(ops, logits[order], heat[order], seed[order], position[order], vocab)
    assert torch.equal(shuffled, tokens[order])
    for row in (0, 64, 129):
        one = slice(row, row + 1)
        assert torch.equal(call(ops, logits[one], heat[one], seed[one], position[one], vocab)[0], tokens[one])


def test_cold_rows_take_the_largest_logit_and_ties_the_lowest_id(ops: dict[str, Any]) -> None:
    logits = torch.randn(5, 40_000)
    want = logits.double().argmax(-1).int()
    for temperature in (0.0, 1e-30, 1e-9):
        assert torch.equal(call(ops, logits, temperature, 1, 2)[0], want)
    for ids in ([17, 600, 39_999], [2047, 2048], [512, 1], [30_000, 30_001]):
        tied = logits.clone()
        tied[:, ids] = 50.0
        assert call(ops, tied, 0.0, 1, 2)[0].tolist() == [min(ids)] * 5
    assert call(ops, torch.zeros(1, 9), 0.0, 1, 2)[0].tolist() == [0]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_rows_that_are_not_finite_fail_alone(ops: dict[str, Any], temperature: float) -> None:
    logits = torch.randn(7, 9001)
    before, _ = call(ops, logits, temperature, 5, torch.arange(7))
    logits[1, 9000], logits[2, 0], logits[3] = NAN, INF, -INF
    logits[4, :8000] = -INF  # excluded tokens are no failure
    logits[5, 100] = -NAN
    tokens, failed = call(ops, logits, temperature, 5, torch.arange(7))
    assert failed.tolist() == [False, True, True, True, False, True, False]
    assert tokens[failed].tolist() == [0] * 4 and int(tokens[4]) >= 8000
    assert tokens[[0, 6]].tolist() == before[[0, 6]].tolist()


def test_wrong_arguments_of_draw_are_named(ops: dict[str, Any]) -> None:
    logits, column = torch.randn(2, 10), torch.zeros(2, dtype=torch.int64)
    with pytest.raises(ValueError, match=r"valid_vocab 11 .* 10 columns"):
        ops["draw"](logits, torch.ones(2), column, column, 11)
    with pytest.raises(ValueError, match=r"seed must be contiguous torch.int64 \[2\], not torch.int32"):
        ops["draw"](logits, torch.ones(2), column.int(), column, 10)


# ---------------------------------------------------------------- graphs


@pytest.mark.parametrize("pdl", [True, False])
def test_a_captured_chain_waits_for_nothing_and_equals_its_eager_run(pdl: bool) -> None:
    """Every operator in a row, each reading what the one before wrote: with dependent launches, a missing wait would show."""
    ops = operators(pdl)
    size, heads, dim, vocab = 1024, 12, 128, 9000
    table, weight = torch.randn(vocab, size).to(BF16), torch.randn(size)
    up, down = (torch.randn(shape).to(BF16) / 32 for shape in ((heads * dim, size), (size, heads * dim // 2)))
    cos, sin = (torch.randn(3, 1, dim).to(BF16) for _ in range(2))
    ids = torch.randint(vocab, (3,))
    heat, seed = torch.ones(3), torch.arange(3)

    def chain() -> tuple[Tensor, Tensor]:
        stream = ops["embedding"](ids, table)
        x = ops["rms_norm"](stream, weight, 1e-5, BF16)
        for _ in range(20):
            y = ops["small_linear"](x, up)
            y = ops["qk_norm_rope"](y.view(3, heads, dim), None, 1e-5, cos, sin).reshape(3, -1)
            y = ops["silu_mul"](y)
            x, stream = ops["add_rms_norm"](ops["small_linear"](y, down), stream, weight, 1e-5)
        tokens, failed = ops["draw"](ops["small_linear"](x, table, FP32), heat, seed, ids, vocab)
        assert failed.shape == (3,)
        return stream, tokens

    chain()
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        chain()
    finally:
        torch.cuda.set_sync_debug_mode("default")
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        stream, tokens = chain()
    for _ in range(5):
        ids.copy_(torch.randint(vocab, (3,)))
        want = chain()
        graph.replay()
        assert torch.equal(stream, want[0]) and torch.equal(tokens, want[1])
