"""Sparse latent attention of triton_latent on a GPU: its conformance suite, and a graph of index and attention whose rows grow."""

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

from octavo.attention.sparse import choose
from octavo.bench.kernel import cuda_device
from octavo.testing.attention import AttentionTarget
from octavo.testing.paged import Shape
from octavo.testing.sparse import SparseSuite
from octavo_attention_triton.latent_provider import provider

pytestmark = pytest.mark.gpu


class TestSparse(SparseSuite):
    target = AttentionTarget(provider, cuda_device(), ("bfloat16", "float32"))


def test_a_captured_graph_chooses_and_attends_at_other_lengths() -> None:
    """Captured with rows shorter than the number of chosen keys, replayed with longer ones. An index whose keys are the entries
    themselves, so that one cache serves both."""
    lengths, count = (1500, 700, 3, 20000), 96
    scene = AttentionTarget(provider, cuda_device(), ("float32",)).scene(
        Shape((4, 1), 64, 64, 16, "float32", latent=True), lengths
    )
    scene.fill(lengths)
    step = scene.step([(i, n - 1, 1) for i, n in enumerate(lengths)])
    q = torch.cat([row.q[0][-1:] for row in scene.rows])
    weights = torch.randn(4, 4, generator=torch.Generator().manual_seed(1)).cuda()
    out, chosen = torch.empty(4, 4, 64, device="cuda"), torch.empty(4, count, dtype=torch.int32, device="cuda")

    def work() -> None:
        scene.backend.plan(step)
        chosen.copy_(scene.backend.choose(0, step, q, weights, count))  # type: ignore[attr-defined]
        scene.backend.run(0, step, q, out, select=chosen)  # type: ignore[call-arg]

    def setup(now: tuple[int, ...]) -> None:
        step.seq_lens.copy_(torch.tensor(now))
        step.positions.copy_(torch.tensor(now) - 1)

    setup((20, 60, 1, 95))
    scene.backend.prepare(step)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()
    for now in ((20, 60, 1, 95), (1500, 97, 3, 20000), (96, 700, 2, 10024)):
        setup(now)
        out.fill_(math.nan)
        graph.replay()
        for i, n in enumerate(now):
            keys = scene.rows[i].k[0][:n, 0]
            best = choose(q[i : i + 1], weights[i : i + 1], keys, torch.tensor([n], device="cuda"), count, 64**-0.5)[0]
            assert set(chosen[i].tolist()) == set(best.tolist()), f"row {i} of {n} tokens"
            held = keys[best[best >= 0].long()].double()
            right = (q[i].double() @ held.T * 64**-0.5).softmax(1) @ held
            assert float((out[i].double() - right).abs().max()) < 1e-5, f"row {i} of {n} tokens"
