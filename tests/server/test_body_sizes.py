"""Bodies that are too large, too long or slow to arrive, and health while a large one is read."""

from __future__ import annotations

import json
import socket
import time

import httpx
import pytest

from tests.server.asking import TEXT
from tests.server.harness import API_KEYS, Server, post_raw


@pytest.fixture(scope="module")
def limit() -> int:
    from octavo.config import ServerConfig

    return ServerConfig().max_body_bytes


def head(path: str, *lines: str) -> bytes:
    rows = [
        f"POST {path} HTTP/1.1",
        "Host: test",
        f"Authorization: Bearer {API_KEYS[0]}",
        "Content-Type: application/json",
        *lines,
    ]
    return ("\r\n".join(rows) + "\r\n\r\n").encode()


def rest_of(sock: socket.socket, seconds: float) -> bytes:
    """What arrives until the server closes, which it must within `seconds`."""
    sock.settimeout(seconds)
    return b"".join(iter(lambda: sock.recv(65536), b""))


def test_a_body_that_declares_too_much_is_refused_before_it_arrives(server: Server) -> None:
    with socket.create_connection(server.address) as sock:
        began = time.monotonic()
        sock.sendall(head("/v1/completions", f"Content-Length: {64 << 20}"))
        answer = b""
        while b"body_too_large" not in answer:
            answer += sock.recv(65536)
        assert answer.startswith(b"HTTP/1.1 413") and time.monotonic() - began < 1
        rest_of(sock, 5)  # and the connection is closed


def test_a_body_of_64_mib_is_refused_while_it_arrives_and_the_client_reads_the_answer(server: Server, limit: int) -> None:
    for lines in ((f"Content-Length: {64 << 20}",), ("Transfer-Encoding: chunked",)):
        with socket.create_connection(server.address) as sock:
            sock.sendall(head("/v1/completions", *lines))
            piece = b"x" * (1 << 20)
            sent = 0
            try:
                for _ in range(64):
                    sock.sendall(piece if "Content" in lines[0] else b"%x\r\n%s\r\n" % (len(piece), piece))
                    sent += len(piece)
            except OSError:
                pass  # the server has stopped listening to it
            assert sent > limit
            assert sock.recv(65536).startswith(b"HTTP/1.1 413")


def test_a_body_longer_than_it_declares_is_cut_where_it_says(server: Server) -> None:
    body = json.dumps(TEXT).encode()
    with socket.create_connection(server.address) as sock:
        sock.sendall(head("/v1/completions", f"Content-Length: {len(body) - 5}") + body)
        assert sock.recv(65536).startswith(b"HTTP/1.1 400")


def test_a_body_of_the_allowed_size_is_read(client: httpx.Client, limit: int) -> None:
    content = json.dumps({"prompt": "x"}).encode()
    response = client.post("/tokenize", content=content + b" " * (limit - len(content)))
    assert response.status_code == 200
    assert client.post("/tokenize", content=content + b" " * (limit - len(content) + 1)).status_code == 413


def test_health_answers_while_a_body_of_8_mb_is_tokenised(server: Server) -> None:
    prompt = "and the page of a token from Paris " * 220_000
    slowest, asked = 0.0, 0
    with post_raw(server, "/v1/completions", {"prompt": prompt[:8_000_000]}) as sock:
        sock.setblocking(False)
        while True:
            began = time.monotonic()
            assert server.status("/health") == 200
            slowest, asked = max(slowest, time.monotonic() - began), asked + 1
            try:
                first = sock.recv(1024)
                break
            except BlockingIOError:
                time.sleep(0.05)
    assert b"400 Bad Request" in first
    assert asked > 2 and slowest < 1.0
