"""How many host slots there are, and how a pool's size follows the utilisation."""

from __future__ import annotations

from typing import Any

import pytest
from octavo.catalog import Device
from octavo.config import EngineConfig
from octavo.engine.sizing import Sizing, host_slots, pool_range, staging_bytes
from octavo.errors import ConfigError

GIB = 1 << 30


def config(**options: Any) -> EngineConfig:
    return EngineConfig(model="m", **options)


def sizing(blocks: int = 1000, context: int = 100) -> Sizing:
    return Sizing(blocks, 1 << 20, context, 0, 0, False, "")


def device(kind: str, memory: int = 100 * GIB) -> Device:
    return Device(type=kind, name="d", memory=memory, free_memory=memory)  # type: ignore[arg-type]


@pytest.mark.parametrize(("gib", "slots"), [(0, 0), (1, 1024), (0.5, 512), (0.001, 1)])
def test_swap_space_is_counted_in_blocks(gib: float, slots: int) -> None:
    assert host_slots(config(swap_space=gib), 1 << 20, 8 * GIB) == slots


def test_swap_space_that_holds_no_block_or_is_not_there_is_an_error() -> None:
    with pytest.raises(ConfigError, match=r"less than one KV block of 1\.0 MiB"):
        host_slots(config(swap_space=0.0001), 1 << 20, 8 * GIB)
    with pytest.raises(ConfigError, match=r"the host has 8\.0 GiB"):
        host_slots(config(swap_space=9), 1 << 20, 8 * GIB)


def test_swapping_without_a_swap_space_is_refused_and_other_modes_need_none() -> None:
    with pytest.raises(ConfigError, match=r"--preemption-mode swap: .*give --swap-space GIB"):
        host_slots(config(preemption_mode="swap"), 1 << 20, 8 * GIB)
    assert [host_slots(config(preemption_mode=mode), 1 << 20, 8 * GIB) for mode in ("auto", "recompute")] == [0, 0]
    assert host_slots(config(preemption_mode="swap", swap_space=1), 1 << 20, 8 * GIB) == 1024


def test_a_pool_that_stays_has_no_range() -> None:
    assert pool_range(config(), device("cuda"), sizing()) is None


def test_on_a_gpu_a_utilisation_is_a_share_of_its_memory() -> None:
    found = pool_range(config(dynamic_memory=True), device("cuda"), sizing(blocks=92_000))
    assert found is not None
    assert found.blocks(0.9) == 92_000
    assert found.blocks(0.92) == 92_000 + 2 * 1024, "two hundredths of 100 GiB in blocks of 1 MiB"
    assert found.most == 92_000 + 5 * 1024
    assert found.blocks(0.0) == 100, "never below one full context"


def test_where_others_held_memory_the_range_reaches_to_what_the_device_alone_would_give() -> None:
    found = pool_range(config(dynamic_memory=True), device("cuda"), sizing(blocks=1000))
    assert found is not None
    assert found.most == 0.9 * 100 * 1024 - 1, "blocks of 1 MiB, one of them scratch"


def test_a_gpu_has_a_little_memory_for_copies_where_anything_is_swapped() -> None:
    assert staging_bytes(config(), device("cuda")) == 0 == staging_bytes(config(swap_space=1), device("cpu"))
    given = [staging_bytes(config(swap_space=1), device("cuda", gib * GIB)) >> 20 for gib in (8, 80, 141, 288)]
    assert given == [64, 320, 512, 512]


def test_elsewhere_the_pool_is_scaled_in_proportion() -> None:
    for options, kind in (({}, "cpu"), ({"num_gpu_blocks_override": 1000}, "cuda")):
        found = pool_range(config(dynamic_memory=True, **options), device(kind), sizing(blocks=900))
        assert found is not None
        assert (found.blocks(0.9), found.blocks(0.95), found.blocks(0.45)) == (900, 950, 450)
