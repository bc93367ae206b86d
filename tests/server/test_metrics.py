"""Metrics: the names that dashboards use, from the same numbers as our own; never an exception into the loop."""

from __future__ import annotations

import pytest
from octavo.request import EngineStats, Event, ModelInfo
from octavo.server.metrics import Histogram, Metrics
from octavo.server.records import Record
from prometheus_client.parser import text_string_to_metric_families

INFO = ModelInfo(model="m", vocab_size=8, max_model_len=64, num_blocks=10, block_size=16, kv_cache_tokens=160, dtype="float32")
STATS = EngineStats(
    running=2, waiting=3, kv_usage=0.25, prompt_tokens=7, generation_tokens=9, preemptions=1, prefix_hits=4, steps=5
)


def make(*, vllm_names: bool = True) -> Metrics:
    return Metrics("served", stats=lambda: STATS, alive=lambda: True, info=INFO, vllm_names=vllm_names)


def samples(metrics: Metrics) -> dict[str, float]:
    return {s.name: s.value for family in text_string_to_metric_families(metrics.render().decode()) for s in family.samples}


def test_vllm_names_are_there_with_its_labels() -> None:
    page = make().render().decode()
    labels = '{engine="0",model_name="served"}'
    for line in (
        f"vllm:num_requests_running{labels} 2.0",
        f"vllm:num_requests_waiting{labels} 3.0",
        f"vllm:kv_cache_usage_perc{labels} 0.25",
        f"vllm:gpu_cache_usage_perc{labels} 0.25",
        f"vllm:prefix_cache_hits_total{labels} 4.0",
        f"vllm:num_preemptions_total{labels} 1.0",
        f"vllm:prompt_tokens_total{labels} 7.0",
        f"vllm:generation_tokens_total{labels} 9.0",
        "vllm:cache_config_info{",
    ):
        assert line in page
    for name in ("time_to_first_token", "inter_token_latency", "e2e_request_latency", "request_queue_time", "request_prefill_time",
                 "request_decode_time", "request_inference_time"):  # fmt: skip
        assert f'vllm:{name}_seconds_bucket{{engine="0",le="+Inf",model_name="served"}} 0.0' in page
    for reason in ("stop", "length", "abort", "error"):
        assert f'finished_reason="{reason}"' in page


def test_every_vllm_number_is_also_under_a_native_name() -> None:
    values = samples(make())
    natives = {value for name, value in values.items() if name.startswith("octavo_")}
    assert {value for name, value in values.items() if name.startswith("vllm:")} <= natives


def test_vllm_names_can_be_switched_off() -> None:
    assert "vllm:" not in make(vllm_names=False).render().decode()


def test_a_histogram_counts_each_value_in_its_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 3):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.sum == 6.0


def test_a_record_feeds_the_histograms_once() -> None:
    metrics = make()
    record = Record(metrics, "/v1/completions", "", log_line=False)
    record.on_submit()
    record.on_first_token()
    record.on_finish("stop")
    record.close()
    record.close()
    values = samples(metrics)
    assert values["octavo_time_to_first_token_seconds_count"] == values["octavo_request_seconds_count"] == 1
    assert metrics.finished["stop"] == 1


def test_a_step_is_counted_once_however_often_its_stats_arrive() -> None:
    metrics = make()
    for _ in range(2):
        metrics.on_step([], EngineStats(steps=1, step_tokens=4))
    assert samples(metrics)["octavo_step_tokens_count"] == 1


def test_time_between_tokens_is_per_sample_and_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo.server.metrics as module

    clock = iter([0.0, 1.0, 2.0])
    monkeypatch.setattr(module, "perf_counter", lambda: next(clock))
    metrics = make()
    metrics.on_step([Event("a", 0, [1]), Event("a", 1, [1])], EngineStats(steps=1, running=2))
    metrics.on_step([Event("a", 0, [2, 3])], EngineStats(steps=2, running=2))
    metrics.on_step([Event("a", 0, [4], finish="stop"), Event("a", 1, [4], finish="length")], EngineStats(steps=3, running=1))
    values = samples(metrics)
    assert values["octavo_inter_token_latency_seconds_count"] == 4  # 2 x 0.5 s, 1 s, 2 s
    assert values["octavo_inter_token_latency_seconds_sum"] == pytest.approx(4.0)
    assert not metrics.last_token


def test_samples_that_end_without_a_word_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo.server.metrics as module

    monkeypatch.setattr(module, "_MAX_TRACKED", 10)
    metrics = make()
    for i in range(100):
        metrics.on_step([Event(f"r{i}", 0, [1])], EngineStats(steps=i + 1, running=1))
        assert len(metrics.last_token) <= 10
    metrics.on_step([], EngineStats(steps=101))
    assert not metrics.last_token


def test_a_fault_in_the_metrics_is_logged_once_and_never_raised(caplog: pytest.LogCaptureFixture) -> None:
    metrics = make()
    for _ in range(3):
        metrics.on_step([None], EngineStats(steps=1))  # type: ignore[list-item]
    assert len(caplog.records) == 1
