"""Latencies of requests: what is recorded for each, and the percentiles that are reported.

Owns the definitions. All times are seconds on one monotonic clock; reports are in milliseconds.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np

PERCENTILES = (50, 90, 95, 99)


@dataclass(slots=True)
class Timeline:
    """One request: when it was sent, when tokens arrived, how many came in all.

    `arrivals` has one entry per piece that brought output; a piece may hold several tokens, so
    `tokens` is counted apart.
    """

    sent: float
    arrivals: list[float] = field(default_factory=list)
    tokens: int = 0

    @property
    def ttft(self) -> float:
        """Time to the first token."""
        return self.arrivals[0] - self.sent

    @property
    def e2e(self) -> float:
        """Time to the last token."""
        return self.arrivals[-1] - self.sent

    @property
    def tpot(self) -> float | None:
        """Mean time per output token after the first; None where there was only one."""
        return (self.arrivals[-1] - self.arrivals[0]) / (self.tokens - 1) if self.tokens > 1 else None

    @property
    def gaps(self) -> list[float]:
        """Inter-token latencies: times between pieces."""
        return [b - a for a, b in zip(self.arrivals, self.arrivals[1:], strict=False)]


def summary(seconds: Sequence[float]) -> dict[str, float] | None:
    """Mean and percentiles (linear interpolation) in milliseconds; None for no value at all."""
    if not seconds:
        return None
    values = np.asarray(seconds) * 1000
    found = {"mean": float(values.mean())}
    found |= {f"p{p}": float(np.percentile(values, p)) for p in PERCENTILES}
    return {name: round(value, 3) for name, value in found.items()}


def report(timelines: Sequence[Timeline]) -> dict[str, Any]:
    """ttft_ms, tpot_ms, itl_ms and e2e_ms of the requests that brought at least one token."""
    done = [t for t in timelines if t.arrivals]
    return {
        "ttft_ms": summary([t.ttft for t in done]),
        "tpot_ms": summary([t.tpot for t in done if t.tpot is not None]),
        "itl_ms": summary([gap for t in done for gap in t.gaps]),
        "e2e_ms": summary([t.e2e for t in done]),
    }


def table(latencies: dict[str, Any]) -> list[str]:
    """The report as aligned lines for a person."""
    names = {
        "ttft_ms": "time to first token",
        "tpot_ms": "time per output token",
        "itl_ms": "inter-token latency",
        "e2e_ms": "end to end",
    }
    shown = {names[key]: value for key, value in latencies.items() if value}
    if not shown:
        return []
    columns = list(next(iter(shown.values())))
    lines = [f"{'ms':<24}" + "".join(f"{c:>10}" for c in columns)]
    return lines + [f"{name:<24}" + "".join(f"{value[c]:>10.1f}" for c in columns) for name, value in shown.items()]
