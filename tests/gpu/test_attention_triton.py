"""attention_triton on a GPU: the conformance suite of backends, and what is particular to this one.

Particular: two prefill kernels, two ways to add up the parts of a split row, pages that are found by one look-up or by many,
transposed FP8 values, and graphs whose lengths change between replays.
"""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "attention_triton" / "src"))
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "ops_triton" / "src"))

from octavo.bench.kernel import cuda_device
from octavo.testing.attention import AttentionSuite, AttentionTarget, check
from octavo.testing.paged import Scene, Shape
from octavo_attention_triton.provider import TritonOptions, provider
from octavo_attention_triton.tuning import PACKED

from tests.gpu.backends import LENGTHS, WORK, check_a_captured_graph, check_a_step_of_all_kinds, check_it_repeats

pytestmark = pytest.mark.gpu

BF16, FP16, FP32, E4M3, E5M2 = "bfloat16", "float16", "float32", "float8_e4m3fn", "float8_e5m2"


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
    check_a_step_of_all_kinds(target(**options).scene(shape, LENGTHS))


@pytest.mark.parametrize(
    "shape",
    [
        Shape((16, 8), 128, block_size=64, dtype=BF16),
        Shape((8, 8), 128, block_size=16, dtype=FP16, window=50, sinks=True, softcap=20.0),
        Shape((16, 8), 128, block_size=64, dtype=BF16, kv_dtype=E4M3, k_scale=0.3, v_scale=0.7),
        Shape((32, 8), 128, block_size=128, dtype=BF16, kv_dtype=E4M3, window=70, sinks=True),
        Shape((16, 8), 128, block_size=64, dtype=FP16, kv_dtype=E5M2, k_scale=0.5),
    ],
    ids=str,
)
def test_rows_that_fill_the_device_many_times_over(shape: Shape) -> None:
    lengths = [1 + 37 * i % 211 for i in range(200)]
    scene = target().scene(shape, lengths)
    work = [(i, n - 1, 1) for i, n in enumerate(lengths)]
    assert len(work) * shape.heads[1] >= PACKED * torch.cuda.get_device_properties(0).multi_processor_count
    scene.fill([start for _, start, _ in work])
    check(scene, work, lse=True)


@pytest.mark.parametrize(
    "shape",
    [
        *(Shape((16, 4), 128, block_size=size, dtype=BF16, kv_dtype=E4M3, k_scale=0.3, v_scale=0.7) for size in (16, 64, 128)),
        Shape((8, 2), 64, block_size=64, dtype=FP16, kv_dtype=E5M2, window=50, sinks=True, softcap=20.0),
        Shape((8, 8), 128, block_size=64, dtype=BF16, kv_dtype=E4M3, window=150),
    ],
    ids=str,
)
def test_an_fp8_cache_is_prefilled_from_pages_that_are_widened(shape: Shape) -> None:
    if cuda_device().capability[0] != 9:
        pytest.skip("the kernel is for compute capability 9")
    check_a_step_of_all_kinds(target(prefill="hopper").scene(shape, LENGTHS))


@pytest.mark.parametrize("size", [64, 128])
@pytest.mark.parametrize("heads", [(16, 4), (8, 8), (24, 1)])
def test_products_in_fp8_are_off_by_what_rounding_their_operands_takes(heads: tuple[int, int], size: int) -> None:
    """Queries and weights have 3 bits behind the first, so each is off by 1/16 at most, and a sum of many by a share of that."""
    if cuda_device().capability[0] != 9:
        pytest.skip("the kernel is for compute capability 9")
    shape = Shape(heads, 128, block_size=size, dtype=BF16, kv_dtype=E4M3, k_scale=0.3, v_scale=0.7)
    scene = target(prefill="hopper", fp8_products=True).scene(shape, LENGTHS)
    scene.fill([start for _, start, _ in WORK])
    for item, answer in zip(WORK, scene.run(WORK, lse=True), strict=True):
        right = scene.expected(item)
        assert torch.isfinite(answer.out).all(), item
        assert float((answer.out.double() - right.out).norm() / right.out.norm()) < 0.05, item
        assert float((answer.lse.double() - right.lse).abs().max()) < 0.1, item
    scene.check_untouched()


@pytest.mark.parametrize("merge", ["fused", "kernel"])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_a_row_of_many_parts_is_added_up_the_same_way_every_time(merge: str, kv_dtype: str | None) -> None:
    check_it_repeats(target(merge=merge).scene(Shape((8, 8), 128, block_size=64, dtype=BF16, kv_dtype=kv_dtype), [9000, 20]))


@pytest.mark.parametrize("merge", ["fused", "kernel"])
@pytest.mark.parametrize("kv_dtype", [None, E4M3])
def test_a_captured_graph_serves_other_lengths_and_padding_rows(merge: str, kv_dtype: str | None) -> None:
    shape = Shape((16, 4), 128, block_size=64, dtype=BF16, kv_dtype=kv_dtype)
    check_a_captured_graph(target(merge=merge).scene(shape, (1000, 300, 64, 2000), layers=2))


def test_a_hopper_prefill_that_cannot_be_is_refused_when_bound() -> None:
    if cuda_device().capability[0] != 9:
        pytest.skip("the kernel is for compute capability 9")
    shape = Shape((8, 2), 96, dtype=BF16)
    with pytest.raises(ValueError, match=r"prefill=hopper needs .* dims 96 and 96"):
        Scene(target(prefill="hopper").build(BF16), shape, cuda_device(), [20])
