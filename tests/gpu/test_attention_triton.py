"""attention_triton on a GPU: the conformance suite of backends, and what is particular to this one (S10, S21, S24).

Particular: two prefill kernels, two ways to add up the parts of a split row, pages that are found by one look-up or by many,
transposed FP8 values, and graphs whose lengths change between replays.
"""

from __future__ import annotations

import math
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "attention_triton" / "src"))

from octavo.bench.kernel import cuda_device
from octavo.testing.attention import AttentionSuite, AttentionTarget, check
from octavo.testing.paged import Scene, Shape, reference, stored
from octavo_attention_triton.provider import TritonOptions, provider

pytestmark = pytest.mark.gpu

BF16, FP16, FP32, E4M3, E5M2 = "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"
LENGTHS = (1, 15, 64, 65, 127, 128, 129, 257, 1000, 40, 300, 700)
WORK = [(i, n - 1, 1) for i, n in enumerate(LENGTHS[:9])] + [(9, 0, 40), (10, 0, 300), (11, 200, 500)]


def target(**options: Any) -> AttentionTarget:
    return AttentionTarget(provider, cuda_device(), (BF16, FP16, FP32), TritonOptions(**options))


class TestTriton(AttentionSuite):
    target = target()


SHAPES = [
    *(Shape((32, 8), 128, block_size=size, dtype=BF16) for size in (8, 16, 64, 128)),
    Shape((24, 1), 128, block_size=24, dtype=BF16),
    Shape((7, 7), 128, block_size=32, dtype=FP16, softcap=15.0),
    *(Shape((8, 2), dim, block_size=64, dtype=BF16, window=50, sinks=True, softcap=20.0) for dim in (64, 128, 256)),
    *(Shape((16, 4), 128, block_size=size, dtype=BF16, kv_dtype=E4M3, k_scale=0.3, v_scale=0.7) for size in (16, 64, 128)),
    Shape((16, 4), 80, block_size=40, dtype=FP16, kv_dtype=E5M2, k_scale=0.5),
]


@pytest.mark.parametrize("options", [{"merge": "fused", "prefill": "portable"}, {"merge": "kernel"}], ids=["fused", "kernel"])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_either_merge_and_either_prefill_gives_what_float64_says(shape: Shape, options: dict[str, str]) -> None:
    scene = target(**options).scene(shape, LENGTHS)
    scene.fill([*(n - 1 for n in LENGTHS[:9]), 0, 0, 200])
    check(scene, WORK, lse=True)


@pytest.mark.parametrize("merge", ["fused", "kernel"])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_a_row_of_many_parts_is_added_up_the_same_way_every_time(merge: str, kv_dtype: str | None) -> None:
    scene = target(merge=merge).scene(Shape((8, 8), 128, block_size=64, dtype=BF16, kv_dtype=kv_dtype), [9000, 20])
    scene.fill([8999, 19])
    first, second = (check(scene, [(0, 8999, 1), (1, 19, 1)], lse=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.out, other.out), "out differs between runs"


@pytest.mark.parametrize("merge", ["fused", "kernel"])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_a_captured_graph_serves_other_lengths_and_padding_rows(merge: str, kv_dtype: str | None) -> None:
    """Captured at one set of lengths over two layers, replayed at others; a padding row has length 0 and slot -1."""
    lengths = (1000, 300, 64, 2000)
    scene = target(merge=merge).scene(Shape((16, 4), 128, block_size=64, dtype=BF16, kv_dtype=kv_dtype), lengths, layers=2)
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


def test_a_hopper_prefill_that_cannot_be_is_refused_when_bound() -> None:
    if cuda_device().capability[0] != 9:
        pytest.skip("the kernel is for compute capability 9")
    shape = Shape((8, 2), 96, dtype=BF16)
    with pytest.raises(ValueError, match=r"prefill=hopper needs .* dims 96 and 96"):
        Scene(target(prefill="hopper").build(BF16), shape, cuda_device(), [20])
