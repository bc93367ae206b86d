"""Metrics for Prometheus: Octavo's own names, and the names that vLLM's dashboards use.

Owns the counts of this server and how they are exported; the engine's totals come with its stats.
Every family is one line of a table and is exported under both names from the same numbers. Must
never take a label value from a client, and never raise into a request or the engine's loop.
"""

from __future__ import annotations

import logging
from bisect import bisect_left
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from time import perf_counter

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from octavo.request import EngineStats, Event, ModelInfo

log = logging.getLogger("octavo.server")

ENGINE = "0"
_FINISH = ("stop", "length", "abort", "error")
_SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
_TOKEN_SECONDS = (0.001, 0.0025, 0.005, 0.01, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1, 2.5, 5, 10)
_MAX_TRACKED = 16384  # samples whose last token's time is kept
_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)


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


class Metrics(Collector):
    """Everything counted in this process, and the collector that renders it with the engine's stats.

    model: the served name, for the label `model_name`. stats and alive are asked at every scrape.
    """

    def __init__(
        self, model: str, *, stats: Callable[[], EngineStats], alive: Callable[[], bool], info: ModelInfo, vllm_names: bool
    ) -> None:
        self._model, self._stats, self._alive, self._info, self._vllm = model, stats, alive, info, vllm_names
        self.ttft, self.e2e = Histogram(_SECONDS), Histogram(_SECONDS)
        self.queue, self.prefill, self.decode, self.inference = (Histogram(_SECONDS) for _ in range(4))
        self.itl = Histogram(_TOKEN_SECONDS)
        self.step_tokens = Histogram(_TOKENS)
        self.finished: Counter[str] = Counter(dict.fromkeys(_FINISH, 0))
        self.http: Counter[tuple[str, str]] = Counter()
        self.in_flight = 0
        self.disconnects = 0
        self.last_token: dict[tuple[str, int], float] = {}  # of running samples, by the engine's clock of arrivals here
        self._steps = 0
        self._broken = False
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def on_step(self, events: list[Event], stats: EngineStats) -> None:
        """Observer of AsyncLLM: once per message from the engine. Swallows its own faults, saying so once."""
        try:
            if stats.steps > self._steps:
                self._steps = stats.steps
                if stats.step_tokens:
                    self.step_tokens.observe(stats.step_tokens)
            self._on_tokens(events, perf_counter())
            # A sample that is aborted from this side sends no finish: its entry must go all the same.
            if stats.running == stats.waiting == 0:
                self.last_token.clear()
            elif len(self.last_token) > _MAX_TRACKED:
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
                    self.itl.observe((now - before) / len(event.tokens), len(event.tokens))
                self.last_token[key] = now
            if event.finish is not None:
                self.last_token.pop(key, None)

    def render(self) -> bytes:
        """The page of GET /metrics, in Prometheus' text format."""
        return generate_latest(self._registry)

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        stats, info = self._stats(), self._info
        labels = ["model_name", "engine"]
        values = [self._model, ENGINE]

        def gauge(name: str, help: str, value: float) -> Metric:
            family = GaugeMetricFamily(name, help, labels=labels)
            family.add_metric(values, value)
            return family

        def counter(name: str, help: str, value: float) -> Metric:
            family = CounterMetricFamily(name, help, labels=labels)
            family.add_metric(values, value)
            return family

        def histogram(name: str, help: str, value: Histogram) -> Metric:
            family = HistogramMetricFamily(name, help, labels=labels)
            family.add_metric(values, buckets=value.buckets(), sum_value=value.sum)
            return family

        gauges: list[tuple[str, tuple[str, ...], str, float]] = [
            ("requests_running", ("num_requests_running",), "Sequences in the running batch.", stats.running),
            ("requests_waiting", ("num_requests_waiting",), "Sequences waiting for a place.", stats.waiting),
            (
                "kv_cache_usage_ratio",
                ("kv_cache_usage_perc", "gpu_cache_usage_perc"),
                "Used part of the KV blocks, 0 to 1.",
                stats.kv_usage,
            ),
            ("kv_blocks_free", (), "KV blocks that a request could take now.", stats.free_blocks),
            ("kv_blocks", (), "KV blocks of the pool.", info.num_blocks),
            ("http_requests_in_flight", (), "HTTP requests being answered.", self.in_flight),
            ("engine_up", (), "1 while the engine lives.", float(self._alive())),
        ]
        counters: list[tuple[str, tuple[str, ...], str, float]] = [
            (
                "prefix_cache_queries",
                ("prefix_cache_queries",),
                "Prompt tokens looked up in the prefix cache.",
                stats.prefix_queries,
            ),
            ("prefix_cache_hits", ("prefix_cache_hits",), "Prompt tokens taken from the prefix cache.", stats.prefix_hits),
            ("preemptions", ("num_preemptions",), "Sequences that gave up their blocks to be recomputed.", stats.preemptions),
            ("prompt_tokens", ("prompt_tokens",), "Prompt tokens of requests that have begun.", stats.prompt_tokens),
            ("generation_tokens", ("generation_tokens",), "Tokens generated.", stats.generation_tokens),
            ("engine_steps", (), "Steps of the engine.", stats.steps),
            ("client_disconnects", (), "Requests whose client went away before the end.", self.disconnects),
        ]
        histograms: list[tuple[str, tuple[str, ...], str, Histogram]] = [
            (
                "time_to_first_token_seconds",
                ("time_to_first_token_seconds",),
                "From the request's arrival to its first token.",
                self.ttft,
            ),
            ("inter_token_latency_seconds", ("inter_token_latency_seconds",), "Between two tokens of one sample.", self.itl),
            ("request_seconds", ("e2e_request_latency_seconds",), "From a request's arrival to its end.", self.e2e),
            ("request_queue_seconds", ("request_queue_time_seconds",), "From arrival to the first scheduled token.", self.queue),
            (
                "request_prefill_seconds",
                ("request_prefill_time_seconds",),
                "From the first scheduled token to the first generated one.",
                self.prefill,
            ),
            ("request_decode_seconds", ("request_decode_time_seconds",), "From the first token to the last.", self.decode),
            (
                "request_inference_seconds",
                ("request_inference_time_seconds",),
                "From the first scheduled token to the last.",
                self.inference,
            ),
            ("step_tokens", ("iteration_tokens_total",), "Tokens computed in one step.", self.step_tokens),
        ]
        for native, vllm, text, value in gauges:
            yield from (gauge(name, text, value) for name in self._names(native, vllm))
        for native, vllm, text, value in counters:
            yield from (counter(name, text, value) for name in self._names(native, vllm))
        for native, vllm, text, seen in histograms:
            yield from (histogram(name, text, seen) for name in self._names(native, vllm))
        yield from self._labelled(labels, values)

    def _names(self, native: str, vllm: Sequence[str]) -> list[str]:
        return ["octavo_" + native, *("vllm:" + name for name in vllm if self._vllm)]

    def _labelled(self, labels: list[str], values: list[str]) -> Iterator[Metric]:
        """Families with labels of their own; their values come from closed sets of this server's."""
        for prefix, label in (("octavo_samples_finished", "reason"), ("vllm:request_success", "finished_reason")):
            if self._vllm or prefix.startswith("octavo"):
                family = CounterMetricFamily(prefix, "Samples ended, by reason.", labels=[*labels, label])
                for reason, count in self.finished.items():
                    family.add_metric([*values, reason], count)
                yield family
        family = CounterMetricFamily("octavo_http_responses", "Answers by route and status.", labels=["route", "status"])
        for (route, status), count in self.http.items():
            family.add_metric([route, status], count)
        yield family
        info = self._info
        cache = {
            "block_size": str(info.block_size),
            "num_gpu_blocks": str(info.num_blocks),
            "kv_cache_tokens": str(info.kv_cache_tokens),
            "dtype": info.dtype,
            "max_model_len": str(info.max_model_len),
        }
        for name in ("octavo_cache_config_info", "vllm:cache_config_info"):
            if self._vllm or name.startswith("octavo"):
                gauge = GaugeMetricFamily(name, "Geometry of the KV cache.", labels=[*labels, *cache])
                gauge.add_metric([*values, *cache.values()], 1)
                yield gauge
