"""Keys spread over the channels of a head: the matrix, what it does not change, and what it makes better."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from octavo.attention.layer import PagedAttention
from octavo.attention.torch_backend import TorchAttention
from octavo.catalog import Device
from octavo.interfaces import AttentionLayer, AttentionParts, Step
from octavo.model.operators import qk_norm_rope, qk_norm_rope_spread, spread
from octavo.model.spread import gathered, spread_matrix, whole_matrix
from octavo.testing.paged import Scene, Shape
from torch import Tensor

HEADS = [16, 32, 64, 72, 80, 96, 112, 128, 160, 192, 256]
CPU = torch.device("cpu")
WORK = [(0, 0, 90), (1, 0, 1), (2, 0, 33)]


@pytest.mark.parametrize("dim", HEADS)
def test_the_matrix_is_orthogonal_and_made_of_small_whole_numbers(dim: int) -> None:
    whole, factor = whole_matrix(dim)
    assert int(whole.abs().max()) <= 16 and torch.equal(whole, whole.bfloat16().long()), "not exact in 16 bits"
    matrix = whole.double() * factor
    torch.testing.assert_close(matrix @ matrix.t(), torch.eye(dim, dtype=torch.float64), rtol=0, atol=1e-12)


@pytest.mark.parametrize("dim", [d for d in HEADS if d & (d - 1) == 0])
def test_what_has_one_channel_or_the_same_in_all_is_spread_evenly(dim: int) -> None:
    matrix = spread_matrix(dim, CPU)
    assert torch.equal(matrix.abs(), torch.full((dim, dim), dim**-0.5)), "a channel"
    same = torch.ones(dim) @ matrix
    most = 1.0 if dim.bit_length() % 2 else math.sqrt(2)  # no sequence is flatter where dim is no square
    assert float(same.abs().max()) <= most + 1e-5


@pytest.mark.parametrize("dim", HEADS)
def test_products_of_two_heads_stay_and_a_head_comes_back(dim: int) -> None:
    q, k = torch.randn(5, 3, dim), torch.randn(7, 3, dim)
    torch.testing.assert_close(
        torch.einsum("ahd,bhd->abh", spread(q), spread(k)), torch.einsum("ahd,bhd->abh", q, k), rtol=1e-5, atol=1e-4
    )
    torch.testing.assert_close(gathered(spread(k)), k, rtol=1e-5, atol=1e-5)


def test_the_operator_behind_rope_is_both_in_turn() -> None:
    x, weight, turn = torch.randn(4, 3, 24), torch.randn(3, 24), torch.randn(4, 1, 8)
    cos, sin = torch.cat((turn.cos(),) * 2, -1), torch.cat((-turn.sin(), turn.sin()), -1)
    for w in (weight, None):
        want = spread(qk_norm_rope(x.clone(), w, 1e-5, cos, sin))
        assert torch.equal(qk_norm_rope_spread(x.clone(), w, 1e-5, cos, sin), want)


def scene(shape: Shape) -> Scene:
    return Scene(TorchAttention(None, AttentionParts(Device(), shape.dtype)), shape, Device(), [90, 1, 33])


def attended(shape: Shape, *, spreads: bool, loud: float = 1.0) -> Tensor:
    """What a layer gives for all tokens of three rows. loud: one channel of every q and k is so much larger."""
    made = scene(shape)
    layer = PagedAttention(shape.layer(), made.backend, qk_norm_rope, spread if spreads else None)
    q, k, v = (torch.cat([getattr(row, name)[0] for row in made.rows]) for name in "qkv")
    q[..., 5], k[..., 5] = q[..., 5] * loud, k[..., 5] * loud
    step = made.step(WORK)
    with torch.inference_mode():
        made.backend.prepare(step)
        made.backend.plan(step)
        return layer(step, q, k, v)


@pytest.mark.parametrize(
    "more",
    [{}, {"window": 20}, {"softcap": 3.0}, {"sinks": True}, {"k_dim": 80}, {"k_dim": 96, "v_dim": 64}],
    ids=["plain", "window", "softcap", "sinks", "80 wide", "values less wide"],
)
def test_attention_over_exact_keys_is_unchanged(more: dict[str, Any]) -> None:
    shape = Shape(heads=(4, 2), **more)
    torch.testing.assert_close(attended(shape, spreads=True), attended(shape, spreads=False), rtol=1e-5, atol=2e-5)


@pytest.mark.parametrize("kv_dtype", ["float8_e5m2", "float8_e4m3fn"])
def test_keys_with_a_loud_channel_are_rounded_with_much_less_harm(kv_dtype: str) -> None:
    """The channel is in queries and keys alike, as models have them. Values are rounded too, which spreading leaves alone."""
    exact = attended(Shape(), spreads=False, loud=5.0)
    rounded = Shape(kv_dtype=kv_dtype)
    plain, better = (
        float((attended(rounded, spreads=spreads, loud=5.0) - exact).square().mean().sqrt()) for spreads in (False, True)
    )
    assert better < plain / 2, f"an error of {better:.4f} with spread keys, {plain:.4f} without"


class Prologue(TorchAttention):
    """A backend whose prologue spreads heads of 16 channels and no others, and counts its calls."""

    calls = 0

    def prologue_spreads(self, layer: AttentionLayer) -> bool:
        return layer.k_dim == 16

    def prologue(self, layer: int, step: Step, qkv: Tensor, *args: Any, spread: bool = False) -> Tensor:
        assert spread and qkv.shape[2] == 16
        self.calls += 1
        q, k = qk_norm_rope_spread(qkv[:, :6], *args).split((4, 2), 1)
        self.write(layer, step, k, qkv[:, 6:])
        return q


class Plain(TorchAttention):
    """A backend whose prologue does not spread."""

    def prologue(self, *args: Any) -> Tensor:
        raise AssertionError("it stores keys that are not spread")


@pytest.mark.parametrize(
    ("kind", "dim", "calls"), [(Prologue, 16, 1), (Prologue, 32, 0), (Plain, 16, 0), (TorchAttention, 16, 0)]
)
def test_a_prologue_is_used_where_it_spreads_and_keys_are_read_as_they_came(
    kind: type[TorchAttention], dim: int, calls: int
) -> None:
    shape, turn = Shape(k_dim=dim), torch.randn(124, 1, dim // 2)
    made = Scene(kind(None, AttentionParts(Device(), "float32")), shape, Device(), [90, 1, 33])
    cos, sin = torch.cat((turn.cos(),) * 2, -1), torch.cat((-turn.sin(), turn.sin()), -1)
    qkv = torch.randn(124, 8, dim)
    step = made.step(WORK)
    with torch.inference_mode():
        made.backend.prepare(step)
        made.backend.plan(step)
        layer = PagedAttention(shape.layer(), made.backend, qk_norm_rope_spread, spread)
        layer.turned(step, qkv.clone(), None, 1e-5, cos, sin)
        assert getattr(made.backend, "calls", 0) == calls
        keys, values = layer.read(made.rows[0].slot, 0, 90)
        stored, _ = made.backend.gather(0, made.rows[0].slot, 90)
    right = qk_norm_rope(qkv[:90, 4:6].clone(), None, 1e-5, cos[:90], sin[:90])
    torch.testing.assert_close(keys, right, rtol=1e-5, atol=1e-5)
    torch.testing.assert_close(stored, spread(right), rtol=1e-5, atol=1e-5)
    assert torch.equal(values, qkv[:90, 6:])
