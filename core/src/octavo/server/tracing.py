"""Traces: one span a generating request, with its queue, prefill and decode inside, for OpenTelemetry.

Owns the exporter. Built only where --otlp-traces-endpoint is set; the packages are an extra
(octavo[otel]). A span carries the facts of a request's log line and never text of a client.
"""

from __future__ import annotations

import itertools
import threading
import time
from collections.abc import Mapping
from typing import Any

import octavo
from octavo.errors import ConfigError
from octavo.server.records import Record

CLOSE_SECONDS = 1.0
_NO_FAULT = frozenset({"ok", "disconnected"})


class Tracing:
    """`end(record, headers)` once a request has ended. exporter: an OpenTelemetry SpanExporter instead of OTLP.

    Raises ConfigError where the packages are missing.
    """

    def __init__(self, endpoint: str, *, exporter: Any = None) -> None:
        try:
            from opentelemetry.propagate import extract
            from opentelemetry.sdk.resources import Resource
            from opentelemetry.sdk.trace import TracerProvider
            from opentelemetry.sdk.trace.export import BatchSpanProcessor
            from opentelemetry.trace import Status, StatusCode, set_span_in_context

            if exporter is None:
                from opentelemetry.exporter.otlp.proto.http.trace_exporter import OTLPSpanExporter

                exporter = OTLPSpanExporter(endpoint=endpoint)
        except ImportError as error:
            raise ConfigError(f"--otlp-traces-endpoint needs `pip install 'octavo[otel]'`: {error}") from error
        self._extract, self._inside = extract, set_span_in_context
        self._error = Status(StatusCode.ERROR)
        self._provider = TracerProvider(
            resource=Resource.create({"service.name": "octavo", "service.version": octavo.__version__})
        )
        self._provider.add_span_processor(BatchSpanProcessor(exporter))
        self._tracer = self._provider.get_tracer("octavo.server")

    def end(self, record: Record, headers: Mapping[str, str]) -> None:
        """Make the spans of an ended request; `headers` may carry the client's trace (W3C `traceparent`)."""
        assert record.ended is not None
        offset = time.time_ns() - time.perf_counter_ns()

        def wall(moment: float) -> int:
            return int(moment * 1e9) + offset

        parent = self._extract({"traceparent": headers.get("traceparent", ""), "tracestate": headers.get("tracestate", "")})
        span = self._tracer.start_span(
            "llm_request", context=parent, start_time=wall(record.arrived), attributes=attributes(record)
        )
        if record.outcome not in _NO_FAULT:
            span.set_status(self._error)
        inside = self._inside(span)
        moments = [("queue", record.submitted), ("prefill", record.scheduled), ("decode", record.first_token), ("", record.ended)]
        for (name, begin), (_, end) in itertools.pairwise(moments):
            if begin is not None and end is not None and record.first_token is not None:
                child = self._tracer.start_span(name, context=inside, start_time=wall(begin))
                child.end(wall(max(end, begin)))
        span.end(wall(record.ended))

    def close(self, seconds: float = CLOSE_SECONDS) -> None:
        """Send what is left, for `seconds` at most: a collector that does not answer must not hold the end up."""
        sending = threading.Thread(target=self._provider.shutdown, daemon=True)
        sending.start()
        sending.join(seconds)


def attributes(record: Record) -> dict[str, Any]:
    """OpenTelemetry's names for generative AI where it has them, ours elsewhere."""
    facts = record.facts()
    told = {
        "gen_ai.system": "octavo",
        "gen_ai.request.model": facts["model"],
        "gen_ai.response.id": facts["id"],
        "gen_ai.response.finish_reasons": facts["finish"],
        "gen_ai.usage.input_tokens": facts["prompt_tokens"],
        "gen_ai.usage.output_tokens": facts["completion_tokens"],
        "http.route": facts["route"],
        "octavo.outcome": facts["outcome"],
        "octavo.cached_tokens": facts["cached_tokens"],
        "octavo.queue_seconds": facts["queue_seconds"],
        "octavo.ttft_seconds": facts["ttft_seconds"],
        "octavo.tenant": facts["tenant"],
    }
    return {name: value for name, value in told.items() if value is not None}
