"""Totals: what an engine's statistics add up over its life, less what was no traffic."""

from __future__ import annotations

from octavo.request import EngineStats

TOTALS = (
    "preemptions",
    "prefix_queries",
    "prefix_hits",
    "prompt_tokens",
    "generation_tokens",
    "steps",
    "swapped_out",
    "swapped_in",
)
"""What EngineStats adds up over the life of an engine, of its traffic."""


class Totals:
    """`latest` is what the engine has said last. Made of the statistics before its first word."""

    def __init__(self, latest: EngineStats) -> None:
        self.latest = latest
        self._left_out: dict[str, int] = {}

    def take(self, stats: EngineStats) -> None:
        """The engine's next word. The parts of a long step bring the same object: it is taken once."""
        if self.latest is not stats:
            for name, before in self._left_out.items():
                setattr(stats, name, getattr(stats, name) - before)
            self.latest = stats

    def from_here(self) -> None:
        """Leave out what has been counted so far."""
        self._left_out = {name: getattr(self.latest, name) + self.left_out(name) for name in TOTALS}
        for name in TOTALS:
            setattr(self.latest, name, 0)

    def left_out(self, name: str) -> int:
        return self._left_out.get(name, 0)
