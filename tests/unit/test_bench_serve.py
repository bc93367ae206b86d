"""`octavo bench serve` against a server that misbehaves on purpose: what is counted, and what never is."""

from __future__ import annotations

import asyncio
import json
import threading
from collections.abc import Iterator
from contextlib import contextmanager

import pytest
from octavo.bench import serve
from octavo.bench.workloads import Ask
from octavo.errors import ConfigError, OctavoError

GAP = 0.02


def event(chunk: object) -> bytes:
    return b"data: " + (chunk if isinstance(chunk, bytes) else json.dumps(chunk).encode()) + b"\n\n"


def usage(prompt: int, output: int) -> bytes:
    return event({"choices": [], "usage": {"prompt_tokens": prompt, "completion_tokens": output}})


class Scripted:
    """An HTTP/1.1 server whose answer to request i is decided by the first prompt token id."""

    def __init__(self) -> None:
        self.bodies: list[dict] = []  # type: ignore[type-arg]
        self.heads: list[str] = []
        self.open, self.most_open = 0, 0

    async def handle(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        head = (await reader.readuntil(b"\r\n\r\n")).decode()
        length = int(next((line.split(":")[1] for line in head.splitlines() if line.lower().startswith("content-length")), "0"))
        body = json.loads(await reader.readexactly(length))
        self.heads.append(head)
        self.bodies.append(body)
        self.open += 1
        self.most_open = max(self.most_open, self.open)
        await self.answer(writer, body)
        self.open -= 1
        writer.close()

    async def answer(self, writer: asyncio.StreamWriter, body: dict) -> None:  # type: ignore[type-arg]
        kind = body["prompt"][0] if "prompt" in body else "ok"
        if kind == 500:
            error = json.dumps({"error": {"message": "out of cheese"}}).encode()
            writer.write(b"HTTP/1.1 500 Oops\r\nconnection: close\r\ncontent-length: %d\r\n\r\n" % len(error) + error)
            return
        writer.write(b"HTTP/1.1 200 OK\r\nconnection: close\r\ncontent-type: text/event-stream\r\n\r\n")
        if kind == 1:  # dies after two tokens
            writer.write(event({"choices": [{"text": "a"}]}) * 2)
        elif kind == 2:
            writer.write(event({"choices": [{"text": "a"}]}) + event({"error": {"message": "engine gone"}}))
        elif kind == 4:  # a proxy that speaks for itself
            writer.write(event(b"<html>") + event(b"[DONE]"))
        elif kind == 3:
            writer.write(usage(3, 0) + event(b"[DONE]"))
        else:
            delta = "prompt" not in body
            if delta:
                writer.write(event({"choices": [{"delta": {"role": "assistant", "content": ""}}]}))
            await asyncio.sleep(GAP)
            for _ in range(body["max_tokens"]):
                writer.write(event({"choices": [{"delta": {"content": "x"}} if delta else {"text": "x"}]}))
                await writer.drain()
                await asyncio.sleep(GAP)
            writer.write(usage(len(body.get("prompt", "12")), body["max_tokens"]) + event(b"[DONE]"))


@contextmanager
def running() -> Iterator[tuple[str, Scripted]]:
    """The scripted server on a loop of its own, in a thread."""
    scripted, loop, port = Scripted(), asyncio.new_event_loop(), []
    ready = threading.Event()

    def run() -> None:
        async def begin() -> None:
            server = await asyncio.start_server(scripted.handle, "127.0.0.1", 0)
            port.append(server.sockets[0].getsockname()[1])
            ready.set()

        loop.run_until_complete(begin())
        loop.run_forever()

    thread = threading.Thread(target=run, daemon=True)
    thread.start()
    assert ready.wait(5)
    try:
        yield f"http://127.0.0.1:{port[0]}", scripted
    finally:
        loop.call_soon_threadsafe(loop.stop)
        thread.join(5)


@pytest.fixture
def server() -> Iterator[tuple[str, Scripted]]:
    with running() as found:
        yield found


def load(url: str, asks: list[Ask], **kw: object) -> serve.Load:
    return serve.Load(base_url=url, model="m", asks=asks, timeout=5, **kw)  # type: ignore[arg-type]


def test_tokens_and_times_come_from_the_stream(server: tuple[str, Scripted]) -> None:
    record = serve.measure(load(server[0], [Ask([20, 21, 22], 4)] * 3))
    assert (record["completed"], record["errors"]["count"]) == (3, 0)
    assert (record["prompt_tokens"], record["output_tokens"]) == (9, 12)
    assert record["latency"]["ttft_ms"]["p50"] >= GAP * 1000
    assert record["latency"]["itl_ms"]["p50"] >= GAP * 1000 * 0.9
    assert record["latency"]["e2e_ms"]["mean"] > record["latency"]["ttft_ms"]["mean"]
    assert record["output_tok_s"] == pytest.approx(12 / record["wall_s"], rel=0.01)


def test_failures_are_counted_by_kind_and_stand_in_no_latency(server: tuple[str, Scripted]) -> None:
    asks = [Ask([20], 1), Ask([500], 1), Ask([500], 1), Ask([1], 1), Ask([2], 1), Ask([3], 1), Ask([4], 1)]
    record = serve.measure(load(server[0], asks))
    assert record["completed"] == 1
    assert record["errors"] == {
        "count": 6,
        "kinds": {
            "HTTP 500: out of cheese": 2,
            "the stream ended without [DONE]": 1,
            "error event: engine gone": 1,
            "the stream brought no text": 1,
            "JSONDecodeError: Expecting value: line 1 column 1 (char 0)": 1,
        },
    }
    assert record["output_tokens"] == 1


def test_concurrency_is_bounded(server: tuple[str, Scripted]) -> None:
    serve.measure(load(server[0], [Ask([20], 2)] * 8, concurrency=2))
    assert server[1].most_open == 2


def test_a_rate_spreads_the_requests(server: tuple[str, Scripted]) -> None:
    record = serve.measure(load(server[0], [Ask([20], 1)] * 10, rate=50.0, seed=1))
    assert record["wall_s"] > 5 / 50


def test_a_chat_counts_from_the_first_content_not_from_the_role(server: tuple[str, Scripted]) -> None:
    record = serve.measure(load(server[0], [Ask([20] * 5, 2)], endpoint="/v1/chat/completions"))
    assert record["latency"]["ttft_ms"]["p50"] >= GAP * 1000
    assert len(server[1].bodies[-1]["messages"][0]["content"].split()) == 5


def test_the_key_is_sent_and_is_not_in_the_record(server: tuple[str, Scripted]) -> None:
    record = serve.measure(load(server[0], [Ask([20], 1)], api_key="s3cret"))
    assert all("authorization: bearer s3cret" in head.lower() for head in server[1].heads)
    assert "s3cret" not in json.dumps(record)


def test_goodput_counts_requests_that_keep_every_limit(server: tuple[str, Scripted]) -> None:
    asks = [Ask([20], 1), Ask([20], 20)]
    limits = serve.parse_goodput(["ttft:5000", f"e2el:{GAP * 1000 * 12}"])
    assert serve.measure(load(server[0], asks, goodput=limits))["goodput"]["requests"] == 1
    with pytest.raises(ConfigError, match="ttft:500"):
        serve.parse_goodput(["ttfb:3"])


def test_nobody_at_the_address_is_an_error_rather_than_a_table_of_zeros() -> None:
    with pytest.raises(OctavoError, match="does not answer a first request"):
        serve.measure(load("http://127.0.0.1:9", [Ask([20], 1)]))
