"""A real engine on a tiny model, stepped by hand, with an integrity check after every step."""

from __future__ import annotations

import contextlib
import dataclasses
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.engine.inputs import StateTable
from octavo.plugins import discover
from octavo.request import Batch, Event, Request, SamplingParams, check_request


def make_engine(path: Path, *, late: int | dict[str, Any] | None = None, **options: Any) -> Engine:
    """An engine whose results come `late` steps late (None: core's own executor). Grammars are choices of texts."""
    plugins = {**options.pop("plugins", {})}
    if late is not None:
        plugins["executor"] = {"late": {"depth": late} if isinstance(late, int) else late}
        options["executor"] = "late"
    config = EngineConfig(
        model=str(path),
        plugins=plugins,
        **{"dtype": "float32", "num_threads": 1, "max_model_len": 256, "grammar_backend": "choices", **options},
    )
    return build_engine(config, discover(plugins, extra_modules=["octavo.testing.late", "octavo.testing.choices"]))


def request(engine: Engine, id: str, prompt: Iterable[int], eos: tuple[int, ...] | None = None, **fields: Any) -> Request:
    """A checked request; keyword arguments go to SamplingParams, those of Request to it."""
    own = {key: fields.pop(key) for key in ("priority", "domain", "tenant", "deadline") if key in fields}
    ids = list(prompt)
    params = check_request(ids, SamplingParams(**{"temperature": 0.0, **fields}), engine.info)
    return Request(id=id, prompt=ids, params=params, eos_token_ids=engine.info.eos_token_ids if eos is None else eos, **own)


@contextlib.contextmanager
def unread_tokens_poisoned() -> Iterator[None]:
    """While this lasts, no step and no draw may read a token of the state table that the runner did not have to be told: each is an id
    outside every vocabulary."""
    apply = StateTable.apply

    def poisoned(self: StateTable, batch: Batch) -> None:
        for admission in batch.admissions:
            self.tokens[admission.slot] = 2**31 - 1
        apply(self, batch)

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(StateTable, "apply", poisoned)
        yield


@dataclasses.dataclass
class Outcome:
    """What one sample of one request got."""

    tokens: list[int] = dataclasses.field(default_factory=list)
    finish: str | None = None
    error: str | None = None
    events: list[Event] = dataclasses.field(default_factory=list)

    def take(self, event: Event) -> None:
        assert self.finish is None, f"an event after the end: {event}"
        self.tokens += event.tokens
        self.finish, self.error = event.finish, event.error
        self.events.append(event)


Outcomes = dict[tuple[str, int], Outcome]


def step(engine: Engine, outcomes: Outcomes) -> None:
    """One step; the allocator's books are checked after it."""
    for event in engine.step().events:
        outcomes.setdefault((event.request_id, event.sample), Outcome()).take(event)
    engine.allocator.check()


def run(
    engine: Engine, requests: Iterable[Request], *, between: Callable[[int], None] | None = None, limit: int = 5000
) -> Outcomes:
    """Add everything, step until nothing is left, and demand that every block came back."""
    outcomes: Outcomes = {}
    for one in requests:
        engine.add(one)
    for turn in range(limit):
        if not engine.busy:
            break
        if between:
            between(turn)
        step(engine, outcomes)
    assert not engine.busy, "the engine did not come to an end"
    assert_empty(engine)
    return outcomes


def assert_empty(engine: Engine) -> None:
    """Nothing runs, waits or holds a block."""
    stats = engine.stats()
    assert (stats.running, stats.waiting) == (0, 0)
    usage = engine.allocator.usage()
    assert usage.used == 0 and usage.free + usage.cached == usage.total


def alone(engine: Engine, one: Request) -> Outcomes:
    """The same request on an engine that runs nothing else and remembers nothing."""
    engine.allocator.reset()
    outcomes = run(engine, [one])
    engine.allocator.reset()
    return outcomes
