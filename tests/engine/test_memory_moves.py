"""Utilisation that moves: the rule, the alert, and an engine whose pool changes its size under its requests."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
from octavo.cache.allocator import BlockAllocator
from octavo.engine.memory import CacheAlert, MemoryWatch, PoolGovernor
from octavo.engine.sizing import PoolRange
from octavo.errors import ConfigError
from octavo.interfaces import AllocatorParts
from octavo.request import EngineStats
from octavo.testing.allocator_model import groups_of

from tests.engine.harness import Outcomes, make_engine, request, run, step
from tests.engine.test_pressure import LATE, build, expected

# ---------------------------------------------------------------- the rule


class Machine:
    """An executor and a clock. A growth past `memory` blocks finds none."""

    depth = 0

    def __init__(self, memory: int = 10**9) -> None:
        self.memory, self.now = memory, 0.0
        self.sizes: list[int] = []

    def resize(self, blocks: int, tables: Any, copies: Any) -> None:
        if blocks > self.memory:
            raise MemoryError("the device has no memory left")
        self.sizes.append(blocks)


def governor(machine: Machine, start: float = 0.9, blocks: int = 900) -> tuple[BlockAllocator, PoolGovernor]:
    range_ = PoolRange(start, blocks, 1000.0, least=100)
    allocator = BlockAllocator(None, AllocatorParts(groups_of((1, None)), blocks, 4, 1000, max_blocks=range_.most))
    return allocator, PoolGovernor(allocator, machine, range_, lambda: machine.now, 30.0)  # type: ignore[arg-type]


def look(machine: Machine, governor: PoolGovernor, use: float) -> float:
    machine.now += 30.0
    governor.tick(use)
    return round(governor.utilization, 3)


def test_below_80_percent_it_grows_by_two_hundredths_to_95() -> None:
    machine = Machine()
    allocator, rule = governor(machine)
    assert [look(machine, rule, 0.79) for _ in range(4)] == [0.92, 0.94, 0.95, 0.95]
    assert machine.sizes == [920, 940, 950] and allocator.usage().total == 950


def test_above_92_percent_it_shrinks_by_three_hundredths_to_85() -> None:
    machine = Machine()
    allocator, rule = governor(machine)
    assert [look(machine, rule, 0.93) for _ in range(4)] == [0.87, 0.85, 0.85, 0.85]
    assert machine.sizes == [870, 850] and allocator.usage().total == 850


@pytest.mark.parametrize("use", [0.8, 0.86, 0.92])
def test_in_between_nothing_moves(use: float) -> None:
    machine = Machine()
    _, rule = governor(machine)
    assert look(machine, rule, use) == 0.9 and machine.sizes == []


def test_it_looks_only_every_so_often() -> None:
    machine = Machine()
    _, rule = governor(machine)
    for _ in range(29):
        machine.now += 1.0
        rule.tick(0.1)
    assert machine.sizes == []
    machine.now += 1.0
    rule.tick(0.1)
    rule.tick(0.1)
    assert machine.sizes == [920]


def test_a_growth_that_finds_no_memory_is_put_off() -> None:
    machine = Machine(memory=930)
    allocator, rule = governor(machine)
    assert look(machine, rule, 0.5) == 0.92
    assert look(machine, rule, 0.5) == 0.92 and allocator.usage().total == 920
    machine.memory = 10**9
    assert look(machine, rule, 0.5) == 0.94


def test_an_order_sets_the_size_within_the_range_and_the_rule_rests_while_it_is_told_to() -> None:
    machine = Machine()
    range_ = PoolRange(0.9, 300, 1000.0, least=100, whole=900)  # built beside somebody who held 600 blocks' memory
    allocator = BlockAllocator(None, AllocatorParts(groups_of((1, None)), 300, 4, 1000, max_blocks=range_.most))
    rule = PoolGovernor(allocator, machine, range_, lambda: machine.now, 30.0)  # type: ignore[arg-type]
    assert rule.resize(1, rest=True) == 100  # a request of the full context must still fit
    assert look(machine, rule, 0.1) == pytest.approx(0.7) and allocator.usage().total == 100
    assert rule.resize(None, rest=False) == 900 and allocator.usage().total == 900
    assert rule.resize(5000, rest=False) == 900  # the address range ends there
    machine.memory = 500
    rule.resize(400, rest=False)
    assert rule.resize(None, rest=False) == 400  # no memory: as it was
    with pytest.raises(ConfigError, match="--dynamic-memory"):
        MemoryWatch(allocator).resize(5, rest=False)


def test_it_never_shrinks_below_one_full_context() -> None:
    machine = Machine()
    range_ = PoolRange(0.9, 900, 1000.0, least=890)
    allocator = BlockAllocator(None, AllocatorParts(groups_of((1, None)), 900, 4, 1000, max_blocks=range_.most))
    rule = PoolGovernor(allocator, machine, range_, lambda: machine.now, 30.0)  # type: ignore[arg-type]
    look(machine, rule, 0.95)
    assert allocator.usage().total == 890


def test_live_blocks_are_moved_off_the_tail_and_bound_the_shrink() -> None:
    machine = Machine()
    allocator, rule = governor(machine)
    for row in range(4):
        allocator.admit(row, np.arange(220, dtype=np.int32) + 1000 * row, "a")
        assert allocator.reserve(np.array([row]), np.array([0]), np.array([220]))
    allocator.commit(np.arange(4), np.full(4, 220))
    look(machine, rule, 880 / 900)
    assert allocator.usage().total == 880, "870 would not hold what lives"
    assert allocator.table(0).max() < 880
    allocator.check()


# ---------------------------------------------------------------- the alert


def test_at_95_percent_unpinned_prefixes_are_evicted_once_until_use_has_fallen() -> None:
    allocator = BlockAllocator(None, AllocatorParts(groups_of((1, None)), 100, 4, 1000))
    for row, tokens in enumerate((2, 3)):
        allocator.admit(row, np.full(tokens, row, np.int32), "a")
        allocator.reserve(np.array([row]), np.array([0]), np.array([tokens]))
        allocator.commit(np.array([row]), np.array([tokens]))
        allocator.release(np.array([row]))
    assert allocator.pin(np.full(2, 0, np.int32), "a") == 2
    alert = CacheAlert(allocator)
    alert.see(0.949)
    assert (alert.raised, allocator.usage().cached) == (False, 3)
    alert.see(0.95)
    assert (alert.raised, alert.count) == (True, 1)
    assert (allocator.usage().cached, allocator.usage().pinned) == (0, 2)
    for use in (0.99, 0.91):
        alert.see(use)
        assert (alert.raised, alert.count) == (True, 1)
    alert.see(0.89)
    assert not alert.raised


def test_the_alert_reaches_the_stats() -> None:
    allocator = BlockAllocator(None, AllocatorParts(groups_of((1, None)), 20, 1, 100))
    allocator.admit(0, np.arange(19, dtype=np.int32), "a")
    allocator.reserve(np.array([0]), np.array([0]), np.array([19]))
    watch, stats = MemoryWatch(allocator), EngineStats()
    watch.tick()
    watch.report(stats)
    assert (stats.kv_alert, stats.kv_alerts) == (True, 1)


# ---------------------------------------------------------------- the engine


def moving(path: Path, late: Any, **options: Any) -> Any:
    given = {"block_size": 4, "num_gpu_blocks_override": 30, "max_num_batched_tokens": 16, "max_num_seqs": 4, "max_model_len": 80}
    return make_engine(path, late=late, dynamic_memory=True, dynamic_memory_interval=1e9, **{**given, **options})


@pytest.mark.parametrize("swap_space", [0.0, 0.001])
@pytest.mark.parametrize("late", [*LATE, {"depth": 1, "padded": True}])
def test_tokens_stay_the_same_while_the_pool_moves(tiny1: Path, late: Any, swap_space: float) -> None:
    engine = moving(tiny1, late, swap_space=swap_space, preemption_mode="swap" if swap_space else "auto")
    governor = engine._watch._governor
    specs = [{"prompt": list(range(40 + i, 60 + i)), "max_tokens": 40, "ignore_eos": True} for i in range(6)]
    outcomes: Outcomes = {}
    for i, spec in enumerate(specs):
        engine.add(build(engine, str(i), spec))
    turn = 0
    while engine.busy:
        step(engine, outcomes)
        turn += 1
        if turn % 3 == 0:
            governor.move((0.95, 0.5, 0.9)[turn // 3 % 3])
    assert governor.growths > 5 and governor.shrinks > 5
    for i, spec in enumerate(specs):
        assert (outcomes[str(i), 0].tokens, outcomes[str(i), 0].finish) == expected(tiny1, spec)[0]


def test_a_prefix_survives_a_shrink_when_it_is_pinned(tiny1: Path) -> None:
    engine = moving(tiny1, 0, num_gpu_blocks_override=40)
    for i in range(3):  # so that the pinned one does not lie in the lowest blocks
        run(engine, [request(engine, f"before{i}", range(100 + 50 * i, 133 + 50 * i), max_tokens=1)])
    spec = {"prompt": list(range(40, 61)), "max_tokens": 5, "ignore_eos": True}
    run(engine, [build(engine, "warm", spec)])
    salt = engine.prefixes._salt(26)  # of this load of the model
    assert engine.allocator.pin(np.arange(40, 60, dtype=np.int32), "", salt) == 20
    engine._watch._governor.move(0.1)
    assert engine.allocator.usage().total == 25, "one context of 80 tokens, and five pinned blocks"
    outcome = run_pinned(engine, build(engine, "again", spec))
    assert outcome.events[0].cached_tokens == 20
    assert outcome.tokens == expected(tiny1, spec)[0][0]


def run_pinned(engine: Any, one: Any) -> Any:
    """`run`, without its demand that nothing is held: pins are."""
    outcomes: Outcomes = {}
    engine.add(one)
    while engine.busy:
        step(engine, outcomes)
    return outcomes[one.id, 0]


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"num_gpu_blocks": 100, "num_gpu_blocks_override": None}, "--num-gpu-blocks fixes"),
        ({"kv_cache_memory_bytes": 1 << 20, "num_gpu_blocks_override": None}, "--kv-cache-memory-bytes fixes"),
        ({"num_gpu_blocks_override": 19}, "does not hold one context"),
    ],
)
def test_what_contradicts_a_moving_pool_is_an_error(tiny1: Path, options: dict[str, Any], words: str) -> None:
    with pytest.raises(ConfigError, match=words):
        moving(tiny1, 0, **options)
