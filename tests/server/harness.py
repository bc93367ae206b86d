"""A real server process for the tests: `octavo serve` on a tiny model, asked over real sockets."""

from __future__ import annotations

import json
import os
import re
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import psutil

API_KEYS = ("key-of-the-first-tenant", "key-of-the-second-tenant")
SMALL_KEY = "key-of-a-tenant-with-short-answers"
ADMIN_KEY = "key-of-the-administrator"
NAME = "tiny/model"


def until(condition: Callable[[], Any], seconds: float, what: str) -> Any:
    """The first true value of `condition` within `seconds`."""
    end = time.monotonic() + seconds
    while True:
        value = condition()
        if value:
            return value
        assert time.monotonic() < end, f"not within {seconds} s: {what}"
        time.sleep(0.02)


class Server:
    """`octavo serve MODEL *flags` as a child of the test; `ready()` before the first request."""

    def __init__(self, model: Path, log: Path, *flags: str) -> None:
        self.log = log
        command = [
            sys.executable,
            "-m",
            "octavo.cli.main",
            "serve",
            str(model),
            "--port",
            "0",
            "--served-model-name",
            NAME,
            *flags,
        ]
        environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONUNBUFFERED": "1"}
        with log.open("wb") as out:
            self.process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=out, stderr=subprocess.STDOUT, env=environment
            )
        self._url = ""

    @property
    def text(self) -> str:
        return self.log.read_text(errors="replace")

    @property
    def url(self) -> str:
        if not self._url:
            self._url = until(self._find_url, 60, f"the server listens:\n{self.text}")
        return self._url

    def _find_url(self) -> str:
        assert self.process.poll() is None, self.text
        found = re.search(r"listens on (https?://\S+);", self.text)
        return found[1] if found else ""

    def ready(self) -> Server:
        until(lambda: self.process.poll() is not None or self.status("/ready") == 200, 120, f"the engine is ready:\n{self.text}")
        assert self.process.poll() is None, self.text
        return self

    def status(self, path: str) -> int:
        try:
            return httpx.get(self.url + path, timeout=5).status_code
        except httpx.TransportError:
            return 0

    @property
    def address(self) -> tuple[str, int]:
        url = httpx.URL(self.url)
        return url.host, url.port or 0

    def client(self, key: str = API_KEYS[0], **options: Any) -> httpx.Client:
        return httpx.Client(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=60, **options)

    def gauges(self) -> dict[str, float]:
        with self.client(ADMIN_KEY) as client:
            stats: dict[str, float] = client.get("/admin/status").json()["stats"]
        return stats

    def idle(self, seconds: float, blocks: float | None = None) -> None:
        """Nothing runs, nothing waits, and every block that was free before is free again."""

        def quiet() -> bool:
            stats = self.gauges()
            return stats["running"] == stats["waiting"] == 0 and (blocks is None or stats["free_blocks"] == blocks)

        until(quiet, seconds, f"the engine is idle, {blocks} blocks free: {self.gauges()}")

    def engine(self) -> psutil.Process:
        return next(child for child in psutil.Process(self.process.pid).children() if "octavo.engine.process" in child.cmdline())

    def signal(self, number: signal.Signals = signal.SIGTERM) -> None:
        self.process.send_signal(number)

    def stop(self) -> None:
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
            self.process.send_signal(signal.SIGTERM)
            try:
                self.process.wait(10)
            except subprocess.TimeoutExpired:
                self.process.kill()
                self.process.wait()


def post_raw(server: Server, path: str, body: Any, key: str = API_KEYS[0], *, receive_buffer: int = 0) -> socket.socket:
    """A socket on which a whole request has been sent and nothing has been read."""
    data = json.dumps(body).encode()
    head = (
        f"POST {path} HTTP/1.1\r\nHost: test\r\nAuthorization: Bearer {key}\r\nContent-Type: application/json\r\n"
        f"Content-Length: {len(data)}\r\n\r\n"
    )
    sock = socket.socket()
    sock.settimeout(30)
    if receive_buffer:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.connect(server.address)
    sock.sendall(head.encode() + data)
    return sock


def events(lines: Iterator[str]) -> Iterator[Any]:
    """The events of a stream: decoded JSON, or the string "[DONE]"."""
    for line in lines:
        if line:
            assert line.startswith("data: "), line
            data = line.removeprefix("data: ")
            yield data if data == "[DONE]" else json.loads(data)
