"""attention_cupy on a GPU: the conformance suite of backends, and what is particular to this one (S7, S10, S21, S24).

Particular: rows that are split over blocks and added up by the last one, segments of one block that follow each other, groups
wider than a product, graphs whose lengths change between replays, and torch's current stream.
"""

from __future__ import annotations

import math
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
from octavo.testing.attention import AttentionSuite, AttentionTarget, check
from octavo.testing.paged import Shape, reference, stored
from octavo_attention_cupy.provider import CupyOptions, provider

from tests.engine.harness import alone, make_engine, request

pytestmark = pytest.mark.gpu

BF16, FP16, E4M3, E5M2 = "bfloat16", "float16", "float8_e4m3fn", "float8_e5m2"
INSTALLED = any(point.name == "attention_cupy" for point in entry_points(group="octavo"))
LENGTHS = (1, 15, 64, 65, 127, 128, 129, 257, 1000, 40, 300, 700)
WORK = [(i, n - 1, 1) for i, n in enumerate(LENGTHS[:9])] + [(9, 0, 40), (10, 0, 300), (11, 200, 500)]


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
    scene = target(prefill=prefill).scene(shape, LENGTHS)
    scene.fill([*(n - 1 for n in LENGTHS[:9]), 0, 0, 200])
    check(scene, WORK, lse=True)


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_a_row_of_many_parts_is_added_up_the_same_way_every_time(kv_dtype: str | None) -> None:
    scene = target().scene(Shape((8, 8), 128, block_size=64, dtype=BF16, kv_dtype=kv_dtype), [20000, 20, 3000])
    scene.fill([19999, 19, 2999])
    first, second = (check(scene, [(0, 19999, 1), (1, 19, 1), (2, 2999, 1)], lse=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.out, other.out), "out differs between runs"


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_more_rows_than_blocks_share_them(kv_dtype: str | None) -> None:
    """The kernel for a crowd; every block walks over many segments, of many rows."""
    lengths = [1 + 37 * i % 300 for i in range(300)]
    scene = target().scene(Shape((8, 2), 128, block_size=16, dtype=BF16, kv_dtype=kv_dtype), lengths)
    scene.fill([n - 1 for n in lengths])
    check(scene, [(i, n - 1, 1) for i, n in enumerate(lengths)], lse=True)


@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_a_captured_graph_serves_other_lengths_and_padding_rows(kv_dtype: str | None) -> None:
    """Captured at one set of lengths over two layers, replayed at others; a padding row has length 0 and slot -1."""
    lengths = (1000, 300, 64, 2000)
    scene = target().scene(Shape((16, 4), 128, block_size=64, dtype=BF16, kv_dtype=kv_dtype), lengths, layers=2)
    for layer in (0, 1):
        scene.fill(lengths, layer=layer)
    step = scene.step([(i, n - 1, 1) for i, n in enumerate(lengths)])
    q = torch.cat([row.q[0][-1:] for row in scene.rows])
    k, v = (torch.zeros(4, 4, 128, dtype=q.dtype, device="cuda") for _ in range(2))
    outs, lses = torch.empty(2, 4, 16, 128, dtype=q.dtype, device="cuda"), torch.empty(2, 4, 16, device="cuda")

    def work() -> None:
        scene.backend.plan(step)
        for layer in (0, 1):
            scene.backend.write(layer, step, k, v)
            scene.backend.run(layer, step, q, outs[layer], lse=lses[layer])

    def setup(now: tuple[int, ...]) -> None:
        step.seq_lens.copy_(torch.tensor(now))
        slots = []
        for i, n in enumerate(now):
            block = int(scene.table[scene.rows[i].slot, max(n - 1, 0) // 64])
            slots.append(block * 64 + (n - 1) % 64 if n else -1)
            k[i], v[i] = (float(i + 1), 0.5) if n else (math.nan, math.nan)
        step.slot_mapping[0].copy_(torch.tensor(slots))

    setup(lengths)
    scene.backend.prepare(step)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    written: dict[int, list[int]] = {i: [n - 1] for i, n in enumerate(lengths)}
    for now in (lengths, (17, 300, 1, 1999), (512, 256, 63, 128), (1, 299, 0, 65)):
        setup(now)
        outs.fill_(math.nan)
        graph.replay()
        for i, n in enumerate(now):
            if not n:
                assert bool((outs[:, i] == 0).all()), "a padding row's output is not zero"
                continue
            written[i].append(n - 1)
            for layer in (0, 1):
                keys, values = (x[layer][:n].clone() for x in (scene.rows[i].k, scene.rows[i].v))
                for at in written[i]:  # every replay so far wrote one token over what was there
                    keys[at:][:1], values[at:][:1] = float(i + 1), 0.5
                right = reference(q[i : i + 1], stored(keys, kv_dtype, 1.0), stored(values, kv_dtype, 1.0), scale=128**-0.5)
                assert float((outs[layer, i].double() - right.out[0]).abs().max()) < 2e-2, f"row {i} at {now}"
                assert float((lses[layer, i].double() - right.lse[0]).abs().max()) < 1e-2, f"lse of row {i} at {now}"
    scene.check_untouched()


def test_kernels_run_on_the_stream_that_is_current_at_each_launch() -> None:
    """S7: rows are written and read behind a busy kernel on a stream of its own, 50 times; nothing is read too early."""
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
def test_an_engine_gives_the_same_tokens_from_graphs_as_eagerly(tiny: Path) -> None:
    """In graphs every decode launch but the first may start before the kernel in front of it has ended."""
    options = {"device": "cuda", "num_threads": None, "num_gpu_blocks_override": 64, "block_size": 16, "dtype": "bfloat16"}
    graphs, eager = (make_engine(tiny, attention_backend="cupy", enforce_eager=e, **options) for e in (False, True))
    for prompt in ([9, 30, 77], [100] * 17, [9 + i % 200 for i in range(90)]):
        found = [alone(e, request(e, "a", prompt, max_tokens=40, ignore_eos=True))["a", 0].tokens for e in (graphs, eager)]
        assert found[0] == found[1]
