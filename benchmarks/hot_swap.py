"""How long a switch of models takes under load, whether a request is lost, and whether memory comes back.

    python benchmarks/hot_swap.py MODEL [--streams 50] [--rounds 5] [-- flags of `octavo serve`]

A server serves MODEL; a second engine of it is added beside the first while streams run, becomes the
default and gives way again, `rounds` times; then the second is removed. With --replace the first is replaced
under its own name, its cache making room (the server needs --dynamic-memory). A switch is measured from the
administrator's request to the first token of the new default, by a process that does nothing else: the
streams have one of their own. Of every switch above --slow ms it is told where the time went: the administrator's
request, the server's account of the one after it, and what the log says of that moment. Loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import os
import re
import shutil
import statistics
import subprocess
import sys
import tempfile
import time
from collections import Counter
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import Any

import httpx

KEY = "key-of-this-benchmark"
PROMPT = "The quick brown fox jumps over the lazy dog. " * 8


def start(model: str, flags: list[str], log: Path) -> tuple[subprocess.Popen[bytes], str]:
    command = [sys.executable, "-m", "octavo", "serve", model, "--port", "0", "--served-model-name", "first"]
    command += ["--admin-api-key", KEY, "--log-level", "debug", "--log-format", "json", *flags]
    with log.open("wb") as out:
        process = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env={**os.environ, "PYTHONUNBUFFERED": "1"})
    while process.poll() is None:
        found = re.search(r"listens on (http://[^\s;\"]+)", log.read_text(errors="replace"))
        if found and httpx.get(found[1] + "/ready").status_code == 200:
            return process, found[1]
        time.sleep(0.1)
    raise SystemExit(log.read_text(errors="replace"))


async def events(response: httpx.Response) -> Any:
    async for line in response.aiter_lines():
        if line:
            yield line.removeprefix("data: ")


async def carry(url: str, streams: int, tokens: int, pipe: Any) -> None:
    """The load, in its own process: says when every stream has begun, stops when told to, and reports."""
    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        load = Load(client, tokens)
        tasks = [asyncio.create_task(load.one()) for _ in range(streams)]
        for _ in range(streams):
            await load.begun.acquire()
        pipe.send("begun")
        await asyncio.to_thread(pipe.recv)
        load.stopped = True
        await asyncio.gather(*tasks)
        pipe.send((dict(load.ended), dict(load.lost)))


def carrier(url: str, streams: int, tokens: int, pipe: Any) -> None:
    asyncio.run(carry(url, streams, tokens, pipe))


class Load:
    """`streams` clients that each stream one answer after the other until told to stop."""

    def __init__(self, client: httpx.AsyncClient, tokens: int) -> None:
        self._client, self._tokens = client, tokens
        self.stopped, self.ended, self.lost = False, Counter[str](), Counter[str]()
        self.begun = asyncio.Semaphore(0)

    async def one(self) -> None:
        body = {"prompt": PROMPT, "max_tokens": self._tokens, "ignore_eos": True, "stream": True}
        while not self.stopped:
            last = ""
            async with self._client.stream("POST", "/v1/completions", json=body) as response:
                async for event in events(response):
                    last = event
                    self.begun.release()
            served = response.headers.get("x-octavo-model", "?")
            (self.ended if last == "[DONE]" else self.lost)[served if last == "[DONE]" else last[:200]] += 1


@dataclass(slots=True)
class Switch:
    """One switch: when it began (seconds since the epoch), and seconds to the end of the administrator's request and to the
    first token; `request` is the id of the request that got it."""

    name: str
    began: float
    ordered: float
    first: float
    request: str

    def told(self, lines: list[dict[str, Any]]) -> dict[str, Any]:
        """Where the time went, by the server's log."""
        facts = next((line["request"] for line in lines if line.get("request", {}).get("id") == self.request), {})
        near = [
            f"{1000 * (at - self.began):+.0f} ms: {line['message'][:160]}"
            for line in lines
            if "request" not in line and -0.3 < (at := _seconds(line)) - self.began < self.first + 0.1
        ]
        return {
            "to": self.name,
            "ms": round(1000 * self.first, 1),
            "administrator's request, ms": round(1000 * self.ordered, 1),
            "server": {name: value for name, value in facts.items() if name.endswith(("_seconds", "_tokens"))},
            "log": near,
        }


def _seconds(line: dict[str, Any]) -> float:
    return datetime.fromisoformat(line["time"]).timestamp()


def read_log(log: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in log.read_text(errors="replace").splitlines() if line.startswith("{")]


async def switch(client: httpx.AsyncClient, admin: httpx.AsyncClient, name: str) -> Switch:
    at, began = time.time(), time.perf_counter()
    (await admin.post(f"/admin/models/{name}/default")).raise_for_status()
    ordered = time.perf_counter() - began
    body = {"prompt": PROMPT, "max_tokens": 4, "ignore_eos": True, "stream": True}
    async with client.stream("POST", "/v1/completions", json=body) as response:
        async for _ in events(response):
            seconds = time.perf_counter() - began
            assert response.headers["x-octavo-model"] == name
            break
    return Switch(name, at, ordered, seconds, response.headers["x-request-id"])


async def memory(client: httpx.AsyncClient) -> dict[str, float]:
    """Bytes: all engines' resident memory, and what the GPUs hold where there are any."""
    page = (await client.get("/metrics")).text
    found: Counter[str] = Counter()
    for name in ("octavo_engine_resident_bytes", "octavo_gpu_memory_used_bytes"):
        for value in re.findall(rf"^{name}{{.*}} (\S+)$", page, re.M):
            found[name] += float(value)  # type: ignore[assignment]
    return dict(found)


async def measure(url: str, model: str, args: argparse.Namespace, log: Path) -> dict[str, Any]:
    ours, theirs = multiprocessing.Pipe()
    work = multiprocessing.get_context("spawn").Process(
        target=carrier, args=(url, args.streams, args.tokens, theirs), daemon=True
    )
    async with (
        httpx.AsyncClient(base_url=url, timeout=120) as client,
        httpx.AsyncClient(base_url=url, timeout=300, headers={"Authorization": f"Bearer {KEY}"}) as admin,
    ):
        told: dict[str, Any] = {"memory before": await memory(client)}
        work.start()
        await asyncio.to_thread(ours.recv)
        began = time.perf_counter()
        answer = await admin.post("/admin/models", json={"name": "second", "model": model, "settings": args.settings})
        told["seconds to add under load"] = round(time.perf_counter() - began, 2)
        if answer.status_code != 201:
            raise SystemExit(answer.text)
        told["memory with two"] = await memory(client)
        alone = [await switch(client, admin, "first") for _ in range(3)]  # no switch: what a request costs under this load
        waits = []
        for name in ("second", "first") * args.rounds:
            waits.append(await switch(client, admin, name))
            await asyncio.sleep(0.5)
        ours.send("stop")
        ended, lost = await asyncio.to_thread(ours.recv)
        told["first token without a switch, ms"] = [round(1000 * one.first, 1) for one in alone]
        told["switches to the first token, ms"] = [round(1000 * one.first, 1) for one in waits]
        told["median, ms"] = round(1000 * statistics.median(one.first for one in waits), 1)
        told["below 200 ms"] = sum(one.first < 0.2 for one in waits)
        lines = read_log(log)
        told["slow steps and late loops meanwhile"] = sum(
            "took" in line["message"] or "late" in line["message"] for line in lines
        )
        told["slow ones"] = [one.told(lines) for one in waits if 1000 * one.first > args.slow]
        told["streams ended by model"], told["streams lost"] = ended, lost
        (await admin.delete("/admin/models/second")).raise_for_status()
        await asyncio.sleep(2)
        told["memory after removal"] = await memory(client)
        return told


async def replace(url: str, model: str, args: argparse.Namespace, log: Path) -> dict[str, Any]:
    ours, theirs = multiprocessing.Pipe()
    work = multiprocessing.get_context("spawn").Process(
        target=carrier, args=(url, args.streams, args.tokens, theirs), daemon=True
    )
    async with httpx.AsyncClient(base_url=url, timeout=300, headers={"Authorization": f"Bearer {KEY}"}) as admin:

        async def state() -> dict[str, Any]:
            told = (await admin.get("/admin/models")).json()
            rows = [*told["models"], *told["leaving"]]
            return {f"load {row['generation']} {row['state']}": row["blocks"] for row in rows} | await memory(admin)

        told: dict[str, Any] = {"before": await state()}
        work.start()
        await asyncio.to_thread(ours.recv)
        began = time.perf_counter()
        body = {"name": "first", "model": model, "replace": True, "make_room": True, "settings": args.settings, "timeout": 60}
        answer = await admin.post("/admin/models", json=body)
        told["seconds until the new engine had the name"] = round(time.perf_counter() - began, 2)
        told["answer"] = answer.status_code if answer.status_code == 201 else answer.text
        told["then"] = await state()
        while (await admin.get("/admin/models")).json()["leaving"]:
            await asyncio.sleep(0.1)
        told["seconds until the old engine had ended"] = round(time.perf_counter() - began, 2)
        await asyncio.sleep(2)
        told["after"] = await state()
        ours.send("stop")
        told["streams ended"], told["streams lost"] = await asyncio.to_thread(ours.recv)
        return told


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model")
    parser.add_argument("--streams", type=int, default=50)
    parser.add_argument("--tokens", type=int, default=200)
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--slow", type=float, default=100, help="ms from which on a switch is told in parts")
    parser.add_argument("--keep-log", type=Path, help="copy the server's log to this file")
    parser.add_argument("--replace", action="store_true")
    parser.add_argument("--settings", type=json.loads, default={}, help="settings of the second model, as JSON")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:cut])
    args.flags = sys.argv[cut + 1 :]
    with tempfile.TemporaryDirectory() as folder:
        log = Path(folder) / "log"
        process, url = start(args.model, args.flags, log)
        try:
            work = replace if args.replace else measure
            print(json.dumps(asyncio.run(work(url, args.model, args, log)), indent=1), flush=True)
        except BaseException:
            print(log.read_text(errors="replace")[-4000:], file=sys.stderr)
            raise
        finally:
            process.terminate()
            process.wait(60)
            if args.keep_log is not None:
                shutil.copy(log, args.keep_log)
    return 0


if __name__ == "__main__":
    sys.exit(main())
