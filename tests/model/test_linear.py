"""Linear layers: every memory format gives the product of the definition, and no part is left out."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch
from octavo.catalog import Device
from octavo.interfaces import QuantizerParts
from octavo.model.linear import PlainQuantizer
from octavo.model.matrix import (
    HalfMatrix,
    PackedMatrix,
    PlainMatrix,
    WideMatrix,
    has_half_kernel,
    head_matrix,
    layer_matrix,
    packs,
)
from octavo.testing.model import DictWeights
from torch import Tensor


def weights(*shape: int, dtype: torch.dtype, scale: float = 0.1) -> Tensor:
    return (torch.randn(*shape, generator=torch.Generator().manual_seed(1)) * scale).to(dtype)


def right(x: Tensor, weight: Tensor, bias: Tensor | None) -> Tensor:
    product = x.double() @ weight.double().T
    return product if bias is None else product + bias.double()


@pytest.mark.parametrize("rows", [1, 2, 16, 100])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("make", [PlainMatrix, PackedMatrix])
@pytest.mark.parametrize(("dtype", "tolerance"), [(torch.float32, 1e-5), (torch.bfloat16, 2e-2)])
def test_layers(dtype: torch.dtype, tolerance: float, make: Callable[..., object], biased: bool, rows: int) -> None:
    if make is PackedMatrix and not packs("cpu", dtype):
        pytest.skip(f"oneDNN does not pack {dtype} on this processor")
    weight, bias = weights(48, 40, dtype=dtype), weights(48, dtype=dtype) if biased else None
    x = weights(rows, 40, dtype=dtype, scale=1.0)
    found = make(weight, bias)(x)  # type: ignore[operator]
    assert found.dtype == dtype
    assert float((found.double() - right(x, weight, bias)).abs().max()) <= tolerance


@pytest.mark.parametrize("rows", [1, 5, 64])
@pytest.mark.parametrize("biased", [False, True])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_logits_are_float32_and_not_rounded_on_the_way(dtype: torch.dtype, biased: bool, rows: int) -> None:
    weight, bias = weights(300, 64, dtype=dtype, scale=1.0), weights(300, dtype=dtype) if biased else None
    x = weights(rows, 64, dtype=dtype, scale=1.0)
    found = head_matrix(weight, bias)(x)
    assert found.dtype == torch.float32
    error = float((found.double() - right(x, weight, bias)).abs().max())
    rounded = float((right(x, weight, bias).bfloat16().double() - right(x, weight, bias)).abs().max())
    assert error <= 1e-4 < 1e-2 < rounded


def test_small_and_large_weights_survive_the_half_precision_head() -> None:
    """bfloat16 reaches further than float16 at both ends: small weights keep their sum, large ones their value."""
    if not has_half_kernel():
        pytest.skip("torch has no FBGEMM here")
    small = weights(100, 64, dtype=torch.bfloat16, scale=1e-6)
    x = weights(3, 64, dtype=torch.bfloat16, scale=1.0)
    assert isinstance(head_matrix(small, None), HalfMatrix)
    assert float((head_matrix(small, None)(x).double() - right(x, small, None)).abs().max()) <= 1e-6
    large = weights(100, 64, dtype=torch.bfloat16, scale=1.0)
    large[7, 3] = 1e6
    assert isinstance(head_matrix(large, None), WideMatrix)
    found, expected = head_matrix(large, None)(x).double(), right(x, large, None)
    assert torch.allclose(found, expected, rtol=1e-5, atol=1e-4)


# ---------------------------------------------------------------- parts


def build(dtype: str = "float32") -> tuple[PlainQuantizer, DictWeights]:
    declared = DictWeights()
    return PlainQuantizer(None, QuantizerParts(Device(), dtype, {}, declared)), declared


@pytest.mark.parametrize("order", [(0, 1, 2, 3, 4, 5), (5, 3, 1, 0, 2, 4)])
def test_parts_lie_side_by_side_whatever_order_they_come_in(order: tuple[int, ...]) -> None:
    quantizer, declared = build()
    linear = quantizer.linear("layer.attn", 8, {"q": 6, "k": 4, "v": 4}, bias=True)
    names = list(declared.declared)
    assert names == [f"layer.attn.{part}.{kind}" for part in "qkv" for kind in ("weight", "bias")]
    tensors = {name: torch.randn(declared.declared[name][0] or ()) for name in names}
    for i in order:
        declared.declared[names[i]][1](tensors[names[i]])
    linear.finish()
    x = torch.randn(3, 8)
    parts = [right(x, tensors[f"layer.attn.{p}.weight"], tensors[f"layer.attn.{p}.bias"]) for p in "qkv"]
    assert linear.out_features == 14
    assert torch.allclose(linear(x).double(), torch.cat(parts, 1), atol=1e-5)


def test_a_head_without_a_prefix_is_declared_by_its_own_name() -> None:
    quantizer, declared = build("bfloat16")
    head = quantizer.linear("", 8, {"lm_head": 20}, head=True)
    assert list(declared.declared) == ["lm_head.weight"]
    declared.declared["lm_head.weight"][1](torch.randn(20, 8))
    head.finish()
    assert head(torch.randn(2, 8, dtype=torch.bfloat16)).dtype == torch.float32


def test_a_linear_that_is_not_wholly_filled_cannot_be_finished() -> None:
    quantizer, declared = build()
    linear = quantizer.linear("mlp", 8, {"gate": 6, "up": 6})
    declared.declared["mlp.gate.weight"][1](torch.randn(6, 8))
    with pytest.raises(RuntimeError, match=r"mlp\.up\.weight"):
        linear.finish()


def test_weights_are_copied_out_of_the_loaders_buffer() -> None:
    quantizer, declared = build("float16")
    linear = quantizer.linear("", 4, {"only": 4})
    buffer = torch.eye(4, dtype=torch.float16)
    declared.declared["only.weight"][1](buffer)
    buffer.fill_(float("nan"))
    linear.finish()
    assert torch.equal(linear(torch.eye(4, dtype=torch.float16)), torch.eye(4, dtype=torch.float16))


def test_the_format_is_named() -> None:
    for dtype in ("float32", "bfloat16"):
        quantizer, _ = build(dtype)
        assert quantizer.path == layer_matrix(torch.zeros(2, 2, dtype=getattr(torch, dtype)), None).name
