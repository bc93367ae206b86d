"""What this process counts of one model's requests: histograms, totals, and shares of tenants.

Owns the numbers between two scrapes; how they are exported is `metrics`. Must never raise into a
request or the engine's loop, and never keep text of a client.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from time import perf_counter

from octavo.request import EngineStats, Event

log = logging.getLogger("octavo.server")

FINISH = ("stop", "length", "abort", "error")
SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
MAX_TRACKED = 16384  # samples whose last token's time is kept
MAX_TENANTS = 100  # label values; whoever comes later is counted as OTHER
OTHER = "other"


class Histogram:
    """Counts per bucket of one quantity; `bounds` are the buckets' inclusive upper ends, without +Inf."""

    def __init__(self, bounds: Sequence[float]) -> None:
        self.bounds = tuple(bounds)
        self.counts = [0] * (len(bounds) + 1)
        self.sum = 0.0

    def observe(self, value: float, times: int = 1) -> None:
        self.counts[bisect_left(self.bounds, value)] += times
        self.sum += value * times

    def buckets(self) -> list[tuple[str, float]]:
        total, rows = 0, []
        for bound, count in zip((*map(float, self.bounds), float("inf")), self.counts, strict=True):
            total += count
            rows.append(("+Inf" if bound == float("inf") else str(bound), float(total)))
        return rows


@dataclass(slots=True)
class TenantCounts:
    """One tenant's share. `failed`: requests that ended with an error."""

    requests: int = 0
    failed: int = 0
    prompt_tokens: int = 0
    generation_tokens: int = 0


class Counts:
    """Everything counted of one model over all its engines: a restart or a replacement does not reset it."""

    def __init__(self) -> None:
        self.ttft, self.e2e = Histogram(SECONDS), Histogram(SECONDS)
        self.queue, self.prefill, self.decode, self.inference = (Histogram(SECONDS) for _ in range(4))
        self.itl = Histogram(TOKEN_SECONDS)
        self.admission, self.delivery = Histogram(TOKEN_SECONDS), Histogram(TOKEN_SECONDS)
        self.step_tokens = Histogram(TOKENS)
        self.finished: Counter[str] = Counter(dict.fromkeys(FINISH, 0))
        self.tenants: dict[str, TenantCounts] = {}
        self.in_flight = 0
        self.disconnects = 0

    def tenant(self, name: str) -> TenantCounts:
        """The share of a tenant; at most MAX_TENANTS have one of their own."""
        if name not in self.tenants and len(self.tenants) >= MAX_TENANTS:
            name = OTHER
        return self.tenants.setdefault(name, TenantCounts())

    def observer(self) -> StepObserver:
        """For one engine: what counts its steps here."""
        return StepObserver(self)


class StepObserver:
    """An observer of one AsyncLLM: a step is counted once, however often its stats arrive. Engines number
    their requests themselves, so the times of last tokens are kept here, by engine. Swallows its own
    faults, saying so once."""

    def __init__(self, counts: Counts) -> None:
        self._counts, self._steps, self._broken = counts, 0, False
        self.last_token: dict[tuple[str, int], float] = {}  # of running samples, by the clock of arrivals here

    def __call__(self, events: list[Event], stats: EngineStats) -> None:
        try:
            if stats.steps > self._steps:
                self._steps = stats.steps
                if stats.step_tokens:
                    self._counts.step_tokens.observe(stats.step_tokens)
            self._on_tokens(events, perf_counter())
            # A sample that is aborted from this side sends no finish: its entry must go all the same.
            if stats.running == stats.waiting == 0:
                self.last_token.clear()
            elif len(self.last_token) > MAX_TRACKED:
                by_age = sorted(self.last_token.items(), key=lambda item: item[1])
                self.last_token = dict(by_age[len(by_age) // 2 :])
        except Exception:
            if not self._broken:
                log.exception("metrics of a step failed; this is said once")
            self._broken = True

    def _on_tokens(self, events: list[Event], now: float) -> None:
        for event in events:
            key = (event.request_id, event.sample)
            if event.tokens:
                before = self.last_token.get(key)
                if before is not None:
                    self._counts.itl.observe((now - before) / len(event.tokens), len(event.tokens))
                self.last_token[key] = now
            if event.finish is not None:
                self.last_token.pop(key, None)
