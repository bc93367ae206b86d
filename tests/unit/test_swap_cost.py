"""Swap or recompute: the stated model, by hand."""

from __future__ import annotations

import pytest
import torch
from octavo.engine.swapping import SwapCost, measure, policy
from octavo.interfaces import AttentionLayer

LAYER = AttentionLayer(index=0, num_heads=4, num_kv_heads=2, k_dim=16, v_dim=16, scale=0.25)
WINDOW = AttentionLayer(index=1, num_heads=4, num_kv_heads=2, k_dim=16, v_dim=16, scale=0.25, window=10)


def test_the_seconds_are_those_of_the_formula() -> None:
    cost = SwapCost(block_bytes=1000, bandwidth=1e6, parameters=500, layers=(LAYER, WINDOW), rate=1e6)
    assert cost.swap_seconds(4) == pytest.approx(2 * 4 * 1000 / 1e6)
    full, window = 20 * 21 / 2, 10 * 11 / 2 + 10 * 10
    assert cost.recompute_seconds(20) == pytest.approx(2 * (500 * 20 + 4 * 32 * (full + window)) / 1e6)


def test_long_sequences_are_swapped_before_short_ones() -> None:
    """Copies grow with the length, attention with its square."""
    cost = SwapCost(block_bytes=16 * 256, bandwidth=1e5, parameters=100, layers=(LAYER,), rate=1e6)
    pays = [cost.pays(n, n // 16) for n in (16, 64, 256, 1024, 4096)]
    assert pays == sorted(pays) and pays[0] is False and pays[-1] is True


def test_a_slow_bus_recomputes_and_a_slow_device_swaps() -> None:
    slow_bus = SwapCost(block_bytes=1 << 20, bandwidth=1e8, parameters=10**8, layers=(), rate=1e15)
    slow_device = SwapCost(block_bytes=1 << 20, bandwidth=1e11, parameters=10**8, layers=(), rate=1e11)
    assert not slow_bus.pays(1024, 64) and slow_device.pays(1024, 64)


def test_the_mode_overrules_the_model() -> None:
    never = SwapCost(block_bytes=1 << 30, bandwidth=1.0, parameters=1, layers=(), rate=1e18)
    assert policy("swap", never)(1, 1) is True
    assert policy("auto", never)(1, 1) is False
    assert policy("recompute", None)(10**6, 1) is False


def test_rates_are_measured_on_the_device() -> None:
    cost = measure(torch.device("cpu"), "float32", 4096, 4000, (LAYER,))
    assert cost.parameters == 1000
    assert 1e8 < cost.bandwidth < 1e13 and 1e8 < cost.rate < 1e15
