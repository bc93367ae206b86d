"""A soak of the real server on the CPU: random clients for a long time, then nothing may be left.

    python benchmarks/soak.py --minutes 30 [--out soak.json]

Starts `octavo serve` on a tiny random model with a KV cache that is much too small, swap space, priorities, a pool
that changes its size, and pins. Clients of two tenants stream, do not stream, ask for several samples, share
prefixes, and go away in the middle, at random. Meanwhile an operator warms, pins, unpins and forgets prefixes.

Checked while it runs: a probe always gets the tokens that it got first; every answer is whole. Checked at the end:
nothing runs or waits, every block is free again, no parcel is left in host memory, and the memory of both
processes is flat. The exit status says whether all held.

What flat means. Compared is what a process holds (soak_probe/sitecustomize.py), in the last quarter of the load against the second,
and of each quarter the least, since requests that are alive only add to it. A server holds on to three things that are no
leak, each with a bound of its own: the products that oneDNN compiles for every number of tokens that a step may have (about 2 MiB each
here), the words that the tokenizer has split before (up to 10,000), and what libraries set up when they are first called. So
before the load every such number comes up once, prompts are made of some hundred words, and the first quarter does not count. Resident memory is
printed beside it; it has a wider bound, as an allocator does not give back all that is free.
"""

from __future__ import annotations

import argparse
import asyncio
import collections
import contextlib
import json
import os
import random
import signal
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import httpx
import psutil

ROOT = Path(__file__).resolve().parent.parent
sys.path.insert(0, str(ROOT))

KEYS, ADMIN = ("soak-first-tenant", "soak-second-tenant"), "soak-administrator"
CONTEXT = 512
BLOCKS = 72
SEQUENCES, STEP_TOKENS = 8, 128
FLAGS = (
    *("--port", "0", "--served-model-name", "soak", "--admin-api-key", ADMIN, "--num-threads", "1"),
    *("--block-size", "16", "--num-gpu-blocks-override", str(BLOCKS)),
    *("--max-num-seqs", str(SEQUENCES), "--max-num-batched-tokens", str(STEP_TOKENS)),
    *("--swap-space", "0.001", "--preemption-mode", "swap", "--scheduling-policy", "priority", "--min-priority", "-3"),
    *("--dynamic-memory", "--dynamic-memory-interval", "3", "--disable-log-requests"),
    *(flag for key in KEYS for flag in ("--api-key", key)),
)
PREFIXES = ["The library opens at nine. ", "A list of birds that were seen this year: ", "Once upon a time "]
HELD_MIB, HELD_BLOCKS, RESIDENT_MIB = 0.5, 5000, 12.0
"""Growth of a process between the second and the last quarter that still counts as flat: bytes of malloc, blocks of Python's allocator
(of half a kilobyte at most), resident memory. A leak of 500 bytes a request is 1.4 MiB in the half of a run of half an hour."""


class Soak:
    """Clients and their counts. url of the server; pause: mean seconds that a client waits between two requests."""

    def __init__(self, url: str, pause: float, seed: int) -> None:
        self.url, self.pause = url, pause
        self.random = random.Random(seed)
        self.counts: collections.Counter[str] = collections.Counter()
        self.faults: list[str] = []
        self.probe: str | None = None

    def client(self, key: str) -> httpx.AsyncClient:
        return httpx.AsyncClient(base_url=self.url, headers={"Authorization": f"Bearer {key}"}, timeout=300)

    async def person(self, end: float) -> None:
        """One client after another, until the end."""
        while time.monotonic() < end:
            await asyncio.sleep(self.random.expovariate(1 / self.pause))
            key = self.random.choice(KEYS)
            act = self.random.choice(
                [self.whole, self.stream, self.stream, self.leave_stream, self.leave_stream, self.leave_whole]
            )
            try:
                async with self.client(key) as client:
                    await act(client)
                self.counts[act.__name__] += 1
            except Exception as error:
                self.fault(f"{act.__name__}: {type(error).__name__}: {error}")

    def body(self, **more: Any) -> dict[str, Any]:
        ending = " ".join(str(self.random.randrange(100)) for _ in range(4))
        prompt = self.random.choice(PREFIXES) * self.random.randint(1, 8) + ending
        samples = self.random.choice([1, 1, 1, 3])
        return {
            "model": "soak",
            "prompt": prompt,
            "max_tokens": self.random.randint(1, 150),
            "ignore_eos": True,
            "temperature": self.random.choice([0.0, 1.0]),
            "n": samples,
            "priority": self.random.randint(-3, 3),
            **more,
        }

    async def whole(self, client: httpx.AsyncClient) -> None:
        body = self.body()
        response = await client.post("/v1/completions", json=body)
        response.raise_for_status()
        answer = response.json()
        assert len(answer["choices"]) == body["n"]
        assert answer["usage"]["completion_tokens"] == body["n"] * body["max_tokens"], answer["usage"]

    async def stream(self, client: httpx.AsyncClient) -> None:
        lines = [line async for line in self.lines(client, self.body())]
        assert lines[-1] == "data: [DONE]", lines[-1]

    async def leave_stream(self, client: httpx.AsyncClient) -> None:
        left = self.random.randint(1, 12)
        async for _ in self.lines(client, self.body(max_tokens=150)):
            left -= 1
            if not left:
                return

    async def leave_whole(self, client: httpx.AsyncClient) -> None:
        with contextlib.suppress(TimeoutError):
            await asyncio.wait_for(client.post("/v1/completions", json=self.body(max_tokens=150)), self.random.uniform(0.01, 0.5))

    async def lines(self, client: httpx.AsyncClient, body: dict[str, Any]) -> Any:
        async with client.stream("POST", "/v1/completions", json={**body, "stream": True}) as response:
            response.raise_for_status()
            async for line in response.aiter_lines():
                if line:
                    yield line

    async def prober(self, end: float) -> None:
        """The same greedy request, again and again, whatever else runs."""
        body = {"model": "soak", "prompt": "A probe of forty tokens.", "max_tokens": 40, "temperature": 0, "ignore_eos": True}
        async with self.client(KEYS[0]) as client:
            while time.monotonic() < end:
                text = (await client.post("/v1/completions", json=body)).raise_for_status().json()["choices"][0]["text"]
                self.probe = self.probe or text
                if text != self.probe:
                    self.fault(f"the probe's answer changed from {self.probe!r} to {text!r}")
                self.counts["probe"] += 1
                await asyncio.sleep(5 * self.pause)

    async def operator(self, end: float) -> None:
        async with self.client(ADMIN) as client:
            while time.monotonic() < end:
                await asyncio.sleep(self.random.expovariate(1 / (20 * self.pause)))
                action = self.random.choice(["warm", "pin", "unpin", "pin", "unpin", "reset"])
                if action == "reset":
                    answer = await client.delete("/admin/prefix-cache")
                else:
                    text = self.random.choice(PREFIXES) * self.random.randint(2, 6)
                    answer = await client.post("/admin/prefix-cache", json={"action": action, "prefixes": [text]})
                if answer.status_code != 200:
                    self.fault(f"operator {action}: {answer.status_code} {answer.text[:200]}")
                self.counts["operator"] += 1

    def fault(self, what: str) -> None:
        self.counts["faults"] += 1
        if len(self.faults) < 20:
            self.faults.append(what)

    def ask(self, path: str, method: str = "GET") -> Any:
        response = httpx.request(method, self.url + path, headers={"Authorization": f"Bearer {ADMIN}"}, timeout=30)
        return response.raise_for_status().json()


async def warm_up(soak: Soak) -> None:
    """Every number of tokens that a step may have, once, and steps of several sequences: libraries compile something for each."""
    async with soak.client(KEYS[0]) as client:

        async def ask(prompt: list[int], tokens: int) -> None:
            body = {"model": "soak", "prompt": prompt, "max_tokens": tokens, "ignore_eos": True}
            (await client.post("/v1/completions", json=body)).raise_for_status()

        for length in range(1, STEP_TOKENS + 1):
            await ask([soak.random.randrange(100, 400) for _ in range(length)], 1)
        for together in range(2, SEQUENCES + 1):
            await asyncio.gather(*(ask([100 + i], 8) for i in range(together)))


async def watch(processes: dict[str, psutil.Process], end: float) -> dict[str, list[float]]:
    """Resident memory of each process in MiB, every second."""
    seen: dict[str, list[float]] = {name: [] for name in processes}
    while time.monotonic() < end:
        for name, process in processes.items():
            seen[name].append(process.memory_info().rss / 2**20)
        await asyncio.sleep(1)
    return seen


def held(probe: Path, process: psutil.Process, since: float) -> tuple[list[float], list[float]]:
    """MiB that malloc has given to a process, and blocks that Python's allocator has, every second since then."""
    rows = [line.split() for line in (probe / str(process.pid)).read_text().splitlines()]
    rows = [row for row in rows if len(row) == 3 and float(row[0]) >= since]
    return [int(row[1]) / 2**20 for row in rows], [float(row[2]) for row in rows]


async def drive(soak: Soak, seconds: float, clients: int, processes: dict[str, psutil.Process]) -> dict[str, list[float]]:
    end = time.monotonic() + seconds
    people = [soak.person(end) for _ in range(clients)]
    *_, memory = await asyncio.gather(*people, soak.prober(end), soak.operator(end), watch(processes, end))
    return memory


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--minutes", type=float, default=30)
    parser.add_argument("--clients", type=int, default=12)
    parser.add_argument("--pause", type=float, default=0.3, help="mean seconds between two requests of a client")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--out", type=Path)
    args = parser.parse_args()
    from tests.tiny import tiny_llama

    with tempfile.TemporaryDirectory(prefix="octavo-soak-") as folder:
        model = tiny_llama(Path(folder) / "model", max_position_embeddings=CONTEXT)
        log, probe = Path(folder) / "log", Path(folder) / "probe"
        probe.mkdir()
        paths = [str(ROOT / "benchmarks" / "soak_probe"), *filter(None, [os.environ.get("PYTHONPATH")])]
        environment = {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "SOAK_PROBE": str(probe)}
        with log.open("wb") as out:
            command = [sys.executable, "-m", "octavo.cli.main", "serve", str(model), *FLAGS]
            server = subprocess.Popen(command, stdout=out, stderr=subprocess.STDOUT, env=environment)
        try:
            record = measure(server, log, probe, args)
        finally:
            server.send_signal(signal.SIGTERM)
            server.wait(60)
        record["exit_status"] = server.returncode
    record["held"] = record["held"] and server.returncode == 0
    text = json.dumps(record, indent=1)
    if args.out:
        args.out.write_text(text)
    print(text)
    return 0 if record["held"] else 1


def measure(server: subprocess.Popen[bytes], log: Path, probe: Path, args: argparse.Namespace) -> dict[str, Any]:
    url = wait_for(server, log)
    engine = next(child for child in psutil.Process(server.pid).children() if "octavo.engine.process" in child.cmdline())
    processes = {"server": psutil.Process(server.pid), "engine": engine}
    soak = Soak(url, args.pause, args.seed)
    asyncio.run(warm_up(soak))
    began = time.monotonic()
    resident = asyncio.run(drive(soak, 60 * args.minutes, args.clients, processes))
    memory: dict[str, dict[str, list[float]]] = {}
    for name, process in processes.items():
        malloc, blocks = held(probe, process, began)
        memory[name] = {
            "held_mib": quarters(malloc, min),
            "held_blocks": quarters(blocks, min),
            "resident_mib": quarters(resident[name], statistics.median),
        }
    stats = settle(soak)
    pinned, back = soak.ask("/admin/prefix-cache")["pins"], restored(soak)["pins"]
    shrunk = ": 0 of them are pinned" in log.read_text(errors="replace")  # a pool that has shrunk may have no room for them
    kept = back == pinned or (shrunk and back.items() <= pinned.items())
    cache = soak.ask("/admin/prefix-cache?pins=true", "DELETE")
    bounds = {"held_mib": HELD_MIB, "held_blocks": HELD_BLOCKS, "resident_mib": RESIDENT_MIB}
    growth = {name: {what: round(values[3] - values[1], 2) for what, values in found.items()} for name, found in memory.items()}
    checks = {
        "no fault": not soak.faults,
        "pins come back after a reset": kept,
        "nothing runs or waits": stats["running"] == stats["waiting"] == 0,
        "every block is free": cache["used_blocks"] == cache["pinned_blocks"] == cache["cached_blocks"] == 0,
        "no parcel is left": cache["host_parcel_slots"] == 0,
        "memory is flat": all(found[what] < bound for found in growth.values() for what, bound in bounds.items()),
    }
    counted = (
        "preemptions",
        "swapped_out",
        "swapped_in",
        "pool_growths",
        "pool_shrinks",
        "kv_alerts",
        "generation_tokens",
        "steps",
    )
    return {
        "minutes": args.minutes,
        "requests": dict(soak.counts),
        "engine": {name: stats[name] for name in counted},
        "host": {name: cache[name] for name in ("host_hits", "host_stores")},
        "memory by quarter": memory,
        "growth": growth,
        "checks": checks,
        "faults": soak.faults,
        "held": all(checks.values()),
    }


def quarters(values: list[float], of: Callable[[list[float]], float]) -> list[float]:
    """One figure for each quarter of a series."""
    length = len(values) // 4
    if not length:
        raise SystemExit("the soak was too short to say anything about memory")
    return [round(of(values[at * length : (at + 1) * length]), 2) for at in range(4)]


def settle(soak: Soak) -> dict[str, Any]:
    """The engine's stats once nothing runs any more, or after ten seconds."""
    for _ in range(100):
        stats: dict[str, Any] = soak.ask("/admin/status")["stats"]
        if stats["running"] == stats["waiting"] == 0:
            break
        time.sleep(0.1)
    return stats


def restored(soak: Soak) -> dict[str, Any]:
    """The prefix cache after a reset, once the pins are back (those for which the pool has become too small stay away)."""
    cache: dict[str, Any] = soak.ask("/admin/prefix-cache", "DELETE")
    for _ in range(100):
        if not cache["pins_returning"]:
            break
        time.sleep(0.1)
        cache = soak.ask("/admin/prefix-cache")
    return cache


def wait_for(server: subprocess.Popen[bytes], log: Path) -> str:
    """The server's address, once it is ready."""
    for _ in range(1200):
        words = log.read_text(errors="replace")
        if server.poll() is not None:
            raise SystemExit(f"the server ended with {server.returncode}:\n{words}")
        url = next((word.rstrip(";") for word in words.split() if word.startswith("http://")), "")
        try:
            if url and httpx.get(url + "/ready", timeout=5).status_code == 200:
                return url
        except httpx.TransportError:
            pass
        time.sleep(0.1)
    raise SystemExit("the server was not ready within two minutes")


if __name__ == "__main__":
    sys.exit(main())
