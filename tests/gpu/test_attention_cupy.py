"""attention_cupy on a GPU: the conformance suite of backends, and what is particular to this one.

Particular: rows that are split over blocks and added up by the last one, segments of one block that follow each other, groups
wider than a product, graphs whose lengths change between replays, and torch's current stream.
"""

from __future__ import annotations

import sys
from importlib.metadata import entry_points
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("cupy", reason="cupy is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "attention_cupy" / "src"))

from octavo.bench.kernel import cuda_device
from octavo.model.spread import whole_matrix
from octavo.testing.attention import AttentionSuite, AttentionTarget, check
from octavo.testing.paged import Shape, stored
from octavo_attention_cupy import tuning
from octavo_attention_cupy.provider import CupyOptions, provider

from tests.engine.harness import alone, make_engine, request
from tests.gpu.backends import LENGTHS, WORK, check_a_captured_graph, check_a_step_of_all_kinds, check_it_repeats
from tests.gpu.greedy import check_tokens

pytestmark = pytest.mark.gpu

BF16, FP16, E4M3, E5M2 = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
INSTALLED = any(point.name == "attention_cupy" for point in entry_points(group="octavo"))


def target(**options: Any) -> AttentionTarget:
    return AttentionTarget(provider, cuda_device(), (BF16, FP16), CupyOptions(**options))


class TestCupy(AttentionSuite):
    target = target()


SHAPES = [
    *(Shape((32, 8), 128, block_size=size, dtype=BF16) for size in (8, 16, 64, 128)),
    Shape((24, 1), 128, block_size=24, dtype=BF16),
    Shape((24, 1), 256, block_size=16, dtype=FP16),
    Shape((64, 1), 64, block_size=16, dtype=BF16, sinks=True),
    Shape((7, 7), 128, block_size=32, dtype=FP16, softcap=15.0),
    *(Shape((8, 2), dim, block_size=64, dtype=BF16, window=50, sinks=True, softcap=20.0) for dim in (64, 128, 256)),
    *(
        Shape((16, 4), dim, block_size=size, dtype=BF16, kv_dtype=E4M3, k_scale=0.3, v_scale=0.7)
        for size, dim in ((8, 64), (16, 128), (64, 128), (128, 256), (64, 112), (40, 80))
    ),
    Shape((16, 4), 80, block_size=40, dtype=FP16, kv_dtype=E5M2, k_scale=0.5),
    Shape((24, 2), 192, v_dim=128, block_size=64, dtype=FP16, kv_dtype=E4M3, window=90),
]


@pytest.mark.parametrize("prefill", ["auto", "portable"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_what_float64_says_is_what_comes_out(shape: Shape, prefill: str) -> None:
    check_a_step_of_all_kinds(target(prefill=prefill).scene(shape, LENGTHS))


WIDENED = [
    *(shape for shape in SHAPES if shape.kv_dtype and shape.k_dim in (64, 128)),
    Shape((24, 1), 64, block_size=24, dtype=FP16, kv_dtype=E5M2, window=150, sinks=True),
    Shape((8, 2), 128, block_size=64, dtype=BF16, kv_dtype=E4M3, window=300, softcap=20.0, k_scale=2.0),
    Shape((4, 4), 128, block_size=256, dtype=FP16, kv_dtype=E4M3),
]


def need_hopper() -> None:
    if cuda_device().capability != (9, 0):
        pytest.skip("the kernel is for compute capability 9.0")


@pytest.mark.parametrize("shape", WIDENED, ids=str)
def test_an_fp8_cache_is_prefilled_from_pages_that_are_widened(shape: Shape) -> None:
    need_hopper()
    check_a_step_of_all_kinds(target(prefill="hopper").scene(shape, LENGTHS))


def test_a_workspace_that_is_too_small_for_all_rows_serves_them_in_turn(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of LENGTHS, rows of 40, 300 and 700 tokens have chunks: the first two together, then the third; then one that fits nowhere."""
    need_hopper()
    shape = Shape((8, 2), 128, block_size=16, dtype=BF16, kv_dtype=E4M3, k_scale=0.3, v_scale=0.7)
    for tokens, launches in ((704, 2), (688, None)):
        monkeypatch.setattr(tuning, "MOST_WIDE_BYTES", tokens * 2 * 2 * 256)
        scene = target(prefill="hopper").scene(shape, LENGTHS)
        bound = scene.backend._layers[0]
        assert bound.widened.pages == tokens // 16
        step = scene.step(WORK)
        scene.backend.prepare(step)
        found = step.scratch["cupy.prefill"][scene.backend._prefilling._key(bound, bound.widened)]
        assert found is None if launches is None else len(found) == launches
        check_a_step_of_all_kinds(scene)


def test_long_chunks_over_an_fp8_cache_are_widened_unasked() -> None:
    need_hopper()
    scene = target().scene(Shape((8, 2), 128, block_size=64, dtype=BF16, kv_dtype=E4M3), [1500, 900, 70])
    scene.fill([0, 300, 69])
    work = [(0, 0, 1500), (1, 300, 600), (2, 69, 1)]
    step = scene.step(work)
    scene.backend.prepare(step)
    bound = scene.backend._layers[0]
    assert list(step.scratch["cupy.prefill"]) == [scene.backend._prefilling._key(bound, bound.widened)]
    check(scene, work, lse=True)


@pytest.mark.parametrize(("dtype", "kv_dtype"), [(BF16, None), (FP16, None), (BF16, E4M3)])
def test_scores_that_climb_fall_jump_or_lie_far_below_zero(dtype: str, kv_dtype: str | None) -> None:
    """Prefill's exponents are relative to a base that follows the largest score at a distance: here it moves in either half of a tile,
    in both or in none, and is negative. Scores are 16.3 powers of two times these numbers."""
    need_hopper()
    count = 700
    climb, low, jumps = torch.linspace(-12, 12, count), torch.linspace(-12, -4, count), torch.zeros(count)
    jumps[[100, 190, 300, 400]] = torch.tensor([1.0, 2.0, 4.0, 5.0])
    scores = (climb, climb.flip(0), low, low.flip(0), jumps)
    shape = Shape((8, 2), 128, block_size=64, dtype=dtype, kv_dtype=kv_dtype)
    scene = target(prefill="hopper").scene(shape, [count] * len(scores))
    for row, values in zip(scene.rows, scores, strict=True):
        row.q[0].fill_(1.0)
        row.k[0].copy_(values.to(row.k[0])[:, None, None].expand_as(row.k[0]))
        row.v[0].mul_(0.5)
    check(scene, [(i, 0, count) for i in range(len(scores))], lse=True)


def test_a_hopper_prefill_that_cannot_be_is_refused_when_bound() -> None:
    with pytest.raises(ValueError, match=r"layer 0: prefill=hopper needs capability 9.0 .* dims 96 and 96"):
        target(prefill="hopper").scene(Shape((8, 2), 96, dtype=BF16), [20])


SPREAD = [
    (Shape((5, 1), 16, dtype=BF16, kv_dtype=E4M3, k_scale=0.5), 16),
    (Shape((6, 2), 32, dtype=FP16, block_size=8), 32),
    (Shape((8, 2), 48, dtype=BF16), 24),
    (Shape((9, 3), 64, dtype=BF16, kv_dtype=E4M3, k_scale=0.5), 64),
    (Shape((6, 2), 64, dtype=FP16, block_size=8), 8),
    (Shape((7, 7), 80, dtype=BF16, kv_dtype=E5M2, block_size=40), 24),
    (Shape((9, 3), 96, dtype=FP16, kv_dtype=E4M3, block_size=24), 96),
    (Shape((9, 3), 112, dtype=FP16, kv_dtype=E4M3, v_scale=2.0), 64),
    (Shape((32, 8), 128, dtype=BF16, kv_dtype=E4M3, block_size=64, k_scale=0.5), 128),
    (Shape((8, 2), 128, dtype=BF16), 16),
    (Shape((8, 2), 144, dtype=BF16), 144),
    (Shape((6, 2), 176, dtype=FP16), 80),
    (Shape((9, 3), 192, dtype=FP16, kv_dtype=E4M3, block_size=24), 64),
    (Shape((8, 2), 224, dtype=BF16), 224),
    (Shape((6, 2), 240, dtype=FP16), 240),
    (Shape((7, 7), 256, dtype=BF16, kv_dtype=E5M2, block_size=40, v_scale=2.0), 256),
    (Shape((6, 2), 256, dtype=FP16), 64),
]
"""Every kind of width, and how many dims turn."""


@pytest.mark.parametrize("norm", [False, True], ids=["", "norm"])
@pytest.mark.parametrize(("shape", "rotary"), SPREAD, ids=str)
def test_a_prologue_spreads_heads_and_rounds_them_once_more(shape: Shape, rotary: int, norm: bool) -> None:
    """What it gives without spreading times the matrix in float64, rounded. Keys are made of what the first query heads are, so what is
    stored of them is known to the bit."""
    scene = target().scene(shape, [33, 20, 40])
    assert scene.backend.prologue_spreads(shape.layer())
    work = [(0, 32, 1), (1, 0, 20), (2, 37, 3)]
    step, (heads, kv_heads), dim = scene.step(work), shape.heads, shape.k_dim
    dtype, random = getattr(torch, shape.dtype), torch.Generator().manual_seed(3)
    qkv = torch.randn(len(step.token_ids), heads + 2 * kv_heads, dim, generator=random)
    qkv[:, :, 5] *= 40  # a channel that stands out, which is what keys are spread for
    weight = 1 + torch.randn(heads + kv_heads, dim, generator=random) / 4
    qkv[:, heads : heads + kv_heads], weight[heads:] = qkv[:, :kv_heads], weight[:kv_heads]
    angle = torch.rand(len(step.token_ids), 1, rotary // 2, generator=random) * 6
    cos, sin = torch.cat((angle.cos(), angle.cos()), -1), torch.cat((-angle.sin(), angle.sin()), -1)
    qkv, weight, cos, sin = (x.cuda().to(dtype) for x in (qkv, weight, cos, sin))
    scene.backend.prepare(step)

    def run(qkv: torch.Tensor, spread: bool) -> torch.Tensor:
        return scene.backend.prologue(0, step, qkv.clone(), weight if norm else None, 1e-5, cos, sin, spread=spread)

    plain, found = run(qkv, False), run(qkv, True)
    whole, factor = whole_matrix(dim)
    exact = plain.double() @ whole.double().cuda() * factor
    sums = plain.double().norm(dim=-1, keepdim=True) * 2.0**-18  # of float32, where they cancel
    half_a_step = torch.finfo(dtype).eps / 2
    off = (found.double() - exact).abs() - exact.abs() * half_a_step - sums
    assert float(off.max()) <= 0, f"off by {float(off.max()):.2e} more than rounding explains"
    right = (
        stored(found[:, :kv_heads].clone(), shape.kv_dtype, shape.k_scale),
        stored(qkv[:, heads + kv_heads :].clone(), shape.kv_dtype, shape.v_scale),
    )
    at = 0
    for index, start, count in work:
        held = scene.backend.gather(0, scene.rows[index].slot, start + count)
        for kept, wanted in zip(held, right, strict=True):
            assert torch.equal(kept[start:].double(), wanted[at : at + count].double())
        at += count
    scene.check_untouched()
    broken = qkv.clone()
    broken[3, 1, 2] = broken[3, -1, 1] = torch.inf
    broken[4] = torch.nan
    again = run(broken, True)
    assert not again[3, 1].isfinite().any()
    assert not again[4].isfinite().any()
    again[3, 1], again[4] = found[3, 1], found[4]
    assert torch.equal(again, found), "what is not finite in one head has changed another"


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_a_row_of_many_parts_is_added_up_the_same_way_every_time(kv_dtype: str | None) -> None:
    check_it_repeats(target().scene(Shape((8, 8), 128, block_size=64, dtype=BF16, kv_dtype=kv_dtype), [20000, 20, 3000]))


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_more_rows_than_blocks_share_them(kv_dtype: str | None) -> None:
    """The kernel for a crowd; every block walks over many segments, of many rows."""
    lengths = [1 + 37 * i % 300 for i in range(300)]
    scene = target().scene(Shape((16, 8), 128, block_size=16, dtype=BF16, kv_dtype=kv_dtype), lengths)
    assert len(lengths) * 8 >= scene.backend._layers[0].decodes[False].crowd
    scene.fill([n - 1 for n in lengths])
    check(scene, [(i, n - 1, 1) for i, n in enumerate(lengths)], lse=True)


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_a_captured_graph_serves_other_lengths_and_padding_rows(kv_dtype: str | None) -> None:
    shape = Shape((16, 4), 128, block_size=64, dtype=BF16, kv_dtype=kv_dtype)
    check_a_captured_graph(target().scene(shape, (1000, 300, 64, 2000), layers=2))


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_a_kernel_that_starts_early_reads_no_token_before_this_step_has_written_it(kv_dtype: str | None) -> None:
    """Rows of one step may be tokens of one sequence, in any order. From the second layer on decode starts before the write in front
    of it has ended, and copies what is older than the step at once: what is not must not be among it."""
    lengths, new = (3000, 2000, *[8] * 6), 8  # the short ones only make room for two times eight rows
    scene = target().scene(Shape((8, 2), 128, block_size=8, dtype=BF16, kv_dtype=kv_dtype), lengths, layers=2)
    for layer in (0, 1):
        scene.fill([n - new for n in lengths[:2]], layer=layer)
    work = [(i, n - 1 - j, 1) for j in range(new) for i, n in enumerate(lengths[:2])]  # the last token first
    step = scene.step(work)
    columns = {
        name: [torch.cat([getattr(scene.rows[i], name)[layer][at : at + 1] for i, at, _ in work]) for layer in (0, 1)]
        for name in "qkv"
    }
    outs = [torch.empty_like(columns["q"][0]) for _ in (0, 1)]
    last = [int(scene.table[scene.rows[i].slot, (n - 1) // 8]) for i, n in enumerate(lengths[:2])]
    for _ in range(20):
        for cache in scene.caches:
            for block in last:
                cache[block].view(torch.uint8).fill_(0x7F if kv_dtype else 0xFF)  # NaN
        scene.backend.prepare(step)
        scene.backend.plan(step)
        for layer in (0, 1):
            scene.backend.write(layer, step, columns["k"][layer], columns["v"][layer])
            scene.backend.run(layer, step, columns["q"][layer], outs[layer])
        for layer in (0, 1):
            for found, item in zip(outs[layer], work, strict=True):
                error = float((found.double() - scene.expected(item, layer=layer).out[0]).abs().max())
                assert error < 2e-2, f"layer {layer}, row {item}: off by {error}"


def test_kernels_run_on_the_stream_that_is_current_at_each_launch() -> None:
    """Rows are written and read behind a busy kernel on a stream of its own, 50 times; nothing is read too early."""
    scene = target().scene(Shape((8, 2), 128, block_size=64, dtype=BF16), [600, 90])
    scene.fill([599, 89])
    busy = torch.randn(4096, 4096, device="cuda")
    step = scene.step([(0, 599, 1), (1, 89, 1)])
    q = torch.cat([row.q[0][-1:] for row in scene.rows])
    out = torch.empty_like(q)
    stream = torch.cuda.Stream()
    torch.cuda.synchronize()
    for value in range(50):
        with torch.cuda.stream(stream):
            torch.mm(busy, busy)
            k = torch.full((2, 2, 128), 30.0, dtype=q.dtype, device="cuda")
            v = torch.full((2, 2, 128), float(value), dtype=q.dtype, device="cuda")
            q.copy_(torch.full_like(q, 1.0))  # so that the new token, whose key is large, takes all the weight
            scene.backend.prepare(step)
            scene.backend.plan(step)
            scene.backend.write(0, step, k, v)
            scene.backend.run(0, step, q, out)
        stream.synchronize()
        assert float((out.float() - value).abs().max()) < 0.3, f"round {value}"


@pytest.mark.skipif(not INSTALLED, reason="octavo-attention-cupy is not installed: an engine would not find it")
def test_an_engine_gives_tokens_from_graphs_as_good_as_eagerly(tiny: Path) -> None:
    """In graphs every decode launch but the first may start before the kernel in front of it has ended, and short prompts are rows of
    the decode kernel, where an eager engine runs the prefill kernel: equal but for the order of sums."""
    options = {"device": "cuda", "num_threads": None, "num_gpu_blocks_override": 64, "block_size": 16, "dtype": "float16"}
    graphs, eager = (make_engine(tiny, attention_backend="cupy", enforce_eager=e, **options) for e in (False, True))
    for prompt in ([9, 30, 77], [100] * 17, [9 + i % 200 for i in range(90)]):
        ask = {"prompt": prompt, "max_tokens": 40, "ignore_eos": True}
        check_tokens(eager, ask, alone(graphs, request(graphs, "a", **ask))["a", 0].tokens, "float16")
