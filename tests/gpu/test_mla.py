"""triton_latent on a GPU: the conformance suite of latent caches with either kernel, and graphs whose lengths change."""

from __future__ import annotations

import math
import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "attention_triton" / "src"))

from octavo.bench.kernel import cuda_device
from octavo.testing.attention import AttentionTarget, check
from octavo.testing.latent import SHAPES, LatentSuite, latent
from octavo.testing.paged import Scene, reference
from octavo_attention_triton.latent_provider import LatentOptions, provider

pytestmark = pytest.mark.gpu

BF16, FP16, FP32 = "bfloat16", "float16", "float32"


def target(kernel: str = "auto", *dtypes: str) -> AttentionTarget:
    return AttentionTarget(provider, cuda_device(), dtypes, LatentOptions(kernel=kernel))


class TestAuto(LatentSuite):
    target = target("auto", BF16, FP16, FP32)


class TestPortable(LatentSuite):
    target = target("portable", BF16)
    shapes = SHAPES[:2]


def test_a_row_of_many_parts_is_added_up_the_same_way_every_time() -> None:
    scene = target().scene(latent(128, 512, 64, BF16), [9000, 20])
    scene.fill([8999, 19])
    first, second = (check(scene, [(0, 8999, 1), (1, 19, 1)], lse=True) for _ in range(2))
    for one, other in zip(first, second, strict=True):
        assert torch.equal(one.out, other.out), "out differs between runs"


@pytest.mark.parametrize("kernel", ["auto", "portable"])
def test_a_captured_graph_serves_other_lengths_and_padding_rows(kernel: str) -> None:
    """Captured at one set of lengths over two layers, replayed at others; a padding row has length 0 and slot -1."""
    lengths = (1000, 300, 64, 2000)
    scene = target(kernel).scene(latent(128, 512, 64, BF16), lengths, layers=2)
    for layer in (0, 1):
        scene.fill(lengths, layer=layer)
    step = scene.step([(i, n - 1, 1) for i, n in enumerate(lengths)])
    q = torch.cat([row.q[0][-1:] for row in scene.rows])
    k = torch.zeros(4, 1, 576, dtype=q.dtype, device="cuda")
    outs = torch.empty(2, 4, 128, 512, dtype=q.dtype, device="cuda")

    def work() -> None:
        scene.backend.plan(step)
        for layer in (0, 1):
            scene.backend.write(layer, step, k, k[..., :512])
            scene.backend.run(layer, step, q, outs[layer])

    def setup(now: tuple[int, ...]) -> None:
        step.seq_lens.copy_(torch.tensor(now))
        slots = []
        for i, n in enumerate(now):
            block = int(scene.table[scene.rows[i].slot, max(n - 1, 0) // 64])
            slots.append(block * 64 + (n - 1) % 64 if n else -1)
            k[i] = float(i + 1) / 8 if n else math.nan
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
                keys = scene.rows[i].k[layer][:n].clone()
                for at in written[i]:  # every replay so far wrote one token over what was there
                    keys[at:][:1] = float(i + 1) / 8
                right = reference(q[i : i + 1], keys, keys[..., :512], scale=576**-0.5)
                assert float((outs[layer, i].double() - right.out[0]).abs().max()) < 2e-2, f"row {i} at {now}"
    scene.check_untouched()


def test_a_hopper_kernel_that_cannot_be_is_refused_when_bound() -> None:
    if cuda_device().capability[0] != 9:
        pytest.skip("the kernel is for compute capability 9")
    with pytest.raises(ValueError, match=r"kernel=hopper needs .* 256 \+ 64"):
        Scene(target("hopper").build(BF16), latent(64, 256, 64, BF16), cuda_device(), [20])
