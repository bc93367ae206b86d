"""Which product a matrix takes, and that a small one is asked only where it wins."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from octavo.model.matrix import Matrix, Offers, PlainMatrix, head_matrix, layer_matrix, packs
from torch import Tensor


class Small:
    """A small product in plain torch that wins for one and two rows, and counts its calls."""

    def __init__(self) -> None:
        self.rows: list[int] = []

    def __call__(self, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        self.rows.append(len(x))
        return (x.float() @ weight.float().t()).to(dtype or x.dtype)

    def wins(self, m: int, n: int, k: int) -> bool:
        return m <= 2


@pytest.fixture
def unpacked(monkeypatch: pytest.MonkeyPatch) -> None:
    """A device whose matrices lie as they are, such as a GPU."""
    monkeypatch.setattr("octavo.model.matrix.packs", lambda device, dtype: False)


@pytest.mark.parametrize("rows", [1, 2, 3, 17])
def test_a_small_product_serves_the_steps_that_it_wins(unpacked: None, rows: int) -> None:
    small = Small()
    weight, x = torch.randn(24, 16).bfloat16(), torch.randn(rows, 16).bfloat16()
    y = layer_matrix(weight, None, Offers(small=small))(x)
    assert small.rows == ([rows] if rows <= 2 else [])
    torch.testing.assert_close(y.double(), x.double() @ weight.double().t(), atol=0.1, rtol=0.02)


def test_a_bias_or_float32_does_without_the_small_product(unpacked: None) -> None:
    small = Small()
    x = torch.randn(1, 16)
    layer_matrix(torch.randn(24, 16), None, Offers(small=small))(x)
    layer_matrix(torch.randn(24, 16).bfloat16(), torch.randn(24).bfloat16(), Offers(small=small))(x.bfloat16())
    assert small.rows == []


class Maker:
    """A maker of matrices with an even number of rows."""

    name = "even"

    def __init__(self) -> None:
        self.asked: list[tuple[int, bool]] = []

    def __call__(self, weight: Tensor, bias: Tensor | None, *, head: bool) -> PlainMatrix | None:
        self.asked.append((len(weight), head))
        return None if len(weight) % 2 else PlainMatrix(weight, bias)


@pytest.mark.parametrize(("make", "head"), [(layer_matrix, False), (head_matrix, True)])
def test_a_matrix_is_made_by_who_offers_it_and_by_core_where_that_gives_none(make: Callable[..., Matrix], head: bool) -> None:
    maker = Maker()
    assert isinstance(make(torch.randn(6, 16).bfloat16(), None, Offers(matrix=maker)), PlainMatrix)
    other = make(torch.randn(7, 16).bfloat16(), None, Offers(matrix=maker))
    assert not isinstance(other, PlainMatrix) or not packs("cpu", torch.bfloat16)
    assert maker.asked == [(6, head), (7, head)]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("rows", [1, 5])
def test_a_head_gives_float32_logits_without_rounding_them(dtype: torch.dtype, rows: int) -> None:
    weight, x = (torch.randn(300, 64) * 4).to(dtype), torch.randn(rows, 64).to(dtype)
    logits = head_matrix(weight, None)(x)
    assert logits.dtype == torch.float32
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().t(), atol=2e-4, rtol=1e-5)


def test_a_bfloat16_head_whose_values_do_not_fit_float16_is_kept_wide() -> None:
    weight = torch.randn(32, 16).bfloat16()
    weight[3, 4] = 1e6
    x = torch.randn(2, 16).bfloat16()
    logits = head_matrix(weight, None)(x)
    assert torch.isfinite(logits).all()
    torch.testing.assert_close(logits.double(), x.double() @ weight.double().t(), atol=1e-1, rtol=1e-5)


def test_packing_is_for_cpus_only() -> None:
    assert not packs("cuda", torch.bfloat16)
