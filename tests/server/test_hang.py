"""An engine that stops answering without ending: a stuck driver, a deadlock; here a process that is stopped."""

from __future__ import annotations

import re
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.server.harness import ADMIN_KEY, Server, events, until

TIMEOUT = 2.0
LONG = {"prompt": "hello world", "temperature": 0, "ignore_eos": True, "max_tokens": 3000, "stream": True}
SHORT = {**LONG, "max_tokens": 4, "stream": False}


@pytest.fixture(scope="module")
def server(long_tiny: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    flags = ("--num-gpu-blocks-override", "600", "--block-size", "16", "--num-threads", "1", "--admin-api-key", ADMIN_KEY)
    log = tmp_path_factory.mktemp("hang") / "log"
    running = Server(
        long_tiny, log, *flags, "--engine-timeout", str(TIMEOUT), "--max-engine-restarts", "3", "--log-level", "debug"
    )
    try:
        yield running.ready()
    finally:
        running.stop()


def row(server: Server) -> dict[str, Any]:
    with server.client(ADMIN_KEY) as client:
        found: dict[str, Any] = client.get("/admin/models").json()["models"][0]
    return found


def served(server: Server) -> None:
    until(lambda: httpx.post(server.url + "/v1/completions", json=SHORT, timeout=60).status_code == 200, 60, "it serves")


def test_a_hung_engine_ends_its_requests_with_an_error_turns_health_red_and_is_replaced(server: Server) -> None:
    before = row(server)
    engine = server.engine()
    with httpx.stream("POST", server.url + "/v1/completions", json=LONG, timeout=60) as response:
        lines = events(response.iter_lines())
        next(lines)
        engine.suspend()
        began = time.monotonic()
        last = list(lines)[-1]
        waited = time.monotonic() - began
        assert server.status("/health") == server.status("/ready") == 503
        assert row(server)["state"] == "restarting" and "hung" in row(server)["error"]
    assert last["error"]["code"] == "engine_dead" and "--engine-timeout" in last["error"]["message"]
    assert TIMEOUT * 0.9 < waited < TIMEOUT + 3
    refused = httpx.post(server.url + "/v1/completions", json=SHORT)
    assert refused.status_code == 503 and refused.json()["error"]["code"] == "restarting" and refused.headers["retry-after"]
    served(server)
    assert server.status("/health") == server.status("/ready") == 200
    after = row(server)
    assert after["pid"] != before["pid"] and after["restarts"] == before["restarts"] + 1
    assert not psutil.pid_exists(before["pid"])  # never beside the one that hung


def test_an_engine_that_hangs_while_nobody_asks_for_anything_is_found_too(server: Server) -> None:
    before = row(server)["pid"]
    server.engine().suspend()
    until(lambda: row(server)["pid"] not in (before, None), 60, "it has been replaced")
    served(server)


def test_a_pause_within_the_timeout_and_long_idleness_are_no_hang(server: Server) -> None:
    before = row(server)
    time.sleep(2 * TIMEOUT)  # nothing is asked for
    engine = server.engine()
    with httpx.stream("POST", server.url + "/v1/completions", json={**LONG, "max_tokens": 2500}, timeout=60) as response:
        lines = events(response.iter_lines())
        next(lines)
        engine.suspend()
        time.sleep(TIMEOUT / 2)
        engine.resume()
        assert list(lines)[-1] == "[DONE]"
    after = row(server)
    assert (after["pid"], after["restarts"]) == (before["pid"], before["restarts"])
    told = re.findall(r"step \d+ took (\d+) ms \((\d+) waiting for the device, (\d+) of processor time\)", server.text)
    took, waited, worked = max(tuple(map(int, line)) for line in told)
    assert took > 1000 * TIMEOUT / 2 - 100 and waited + worked < took / 2  # it was kept from running


def test_where_it_hung_is_in_the_log(server: Server) -> None:
    """A process that is stopped cannot say it; one that spins can: the signal alone shows what would be there."""
    engine = server.engine()
    engine.send_signal(signal.SIGUSR1)
    until(lambda: "in _await_message" in server.text, 10, "the stacks of the engine's threads are in the log")
    served(server)  # and it goes on
