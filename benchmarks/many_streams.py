"""Many streaming clients at once against one server on this machine: what the server itself adds, and whether it grows.

    python benchmarks/many_streams.py FOLDER --clients 1000 --rounds 3 -- --max-num-seqs 256 --max-num-queued-reqs 0

Starts `octavo serve FOLDER` with what follows `--`, sends rounds of `--clients` requests side by side (16 tokens in, 16 out), and
prints a line a round: errors, the server's own part of a token and of a request's start (bounds of histogram buckets, from
/metrics), how long its event loop worked in one go, and what its process holds.
"""

from __future__ import annotations

import argparse
import os
import subprocess
import sys
import time

import httpx
import psutil
from octavo.bench.serve import Load, measure, random_asks

FAMILIES = ("delivery_seconds", "admission_seconds", "event_loop_busy_seconds", "event_loop_lag_seconds")


def buckets(url: str, family: str) -> dict[float, float]:
    """Cumulative counts by upper bound."""
    found = {}
    for line in httpx.get(url + "/metrics", timeout=60).text.splitlines():
        if line.startswith(f"octavo_{family}_bucket"):
            bound = line.split('le="')[1].split('"')[0]
            found[float(bound.replace("+Inf", "inf"))] = float(line.rsplit(" ", 1)[1])
    return found


def bound_of(before: dict[float, float], after: dict[float, float], part: float) -> float:
    """The smallest bound under which this part of what came in between lies."""
    counts = {bound: count - before[bound] for bound, count in after.items()}
    return min(bound for bound, count in counts.items() if count >= part * counts[float("inf")])


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model")
    parser.add_argument("--clients", type=int, default=1000)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--port", type=int, default=8010)
    own, _, flags = " ".join(sys.argv[1:]).partition(" -- ")
    args = parser.parse_args(own.split())
    url = f"http://127.0.0.1:{args.port}"
    command = [
        sys.executable,
        "-m",
        "octavo",
        "serve",
        args.model,
        "--port",
        str(args.port),
        "--served-model-name",
        "m",
        *flags.split(),
    ]
    server = subprocess.Popen([*command, "--disable-log-requests", "--log-level", "warning"])
    try:
        while True:
            try:
                if httpx.get(url + "/ready").status_code == 200:
                    break
            except httpx.TransportError:
                time.sleep(0.2)
        process = psutil.Process(server.pid)
        asks = random_asks(args.clients, 16, 16, spread=0.5, vocab=500)
        measure(Load(url, "m", asks[:20], concurrency=20))
        for number in range(args.rounds):
            before, spent = {family: buckets(url, family) for family in FAMILIES}, sum(process.cpu_times()[:2])
            result = measure(Load(url, "m", asks, concurrency=args.clients))
            spent = sum(process.cpu_times()[:2]) - spent
            print(
                f"round {number}: {result['completed']} of {args.clients} complete, errors {result['errors']}, "
                f"{result['wall_s']} s, {result['output_tok_s']} tokens/s, {1000 * spent / args.clients:.2f} ms of processor a request, "
                f"{process.memory_info().rss >> 20} MiB, {process.num_fds()} files, load average {os.getloadavg()[0]:.1f}"
            )
            for name, seen in result["latency"].items():
                print(f"  client's {name}: " + ", ".join(f"{part} {value}" for part, value in seen.items()))
            for family in FAMILIES:
                after = buckets(url, family)
                parts = {f"p{100 * part:g}": bound_of(before[family], after, part) for part in (0.5, 0.9, 0.99, 1)}
                print(f"  {family}: " + ", ".join(f"{name} <= {1000 * bound:g} ms" for name, bound in parts.items()), flush=True)
    finally:
        server.terminate()
        server.wait()


if __name__ == "__main__":
    main()
