"""Under any pressure a request gets the tokens that it gets alone (CPU, fp32).

Interleaving, chunk size, block size, preemption, swap space, prefix cache, late results, aborts, forks and grammars
are drawn by hypothesis; the oracle is the same engine class with room for everything, running one
request at a time. Results come 0, 1 and 3 steps late, as from an asynchronous device.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from functools import lru_cache
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from octavo.engine.engine import Engine
from octavo.grammar import Grammar
from octavo.request import Request

from tests.engine.harness import Outcomes, alone, make_engine, request, run, unread_tokens_poisoned

LATE = (0, 1, 3)
PADDED = {"depth": 1, "padded": True}  # decode steps in the padded buffers of captured graphs
PREFIXES = [list(range(40, 40 + 37)), [7] * 24 + list(range(100, 120)), list(range(300, 330))]

CHOICES = (["yes", "no"], ["the model", "the world and all", "the world", "Paris!"], ["é" * 12, "0123456789" * 3, "日本"])


@pytest.fixture(scope="module", autouse=True)
def poisoned() -> Iterator[None]:
    with unread_tokens_poisoned():
        yield


@lru_cache(maxsize=1)
def oracle(path: Path) -> Engine:
    return make_engine(path, num_gpu_blocks_override=64, block_size=16, max_num_batched_tokens=512, max_num_seqs=4)


def expected(path: Path, spec: dict[str, Any]) -> dict[int, tuple[list[int], str | None]]:
    return _expected(path, json.dumps(spec, sort_keys=True))


@lru_cache(maxsize=4096)
def _expected(path: Path, key: str) -> dict[int, tuple[list[int], str | None]]:
    spec = json.loads(key)
    outcomes = alone(oracle(path), build(oracle(path), "x", spec))
    return {sample: (o.tokens, o.finish) for (_, sample), o in outcomes.items()}


def build(engine: Engine, id: str, spec: dict[str, Any]) -> Request:
    fields = dict(spec)
    if "choice" in fields:
        fields["grammar"] = Grammar.choice(fields.pop("choice"))
    return request(engine, id, fields.pop("prompt"), **fields)


@st.composite
def specs(draw: st.DrawFn) -> dict[str, Any]:
    prefix = draw(st.sampled_from(PREFIXES))
    prompt = prefix[: draw(st.integers(1, len(prefix)))] + draw(st.lists(st.integers(8, 511), max_size=12))
    spec: dict[str, Any] = {"prompt": prompt, "max_tokens": draw(st.integers(1, 24))}
    kind = draw(st.sampled_from(["greedy", "seeded", "penalised", "many"]))
    if kind == "seeded":
        spec |= {"temperature": 0.8, "seed": draw(st.integers(0, 3)), "top_k": draw(st.sampled_from([0, 20]))}
    elif kind == "penalised":
        spec |= {"repetition_penalty": 1.3, "presence_penalty": 0.5}
    elif kind == "many":
        spec |= {"temperature": 1.0, "seed": draw(st.integers(0, 3)), "n": draw(st.integers(2, 3))}
    if draw(st.booleans()):
        spec["ignore_eos"] = True
    if draw(st.integers(0, 2)) == 0:
        spec |= {"choice": draw(st.sampled_from(CHOICES)), "min_tokens": min(draw(st.integers(0, 4)), spec["max_tokens"])}
    spec["priority"] = draw(st.integers(0, 2))
    return spec


def host_memory(slots: int, block_size: int) -> float:
    """--swap-space in GiB for so many blocks of TINY1: 2 heads of 16 + 16 float32."""
    return slots * block_size * 2 * 32 * 4 / 2**30


@st.composite
def pressures(draw: st.DrawFn) -> dict[str, Any]:
    block = draw(st.sampled_from([1, 4, 5, 16]))
    longest = -(-(max(map(len, PREFIXES)) + 12 + 24) // block)  # one request of the longest kind must fit
    slots = draw(st.sampled_from([0, 0, 1, 2, longest, 4 * longest]))
    return {
        "block_size": block,
        "num_gpu_blocks_override": longest + draw(st.integers(0, longest)),
        "max_num_batched_tokens": draw(st.sampled_from([3, 8, 17, 128])),
        "max_num_seqs": draw(st.sampled_from([1, 2, 3, 5, 40])),  # 40: prompts are steps of single tokens where they are padded
        "enable_prefix_caching": draw(st.booleans()),
        "scheduling_policy": draw(st.sampled_from(["fcfs", "priority"])),
        "swap_space": host_memory(slots, block),
        "preemption_mode": "swap" if slots else "auto",
    }


@pytest.mark.parametrize("late", [*LATE, PADDED], ids=["0", "1", "3", "padded"])
@settings(max_examples=20, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(requests=st.lists(specs(), min_size=2, max_size=7), pressure=pressures(), aborts=st.lists(st.tuples(st.integers(0, 30), st.integers(0, 6)), max_size=2), arrivals=st.lists(st.integers(0, 12), min_size=7, max_size=7))  # fmt: skip
def test_every_request_gets_the_tokens_it_gets_alone(
    tiny1: Path,
    late: int,
    requests: list[dict[str, Any]],
    pressure: dict[str, Any],
    aborts: list[tuple[int, int]],
    arrivals: list[int],
) -> None:
    engine = make_engine(tiny1, late=late, **pressure)
    aborted: set[str] = set()

    def between(turn: int) -> None:
        for i, spec in enumerate(requests):
            if arrivals[i] == turn:
                engine.add(build(engine, str(i), spec))
        for when, which in aborts:
            if when == turn and which < len(requests) and arrivals[which] <= turn:
                engine.abort(str(which))
                aborted.add(str(which))

    # One request is there from the start, so that the loop begins; the others come while it runs or after.
    first = request(engine, "first", [9, 8, 7], max_tokens=20, ignore_eos=True)
    outcomes: Outcomes = run(engine, [first], between=between)
    for i, spec in enumerate(requests):
        if str(i) in aborted or not any(key[0] == str(i) for key in outcomes):
            continue
        want = expected(tiny1, {k: v for k, v in spec.items() if k != "priority"})
        got = {sample: (o.tokens, o.finish) for (id, sample), o in outcomes.items() if id == str(i)}
        assert got == want, f"request {i}: {spec}"


@pytest.mark.parametrize("late", LATE)
def test_a_pool_too_small_for_everybody_preempts_and_nobody_notices(tiny1: Path, late: int) -> None:
    engine = make_engine(
        tiny1,
        late=late,
        block_size=4,
        num_gpu_blocks_override=20,
        max_num_batched_tokens=16,
        max_num_seqs=4,
        enable_prefix_caching=False,
    )
    wanted = [{"prompt": list(range(40 + i, 60 + i)), "max_tokens": 40, "ignore_eos": True} for i in range(4)]
    outcomes = run(engine, [build(engine, str(i), spec) for i, spec in enumerate(wanted)])
    assert engine.stats().preemptions > 0
    for i, spec in enumerate(wanted):
        assert (outcomes[str(i), 0].tokens, outcomes[str(i), 0].finish) == expected(tiny1, spec)[0]


@pytest.mark.parametrize("late", LATE)
def test_a_stop_that_is_found_late_costs_no_token_and_no_block(tiny1: Path, late: int) -> None:
    """The step after the one that sampled the stop is in flight already; its token is dropped."""
    engine = make_engine(tiny1, late=late, block_size=4, num_gpu_blocks_override=64)
    free = run(engine, [request(engine, "free", range(50, 70), max_tokens=12, ignore_eos=True)])["free", 0].tokens
    stop = free[5]
    stopped = run(engine, [request(engine, "stop", range(50, 70), max_tokens=12, ignore_eos=True, stop_token_ids=[stop])])
    outcome = stopped["stop", 0]
    assert outcome.tokens == free[: free.index(stop) + 1]
    assert (outcome.finish, outcome.events[-1].stop_reason) == ("stop", stop)


@pytest.mark.parametrize("late", LATE)
def test_a_preempted_row_keeps_the_token_that_was_in_flight(tiny1: Path, late: int) -> None:
    """A better request takes the place of a row whose last token is still on its way."""
    engine = make_engine(tiny1, late=late, max_num_seqs=1, scheduling_policy="priority", block_size=4, num_gpu_blocks_override=64)
    spec = {"prompt": list(range(60, 80)), "max_tokens": 30, "ignore_eos": True}

    def between(turn: int) -> None:
        if turn in (4, 15, 26):
            engine.add(request(engine, f"vip{turn}", range(90, 99), max_tokens=3, ignore_eos=True, priority=-1))

    outcomes = run(engine, [build(engine, "slow", spec)], between=between)
    assert engine.stats().preemptions == 3
    assert outcomes["slow", 0].tokens == expected(tiny1, spec)[0][0]
    finished = list(outcomes)
    assert len(finished) == 4


@pytest.mark.parametrize("late", LATE)
@pytest.mark.parametrize("where", ["result", "submission"])
def test_a_step_that_fails_ends_its_own_requests_and_the_engine_goes_on(tiny1: Path, late: int, where: str) -> None:
    faults = {"depth": late, ("fail_at" if where == "result" else "fail_submit_at"): (4,)}
    engine = make_engine(tiny1, late=faults, block_size=4, num_gpu_blocks_override=64)
    outcomes = run(engine, [request(engine, "hit", range(50, 70), max_tokens=12, ignore_eos=True)])
    outcome = outcomes["hit", 0]
    assert outcome.finish == "error" and outcome.error is not None and "injected fault" in outcome.error
    again = {"prompt": list(range(50, 70)), "max_tokens": 12, "ignore_eos": True}
    assert run(engine, [build(engine, "again", again)])["again", 0].tokens == expected(tiny1, again)[0][0]


def test_the_prefix_cache_changes_no_token_and_is_really_used(tiny1: Path) -> None:
    engine = make_engine(tiny1, block_size=4, num_gpu_blocks_override=64)
    spec = {"prompt": list(range(40, 77)), "max_tokens": 10, "ignore_eos": True}
    cold = run(engine, [build(engine, "cold", spec)])["cold", 0]
    warm = run(engine, [build(engine, "warm", spec)])["warm", 0]
    assert cold.tokens == warm.tokens == expected(tiny1, spec)[0][0]
    assert (cold.events[0].cached_tokens, warm.events[0].cached_tokens) == (0, 36)


def test_samples_of_one_request_share_the_prompt_and_equal_solo_runs_with_their_own_seeds(tiny1: Path) -> None:
    """n = 4 over a prompt of 17 tokens and blocks of 16: the partial block is copied before it is written."""
    engine = make_engine(tiny1, block_size=16, num_gpu_blocks_override=64, max_num_seqs=8)
    common = {"temperature": 1.0, "max_tokens": 12, "ignore_eos": True}
    many = run(engine, [request(engine, "many", range(40, 57), n=4, seed=100, **common)])
    for sample in range(4):
        solo = alone(oracle(tiny1), request(engine, "solo", range(40, 57), seed=100 + sample, **common))
        assert many["many", sample].tokens == solo["solo", 0].tokens
    assert len({tuple(o.tokens) for o in many.values()}) == 4
