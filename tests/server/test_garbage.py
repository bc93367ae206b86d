"""The garbage collector's full look comes in a quiet moment, and comes in the end."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
from octavo.server import garbage
from octavo.server.garbage import Collector


class Knot:
    """A cycle: only the collector finds it."""

    alive = 0

    def __init__(self) -> None:
        self.me = self
        Knot.alive += 1

    def __del__(self) -> None:
        Knot.alive -= 1


@pytest.fixture(autouse=True)
def untouched(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """A full collection is due at once; the process's own thresholds come back."""
    before = gc.get_threshold()
    gc.collect()
    monkeypatch.setattr(garbage, "_DUE", 0)
    monkeypatch.setattr(Knot, "alive", 0)
    yield
    gc.set_threshold(*before)


def knots() -> int:
    """How many of a thousand lost cycles are left, for a generation that is looked at last."""
    for _ in range(1000):
        Knot()
    return Knot.alive


@pytest.mark.parametrize(("requests", "collected"), [(0, True), (garbage._FEW, True), (garbage._FEW + 1, False), (1000, False)])
def test_everything_is_looked_at_only_while_few_requests_run(requests: int, collected: bool) -> None:
    gc.disable()
    try:
        left = knots()
        assert Collector(lambda: requests).look() is collected
        assert Knot.alive == (0 if collected else left)
    finally:
        gc.enable()


def test_it_does_not_wait_for_ever(monkeypatch: pytest.MonkeyPatch) -> None:
    busy = Collector(lambda: 1000)
    monkeypatch.setattr(garbage, "_LONGEST", 0.0)
    assert busy.look()
