"""A client that goes away ends its request, in whatever state it is."""

from __future__ import annotations

import random
import socket
import threading
import time
from typing import Any

import pytest

from tests.server.harness import API_KEYS, Server, events, post_raw, until

LONG = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
SECONDS = 1.0  # from the close of the socket to an idle engine with every block free


@pytest.fixture
def blocks(server: Server) -> float:
    """Free blocks of the idle engine."""
    server.idle(20)
    return server.gauges()["free_blocks"]


def read_events(sock: Any, count: int) -> None:
    data = b""
    while data.count(b"data: ") < count:
        data += sock.recv(4096)


def to_the_end(sock: Any) -> bytes:
    """The rest of a stream, which must succeed."""
    data = b""
    while b"[DONE]" not in data[-200:]:
        piece = sock.recv(1 << 16)
        assert piece, "the stream was cut"
        data += piece
    return data


def running(server: Server, count: int) -> None:
    until(lambda: server.gauges()["running"] >= count, 10, f"{count} sequences run")


def test_while_it_streams(server: Server, blocks: float) -> None:
    for path, extra in (
        ("/v1/completions", {}),
        ("/generate", {}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "x"}]}),
    ):
        body = {**LONG, **extra, "stream": True, "max_tokens": 3900}
        if extra:
            del body["prompt"]
        sock = post_raw(server, path, body)
        read_events(sock, 3)
        sock.close()
        server.idle(SECONDS, blocks)


@pytest.mark.parametrize("path", ["/v1/completions", "/generate"])
def test_while_it_waits_for_a_whole_answer(server: Server, blocks: float, path: str) -> None:
    sock = post_raw(server, path, LONG)
    running(server, 1)
    time.sleep(0.3)  # some tokens
    sock.close()
    server.idle(SECONDS, blocks)
    line = next(line for line in reversed(server.text.splitlines()) if " disconnected " in line)
    assert int(line.split(" completion=")[1].split()[0]) > 0, "what was generated for nobody counts all the same"


def test_with_several_samples_and_prompts(server: Server, blocks: float) -> None:
    for stream in (True, False):
        sock = post_raw(server, "/v1/completions", {**LONG, "prompt": ["a", "b"], "n": 4, "temperature": 1, "stream": stream})
        running(server, 8)
        sock.close()
        server.idle(SECONDS, blocks)


def test_while_it_is_queued_and_those_before_it_go_on(server: Server, blocks: float) -> None:
    first = [post_raw(server, "/v1/completions", {**LONG, "max_tokens": 600, "stream": True}) for _ in range(8)]
    running(server, 8)
    queued = [post_raw(server, "/v1/completions", {**LONG, "stream": stream}) for stream in (True, False)]
    until(lambda: server.gauges()["waiting"] == 2, 10, "two requests wait")
    for sock in queued:
        sock.close()
    until(lambda: server.gauges()["waiting"] == 0, SECONDS, "nobody waits")
    assert server.gauges()["running"] == 8
    for sock in first:
        assert b"data: {" in to_the_end(sock)
        sock.close()
    server.idle(SECONDS, blocks)


def test_during_a_long_prefill(server: Server, blocks: float) -> None:
    for stream in (True, False):
        sock = post_raw(server, "/v1/completions", {**LONG, "prompt": [9 + stream] * 4000, "max_tokens": 90, "stream": stream})
        running(server, 1)
        sock.close()
        server.idle(SECONDS, blocks)


def test_while_its_prompt_is_tokenised(server: Server, blocks: float) -> None:
    sock = post_raw(server, "/v1/completions", {**LONG, "prompt": "and the page " * 50_000})
    time.sleep(0.05)
    sock.close()
    server.idle(5, blocks)


def test_before_its_body_is_complete(server: Server, blocks: float) -> None:
    with socket.create_connection(server.address) as sock:
        sock.sendall(
            f"POST /v1/completions HTTP/1.1\r\nHost: t\r\nAuthorization: Bearer {API_KEYS[0]}\r\nContent-Length: 100\r\n\r\n{{".encode()
        )
        time.sleep(0.05)
    server.idle(SECONDS, blocks)
    with server.client() as client:
        assert client.post("/v1/completions", json={**LONG, "max_tokens": 2}).status_code == 200


def test_a_slow_reader_is_no_disconnect_and_gets_fewer_larger_events(server: Server, blocks: float) -> None:
    # Eight samples of 700 tokens, a kilobyte and more an event: Linux buffers up to four megabytes for a socket.
    body = {**LONG, "max_tokens": 700, "stream": True, "logprobs": 20, "n": 8}
    sock = post_raw(server, "/v1/completions", body, receive_buffer=4096)
    server.idle(60)  # the engine does not wait for the reader
    text = to_the_end(sock).decode(errors="replace")
    sock.close()
    lines = [line[line.index("data: ") :].strip() for line in text.splitlines() if "data: {" in line]
    assert 10 < len(lines) < 8 * 700 * 0.9
    server.idle(SECONDS, blocks)
    assert "disconnected" not in server.text.splitlines()[-1]


def test_200_clients_that_leave_at_random_leave_every_block_free(server: Server, blocks: float) -> None:
    rng = random.Random(7)
    failures: list[BaseException] = []

    def leave(seed: int) -> None:
        mine = random.Random(seed)
        try:
            for _ in range(25):
                body = {
                    **LONG,
                    "prompt": [mine.randrange(8, 500) for _ in range(mine.randrange(1, 300))],
                    "stream": mine.random() < 0.5,
                }
                body |= {"max_tokens": 500, "n": mine.choice([1, 1, 1, 4]), "temperature": 1}
                sock = post_raw(server, "/v1/completions", body)
                time.sleep(mine.random() * 0.1)
                sock.close()
        except BaseException as exc:
            failures.append(exc)

    threads = [threading.Thread(target=leave, args=(rng.random(),)) for _ in range(8)]
    for thread in threads:
        thread.start()
    with (
        server.client() as client,
        client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 20, "stream": True, "priority": -5}) as kept,
    ):
        assert list(events(kept.iter_lines()))[-1] == "[DONE]"
    for thread in threads:
        thread.join()
    assert not failures
    server.idle(2 * SECONDS, blocks)
