"""How a server and its streams end: signals, a dead engine, start-up."""

from __future__ import annotations

import concurrent.futures
import json
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.harness import ADMIN_KEY, Server, events, post_raw, until

LONG = {"prompt": "hello", "max_tokens": 4000, "ignore_eos": True, "temperature": 0}
Start = Callable[..., Server]


@pytest.fixture
def start(long_tiny: Path, tmp_path: Path) -> Iterator[Start]:
    running: list[Server] = []

    def one(*flags: str) -> Server:
        log = tmp_path / f"log{len(running)}"
        running.append(
            Server(
                long_tiny, log, "--block-size", "16", "--num-gpu-blocks-override", "1200", "--admin-api-key", ADMIN_KEY, *flags
            )
        )
        return running[-1]

    yield one
    for server in running:
        server.stop()


def streams(server: Server, count: int, **options: Any) -> list[Any]:
    """`count` long streams that have begun."""
    socks = [post_raw(server, "/v1/completions", {**LONG, "stream": True, **options}) for _ in range(count)]
    for sock in socks:
        data = b""
        while data.count(b"data: ") < 5:
            data += sock.recv(4096)
    return socks


def ending(sock: Any, seconds: float) -> list[Any]:
    """The rest of a stream's events; the connection must close within `seconds` of this call."""
    sock.settimeout(seconds)
    data = b"".join(iter(lambda: sock.recv(1 << 16), b""))
    sock.close()
    lines = [line[line.index(b"data: ") + 6 :] for line in data.splitlines() if b"data: " in line]
    return [line if line == b"[DONE]" else json.loads(line) for line in lines if line == b"[DONE]" or line.endswith(b"}")]


def is_cut(found: list[Any], code: str) -> None:
    """The last event is the error, it is the only one, and nothing says success."""
    assert found[-1]["error"]["code"] == code
    assert sum(isinstance(event, dict) and "error" in event for event in found) == 1
    assert b"[DONE]" not in found
    assert not any(choice["finish_reason"] for event in found[:-1] for choice in event["choices"])


def gone(process: psutil.Process) -> bool:
    return not process.is_running() or process.status() == psutil.STATUS_ZOMBIE


def test_a_drain_refuses_new_requests_lets_short_ones_finish_and_cuts_long_ones(start: Start) -> None:
    drain = 1.0  # less than a long stream takes on a machine that is quick
    server = start("--shutdown-timeout", str(drain)).ready()
    engine = server.engine()
    long = streams(server, 2)
    short = post_raw(server, "/v1/completions", {**LONG, "max_tokens": 30, "stream": True})
    short.recv(10)
    began = time.monotonic()
    server.signal()
    engine.terminate()  # service managers signal every process of a service
    until(lambda: server.status("/ready") == 503, 1, "the server is not ready while it drains")
    with concurrent.futures.ThreadPoolExecutor() as pool:  # side by side: the drain is short
        alive = pool.map(server.status, ("/health", "/ping"))
        asked = pool.map(lambda body: httpx.post(server.url + "/v1/completions", json=body), (LONG, {**LONG, "stream": True}))
        assert list(alive) == [200, 200]
        for refused in asked:
            assert refused.status_code == 503 and refused.json()["error"]["code"] == "draining"
            assert int(refused.headers["retry-after"]) >= 1
    assert ending(short, drain)[-1] == b"[DONE]"
    with concurrent.futures.ThreadPoolExecutor() as pool:
        for found in pool.map(lambda sock: ending(sock, drain + 2), long):
            is_cut(found, "draining")
    assert server.process.wait(drain + 2) == 0
    assert drain - 0.5 < time.monotonic() - began < drain + 2
    until(lambda: gone(engine), 0.5, "the engine process is gone")


def test_without_a_drain_streams_are_cut_at_once_and_plain_requests_get_503(start: Start) -> None:
    server = start("--shutdown-timeout", "0").ready()
    engine = server.engine()
    long = streams(server, 3)
    plain = post_raw(server, "/v1/completions", LONG)
    time.sleep(0.2)
    began = time.monotonic()
    server.signal(signal.SIGINT)
    for sock in long:
        is_cut(ending(sock, 2), "draining")
    answer = plain.recv(1 << 16)
    assert answer.startswith(b"HTTP/1.1 503")
    assert server.process.wait(2) == 0
    assert time.monotonic() - began < 2
    until(lambda: gone(engine), 0.5, "the engine process is gone")


def test_a_reload_of_nothing_ends_nothing(start: Start) -> None:
    """A service manager's `reload` sends SIGHUP, whose default is death."""
    server = start().ready()
    server.signal(signal.SIGHUP)
    until(lambda: "SIGHUP: there is nothing to read again" in server.text, 3, "the log says that there was nothing to do")
    assert server.status("/ready") == 200


def test_a_second_signal_ends_the_drain_at_once(start: Start) -> None:
    server = start("--shutdown-timeout", "60").ready()
    engine = server.engine()
    long = streams(server, 2)
    server.signal()
    until(lambda: server.status("/ready") == 503, 1, "the server drains")
    began = time.monotonic()
    server.signal()
    for sock in long:
        is_cut(ending(sock, 2), "engine_dead")
    server.process.wait(2)
    assert time.monotonic() - began < 2
    until(lambda: gone(engine), 0.5, "the engine process is gone")


def test_a_dead_engine_that_gets_no_restart_ends_every_request_and_health_says_so(start: Start) -> None:
    server = start("--max-engine-restarts", "0").ready()
    long = streams(server, 2) + streams(server, 1, prompt=["one", "two"], n=2)
    plain = post_raw(server, "/v1/completions", LONG)
    time.sleep(0.2)
    server.engine().kill()
    for sock in long:
        is_cut(ending(sock, 2), "engine_dead")
    assert plain.recv(1 << 16).startswith(b"HTTP/1.1 503")
    assert server.status("/health") == server.status("/ping") == server.status("/ready") == 503
    refused = httpx.post(server.url + "/v1/completions", json=LONG)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "engine_dead"
    assert "octavo_engine_up" in (page := httpx.get(server.url + "/metrics").text)
    assert next(line for line in page.splitlines() if line.startswith("octavo_engine_up{")).endswith(" 0.0")
    server.signal()
    assert server.process.wait(3) == 0


def test_while_the_model_loads_the_port_answers_503_and_a_signal_ends_it(start: Start) -> None:
    server = start()
    assert server.status("/health") == server.status("/ready") == 503
    answer = httpx.post(server.url + "/v1/completions", json=LONG)
    assert answer.status_code == 503 and answer.json()["error"]["code"] == "loading"
    assert httpx.get(server.url + "/nowhere").status_code == 404
    children = psutil.Process(server.process.pid).children()
    server.signal()
    assert server.process.wait(5) == 0
    assert all(gone(child) for child in children)
    assert "stopping before the models were loaded" in server.text and server.text.endswith("octavo.server: stopped\n")


def test_a_port_in_use_and_a_model_that_is_not_there_stop_the_start_with_a_reason(start: Start, tmp_path: Path) -> None:
    first = start()
    second = Server(tmp_path / "no-such-model", tmp_path / "other")
    third = Server(tmp_path, tmp_path / "third", "--port", str(first.address[1]))
    assert second.process.wait(30) > 0 and third.process.wait(30) > 0
    assert "no-such-model" in second.text and "Traceback" not in second.text
    assert "--port" in third.text and "in use" in third.text and "Traceback" not in third.text


def test_listening_beyond_this_machine_without_a_key_warns_loudly(start: Start) -> None:
    open_to_all = start("--host", "0.0.0.0")
    keyed = start("--host", "0.0.0.0", "--api-key", "a-key-that-must-not-show")
    until(lambda: "listens on" in open_to_all.text and "listens on" in keyed.text, 30, "both listen")
    assert "ANYBODY" in open_to_all.text and "--api-key" in open_to_all.text
    assert "ANYBODY" not in keyed.text and "a-key-that-must-not-show" not in keyed.text


def test_a_killed_server_leaves_no_engine_and_its_unix_socket_can_be_taken_over(start: Start, tmp_path: Path) -> None:
    path = tmp_path / "sock"
    server = start("--uds", str(path))
    until(lambda: "listens on" in server.text, 30, "the server listens")
    with httpx.Client(transport=httpx.HTTPTransport(uds=str(path)), base_url="http://test") as client:
        until(lambda: client.get("/ready").status_code == 200, 60, "it is ready")
        with client.stream("POST", "/v1/completions", json={**LONG, "max_tokens": 3, "stream": True}) as response:
            assert list(events(response.iter_lines()))[-1] == "[DONE]"
    taken = start("--uds", str(path))
    assert taken.process.wait(30) != 0 and "in use" in taken.text
    engine = server.engine()
    server.process.kill()
    server.process.wait()
    until(lambda: gone(engine), 3, "the engine process is gone")
    assert path.exists()
    second = start("--uds", str(path))
    until(lambda: "listens on" in second.text, 30, "the second server listens")
    second.signal()
    second.process.wait(10)
    assert not path.exists()
