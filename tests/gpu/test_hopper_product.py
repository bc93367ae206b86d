"""ops_triton's product of many rows on a Hopper GPU: against float64, at edges of its tiles, and behind the operator "matrix"."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
    pytest.skip("torch sees no CUDA device of capability 9", allow_module_level=True)
pytest.importorskip("triton", reason="triton is not installed")
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "ops_triton" / "src"))

from octavo.bench.kernel import cuda_device
from octavo.interfaces import OperatorParts
from octavo.model import operators as oracle
from octavo_ops_triton.kernels.hopper_product import GatedProduct
from octavo_ops_triton.launch import Launcher
from octavo_ops_triton.matrix import GATED_ROWS
from octavo_ops_triton.operators import TritonOperators
from octavo_ops_triton.provider import TritonOptions

pytestmark = pytest.mark.gpu

BF16, FP16 = torch.bfloat16, torch.float16
ROUNDING = {BF16: 2.0**-8, FP16: 2.0**-11}


def near(got: Tensor, want: Tensor) -> None:
    """got is want (float64), rounded once; a sum of float32 is off by little beside that."""
    error = (got.double() - want).abs()
    bound = ROUNDING[got.dtype] * (want.abs() + want.abs().mean())
    assert not got.isnan().any() and bool((error <= bound).all()), float((error / bound).max())


def values(*shape: int, dtype: torch.dtype = BF16) -> Tensor:
    return torch.randn(*shape, device="cuda").to(dtype)


def poison(rows: int, columns: int, dtype: torch.dtype) -> None:
    """Leave NaN where the next tensor of this size will lie, so that a value that is not written shows."""
    torch.full((rows, columns), float("nan"), dtype=dtype, device="cuda")


def gated(x: Tensor, weight: Tensor, activation: str) -> Tensor:
    """The definition, in float64."""
    return {"silu": oracle.silu_mul, "gelu_tanh": oracle.gelu_tanh_mul}[activation](x.double() @ weight.double().t())


@pytest.mark.parametrize(
    ("rows", "columns", "k", "dtype"),
    [
        (128, 256, 64, BF16),  # one tile
        (1, 8, 8, BF16),  # less than a tile of anything
        (300, 264, 1000, FP16),  # a few columns and rows past a tile, K that no box divides
        (5000, 1408, 4096, BF16),  # several tiles a program, groups of row tiles that are not full
    ],
)
@pytest.mark.parametrize("activation", ["silu", "gelu_tanh"])
def test_a_product_is_what_float64_says(rows: int, columns: int, k: int, dtype: torch.dtype, activation: str) -> None:
    torch.manual_seed(rows)
    x, weight = values(rows, k, dtype=dtype), values(2 * columns, k, dtype=dtype) / k**0.5
    product = GatedProduct(Launcher(pdl=True), weight, activation)
    poison(rows, columns, dtype)
    got = product(x)
    assert got.shape == (rows, columns) and got.dtype == dtype
    near(got, gated(x, weight, activation))


def test_a_product_repeats_bit_for_bit_and_in_a_graph() -> None:
    x, weight = values(3000, 512), values(2048, 512) / 23
    product = GatedProduct(Launcher(pdl=True), weight, "silu")
    first = product(x)
    assert all(torch.equal(first, product(x)) for _ in range(20))
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        captured = product(x)
    captured.fill_(float("nan"))
    graph.replay()
    assert torch.equal(first, captured)


def test_rows_that_cannot_be_copied_are_refused_with_their_strides() -> None:
    product = GatedProduct(Launcher(pdl=True), values(256, 512), "silu")
    for x in (values(4, 256), values(4, 512, dtype=FP16), values(4, 513)[:, 1:]):
        with pytest.raises(ValueError, match="gated product: x"):
            product(x)
    with pytest.raises(ValueError, match="not dense"):
        product(values(512, 4).t())


@pytest.mark.parametrize("rows", [1, 17, 200, GATED_ROWS, GATED_ROWS + 300])
def test_a_gated_mlp_of_any_number_of_rows(rows: int) -> None:
    ops: dict[str, Any] = {
        name: op for (name, _), op in TritonOperators(TritonOptions(), OperatorParts(cuda_device(), "bfloat16")).ops.items()
    }
    x, weight = values(rows, 1024), values(6144, 1024) / 32
    matrix = ops["matrix"](weight, None, head=False)
    product = x.double() @ weight.double().t()
    near(matrix(x), product)
    got = matrix.gated("silu")(x)
    want = gated(x, weight, "silu")
    # Fewer rows go through a product that is rounded before the activation: three roundings of values about as large.
    assert bool(((got.double() - want).abs() <= 4 * ROUNDING[BF16] * (want.abs() + want.abs().mean())).all())
    assert matrix.gated("relu") is None, "an activation that no kernel has"


def test_what_the_matrix_leaves_to_core() -> None:
    ops: dict[str, Any] = {
        name: op for (name, _), op in TritonOperators(TritonOptions(), OperatorParts(cuda_device(), "bfloat16")).ops.items()
    }
    weight = values(256, 512)
    assert ops["matrix"](weight, None, head=True) is None, "a head's result is float32"
    assert ops["matrix"](weight, values(256), head=False) is None
    assert ops["matrix"](weight.float(), None, head=False) is None
    assert ops["matrix"](values(256, 516), None, head=False) is None, "rows of 1032 bytes"
