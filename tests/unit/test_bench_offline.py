"""`octavo bench offline` on a tiny model: every token is counted, nothing is carried over, the baseline is real."""

from __future__ import annotations

from pathlib import Path

import pytest
from octavo.bench.offline import Ours, measure
from octavo.bench.workloads import SHAPES, Ask, Draw, Workload
from octavo.config import EngineConfig
from octavo.errors import ConfigError


def small(requests: int, prompt: int, output: int) -> Workload:
    return Workload("small", "for the tests", 512, lambda draw: [Ask(draw.ids(prompt), output) for _ in range(requests)])


def config(model: Path, **kw: object) -> EngineConfig:
    return EngineConfig(model=str(model), device="cpu", num_threads=1, **kw)  # type: ignore[arg-type]


def test_a_record_has_every_figure_with_its_settings(tiny: Path) -> None:
    record = measure(config(tiny), small(3, 20, 5), repeats=2)
    ours = record["ours"]
    assert (ours["prompt_tokens"], ours["output_tokens"], len(ours["walls_s"])) == (60, 15, 2)
    ttft, whole, wall = ours["latency"]["ttft_ms"]["p50"], ours["latency"]["e2e_ms"]["p50"], max(ours["walls_s"]) * 1000
    assert ttft <= whole <= wall + 0.06, "walls are rounded to 0.1 ms, latencies to 0.01"
    assert record["workload"]["vocab"] == 512 and record["engine"]["threads"] == 1 and record["versions"]["torch"]
    assert "ratio" not in record


def test_a_pass_does_not_profit_from_the_prefixes_of_the_one_before(tiny: Path) -> None:
    ours = Ours(config(tiny, block_size=4), lambda *_: None)
    asks = small(2, 40, 2).asks()
    for _ in range(2):
        ours.run(asks)
    stats = ours.engine.stats()
    assert stats.prefix_queries > 0 and stats.prefix_hits == 0


def test_prefixes_that_requests_of_one_pass_share_are_hit(tiny: Path) -> None:
    ours = Ours(config(tiny, block_size=4), lambda *_: None)
    shared = Draw(512).ids(40)
    ours.run([Ask([*shared, 20 + i], 2) for i in range(3)] + [Ask([*shared, 99], 30)])
    ours.run([Ask(shared, 20)])
    before = ours.engine.stats().prefix_hits
    ours.run([Ask([*shared, 21], 1)] + [Ask([*shared, 22], 1) for _ in range(300)])
    assert ours.engine.stats().prefix_hits > before


@pytest.mark.parametrize(("output", "call"), [(4, "generate"), (1, "forward")])
def test_transformers_runs_on_the_same_weights_in_turn_with_ours(tiny: Path, output: int, call: str) -> None:
    record = measure(config(tiny), small(2, 24, output), repeats=2, against="transformers")
    baseline = record["baseline"]
    assert baseline["call"] == call
    assert len(baseline["walls_s"]) == 2 and min(baseline["trials_tok_s"].values()) > 0
    assert baseline["prompt_tokens"] == (48 if call == "forward" else 24)
    key = "input_tok_s" if call == "forward" else "output_tok_s"
    assert record["ratio"] == pytest.approx(record["ours"][key] / baseline[key], abs=1e-3)


def test_a_workload_longer_than_the_context_is_refused_with_both_numbers(tiny: Path) -> None:
    with pytest.raises(ConfigError, match=r"context of 70 tokens.*64"):
        measure(config(tiny, max_model_len=64), small(1, 60, 10), repeats=1)


def test_a_shape_needs_dummy_weights() -> None:
    with pytest.raises(ConfigError, match="--load-format dummy"):
        measure(EngineConfig(model=next(iter(SHAPES))), small(1, 4, 1), repeats=1)
