"""quant_awq on a GPU: every checkpoint layout through the conformance suite of quantizers on either kernel, and what loading holds."""

from __future__ import annotations

import gc
from typing import TYPE_CHECKING

import pytest
import torch

if not torch.cuda.is_available():
    pytest.skip("torch sees no CUDA device", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")

from octavo.bench.kernel import cuda_device
from octavo.testing.quantizer import QuantizerSuite, QuantizerTarget, random_weight

from tests.plugins.fourbit import LAYOUTS, cut_gemm

if TYPE_CHECKING:
    from octavo_quant_awq.gpu import GpuMatrix

pytestmark = pytest.mark.gpu


def target(layout: str, group: int, dtypes: tuple[str, ...], kernel: str = "cuda") -> QuantizerTarget:
    from octavo_quant_awq import provider

    made = LAYOUTS[layout]
    config = made.config(group)
    by_method = {"awq": provider.awq, "gptq": provider.gptq, "compressed-tensors": provider.pack_quantized}
    return QuantizerTarget(
        by_method[str(config["quant_method"])],
        cuda_device(),
        dtypes,
        made.store(group),
        config,
        options=provider.FourBitOptions(kernel=kernel),  # type: ignore[arg-type]
        inputs_multiple=max(group, 8),
        cut=cut_gemm if layout == "gemm" else None,
    )


class TestGemm128(QuantizerSuite):
    target = target("gemm", 128, ("bfloat16", "float16"))


class TestGemv64(QuantizerSuite):
    target = target("gemv", 64, ("bfloat16",))


class TestGptq32(QuantizerSuite):
    target = target("gptq", 32, ("float16",))


class TestPackedWhole(QuantizerSuite):
    target = target("packed", -1, ("bfloat16",))


class TestPackedAsymmetric32(QuantizerSuite):
    target = target("packed-asymmetric", 32, ("bfloat16",))


class TestTritonGemm128(QuantizerSuite):
    target = target("gemm", 128, ("bfloat16",), "triton")


class TestTritonPacked32(QuantizerSuite):
    target = target("packed-asymmetric", 32, ("float16",), "triton")


def matrix_and_weight(inputs: int, outputs: int, kernel: str) -> tuple[GpuMatrix, torch.Tensor]:
    """Random weights in groups of 64, in memory and in float64."""
    from octavo_quant_awq.gpu import GpuMatrix

    from tests.plugins.fourbit import rounded

    integers = rounded(random_weight(outputs, inputs), 64)
    matrix = GpuMatrix(
        outputs, inputs, 64, zeros=True, bias=False, dtype=torch.bfloat16, device=torch.device("cuda", 0), kernel=kernel  # type: ignore[arg-type]
    )  # fmt: skip
    q, z, s = (torch.from_numpy(part).cuda() for part in (integers.q, integers.z, integers.s))
    matrix.put_q(0, q.to(torch.uint8))
    matrix.put_zeros(0, z.to(torch.uint8))
    matrix.put_scales(0, s)
    matrix.finish()
    return matrix, integers.weight.cuda()


def check_products(matrix: GpuMatrix, weight: torch.Tensor, counts: tuple[int, ...]) -> None:
    for rows in counts:
        x = torch.randn(rows, weight.shape[1], device="cuda").bfloat16()
        right = x.double() @ weight.T
        error = float((matrix(x).double() - right).norm() / right.norm())
        assert error < 4e-3, f"{rows} rows: off by {error:.1e}"


SHAPES = [(4096, 4096), (1536, 576), (14336, 1024), (576, 1536), (640, 8976), (1024, 6144), (4096, 14336), (2112, 11272)]


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
@pytest.mark.parametrize("kernel", ["cuda", "triton"])
def test_both_kernels_at_the_shapes_of_models(inputs: int, outputs: int, kernel: str) -> None:
    """Every number of rows about the borders between kernels; cut K, clusters and padded tokens among them."""
    matrix, weight = matrix_and_weight(inputs, outputs, kernel)
    assert torch.equal(matrix.weights(0, outputs), weight.bfloat16())
    assert torch.equal(matrix.weights(37, outputs), weight[37:].bfloat16())
    check_products(matrix, weight, (1, 2, 3, 4, 5, 8, 9, 16, 17, 32, 33, 64, 65, 128, 129, 300, 512, 1025, 3584, 3585, 4096))


VARIANTS = [  # group, dtype, scales' dtype, zero points, bias
    (32, "bfloat16", "float16", True, False),
    (64, "float16", "float16", False, True),
    (128, "bfloat16", "float16", True, False),
    (128, "bfloat16", "bfloat16", False, True),
    (128, "float16", "float16", True, False),
    (-1, "bfloat16", "float16", True, True),
]


def random_matrix(
    inputs: int, outputs: int, group: int, dtype: str, scale_dtype: str, zeros: bool, bias: bool
) -> tuple[GpuMatrix, torch.Tensor, torch.Tensor]:
    """A matrix of random integers, its weights in float64 and its bias, a zero without one."""
    from octavo_quant_awq.gpu import GpuMatrix
    from octavo_quant_awq.packing import Grouped

    group, kind = inputs if group < 0 else group, getattr(torch, dtype)
    q = torch.randint(0, 16, (outputs, inputs), dtype=torch.uint8, device="cuda")
    s = (torch.rand(outputs, inputs // group, device="cuda") * 0.01 + 0.001).to(getattr(torch, scale_dtype))
    z = torch.randint(0, 16, s.shape, dtype=torch.uint8, device="cuda") if zeros else None
    matrix = GpuMatrix(outputs, inputs, group, zeros=zeros, bias=bias, dtype=kind, device=torch.device("cuda", 0), kernel="cuda")
    matrix.put_q(0, q)
    matrix.put_scales(0, s)
    shift = torch.randn(outputs, device="cuda").to(kind) if bias else torch.zeros((), device="cuda")
    if z is not None:
        matrix.put_zeros(0, z)
    if bias:
        matrix.put_bias(0, shift)
    matrix.finish()
    return matrix, Grouped(q, s, z, group).dequantised(torch.float64), shift.double()


def check_few_rows(matrix: GpuMatrix, weight: torch.Tensor, shift: torch.Tensor, dtype: str, counts: tuple[int, ...]) -> None:
    """Products with so many rows, each row right by itself: one with outliers, one of small numbers; the same twice."""
    kind, (outputs, inputs) = getattr(torch, dtype), weight.shape
    for rows in counts:
        x = torch.randn(rows, inputs, device="cuda")
        x[0, ::97] *= 1e4
        x[-1] *= 1e-6
        x = x.to(kind)
        right = x.double() @ weight.T + shift
        found = matrix(x)
        smallest = float(torch.finfo(kind).smallest_normal * torch.finfo(kind).eps)
        allowed = 2.6e-3 * right.norm(dim=1) + smallest * outputs**0.5
        errors = (found.double() - right).norm(dim=1)
        assert (errors <= allowed).all(), f"{rows} rows: off by {(errors / right.norm(dim=1)).tolist()}"
        assert torch.equal(found, matrix(x))


@pytest.mark.parametrize(("inputs", "group"), [(1056, 32), (1088, 64), (1152, 128), (4096, 128), (4096, -1)])
@pytest.mark.parametrize(("dtype", "scale_dtype"), [("bfloat16", "float16"), ("bfloat16", "bfloat16"), ("float16", "float16")])
@pytest.mark.parametrize(("zeros", "bias"), [(True, False), (False, True)])
def test_products_whose_x_stands_in_registers(
    inputs: int, group: int, dtype: str, scale_dtype: str, zeros: bool, bias: bool
) -> None:
    """Every variant of stationary.cu: groups of a block and less, a cut last block, warps without one, outputs that fill no tile."""
    matrix, weight, shift = random_matrix(inputs, 11272, group, dtype, scale_dtype, zeros, bias)
    check_few_rows(matrix, weight, shift, dtype, (2, 5, 8, 9, 13, 16))
    assert set(matrix._few._standing) == {8, 16}  # type: ignore[union-attr]


@pytest.mark.parametrize(("group", "dtype", "scale_dtype", "zeros", "bias"), VARIANTS)
def test_products_whose_inputs_are_shared(group: int, dtype: str, scale_dtype: str, zeros: bool, bias: bool) -> None:
    """Every variant of split.cu; a strip with one tile, so that a cluster has a block without weights."""
    matrix, weight, shift = random_matrix(8192, 4112, group, dtype, scale_dtype, zeros, bias)
    check_few_rows(matrix, weight, shift, dtype, tuple(range(2, 17)))
    assert set(matrix._few._split_shapes) == {8, 16}  # type: ignore[union-attr]


@pytest.mark.parametrize(("group", "dtype", "scale_dtype", "zeros", "bias"), VARIANTS)
def test_products_of_other_few_rows(group: int, dtype: str, scale_dtype: str, zeros: bool, bias: bool) -> None:
    """narrow.cu with one row, and with more where stationary.cu serves not; ring.cu."""
    matrix, weight, shift = random_matrix(1024, 2064, group, dtype, scale_dtype, zeros, bias)
    check_few_rows(matrix, weight, shift, dtype, (1, 2, 4, 7, 8, 9, 16, 17, 32))


@pytest.mark.parametrize(("inputs", "outputs"), [(4096, 11272), (8192, 4112)])
@pytest.mark.parametrize("group", [64, 128])
def test_large_and_other_numbers_in_x(inputs: int, outputs: int, group: int) -> None:
    """Up to 2^62 products are right; what is infinite or no number in x leaves nothing finite in its row, and the other rows as they are."""
    matrix, weight, _ = random_matrix(inputs, outputs, group, "bfloat16", "float16", True, False)
    x = torch.randn(16, inputs, device="cuda").clamp(-3.9, 3.9)
    x[3] *= 2.0**60
    x = x.bfloat16()
    right, found = x.double() @ weight.T, matrix(x)
    errors = (found.double() - right).norm(dim=1) / right.norm(dim=1)
    assert (errors < 4e-3).all(), f"off by {errors.tolist()}"
    x[5, 7], x[6, 9] = float("inf"), float("nan")
    other = matrix(x)
    assert not other[5:7].isfinite().any()
    assert torch.equal(other[:5], found[:5]) and torch.equal(other[7:], found[7:])


@pytest.mark.parametrize(("inputs", "outputs"), SHAPES)
def test_the_kernel_of_older_gpus_runs_here_too(inputs: int, outputs: int, monkeypatch: pytest.MonkeyPatch) -> None:
    from octavo_quant_awq.kernels import products

    monkeypatch.setattr(products, "is_hopper", lambda device: False)
    matrix, weight = matrix_and_weight(inputs, outputs, "cuda")
    check_products(matrix, weight, (1, 4, 8, 9, 16, 17, 32, 33, 64, 65))


@pytest.mark.parametrize("outputs", [1024, 9216])
def test_few_rows_of_uneven_size_lose_nothing(outputs: int) -> None:
    """Groups that differ by many powers of two in x, and a row of zeros: the scaling of x for float16 operands is undone exactly."""
    matrix, weight = matrix_and_weight(640, outputs, "cuda")
    for rows in (1, 3, 8):
        x = torch.randn(rows, 640, device="cuda") * torch.logspace(-12, 4, 10, device="cuda").repeat_interleave(64)
        for last in (x, x.flip(1)):
            x = last.bfloat16()
            x[-1, 128:256] = 0
            right = x.double() @ weight.T
            error = float((matrix(x).double() - right).norm() / right.norm())
            assert error < 4e-3, f"{rows} rows: off by {error:.1e}"
        assert not matrix(torch.zeros_like(x)).any()


def test_parts_of_many_inputs_meet_in_every_strip() -> None:
    """33 strips of outputs, the last with one tile, so that a cluster has a block without weights; groups of 64."""
    matrix, weight = matrix_and_weight(8192, 4112, "cuda")
    check_products(matrix, weight, tuple(range(1, 18)))


def test_matrices_whose_kernels_differ_in_memory_alone() -> None:
    """The second needs less shared memory with the same code: launches of the first are still allowed what they need."""
    first, first_weight = matrix_and_weight(3072, 2128, "cuda")
    second, second_weight = matrix_and_weight(2048, 2128, "cuda")
    check_products(second, second_weight, (1, 8, 16))
    check_products(first, first_weight, (1, 8, 16))


@pytest.mark.parametrize("rows", [2, 8, 9, 16])
def test_overlapping_launches_share_where_parts_meet(rows: int) -> None:
    """A graph of dependent launches, one matrix several times and twice in a row among them, replayed with other inputs; each result from what its
    product was given, and the same bits each time."""
    down, down_weight = matrix_and_weight(14336, 1024, "cuda")
    up, up_weight = matrix_and_weight(1024, 14336, "cuda")
    x, other = (torch.empty(rows, 14336, dtype=torch.bfloat16, device="cuda") for _ in range(2))

    def chain() -> list[tuple[torch.Tensor, torch.Tensor, torch.Tensor]]:
        first, second = down(x), down(other)
        wide = up(first)
        third = down(wide)
        return [(x, down_weight, first), (other, down_weight, second), (first, up_weight, wide), (wide, down_weight, third)]

    chain()
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        steps = chain()
    for _ in range(20):
        x.normal_()
        other.normal_()
        graph.replay()
        once = [step[2].clone() for step in steps]
        for i, (given, weight, result) in enumerate(steps):
            right = given.double() @ weight.T
            error = float((result.double() - right).norm() / right.norm())
            assert error < 4e-3, f"product {i}: off by {error:.1e}"
        graph.replay()
        for i, step in enumerate(steps):
            assert torch.equal(step[2], once[i]), f"product {i}: other bits the second time"


def test_loading_holds_no_more_than_a_tenth_besides() -> None:
    """Tensors come one at a time, as the loader brings them; the highest use of memory against what stays."""
    from octavo.interfaces import QuantizerParts
    from octavo.model.loader import WeightTable
    from octavo_quant_awq.provider import FourBitOptions
    from octavo_quant_awq.quantizer import AwqQuantizer

    table = WeightTable()
    quantizer = AwqQuantizer(FourBitOptions(), QuantizerParts(cuda_device(), "bfloat16", {}, table))
    linears = [quantizer.linear(f"m.{i}", 4096, {"gate_proj": 14336, "up_proj": 14336}) for i in range(8)]
    gc.collect()
    torch.cuda.synchronize()
    torch.cuda.reset_peak_memory_stats()
    before = torch.cuda.memory_allocated()
    for name, shape, dtype in table.wanted("bfloat16"):
        kind = getattr(torch, dtype)
        made = torch.randint(0, 2**30, shape, dtype=kind) if kind == torch.int32 else torch.full(shape, 0.01, dtype=kind)
        table.fill(name, made)
    for linear in linears:
        linear.finish()
    final, peak = torch.cuda.memory_allocated() - before, torch.cuda.max_memory_allocated() - before
    assert final <= 8 * 4096 * 28672 * 2 * 0.27, "the weights take more than 27% of bfloat16"
    assert peak <= 1.1 * final, f"the highest use is {peak / final:.2f} of what stays"
