"""The scale signal: over 50 waiting with a GPU that is not busy means that room is short, not speed."""

from __future__ import annotations

import pytest
from octavo.server.gpu import Gpu
from octavo.server.scale import LONG, signal


@pytest.mark.parametrize(
    ("waiting", "busy", "verdict"),
    [
        (0, None, 0), (50, 0.1, 0), (51, 0.69, 1), (51, 0.70, 0), (51, 0.95, 0), (51, None, 1), (LONG, 0.95, 0), (LONG + 1, 0.95, 1),
        (51, float("nan"), 1),
    ],
)  # fmt: skip
def test_the_rule(waiting: int, busy: float | None, verdict: int) -> None:
    gpus = [] if busy is None else [Gpu(0, busy, 100, 50), Gpu(1, 0.0, 100, 0)]
    if busy != busy:
        gpus = gpus[:1]
    told = signal(waiting, 3, 0.5, gpus)
    assert told["scale_out"] == verdict and str(waiting) in told["reason"]
    assert told["queue_length"] == waiting and told["running"] == 3 and told["kv_cache_usage"] == 0.5
