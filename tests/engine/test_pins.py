"""Pins outlive what makes the cache forget: a reset, and a step that failed. Nobody but the operator notices."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
from octavo.cache.prefix import PUBLIC
from octavo.engine.engine import Engine
from octavo.engine.pins import ATTEMPTS
from octavo.errors import AdmissionRefused

from tests.engine.harness import Outcomes, make_engine, request, step

PREFIX, OTHER = [*range(30, 62)], [*range(100, 116)]


def engine_of(path: Path, *, fail_at: tuple[int, ...] = (), **options: Any) -> Engine:
    late = {"depth": 1, "fail_at": fail_at}
    return make_engine(path, late=late, **{"block_size": 8, "num_gpu_blocks_override": 48, "max_num_seqs": 4, **options})


def go(engine: Engine, *requests: Any) -> Outcomes:
    outcomes: Outcomes = {}
    for one in requests:
        engine.add(one)
    for _ in range(500):
        if not engine.busy:
            return outcomes
        step(engine, outcomes)
    raise AssertionError("the engine did not come to an end")


def pin(engine: Engine, tokens: list[int]) -> None:
    go(engine, request(engine, "warm", tokens, max_tokens=1, domain=PUBLIC))
    assert engine.prefixes.pin(tokens).pinned == len(tokens)


def pinned(engine: Engine) -> list[int]:
    return sorted(engine.prefixes.state()["pins"].values())


def cached(engine: Engine, tokens: list[int]) -> int:
    return go(engine, request(engine, "ask", [*tokens, 7], max_tokens=1))["ask", 0].events[0].cached_tokens


def test_a_reset_brings_every_pin_back_and_nothing_else(tiny1: Path) -> None:
    engine = engine_of(tiny1)
    pin(engine, PREFIX)
    pin(engine, OTHER)
    go(engine, request(engine, "private", [*range(200, 240)], max_tokens=1))
    engine.prefixes.reset()
    assert pinned(engine) == [] and engine.prefixes.state()["pins_returning"] == 2 and engine.busy
    outcomes = go(engine)
    assert outcomes == {}, "the engine's own requests are nobody's news"
    assert pinned(engine) == [16, 32] and engine.prefixes.state()["pins_returning"] == 0
    assert cached(engine, PREFIX) == 32 and cached(engine, [*range(200, 240)]) == 0


def test_a_reset_with_pins_forgets_them(tiny1: Path) -> None:
    engine = engine_of(tiny1)
    pin(engine, PREFIX)
    engine.prefixes.reset(pins=True)
    assert not engine.busy and pinned(engine) == [] and cached(engine, PREFIX) == 0


@pytest.mark.parametrize("failing", ["result", "submission"])
def test_a_failed_step_costs_its_requests_and_no_pin(tiny1: Path, failing: str) -> None:
    faults = {"fail_at": (3,)} if failing == "result" else {"fail_submit_at": (3,)}
    engine = make_engine(tiny1, late={"depth": 1, **faults}, block_size=8, num_gpu_blocks_override=48, max_num_seqs=4)
    pin(engine, PREFIX)
    outcomes = go(engine, request(engine, "a", [5, 6, 7], max_tokens=9, ignore_eos=True))
    assert outcomes["a", 0].finish == "error" and set(outcomes) == {("a", 0)}
    assert pinned(engine) == [32] and cached(engine, PREFIX) == 32


def test_clients_that_come_meanwhile_are_served(tiny1: Path) -> None:
    engine = engine_of(tiny1, max_num_seqs=1)
    pin(engine, PREFIX)
    engine.prefixes.reset()
    outcomes = go(engine, *(request(engine, str(i), [5, 6, 7 + i], max_tokens=5, ignore_eos=True) for i in range(3)))
    assert [len(outcomes[str(i), 0].tokens) for i in range(3)] == [5, 5, 5]
    assert pinned(engine) == [32]


def test_a_full_queue_is_waited_for(tiny1: Path) -> None:
    engine = engine_of(tiny1, max_num_seqs=1, max_num_queued_reqs=1)
    pin(engine, PREFIX)
    engine.prefixes.reset()
    first = request(engine, "0", [5, 6, 7], max_tokens=20, ignore_eos=True)
    engine.add(first)
    refused = 0
    for i in range(1, 8):  # keep the queue full for a while
        try:
            engine.add(request(engine, str(i), [5, 6, i], max_tokens=3, ignore_eos=True))
        except AdmissionRefused:
            refused += 1
        engine.step()
    assert refused
    go(engine)
    assert pinned(engine) == [32]


def test_one_that_is_let_go_while_it_returns_stays_away(tiny1: Path) -> None:
    engine = engine_of(tiny1)
    pin(engine, PREFIX)
    pin(engine, OTHER)
    engine.prefixes.reset()
    engine.step()  # the first is under way, the second waits
    for tokens in (PREFIX, OTHER):
        engine.prefixes.unpin(tokens)
    go(engine)
    assert pinned(engine) == []


def test_a_prefix_that_fails_again_and_again_is_given_up_until_the_next_reset(
    tiny1: Path, caplog: pytest.LogCaptureFixture
) -> None:
    engine = engine_of(tiny1)
    pin(engine, PREFIX)
    failed = 0
    execute = engine._executor.submit

    def submit(batch: Any) -> Any:
        nonlocal failed
        if any(len(a.tokens) == len(PREFIX) for a in batch.admissions):
            failed += 1
            raise RuntimeError("this prompt breaks the model")
        return execute(batch)

    engine._executor.submit = submit  # type: ignore[method-assign]
    engine.prefixes.reset()
    go(engine)
    assert failed == ATTEMPTS and pinned(engine) == []
    assert "does not come back after 2 attempts" in caplog.text
    engine._executor.submit = execute  # type: ignore[method-assign]
    engine.prefixes.reset()
    go(engine)
    assert pinned(engine) == [32]
