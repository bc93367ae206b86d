"""The size of the KV pool: what it holds, what it refuses, and that the value which an error suggests is accepted."""

from __future__ import annotations

import re
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from octavo.cache.pool import block_bytes
from octavo.catalog import Device
from octavo.config import EngineConfig
from octavo.engine.sizing import Sizing, size_pool
from octavo.errors import ConfigError
from octavo.interfaces import KVGroup, KVSpec, Limits

GIB = 1 << 30
FULL = KVSpec("full", 2, 16, 16, "float32")
WINDOW = KVSpec("window", 2, 16, 16, "float32", window=128)


def groups(block_size: int = 16, *, layers: int = 2, window: bool = False) -> tuple[KVGroup, ...]:
    page = block_size * 2 * 32 * 4
    first = KVGroup(0, FULL, tuple(range(layers)), block_size, page)
    return (first, KVGroup(1, WINDOW, tuple(range(layers, 2 * layers)), block_size, page)) if window else (first,)


def size(
    length: int,
    free: int = 8 * GIB,
    *,
    on: str = "cpu",
    total: int = 8 * GIB,
    block: int = 16,
    window: bool = False,
    **config: Any,
) -> Sizing:
    machine = Device(type=on, memory=total, free_memory=free)
    limits = Limits(8, 64, length)
    return size_pool(EngineConfig(**config), machine, groups(block, window=window), limits, weight_bytes=1000, workspace=500)


@given(length=st.integers(1, 5000), block=st.sampled_from([1, 5, 8, 16, 32, 64]))
def test_a_cpu_holds_one_full_context_and_a_quarter(length: int, block: int) -> None:
    sizing = size(length, block=block)
    whole = -(-length // block)
    assert sizing.blocks_per_context == whole
    assert whole * 1.25 <= sizing.num_blocks < whole * 1.25 + 1


def test_a_window_group_holds_its_window_and_one_step_and_not_the_context() -> None:
    sizing = size(4096, window=True)
    full, windowed = 4096 // 16, sizing.blocks_per_context - 4096 // 16
    assert (128 + 64) // 16 <= windowed <= (128 + 64) // 16 + 2 < full


def test_a_block_counts_every_layer_of_its_group() -> None:
    assert block_bytes(groups(16, layers=2)) == 2 * 16 * 2 * 32 * 4


def test_a_gpu_gets_its_share_less_what_others_hold() -> None:
    free_machine = size(1024, 8 * GIB, on="cuda", gpu_memory_utilization=0.5)
    shared_machine = size(1024, 6 * GIB, on="cuda", gpu_memory_utilization=0.5)
    assert free_machine.bytes <= 4 * GIB - 1500 < free_machine.bytes + free_machine.block_bytes
    assert free_machine.bytes - shared_machine.bytes == pytest.approx(2 * GIB, abs=2 * free_machine.block_bytes)


@pytest.mark.parametrize("name", ["num_gpu_blocks", "num_gpu_blocks_override"])
def test_an_explicit_count_is_that_count_even_below_one_context(name: str) -> None:
    sizing = size(4096, **{name: 7})
    assert sizing.num_blocks == 7 and sizing.hard == (name == "num_gpu_blocks")
    assert "longer requests are refused" in sizing.reason


def test_explicit_bytes_are_rounded_down_to_blocks() -> None:
    each = block_bytes(groups())
    assert size(64, kv_cache_memory_bytes=11 * each - 1).num_blocks == 9  # one page is scratch


def test_two_sizes_are_a_contradiction() -> None:
    with pytest.raises(ConfigError, match="--num-gpu-blocks and --kv-cache-memory-bytes both"):
        size(64, num_gpu_blocks=5, kv_cache_memory_bytes=1 << 20)


@settings(max_examples=60)
@given(
    length=st.integers(200, 100_000),
    free=st.integers(2_000_000, 60_000_000),
    window=st.booleans(),
    on=st.sampled_from(["cpu", "cuda"]),
    explicit=st.sampled_from([{}, {"kv_cache_memory_bytes": 3_000_000}]),
)
def test_the_length_that_an_error_suggests_fits_and_is_the_longest(
    length: int, free: int, window: bool, on: str, explicit: dict[str, int]
) -> None:
    def at(tokens: int) -> Sizing:
        return size(tokens, free, on=on, total=free, window=window, **explicit)

    try:
        at(length)
    except ConfigError as error:
        found = re.search(r"--max-model-len (\d+) (?:or .* )?would fit", str(error))
        if found:
            assert at(int(found[1])).num_blocks > 0
            with pytest.raises(ConfigError):
                at(int(found[1]) + 16)
        else:
            assert "--kv-cache-memory-bytes" in str(error) or "Not even one token" in str(error)


def test_bytes_that_do_not_hold_one_sequence_are_refused_with_those_that_do() -> None:
    with pytest.raises(ConfigError, match=r"there is memory for 0 .*[^r] --kv-cache-memory-bytes (\d+) would fit") as caught:
        size(1000, 1 << 30, kv_cache_memory_bytes=1)
    enough = int(re.findall(r"--kv-cache-memory-bytes (\d+) would fit", str(caught.value))[0])
    assert size(1000, 1 << 30, kv_cache_memory_bytes=enough).num_blocks > 0
    with pytest.raises(ConfigError, match="would fit"):
        size(1000, 1 << 30, kv_cache_memory_bytes=enough - 1)


def test_an_explicit_count_that_does_not_fit_in_memory_is_refused_with_one_that_does() -> None:
    with pytest.raises(ConfigError, match=r"--num-gpu-blocks-override (\d+) would fit") as caught:
        size(64, 1 << 20, num_gpu_blocks_override=10**6)
    fits = int(re.search(r"override (\d+) would", str(caught.value))[1])  # type: ignore[index]
    assert size(64, 1 << 20, num_gpu_blocks_override=fits).num_blocks == fits
    with pytest.raises(ConfigError):
        size(64, 1 << 20, num_gpu_blocks_override=fits + 1)


def test_weights_that_fill_the_memory_leave_nothing_and_the_error_says_so() -> None:
    with pytest.raises(ConfigError, match=r"0 B for it: 1000 B free, less 1000 B of weights"):
        size(64, 1000)
