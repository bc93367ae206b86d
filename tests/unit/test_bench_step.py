"""`octavo bench step`: the situation is the one that was asked for, and idle time is what no operation covers."""

from __future__ import annotations

from pathlib import Path

import pytest
from octavo.bench.step import busy_time, measure, table
from octavo.config import EngineConfig
from octavo.errors import ConfigError


def test_busy_time_counts_overlaps_once_and_gaps_not_at_all() -> None:
    assert busy_time([(10, 20), (15, 18), (30, 40), (12, 22), (41, 43)]) == (33, 24, 8)


def test_a_profiled_step_lists_what_it_computed(tiny: Path) -> None:
    config = EngineConfig(model=str(tiny), num_threads=1, dtype="float32")
    record = measure(config, batch=3, context=20, steps=2, profile=True)
    assert record["step_us"] > 0
    assert record["profile"]["operations"][0]["us"] >= record["profile"]["operations"][-1]["us"]
    assert any("linear" in row["name"] or "mm" in row["name"] for row in record["profile"]["operations"])
    assert "3 sequences" in table(record)[0]


def test_a_prefill_step_is_full(tiny: Path) -> None:
    config = EngineConfig(model=str(tiny), num_threads=1, dtype="float32", max_num_batched_tokens=64)
    record = measure(config, batch=1, context=50, steps=2, profile=False, prefill=True)
    assert record["tokens_per_s"] == pytest.approx(64e6 / record["step_us_mean"], rel=0.01)


@pytest.mark.parametrize(("batch", "context", "message"), [(300, 4, "--max-num-seqs"), (1, 100_000, "--context")])
def test_a_situation_that_the_engine_cannot_hold_is_refused(tiny: Path, batch: int, context: int, message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        measure(EngineConfig(model=str(tiny), num_threads=1), batch=batch, context=context, steps=1, profile=False)
