"""Time from typing `octavo serve MODEL` to the first token of an answer, and what it holds in memory.

Starts a real server in processes of its own on a free port of the loopback interface, asks it one
question over HTTP, and ends it.
"""

from __future__ import annotations

import contextlib
import os
import socket
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import httpx
import psutil

from octavo.bench.record import surroundings
from octavo.bench.workloads import SHAPES, write_shape
from octavo.errors import ConfigError, OctavoError

POLL = 0.02

UNASKED = ("--uds", "--ssl-certfile", "--ssl-keyfile", "--ssl-ca-certs", "--api-key", "--api-keys", "--api-keys-file")
"""Flags of a server that would not answer this one's question: it is asked over plain HTTP, on a port, without a key."""


def measure(
    model: str,
    flags: Sequence[str] = (),
    *,
    repeats: int = 1,
    timeout: float = 600.0,
    tell: Callable[..., None] = lambda *_: None,
) -> dict[str, Any]:
    """The record; times are medians over `repeats` starts. A shape's name is served with a made-up tokenizer.
    Raises OctavoError if a start fails, ConfigError for a flag with which the server could not be asked."""
    for flag in flags:
        name = flag.partition("=")[0].replace("_", "-")
        if name in UNASKED:
            raise ConfigError(f"{name}: the server is asked over plain HTTP, on a port and without a key; leave it out")
    record = surroundings()
    starts = []
    with tempfile.TemporaryDirectory(prefix="octavo-shape-") as folder:
        shape = model in SHAPES and not Path(model).exists()
        served = str(write_shape(model, Path(folder) / model, tokenizer=True)) if shape else model
        for i in range(repeats):
            tell(f"start {i + 1} of {repeats}")
            starts.append(_start(served, flags, timeout))
    middle = {key: round(statistics.median(s[key] for s in starts), 3) for key in starts[0]}
    return record | {"benchmark": "startup", "model": model, "flags": list(flags), "starts": starts} | middle


def _start(model: str, flags: Sequence[str], timeout: float) -> dict[str, float]:
    port = _free_port()
    command = [sys.executable, "-m", "octavo", "serve", model, *flags, "--host", "127.0.0.1", "--port", str(port)]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        with log.open("wb") as output:
            began = time.perf_counter()
            server = subprocess.Popen(command, stdout=output, stderr=subprocess.STDOUT, env=_environment())
            try:
                return _ask(server, f"http://127.0.0.1:{port}", began, timeout)
            except (OctavoError, httpx.HTTPError) as error:
                said = str(error) if isinstance(error, OctavoError) else f"{type(error).__name__}: {error}"
                raise OctavoError(f"{said}; the server's last lines:\n{_tail(log)}") from None
            finally:
                _end(server)


def _ask(server: subprocess.Popen[bytes], url: str, began: float, timeout: float) -> dict[str, float]:
    with httpx.Client(base_url=url, timeout=timeout) as client:
        while True:
            if server.poll() is not None:
                raise OctavoError(f"octavo serve ended with status {server.returncode} before it was ready")
            if time.perf_counter() - began > timeout:
                raise OctavoError(f"octavo serve was not ready after {timeout:g} s")
            with contextlib.suppress(httpx.TransportError):
                if client.get("/ready").status_code == 200:
                    break
            time.sleep(POLL)
        ready = time.perf_counter() - began
        listed = client.get("/v1/models")
        if listed.status_code != 200:
            raise OctavoError(f"GET /v1/models got HTTP {listed.status_code}: {listed.text[:200]}")
        name = listed.json()["data"][0]["id"]
        body = {"model": name, "prompt": "The capital of France is", "max_tokens": 8, "temperature": 0, "stream": True}
        with client.stream("POST", "/v1/completions", json=body) as response:
            if response.status_code != 200:
                raise OctavoError(f"the first request got HTTP {response.status_code}: {response.read().decode()[:200]}")
            lines = (line for line in response.iter_lines() if line.startswith("data:"))
            if next(lines, None) is None:
                raise OctavoError("the first request's stream ended without an event")
            first = time.perf_counter() - began
            for _ in lines:
                pass
        return {"ready_s": round(ready, 3), "first_token_s": round(first, 3)} | _memory(server.pid)


def _memory(pid: int) -> dict[str, float]:
    """MiB of the server and its engine: resident sizes added up (a page that both map counts twice) and,
    where the system tells them, proportional sizes (it counts once)."""
    resident, proportional = 0, 0
    parent = psutil.Process(pid)
    for process in [parent, *parent.children(recursive=True)]:
        with contextlib.suppress(psutil.NoSuchProcess):
            memory = process.memory_full_info()
            resident += memory.rss
            proportional += getattr(memory, "pss", 0)
    return {"resident_mib": round(resident / 2**20, 1), "proportional_mib": round(proportional / 2**20, 1)}


def _end(server: subprocess.Popen[bytes]) -> None:
    server.terminate()
    try:
        server.wait(15)
    except subprocess.TimeoutExpired:
        server.kill()
        server.wait()


def _environment() -> dict[str, str]:
    """The caller's environment without settings that would make another server of this one."""
    return {
        k: v
        for k, v in os.environ.items()
        if k not in ("OCTAVO_API_KEY", "OCTAVO_UDS", "OCTAVO_HOST", "OCTAVO_PORT", "OCTAVO_CONFIG")
    }


def _free_port() -> int:
    with socket.create_server(("127.0.0.1", 0)) as sock:
        return int(sock.getsockname()[1])


def _tail(log: Path) -> str:
    return "\n".join(log.read_text(errors="replace").splitlines()[-15:])
