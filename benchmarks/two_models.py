"""What two models on one device leave each other: tokens a second of each alone, and of both at once.

    python benchmarks/two_models.py MODEL [--clients 32] [--seconds 8] [--settings JSON] [-- flags of `octavo serve`]

A server holds MODEL twice, as `first` and `second`. Clients stream one answer after the other, a process
of them per model. Loopback only.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import multiprocessing
import sys
import tempfile
import time
from pathlib import Path

import httpx
from hot_swap import PROMPT, events, start


async def _clients(url: str, model: str, clients: int, seconds: float) -> tuple[int, float]:
    """(tokens streamed within `seconds`, the longest wait for a first token)."""
    tokens, longest, end = 0, 0.0, time.monotonic() + seconds

    async def one(client: httpx.AsyncClient) -> None:
        nonlocal tokens, longest
        body = {"model": model, "prompt": PROMPT, "max_tokens": 128, "ignore_eos": True, "stream": True}
        body["stream_options"] = {"include_usage": True, "continuous_usage_stats": True}
        while time.monotonic() < end:
            began, seen = time.perf_counter(), 0
            async with client.stream("POST", "/v1/completions", json=body) as response:
                async for event in events(response):
                    if event == "[DONE]" or time.monotonic() > end:
                        break
                    if not seen:
                        longest = max(longest, time.perf_counter() - began)
                    now = json.loads(event)["usage"]["completion_tokens"]
                    tokens, seen = tokens + now - seen, now

    limits = httpx.Limits(max_connections=None)
    async with httpx.AsyncClient(base_url=url, timeout=120, limits=limits) as client:
        await asyncio.gather(*(one(client) for _ in range(clients)))
    return tokens, longest


def _work(url: str, model: str, clients: int, seconds: float, queue: multiprocessing.Queue[tuple[str, int, float]]) -> None:
    queue.put((model, *asyncio.run(_clients(url, model, clients, seconds))))


def phase(url: str, models: list[str], clients: int, seconds: float) -> dict[str, dict[str, float]]:
    context = multiprocessing.get_context("spawn")
    queue = context.Queue()
    work = [context.Process(target=_work, args=(url, model, clients, seconds, queue)) for model in models]
    for process in work:
        process.start()
    found = [queue.get() for _ in work]
    for process in work:
        process.join()
    return {
        name: {"tok/s": round(tokens / seconds, 1), "longest wait, s": round(wait, 3)} for name, tokens, wait in sorted(found)
    }


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=32)
    parser.add_argument("--seconds", type=float, default=8)
    parser.add_argument("--settings", type=json.loads, default={}, help="settings of the second model, as JSON")
    cut = sys.argv.index("--") if "--" in sys.argv else len(sys.argv)
    args = parser.parse_args(sys.argv[1:cut])
    second = ",".join([f"second={args.model}", *(f"{key}={value}" for key, value in args.settings.items())])
    with tempfile.TemporaryDirectory() as folder:
        process, url = start(args.model, ["--models", second, *sys.argv[cut + 1 :]], Path(folder) / "log")
        try:
            phase(url, ["first", "second"], args.clients, 3)  # what happens once happens here
            for models in (["first"], ["second"], ["first", "second"]):
                print(json.dumps(phase(url, models, args.clients, args.seconds)), flush=True)
        finally:
            process.terminate()
            process.wait(60)
    return 0


if __name__ == "__main__":
    sys.exit(main())
