"""A rehearsal runs a step of each kind, of rows that belong to nobody, and ends early where nothing has to be compiled."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from octavo.engine.rehearsal import rehearse
from octavo.interfaces import Limits

from tests.engine.harness import make_engine, request, run

LIMITS = Limits(max_num_seqs=48, max_num_batched_tokens=512, max_model_len=2048)


@dataclass
class Recorder:
    """A runner that only notes what it is asked for."""

    steps: list[tuple[int, ...]] = field(default_factory=list)

    def rehearse(self, rows: int, position: int) -> None:
        self.steps.append((rows, position))

    def rehearse_prompt(self, tokens: int) -> None:
        self.steps.append((tokens,))


@dataclass
class Found:
    compiled: int = 0
    fetched: int = 0
    cached: bool = False

    def all_fetched(self) -> bool:
        return self.cached


def ahead(found: Found) -> Any:
    @contextmanager
    def inside() -> Iterator[Found]:
        yield found

    return inside


def test_steps_of_each_kind_stay_within_the_limits() -> None:
    runner = Recorder()
    rehearse(runner, LIMITS, ahead(Found()))
    prompts = [step[0] for step in runner.steps if len(step) == 1]
    rows = [step for step in runner.steps if len(step) == 2]
    assert max(prompts) == 511, "a row that decodes is in the same step"
    assert {n for n, _ in rows} == {1, 2, 4, 8, 16, 24, 32, 48} and {p for _, p in rows} == {0, 2047}


def test_it_ends_where_all_kernels_lie_on_the_disk() -> None:
    runner = Recorder()
    rehearse(runner, LIMITS, ahead(Found(fetched=9, cached=True)))
    assert sorted(map(len, runner.steps)) == [1, 2], "a prompt and rows were tried"


def test_no_sequence_notices_a_rehearsal(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    from tests.tiny import tiny_llama

    engine = make_engine(tiny_llama(tmp_path / "m"), max_num_seqs=6, block_size=16)
    runner = engine._executor._runner  # type: ignore[attr-defined]
    runner.use_graphs(capture=False)
    asks = [("a", range(9, 60)), ("b", range(30, 37))]
    before = run(engine, [request(engine, id, prompt, max_tokens=12) for id, prompt in asks])
    for id, prompt in asks:
        engine.add(request(engine, id, prompt, max_tokens=12))
    for _ in range(4):
        engine.step()
    tokens = runner._state.tokens.clone()
    kinds = set()
    monkeypatch.setattr(
        runner._attention, "prepare", lambda step: kinds.add((step.host.max_query_len > 1, bool(step.host.shared)))
    )
    monkeypatch.setattr(runner._graphs, "_variant", lambda host: "")
    rehearse(runner, Limits(6, 64, 256), ahead(Found()))
    monkeypatch.undo()
    assert kinds == {(True, False), (False, False), (False, True)}, "prompts, rows, and rows over a shared prefix"
    assert torch.equal(runner._state.tokens[:-1], tokens[:-1])
    while engine.busy:
        engine.step()
    after = run(engine, [request(engine, f"{id}2", prompt, max_tokens=12) for id, prompt in asks])
    assert [o.tokens for o in after.values()] == [o.tokens for o in before.values()]
