"""Clients that send slowly, or never: each stage has its time, and nobody else waits. No engine is needed."""

from __future__ import annotations

import asyncio
import contextlib
import gc
import json
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from typing import Any

import pytest
from octavo.config import ServerConfig
from octavo.server.app import create_app
from octavo.server.connection import HttpConnection
from octavo.server.serve import _Http, _uvicorn_config, listen
from uvicorn.protocols.http.httptools_impl import RequestResponseCycle

HEAD = b"POST /v1/completions HTTP/1.1\r\nHost: test\r\nContent-Type: application/json\r\n"
Reader, Writer = asyncio.StreamReader, asyncio.StreamWriter


@asynccontextmanager
async def serving(**settings: Any) -> AsyncIterator[tuple[str, int]]:
    config = ServerConfig(port=0, **{"header_timeout": 0.4, "body_timeout": 0.4, **settings})
    with listen(config) as sock:
        http = _Http(_uvicorn_config(create_app(None, config, ["tiny"]), config))
        task = asyncio.create_task(http.serve(sockets=[sock]))
        while not http.started:
            await asyncio.sleep(0.01)
        try:
            yield sock.getsockname()
        finally:
            http.should_exit = http.force_exit = True
            await task


def answer_to(talk: Callable[[Writer], Awaitable[None]], **settings: Any) -> tuple[bytes, float]:
    """What the server says to a client that talks so, until it closes, and after how long."""

    async def go() -> tuple[bytes, float]:
        async with serving(**settings) as (host, port):
            reader, writer = await asyncio.open_connection(host, port)
            began = time.monotonic()
            talking = asyncio.create_task(talk(writer))
            data = b""
            try:
                # A client that goes on sending to a closed connection may see a reset: what came before it counts.
                with contextlib.suppress(ConnectionResetError):
                    while piece := await asyncio.wait_for(reader.read(65536), 10):
                        data += piece
            finally:
                talking.cancel()
                writer.close()
            return data, time.monotonic() - began

    return asyncio.run(go())


async def drip(writer: Writer, data: bytes, gap: float = 0.05) -> None:
    for i in range(len(data)):
        writer.write(data[i : i + 1])
        await asyncio.sleep(gap)


def error_of(answer: bytes, status: int) -> dict[str, Any]:
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 %d " % status), answer
    error: dict[str, Any] = json.loads(body)["error"]
    assert set(error) == {"message", "type", "param", "code"}
    return error


async def nothing(writer: Writer) -> None:
    await asyncio.sleep(10)


def test_a_connection_that_says_nothing_is_closed_without_a_word() -> None:
    answer, seconds = answer_to(nothing)
    assert answer == b"" and 0.3 < seconds < 1.5


def test_headers_that_drip_have_one_time_for_all_of_them() -> None:
    """Each byte comes well within the limit; together they do not."""
    answer, seconds = answer_to(lambda writer: drip(writer, HEAD * 3))
    assert error_of(answer, 408)["code"] == "header_timeout" and 0.3 < seconds < 1.5


def test_a_body_that_drips_has_one_time_for_all_of_it() -> None:
    async def talk(writer: Writer) -> None:
        writer.write(HEAD + b"Content-Length: 1000\r\n\r\n")
        await drip(writer, b'{"prompt": "' + b"x" * 900)

    answer, seconds = answer_to(talk)
    assert error_of(answer, 408)["code"] == "body_timeout" and 0.3 < seconds < 4  # two of them for the client to read it
    assert b"connection: close" in answer.lower()


def test_a_chunked_body_that_never_ends_has_the_same_time() -> None:
    async def talk(writer: Writer) -> None:
        writer.write(HEAD + b"Transfer-Encoding: chunked\r\n\r\n")
        for _ in range(100):
            writer.write(b"1\r\nx\r\n")
            await asyncio.sleep(0.05)

    answer, _ = answer_to(talk)
    assert error_of(answer, 408)["code"] == "body_timeout"


def test_the_time_of_a_later_request_begins_with_its_first_byte() -> None:
    """Between two requests a connection may rest for longer than a head may take."""

    async def go() -> tuple[bytes, bytes]:
        async with serving() as (host, port):
            reader, writer = await asyncio.open_connection(host, port)
            ask = b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n"
            writer.write(ask)
            first = await reader.readuntil(b"\r\n\r\n")
            await asyncio.sleep(0.8)
            writer.write(ask)
            second = await reader.readuntil(b"\r\n\r\n")
            writer.write(b"GET /heal")
            rest = await asyncio.wait_for(reader.read(), 3)
            writer.close()
            assert error_of(rest, 408)["code"] == "header_timeout"
            return first, second

    first, second = asyncio.run(go())
    assert first.startswith(b"HTTP/1.1 503") and second.startswith(b"HTTP/1.1 503")  # it has no engine


@pytest.mark.parametrize("stage", ["head", "body"])
def test_two_hundred_slow_clients_hold_nobody_up(stage: str) -> None:
    async def go() -> float:
        async with serving(header_timeout=5, body_timeout=5) as (host, port):
            slow = [await asyncio.open_connection(host, port) for _ in range(200)]
            for _, writer in slow:
                writer.write(HEAD if stage == "head" else HEAD + b"Content-Length: 99\r\n\r\n{")
            await asyncio.sleep(0.1)
            began = time.monotonic()
            reader, writer = await asyncio.open_connection(host, port)
            writer.write(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
            await reader.readuntil(b"\r\n\r\n")
            seconds = time.monotonic() - began
            for _, other in [*slow, (reader, writer)]:
                other.close()
            return seconds

    assert asyncio.run(go()) < 1.0


def test_a_connection_that_has_ended_is_gone_without_the_collectors_help() -> None:
    """Cycles would pile up by the thousand between two looks of the garbage collector."""

    async def go() -> list[str]:
        async with serving() as (host, port):
            for _ in range(5):
                reader, writer = await asyncio.open_connection(host, port)
                writer.write(b"GET /health HTTP/1.1\r\nHost: test\r\n\r\n")
                await reader.readuntil(b"\r\n\r\n")
                writer.close()
                await asyncio.sleep(0.05)
            return [type(thing).__name__ for thing in gc.get_objects() if type(thing) in (HttpConnection, RequestResponseCycle)]

    gc.collect()
    gc.disable()
    try:
        assert asyncio.run(go()) == []
    finally:
        gc.enable()
