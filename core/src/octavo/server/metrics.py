"""Metrics for Prometheus: Octavo's own names, and the names that vLLM's dashboards use.

Owns the tables of families: one row is one number, exported under all of its names. Must never take a
label value from a client: labels are served names, tenants' names (bounded), and closed sets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CollectorRegistry, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, HistogramMetricFamily
from prometheus_client.metrics_core import Metric
from prometheus_client.registry import Collector

from octavo.engine.memory import ALERT_AT
from octavo.request import EngineStats, ModelInfo
from octavo.server.counts import Counts, Histogram
from octavo.server.gpu import Gpu, Gpus
from octavo.server.tenants import Tenants
from octavo.server.watch import LoopWatch

ENGINE = "0"
LABELS = ["model_name", "engine"]


@dataclass(frozen=True, slots=True)
class View:
    """One model at the moment of a scrape. `resident` is what its process holds, in bytes."""

    name: str
    counts: Counts
    stats: EngineStats
    info: ModelInfo | None
    alive: bool = True
    restarts: int = 0
    generation: int = 1
    requests: int = 0
    resident: int = 0


Gauge = tuple[str, tuple[str, ...], str, Callable[[View], float]]
Histograms = tuple[str, tuple[str, ...], str, Callable[[View], Histogram]]

# our name (after octavo_), vLLM's names in full, help, value
GAUGES: tuple[Gauge, ...] = (
    ("requests_running", ("vllm:num_requests_running",), "Sequences in the running batch.", lambda v: v.stats.running),
    (
        "requests_waiting",
        ("vllm:num_requests_waiting", "vllm_request_queue_length"),
        "Sequences waiting for a place.",
        lambda v: v.stats.waiting,
    ),
    (
        "kv_cache_usage_ratio",
        ("vllm:kv_cache_usage_perc", "vllm:gpu_cache_usage_perc", "vllm:gpu_cache_usage_sys", "vllm_kv_cache_usage_ratio"),
        "Used part of the KV blocks, 0 to 1.",
        lambda v: v.stats.kv_usage,
    ),
    (
        "kv_cache_high",
        (),
        "1 from 95% use of the KV blocks on, until it is below 90%.",
        lambda v: float(v.stats.kv_alert or v.stats.kv_usage >= ALERT_AT),
    ),
    ("kv_blocks_free", (), "KV blocks that a request could take now.", lambda v: v.stats.free_blocks),
    ("kv_blocks", (), "KV blocks of the pool.", lambda v: v.stats.total_blocks or (v.info.num_blocks if v.info else 0)),
    ("kv_blocks_cached", (), "KV blocks that hold a prefix nobody uses now.", lambda v: v.stats.cached_blocks),
    ("kv_blocks_pinned", (), "KV blocks that only a pinned prefix holds.", lambda v: v.stats.pinned_blocks),
    (
        "kv_utilization_ratio",
        (),
        "Share of the device's memory that the pool was last sized by (--dynamic-memory), else 0.",
        lambda v: v.stats.kv_utilization,
    ),
    ("http_requests_in_flight", (), "HTTP requests being answered.", lambda v: v.counts.in_flight),
    ("engine_up", (), "1 while the engine lives.", lambda v: float(v.alive)),
    ("engine_generation", (), "Number of the engine's load, over all models of this server.", lambda v: v.generation),
    ("engine_resident_bytes", (), "Memory of this machine that the engine's process holds.", lambda v: v.resident),
)
COUNTERS: tuple[Gauge, ...] = (
    (
        "prefix_cache_queries",
        ("vllm:prefix_cache_queries",),
        "Prompt tokens looked up in the prefix cache.",
        lambda v: v.stats.prefix_queries,
    ),
    (
        "prefix_cache_hits",
        ("vllm:prefix_cache_hits",),
        "Prompt tokens taken from the prefix cache.",
        lambda v: v.stats.prefix_hits,
    ),
    (
        "preemptions",
        ("vllm:num_preemptions",),
        "Sequences that gave up their blocks to others.",
        lambda v: v.stats.preemptions,
    ),
    ("swapped_out", (), "Preempted sequences that went to host memory.", lambda v: v.stats.swapped_out),
    ("swapped_in", (), "Sequences that continued from host memory.", lambda v: v.stats.swapped_in),
    (
        "kv_cache_alerts",
        (),
        "How often KV use reached 95%, and unpinned prefixes were evicted.",
        lambda v: v.stats.kv_alerts,
    ),
    ("kv_pool_growths", (), "How often the pool grew (--dynamic-memory).", lambda v: v.stats.pool_growths),
    ("kv_pool_shrinks", (), "How often the pool shrank (--dynamic-memory).", lambda v: v.stats.pool_shrinks),
    (
        "prompt_tokens",
        ("vllm:prompt_tokens",),
        "Prompt tokens of requests that have begun.",
        lambda v: v.stats.prompt_tokens,
    ),
    ("generation_tokens", ("vllm:generation_tokens",), "Tokens generated.", lambda v: v.stats.generation_tokens),
    ("engine_steps", (), "Steps of the engine.", lambda v: v.stats.steps),
    ("engine_restarts", (), "Times that the engine was started again after a crash.", lambda v: v.restarts),
    ("client_disconnects", (), "Requests whose client went away before the end.", lambda v: v.counts.disconnects),
)
HISTOGRAMS: tuple[Histograms, ...] = (
    (
        "time_to_first_token_seconds",
        ("vllm:time_to_first_token_seconds",),
        "From the request's arrival to its first token.",
        lambda v: v.counts.ttft,
    ),
    (
        "inter_token_latency_seconds",
        ("vllm:inter_token_latency_seconds",),
        "Between two tokens of one sample.",
        lambda v: v.counts.itl,
    ),
    (
        "request_seconds",
        ("vllm:e2e_request_latency_seconds",),
        "From a request's arrival to its end.",
        lambda v: v.counts.e2e,
    ),
    (
        "request_queue_seconds",
        ("vllm:request_queue_time_seconds",),
        "From arrival to the first scheduled token.",
        lambda v: v.counts.queue,
    ),
    (
        "request_prefill_seconds",
        ("vllm:request_prefill_time_seconds",),
        "From the first scheduled token to the first generated one.",
        lambda v: v.counts.prefill,
    ),
    (
        "request_decode_seconds",
        ("vllm:request_decode_time_seconds",),
        "From the first token to the last.",
        lambda v: v.counts.decode,
    ),
    (
        "request_inference_seconds",
        ("vllm:request_inference_time_seconds",),
        "From the first scheduled token to the last.",
        lambda v: v.counts.inference,
    ),
    (
        "admission_seconds",
        (),
        "From a request's body to the engine: limits, template, tokenising. The server's own part of a first token.",
        lambda v: v.counts.admission,
    ),
    (
        "delivery_seconds",
        (),
        "From the engine's sending of tokens to their place in the client's socket. The server's own part of every token.",
        lambda v: v.counts.delivery,
    ),
    ("step_tokens", ("vllm:iteration_tokens_total",), "Tokens computed in one step.", lambda v: v.counts.step_tokens),
)
GPU_GAUGES: tuple[tuple[str, tuple[str, ...], str, Callable[[Gpu], float]], ...] = (
    ("gpu_utilization_ratio", (), "Part of the last moments in which the GPU computed, 0 to 1.", lambda g: g.utilization),
    (
        "gpu_utilization_percent",
        ("vllm_gpu_utilization_percent",),
        "The same, 0 to 100.",
        lambda g: 100 * g.utilization,
    ),
    ("gpu_memory_used_bytes", (), "Memory of the GPU that is held, by whomever.", lambda g: g.memory_used),
    ("gpu_memory_bytes", (), "Memory of the GPU.", lambda g: g.memory),
)
TENANT_COUNTERS: tuple[tuple[str, str, str], ...] = (
    ("tenant_requests", "requests", "Requests that have ended."),
    ("tenant_requests_failed", "failed", "Requests that ended with an error."),
    ("tenant_prompt_tokens", "prompt_tokens", "Prompt tokens of requests that have ended."),
    ("tenant_generation_tokens", "generation_tokens", "Tokens generated for requests that have ended."),
)


class Metrics(Collector):
    """The page of GET /metrics. `views` is asked at every scrape; the rest is counted here."""

    def __init__(
        self,
        views: Callable[[], Sequence[View]],
        *,
        vllm_names: bool,
        gpus: Gpus | None = None,
        watch: LoopWatch | None = None,
        tenants: Tenants | None = None,
    ) -> None:
        self._views, self._vllm, self._gpus, self._watch, self._limited = views, vllm_names, gpus, watch, tenants
        self.http: Counter[tuple[str, str]] = Counter()  # (route, status)
        self._only: str | None = None
        self._registry = CollectorRegistry(auto_describe=False)
        self._registry.register(self)

    def render(self, *, only: str | None = None) -> bytes:
        """Prometheus' text format. only: of tenants, show this one alone."""
        self._only = only
        return generate_latest(self._registry)

    def _shown(self, tenant: str) -> bool:
        return self._only is None or tenant == self._only

    def describe(self) -> Iterator[Metric]:
        return iter(())

    def collect(self) -> Iterator[Metric]:
        views = self._views()
        for native, vllm, text, value in GAUGES:
            for name in self._names(native, vllm):
                gauge = GaugeMetricFamily(name, text, labels=LABELS)
                for view in views:
                    gauge.add_metric([view.name, ENGINE], value(view))
                yield gauge
        for native, vllm, text, value in COUNTERS:
            for name in self._names(native, vllm):
                counter = CounterMetricFamily(name, text, labels=LABELS)
                for view in views:
                    counter.add_metric([view.name, ENGINE], value(view))
                yield counter
        for native, vllm, text, seen in HISTOGRAMS:
            for name in self._names(native, vllm):
                family = HistogramMetricFamily(name, text, labels=LABELS)
                for view in views:
                    histogram = seen(view)
                    family.add_metric([view.name, ENGINE], buckets=histogram.buckets(), sum_value=histogram.sum)
                yield family
        yield from self._labelled(views)
        yield from self._tenants(views)
        yield from self._devices()
        yield from self._loop()

    def _names(self, native: str, vllm: Sequence[str]) -> list[str]:
        return ["octavo_" + native, *(vllm if self._vllm else ())]

    def _labelled(self, views: Sequence[View]) -> Iterator[Metric]:
        """Families with labels of their own; their values come from closed sets of this server's."""
        for name, label in (("octavo_samples_finished", "reason"), ("vllm:request_success", "finished_reason")):
            if self._vllm or name.startswith("octavo"):
                family = CounterMetricFamily(name, "Samples ended, by reason.", labels=[*LABELS, label])
                for view in views:
                    for reason, count in view.counts.finished.items():
                        family.add_metric([view.name, ENGINE, reason], count)
                yield family
        family = CounterMetricFamily("octavo_http_responses", "Answers by route and status.", labels=["route", "status"])
        for (route, status), count in self.http.items():
            family.add_metric([route, status], count)
        yield family
        keys = ["block_size", "num_gpu_blocks", "kv_cache_tokens", "dtype", "max_model_len"]
        for name in ("octavo_cache_config_info", "vllm:cache_config_info"):
            if self._vllm or name.startswith("octavo"):
                gauge = GaugeMetricFamily(name, "Geometry of the KV cache.", labels=[*LABELS, *keys])
                for view in views:
                    if view.info is not None:
                        info = view.info
                        shown = (info.block_size, info.num_blocks, info.kv_cache_tokens, info.dtype, info.max_model_len)
                        gauge.add_metric([view.name, ENGINE, *map(str, shown)], 1)
                yield gauge

    def _tenants(self, views: Sequence[View]) -> Iterator[Metric]:
        for name, field, text in TENANT_COUNTERS:
            family = CounterMetricFamily("octavo_" + name, text, labels=["model_name", "tenant"])
            for view in views:
                for tenant, share in view.counts.tenants.items():
                    if self._shown(tenant):
                        family.add_metric([view.name, tenant or "-"], getattr(share, field))
            yield family

        family = CounterMetricFamily(
            "octavo_tenant_limited", "Requests refused with 429 by a limit of their tenant.", labels=["tenant", "limit"]
        )
        quotas = self._limited.quotas if self._limited is not None else []
        for quota in (quota for quota in quotas if self._shown(quota.tenant)):
            for limit, count in quota.refused.items():
                family.add_metric([quota.tenant, limit], count)
        yield family

    def _loop(self) -> Iterator[Metric]:
        if self._watch is None:
            return
        for name, text, seen in (
            ("octavo_event_loop_lag_seconds", "How late the server's event loop came to a timer.", self._watch.lag),
            ("octavo_event_loop_busy_seconds", "How long it had worked in one go where it was late.", self._watch.busy),
        ):
            family = HistogramMetricFamily(name, text)
            family.add_metric([], buckets=seen.buckets(), sum_value=seen.sum)
            yield family

    def _devices(self) -> Iterator[Metric]:
        """Nothing at all where no GPU can be asked: a zero would look like an idle one."""
        devices = self._gpus.read() if self._gpus is not None else []
        for native, vllm, text, value in GPU_GAUGES if devices else ():
            for name in self._names(native, vllm):
                family = GaugeMetricFamily(name, text, labels=["gpu"])
                for gpu in devices:
                    family.add_metric([str(gpu.index)], value(gpu))
                yield family
