"""Swapping changes no token: a preempted sequence continues from host memory as if nothing had happened.

On the CPU, and all of it with results that come late. What the copies do on a GPU's streams is in
tests/gpu/test_swap.py.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from octavo.engine.engine import Engine
from octavo.request import FROM_HOST, TO_HOST

from tests.engine.harness import make_engine, request, run, unread_tokens_poisoned
from tests.engine.test_pressure import LATE, build, expected, host_memory

OUTPUT = 24
SMALL = {"block_size": 4, "num_gpu_blocks_override": 20, "max_num_batched_tokens": 16, "max_num_seqs": 4}


@pytest.fixture(scope="module", autouse=True)
def poisoned() -> Iterator[None]:
    with unread_tokens_poisoned():
        yield


def swapping(path: Path, slots: int, *, late: Any = 0, **options: Any) -> Engine:
    """A pool for one and a half of four requests, and so many host slots."""
    given = {**SMALL, "preemption_mode": "swap", **options}
    return make_engine(path, late=late, swap_space=host_memory(slots, given["block_size"]), **given)


def four() -> list[dict[str, Any]]:
    return [{"prompt": list(range(40 + i, 60 + i)), "max_tokens": OUTPUT, "ignore_eos": True} for i in range(4)]


def watch_copies(engine: Engine, monkeypatch: pytest.MonkeyPatch) -> dict[int, int]:
    """Blocks copied out and in, as the batches say."""
    counts = {TO_HOST: 0, FROM_HOST: 0}
    submit = engine._executor.submit

    def watched(batch: Any) -> Any:
        for kind, sources, _ in batch.copies:
            if kind in counts:
                counts[kind] += len(sources)
        return submit(batch)

    monkeypatch.setattr(engine._executor, "submit", watched)
    return counts


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("late", LATE)
def test_a_swapped_sequence_continues_where_it_was(
    tiny1: Path, late: int, prefix_caching: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = swapping(tiny1, 60, late=late, enable_prefix_caching=prefix_caching)
    counts = watch_copies(engine, monkeypatch)
    outcomes = run(engine, [build(engine, str(i), spec) for i, spec in enumerate(four())])
    stats = engine.stats()
    assert stats.preemptions == stats.swapped_out > 0, "there was room for every victim"
    assert counts[TO_HOST] > 0 and counts[FROM_HOST] > 0
    for i, spec in enumerate(four()):
        assert (outcomes[str(i), 0].tokens, outcomes[str(i), 0].finish) == expected(tiny1, spec)[0]
    assert engine.allocator.memory()["host_parcel_slots"] == 0


def test_nothing_is_computed_twice_when_every_victim_finds_room(tiny1: Path) -> None:
    engine = swapping(tiny1, 60, enable_prefix_caching=False)
    computed = 0
    submit = engine._executor.submit

    def counted(batch: Any) -> Any:
        nonlocal computed
        computed += batch.num_tokens
        return submit(batch)

    engine._executor.submit = counted  # type: ignore[method-assign]
    run(engine, [build(engine, str(i), spec) for i, spec in enumerate(four())])
    assert engine.stats().swapped_in == engine.stats().swapped_out > 0
    assert computed == 4 * (20 + OUTPUT - 1), "each position once; the last token's K/V is never needed"


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("slots", [1, 2, 7])
def test_a_full_swap_space_means_recompute_and_no_stall(tiny1: Path, late: int, slots: int) -> None:
    """Swap space of 2 blocks and 3 victims."""
    engine = swapping(tiny1, slots, late=late, enable_prefix_caching=False)
    outcomes = run(engine, [build(engine, str(i), spec) for i, spec in enumerate(four())])
    stats = engine.stats()
    assert stats.preemptions > stats.swapped_out, "somebody found no room"
    for i, spec in enumerate(four()):
        assert outcomes[str(i), 0].tokens == expected(tiny1, spec)[0][0]


def test_an_aborted_sequence_gives_its_host_memory_back(tiny1: Path) -> None:
    engine = swapping(tiny1, 60, enable_prefix_caching=False)
    held = 0

    def between(turn: int) -> None:
        nonlocal held
        held = max(held, engine.allocator.memory()["host_parcel_slots"])
        if held:
            for i in range(4):
                engine.abort(str(i))

    run(engine, [build(engine, str(i), spec) for i, spec in enumerate(four())], between=between)
    assert held > 0 and engine.allocator.memory()["host_parcel_slots"] == 0


@pytest.mark.parametrize("where", ["fail_at", "fail_submit_at"])
@pytest.mark.parametrize("late", LATE)
def test_a_failed_step_leaves_nothing_wrong_in_host_memory(tiny1: Path, late: int, where: str) -> None:
    """What the step did not write may have been copied out already: nobody continues from it."""
    engine = swapping(tiny1, 60, late={"depth": late, where: (20,)})
    outcomes = run(engine, [build(engine, str(i), spec) for i, spec in enumerate(four())])
    assert any(o.finish == "error" for o in outcomes.values())
    for i, spec in enumerate(four()):
        if outcomes[str(i), 0].finish != "error":
            assert outcomes[str(i), 0].tokens == expected(tiny1, spec)[0][0]
    again = run(engine, [build(engine, f"again{i}", spec) for i, spec in enumerate(four())])
    for i, spec in enumerate(four()):
        assert again[f"again{i}", 0].tokens == expected(tiny1, spec)[0][0]


@pytest.mark.parametrize("late", LATE)
def test_an_evicted_prefix_comes_back_from_host_memory(tiny1: Path, late: int) -> None:
    engine = swapping(tiny1, 60, late=late)
    first = {"prompt": list(range(100, 141)), "max_tokens": 4, "ignore_eos": True}
    run(engine, [build(engine, "first", first)])
    for i in range(4):  # enough other prompts that nothing of the first stays in the pool
        run(engine, [request(engine, f"other{i}", range(200 + 50 * i, 250 + 50 * i), max_tokens=2)])
    before = engine.allocator.memory()
    outcome = run(engine, [build(engine, "again", first)])["again", 0]
    assert outcome.events[0].cached_tokens == 40
    assert engine.allocator.memory()["host_hits"] - before["host_hits"] == 10
    assert outcome.tokens == expected(tiny1, first)[0][0]


def test_without_swap_space_an_evicted_prefix_is_gone(tiny1: Path) -> None:
    engine = make_engine(tiny1, **SMALL)
    first = {"prompt": list(range(100, 141)), "max_tokens": 4, "ignore_eos": True}
    run(engine, [build(engine, "first", first)])
    for i in range(4):
        run(engine, [request(engine, f"other{i}", range(200 + 50 * i, 250 + 50 * i), max_tokens=2)])
    assert run(engine, [build(engine, "again", first)])["again", 0].events[0].cached_tokens == 0


def test_samples_that_share_a_prompt_are_swapped_one_by_one(tiny1: Path) -> None:
    engine = swapping(tiny1, 60, enable_prefix_caching=False)
    spec = {"prompt": list(range(40, 58)), "max_tokens": 30, "ignore_eos": True, "n": 3, "temperature": 1.0, "seed": 5}
    outcomes = run(engine, [build(engine, "many", spec), build(engine, "other", four()[0])])
    assert engine.stats().swapped_out > 0
    want = expected(tiny1, spec)
    assert {sample: outcomes["many", sample].tokens for sample in range(3)} == {s: tokens for s, (tokens, _) in want.items()}
