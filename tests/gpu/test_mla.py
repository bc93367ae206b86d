"""triton_latent on a GPU: the conformance suite of latent caches with either kernel, and graphs whose lengths change."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "attention_triton" / "src"))

from octavo.bench.kernel import cuda_device
from octavo.testing.attention import AttentionTarget
from octavo.testing.latent import SHAPES, LatentSuite, latent
from octavo.testing.paged import Scene
from octavo_attention_triton.latent_provider import LatentOptions, provider

from tests.gpu.backends import check_a_captured_graph, check_it_repeats

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
    check_it_repeats(target().scene(latent(128, 512, 64, BF16), [9000, 20]))


@pytest.mark.parametrize("kernel", ["auto", "portable"])
def test_a_captured_graph_serves_other_lengths_and_padding_rows(kernel: str) -> None:
    check_a_captured_graph(target(kernel).scene(latent(128, 512, 64, BF16), (1000, 300, 64, 2000), layers=2))


def test_a_hopper_kernel_that_cannot_be_is_refused_when_bound() -> None:
    if cuda_device().capability[0] != 9:
        pytest.skip("the kernel is for compute capability 9")
    with pytest.raises(ValueError, match=r"kernel=hopper needs .* 256 \+ 64"):
        Scene(target("hopper").build(BF16), latent(64, 256, 64, BF16), cuda_device(), [20])
