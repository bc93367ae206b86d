"""Metrics: the names that dashboards use, from the same numbers as our own; never an exception into the loop."""

from __future__ import annotations

import pytest
from octavo.request import EngineStats, Event, ModelInfo
from octavo.server.counts import MAX_TENANTS, OTHER, Counts, Histogram
from octavo.server.gpu import Gpus
from octavo.server.metrics import Metrics, View
from octavo.server.records import Record
from prometheus_client.parser import text_string_to_metric_families

INFO = ModelInfo(model="m", vocab_size=8, max_model_len=64, num_blocks=10, block_size=16, kv_cache_tokens=160, dtype="float32")
STATS = EngineStats(
    running=2, waiting=3, kv_usage=0.25, prompt_tokens=7, generation_tokens=9, preemptions=1, prefix_hits=4, steps=5
)


def make(counts: Counts | None = None, *, vllm_names: bool = True) -> Metrics:
    view = View("served", counts or Counts(), STATS, INFO)
    return Metrics(lambda: [view], vllm_names=vllm_names)


def samples(of: Metrics | Counts) -> dict[str, float]:
    metrics = make(of) if isinstance(of, Counts) else of
    return {s.name: s.value for family in text_string_to_metric_families(metrics.render().decode()) for s in family.samples}


def test_vllm_names_are_there_with_its_labels() -> None:
    page = make().render().decode()
    labels = '{engine="0",model_name="served"}'
    for line in (
        f"vllm:num_requests_running{labels} 2.0",
        f"vllm:num_requests_waiting{labels} 3.0",
        f"vllm:kv_cache_usage_perc{labels} 0.25",
        f"vllm:gpu_cache_usage_perc{labels} 0.25",
        f"vllm:gpu_cache_usage_sys{labels} 0.25",
        f"vllm_kv_cache_usage_ratio{labels} 0.25",
        f"vllm_request_queue_length{labels} 3.0",
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
    assert {value for name, value in values.items() if name.startswith("vllm")} <= natives


def test_vllm_names_can_be_switched_off() -> None:
    assert "vllm" not in make(vllm_names=False).render().decode()


def test_a_histogram_counts_each_value_in_its_first_bucket_that_holds_it() -> None:
    histogram = Histogram((1, 2))
    for value in (0.5, 1, 1.5, 3):
        histogram.observe(value)
    assert histogram.buckets() == [("1.0", 2.0), ("2.0", 3.0), ("+Inf", 4.0)]
    assert histogram.sum == 6.0


def test_a_record_feeds_the_histograms_once() -> None:
    metrics = Counts()
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
    metrics = Counts()
    observe = metrics.observer()
    for _ in range(2):
        observe([], EngineStats(steps=1, step_tokens=4))
    metrics.observer()([], EngineStats(steps=1, step_tokens=4))  # the first step of the next engine
    assert samples(metrics)["octavo_step_tokens_count"] == 2


def test_time_between_tokens_is_per_sample_and_per_token(monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo.server.counts as module

    clock = iter([0.0, 1.0, 2.0])
    monkeypatch.setattr(module, "perf_counter", lambda: next(clock))
    metrics = Counts()
    observe = metrics.observer()
    observe([Event("a", 0, [1]), Event("a", 1, [1])], EngineStats(steps=1, running=2))
    observe([Event("a", 0, [2, 3])], EngineStats(steps=2, running=2))
    observe([Event("a", 0, [4], finish="stop"), Event("a", 1, [4], finish="length")], EngineStats(steps=3, running=1))
    values = samples(metrics)
    assert values["octavo_inter_token_latency_seconds_count"] == 4  # 2 x 0.5 s, 1 s, 2 s
    assert values["octavo_inter_token_latency_seconds_sum"] == pytest.approx(4.0)
    assert not observe.last_token


def test_samples_that_end_without_a_word_are_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo.server.counts as module

    monkeypatch.setattr(module, "MAX_TRACKED", 10)
    metrics = Counts()
    observe = metrics.observer()
    for i in range(100):
        observe([Event(f"r{i}", 0, [1])], EngineStats(steps=i + 1, running=1))
        assert len(observe.last_token) <= 10
    observe([], EngineStats(steps=101))
    assert not observe.last_token


def test_a_fault_in_the_metrics_is_logged_once_and_never_raised(caplog: pytest.LogCaptureFixture) -> None:
    observe = Counts().observer()
    for _ in range(3):
        observe([None], EngineStats(steps=1))  # type: ignore[list-item]
    assert len(caplog.records) == 1


def test_several_models_share_each_family_so_that_the_page_can_be_parsed() -> None:
    views = [View(name, Counts(), EngineStats(running=count), INFO) for name, count in (("a", 1), ("b", 2))]
    page = Metrics(lambda: views, vllm_names=True).render().decode()
    for name in ("octavo_requests_running", "vllm:num_requests_running"):
        assert page.count(f"# TYPE {name} gauge") == 1
        assert f'{name}{{engine="0",model_name="a"}} 1.0' in page and f'{name}{{engine="0",model_name="b"}} 2.0' in page
    assert list(text_string_to_metric_families(page))


def test_a_full_kv_cache_raises_the_alert_metric() -> None:
    for usage, high in ((0.94, 0.0), (0.95, 1.0)):
        view = View("m", Counts(), EngineStats(kv_usage=usage), INFO)
        assert samples(Metrics(lambda view=view: [view], vllm_names=False))["octavo_kv_cache_high"] == high  # type: ignore[misc]


def test_tenants_have_shares_and_their_labels_are_bounded() -> None:
    counts = Counts()
    for i in range(MAX_TENANTS + 5):
        record = Record(counts, "/v1/completions", f"tenant-{i}", log_line=False, prompt_tokens=2)
        if i == 0:
            record.fail("queue_full", RuntimeError())
        record.close()
    assert len(counts.tenants) == MAX_TENANTS + 1
    assert counts.tenants[OTHER].requests == 5 and counts.tenants[OTHER].prompt_tokens == 10
    page = make(counts).render().decode()
    assert 'octavo_tenant_requests_failed_total{model_name="served",tenant="tenant-0"} 1.0' in page
    assert 'octavo_tenant_prompt_tokens_total{model_name="served",tenant="tenant-1"} 2.0' in page


class Nvml:
    """pynvml, of one GPU that is 70% busy. `broken` says when the driver goes away."""

    class NVMLError_NotSupported(Exception):
        pass

    def __init__(self) -> None:
        self.broken = self.sliced = False

    def nvmlInit(self) -> None:
        pass

    def nvmlDeviceGetCount(self) -> int:
        if self.broken:
            raise RuntimeError("the driver is gone")
        return 1

    def nvmlDeviceGetHandleByIndex(self, index: int) -> int:
        return index

    def nvmlDeviceGetHandleByUUID(self, name: str) -> int:
        return {"GPU-aaaa": 2}[name]

    def nvmlDeviceGetIndex(self, handle: int) -> int:
        return handle

    def nvmlDeviceGetMemoryInfo(self, handle: int) -> object:
        return type("Memory", (), {"total": 1000, "used": 250})

    def nvmlDeviceGetUtilizationRates(self, handle: int) -> object:
        if self.sliced:
            raise self.NVMLError_NotSupported
        return type("Rates", (), {"gpu": 70})


def test_gpus_are_read_through_nvml_and_absent_where_there_is_none(monkeypatch: pytest.MonkeyPatch) -> None:
    import octavo.server.gpu as module

    monkeypatch.setattr(module, "FRESH_SECONDS", 0.0)
    nvml = Nvml()
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    gpus = Gpus(nvml)
    page = samples(Metrics(list, vllm_names=True, gpus=gpus))
    assert page["octavo_gpu_utilization_ratio"] == 0.7 and page["vllm_gpu_utilization_percent"] == 70.0
    assert page["octavo_gpu_memory_used_bytes"] == 250 and page["octavo_gpu_memory_bytes"] == 1000
    nvml.sliced = True
    assert gpus.read()[0].utilization != gpus.read()[0].utilization  # not a number: a slice of a GPU has no such value
    nvml.broken = True
    assert gpus.read() == []
    assert not any("gpu_util" in name for name in samples(Metrics(list, vllm_names=True, gpus=gpus)))
    assert Gpus(type("None", (), {"nvmlInit": lambda self: 1 / 0})()).read() == []


@pytest.mark.parametrize(("visible", "seen"), [("1", [1]), ("GPU-aaaa,0", [2, 0]), ("", []), ("0,-1,1", [0]), (None, [0])])
def test_only_gpus_that_are_visible_to_cuda_are_reported(
    visible: str | None, seen: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CUDA_VISIBLE_DEVICES", raising=False)
    assert [gpu.index for gpu in Gpus(Nvml(), visible).read()] == seen


def test_two_engines_of_one_name_do_not_mix_their_requests_up(monkeypatch: pytest.MonkeyPatch) -> None:
    """While one replaces the other both number their requests from 0."""
    import octavo.server.counts as module

    clock = iter([0.0, 10.0, 10.5])
    monkeypatch.setattr(module, "perf_counter", lambda: next(clock))
    counts = Counts()
    old, new = counts.observer(), counts.observer()
    old([Event("r0", 0, [1])], EngineStats(steps=1, running=1))
    new([Event("r0", 0, [1])], EngineStats(steps=1, running=1))
    new([Event("r0", 0, [2])], EngineStats(steps=2, running=1))
    assert counts.itl.sum == pytest.approx(0.5)
