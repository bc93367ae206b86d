"""attention_triton on a GPU: against float64 in hostile memory, graphs against eager, the same bits twice (S10, S21, S24).

Shapes are covered pairwise: what differs is dtype, dims, group, page, window, sinks, soft-cap, cache precision, and whether rows
decode, prefill or both.
"""

from __future__ import annotations

import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.attention_case import Built, Case, build

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.skipif(not torch.cuda.is_available(), reason="torch sees no CUDA device"),
]
pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "attention_triton" / "src"))

from octavo.catalog import Accept, Device, Needs  # noqa: E402
from octavo_attention_triton.backend import TritonAttention  # noqa: E402
from octavo_attention_triton.provider import TritonOptions, accepts  # noqa: E402

LENS = (1, 15, 16, 17, 63, 64, 65, 127, 128, 129, 257, 1000)
ONES = (1,) * len(LENS)
MIXED = (1, 15, 1, 17, 40, 1, 65, 100, 1, 129, 1, 300)
BF16, FP16, FP32, E4M3, E5M2 = "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"

CASES = [
    *(Case(LENS, new, 32, 8, 128, page=page, dtype=BF16) for page in (8, 16, 64, 128) for new in (ONES, MIXED)),
    *(Case(LENS, MIXED, 8, 2, dim, page=16, dtype=BF16) for dim in (64, 80, 96, 112, 192, 256)),
    *(
        Case(LENS, MIXED, heads, kv, 64, page=32, dtype=BF16)
        for heads, kv in ((9, 3), (14, 2), (40, 8), (24, 1), (32, 32), (7, 7))
    ),
    Case(LENS, ONES, 24, 1, 128, page=24, dtype=BF16),
    Case(LENS, MIXED, 8, 8, 128, page=16, dtype=FP16),
    Case(LENS, MIXED, 8, 2, 112, page=40, dtype=FP16, softcap=20.0),
    Case(LENS, MIXED, 8, 2, 64, page=16, dtype=FP32),
    Case(LENS, MIXED, 8, 2, 128, page=64, dtype=FP32, window=50, sinks=True),
    *(Case(LENS, MIXED, 16, 4, 128, page=p, dtype=BF16, kv_dtype=E4M3, k_scale=0.3, v_scale=1.7) for p in (16, 64, 128)),
    Case(LENS, ONES, 16, 4, 64, page=128, dtype=BF16, kv_dtype=E4M3, k_scale=0.3, v_scale=1.7),
    Case(LENS, MIXED, 16, 4, 80, page=16, dtype=FP16, kv_dtype=E4M3),
    Case(LENS, MIXED, 16, 4, 96, page=64, dtype=BF16, kv_dtype=E5M2, k_scale=0.5),
    Case(LENS, MIXED, 8, 2, 64, page=32, dtype=FP32, kv_dtype=E4M3),
    *(Case(LENS, MIXED, 8, 2, 64, page=p, dtype=BF16, window=50, sinks=True, softcap=20.0) for p in (8, 64)),
    Case((3000, 700, 64), (1, 1, 1), 8, 2, 128, page=16, dtype=BF16, window=128, sinks=True),
    Case((3000, 700, 64), (900, 700, 1), 8, 2, 128, page=64, dtype=BF16, window=128, softcap=20.0),
    Case((300, 1290), (300, 5), 8, 2, 192, 128, page=64, dtype=BF16, sinks=True),
    Case((9000, 20), (1, 1), 8, 8, 128, page=16, dtype=BF16),
    Case((9000, 20), (1, 1), 8, 8, 128, page=64, dtype=BF16, kv_dtype=E4M3),
]
BARS = {BF16: 2e-2, FP16: 2e-3, FP32: 1e-5}


def device() -> Device:
    index = torch.cuda.current_device()
    facts = torch.cuda.get_device_properties(index)
    return Device("cuda", index, facts.name, (facts.major, facts.minor), facts.total_memory)


def backend(**options: Any) -> Any:
    return lambda parts: TritonAttention(TritonOptions(**options), parts)


def agrees(got: tuple[torch.Tensor, torch.Tensor], want: tuple[torch.Tensor, torch.Tensor], case: Case) -> None:
    bar = BARS[case.dtype]
    if case.kv != case.dtype and case.dtype != FP32:
        bar = max(bar, 4e-2 if case.dtype == BF16 else 4e-3)  # outputs grow with v_scale, and so do their roundings
    error, lse_error = ((g - w).abs().max() for g, w in zip(got, want, strict=True))
    assert error < bar, f"out is off by {error}"
    assert lse_error < max(bar / 10, 1e-4), f"lse is off by {lse_error}"


@pytest.mark.parametrize(
    "options", [{}, {"merge": "fused", "prefill": "portable"}, {"merge": "kernel"}], ids=["auto", "fused", "kernel"]
)
@pytest.mark.parametrize("case", CASES, ids=str)
def test_attention_is_what_float64_says_and_no_other_block_is_touched(case: Case, options: dict[str, Any]) -> None:
    if options.get("merge") == "kernel" and max(case.new) > 1:
        pytest.skip("the merge of split rows is a matter of decoding rows, which the pure decode cases have")
    built = build(case, backend(**options), device())
    agrees(built.run(), built.oracle(), case)
    assert built.guards_intact(), "a block outside the pool was written"


def test_a_step_gives_the_same_bits_twice() -> None:
    case = Case((9000, 700, 64), (1, 1, 300 - 299), 32, 8, 128, page=64, dtype=BF16)
    for options in ({"merge": "fused"}, {"merge": "kernel"}):
        built = build(case, backend(**options), device())
        first, second = built.run(), built.run()
        assert torch.equal(first[0], second[0]), "out differs"
        assert torch.equal(first[1], second[1]), "lse differs"


@pytest.mark.parametrize("merge", ["fused", "kernel"])
@pytest.mark.parametrize("kv_dtype", [BF16, E4M3])
def test_a_captured_graph_serves_other_lengths(merge: str, kv_dtype: str) -> None:
    """Captured at one set of lengths, replayed at others, with a row that is padding; the second layer too."""
    case = Case((1000, 300, 64, 2000), (1, 1, 1, 1), 16, 4, 128, page=64, dtype=BF16, kv_dtype=kv_dtype, layers=2)
    built = build(case, backend(merge=merge), device())
    out, lse = built.outputs()
    step, k, v = built.step, built.new_k.clone(), built.new_v.clone()

    def work() -> None:
        built.backend.plan(step)
        for layer in range(case.layers):
            built.backend.write(layer, step, k, v)
            built.backend.run(layer, step, built.q, out, lse=lse)

    built.backend.prepare(step)
    stream = torch.cuda.Stream()
    stream.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(stream):
        work()
    torch.cuda.current_stream().wait_stream(stream)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        work()

    for lens in ((1000, 300, 64, 2000), (17, 300, 1, 1999), (512, 256, 63, 128), (1, 299, 0, 65)):
        out.fill_(math.nan), lse.fill_(math.nan)
        step.seq_lens.copy_(torch.tensor(lens))
        slots = []
        for row, n in enumerate(lens):
            if n:
                k[row], v[row] = built.keys[row][n - 1].to(k), built.values[row][n - 1].to(v)
            table = step.tables[0][step.rows[row]]
            slots.append(int(table[(n - 1) // case.page]) * case.page + (n - 1) % case.page if n else -1)
        step.slot_mapping[0].copy_(torch.tensor(slots))
        graph.replay()
        rows = [row for row, n in enumerate(lens) if n]
        short = replace(case, lens=tuple(lens[r] for r in rows), new=(1,) * len(rows))
        want = Built(
            short,
            None,
            step,
            built.q[rows],
            [built.keys[r][: lens[r]] for r in rows],
            [built.values[r][: lens[r]] for r in rows],
            [],
            None,
        ).oracle()
        agrees((out[rows].cpu().double(), lse[rows].cpu().double()), want, short)
        for row, n in enumerate(lens):
            if not n:
                assert bool((out[row] == 0).all()), "a padding row's output is not zero"


def test_blocks_are_copied_in_every_layer_before_any_is_overwritten() -> None:
    case = Case((64, 64), (1, 1), page=16, dtype=BF16, kv_dtype=E4M3, layers=2)
    built = build(case, backend(), device())
    pool = [cache[2:-2] for cache in built.caches]
    before = [p.view(torch.uint8).clone() for p in pool]
    source, target = (torch.tensor(x, device="cuda") for x in ([0, 1], [1, 2]))
    built.backend.copy_blocks(0, source, target)
    for old, now in zip(before, pool, strict=True):
        assert torch.equal(now.view(torch.uint8)[target], old[source])


def test_every_case_is_one_that_the_provider_accepts() -> None:
    for case in CASES:
        from octavo.interfaces import AttentionLayer

        layer = AttentionLayer(0, case.heads, case.kv_heads, case.k_dim, case.values, 1.0, case.window, case.softcap)
        needs = Needs("attention", device(), case.dtype, {"layers": (layer,), "kv_dtype": case.kv, "block_size": case.page})
        assert isinstance(accepts(needs, TritonOptions()), Accept), str(case)
