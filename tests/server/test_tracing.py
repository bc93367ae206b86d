"""Traces: one span a request with its parts inside, in the client's own trace, without text of the client."""

from __future__ import annotations

import ast
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from pathlib import Path

import httpx
import pytest
from octavo.errors import ConfigError
from octavo.server.counts import Counts
from octavo.server.records import Record
from octavo.server.tracing import Tracing

from tests.server.harness import Server

pytest.importorskip("opentelemetry.exporter.otlp.proto.http", reason="octavo[otel]")
trace_export = pytest.importorskip("opentelemetry.sdk.trace.export.in_memory_span_exporter", reason="octavo[otel]")

TRACE = "0af7651916cd43dd8448eb211c80319c"


def ended(**over: object) -> Record:
    record = Record(Counts(), "/v1/completions", "key-0", log_line=False, model="demo", prompt_tokens=5, completion_tokens=3)
    record.on_submit()
    record.queued = 0.002
    time.sleep(0.005)
    record.on_first_token()
    record.on_finish("stop")
    for name, value in over.items():
        setattr(record, name, value)
    record.close()
    return record


def spans(record: Record, headers: dict[str, str]) -> dict[str, object]:
    exporter = trace_export.InMemorySpanExporter()
    tracing = Tracing("http://127.0.0.1:4318/v1/traces", exporter=exporter)
    tracing.end(record, headers)
    tracing.close()
    return {span.name: span for span in exporter.get_finished_spans()}


def test_a_request_is_a_span_with_queue_prefill_and_decode_inside() -> None:
    record = ended()
    found = spans(record, {})
    whole = found["llm_request"]
    assert set(found) == {"llm_request", "queue", "prefill", "decode"}
    for name in ("queue", "prefill", "decode"):
        assert found[name].parent.span_id == whole.context.span_id
        assert whole.start_time <= found[name].start_time <= found[name].end_time <= whole.end_time
    assert found["queue"].end_time - found["queue"].start_time == pytest.approx(2e6, rel=0.01)
    assert abs(whole.end_time - time.time_ns()) < 5e9  # wall time
    assert whole.attributes["gen_ai.request.model"] == "demo" and whole.attributes["gen_ai.response.id"] == record.id
    assert (whole.attributes["gen_ai.usage.input_tokens"], whole.attributes["gen_ai.usage.output_tokens"]) == (5, 3)


def test_a_trace_of_the_client_is_continued() -> None:
    found = spans(ended(), {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"})
    assert f"{found['llm_request'].context.trace_id:032x}" == TRACE
    assert f"{found['llm_request'].parent.span_id:016x}" == "b7ad6b7169203331"


def test_a_failed_request_is_marked_and_one_without_a_token_has_no_parts() -> None:
    found = spans(ended(outcome="queue_full", first_token=None), {"traceparent": "nonsense"})
    assert set(found) == {"llm_request"}
    assert found["llm_request"].status.status_code.name == "ERROR"
    assert spans(ended(outcome="disconnected"), {})["llm_request"].status.status_code.name == "UNSET"


@contextmanager
def collector() -> Iterator[tuple[str, list[tuple[str, bytes]]]]:
    """A collector's address, and what was posted to it: path and body."""
    posts: list[tuple[str, bytes]] = []

    class Collector(BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            posts.append((self.path, self.rfile.read(int(self.headers["content-length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Collector) as server:
        threading.Thread(target=server.serve_forever, daemon=True).start()
        yield f"http://127.0.0.1:{server.server_port}/v1/traces", posts
        server.shutdown()


def test_spans_go_to_the_collector_over_http() -> None:
    with collector() as (address, posts):
        tracing = Tracing(address)
        tracing.end(ended(), {})
        tracing.close(10)
    assert posts and posts[0][0] == "/v1/traces" and b"llm_request" in b"".join(body for _, body in posts)


def test_a_server_that_is_told_of_a_collector_sends_it_a_span_of_each_request_and_no_text(tiny: Path, tmp_path: Path) -> None:
    with collector() as (address, posts):
        server = Server(tiny, tmp_path / "log", "--otlp-traces-endpoint", address).ready()
        try:
            headers = {"traceparent": f"00-{TRACE}-b7ad6b7169203331-01"}
            body = {"prompt": "words of a client", "max_tokens": 2, "user": "somebody"}
            answer = httpx.post(server.url + "/v1/completions", json=body, headers=headers)
        finally:
            server.stop()
    sent = b"".join(body for _, body in posts)
    assert answer.status_code == 200 and sent.count(b"llm_request") == 1
    assert bytes.fromhex(TRACE) in sent and all(name in sent for name in (b"queue", b"prefill", b"decode"))
    assert b"words of a client" not in sent and b"somebody" not in sent


def test_without_a_collector_nothing_of_opentelemetry_is_even_loaded() -> None:
    code = (
        "import sys; from octavo.config import ServerConfig; from octavo.server.app import create_app; import octavo.server.serve;"
        "create_app(None, ServerConfig(), ['m']); print([name for name in sys.modules if name.startswith('opentelemetry.')])"
    )
    loaded = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True).stdout
    assert [name for name in ast.literal_eval(loaded) if ".sdk" in name or ".exporter" in name] == []


def test_a_collector_that_is_not_there_does_not_hold_the_end_up() -> None:
    tracing = Tracing("http://127.0.0.1:9/v1/traces")
    tracing.end(ended(), {})
    began = time.monotonic()
    tracing.close()
    assert time.monotonic() - began < 1.5


def test_without_the_packages_the_start_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "opentelemetry.sdk.trace", None)
    with pytest.raises(ConfigError, match=r"octavo\[otel\]"):
        Tracing("http://127.0.0.1:4318/v1/traces")
