"""Whether a warm-up leaves anything for clients to wait for: bursts of requests of every kind, and what the log says of them.

    python benchmarks/after_warm_up.py MODEL [--seconds 10] [--seed 1] [--settings JSON]

An engine is started and warmed as the server does it. Then bursts of 1 to 48 prompts arrive beside six rows that decode: 1 to
2,200 tokens, some beginning alike, sampled in every way, one sample or several. Afterwards each kernel that was compiled or
fetched from Triton's cache since the warm-up is told, each graph that was captured and each step of over 100 ms.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import logging
import os
import random
import re
import time
from typing import Any

from octavo.config import EngineConfig
from octavo.engine.async_llm import AsyncLLM
from octavo.engine.warmup import warm_up
from octavo.request import SamplingParams

WAYS: tuple[dict[str, Any], ...] = (
    {"temperature": 0.0},
    {"top_p": 0.9, "top_k": 20},
    {"min_p": 0.1},
    {"logprobs": 0},
    {"logprobs": 5},
    {"prompt_logprobs": 1},
    {"presence_penalty": 0.3},
    {"repetition_penalty": 1.1},
    {"logit_bias": {5: 2.0}},
    {"min_tokens": 3},
    {"n": 2},
    {"n": 5},
)
TOLD = re.compile(r"(compiled|fetched) the kernel|^step \d+ took|captured the graph")


class Lines(logging.Handler):
    """What was logged, with the time."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: list[tuple[float, str]] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.kept.append((time.perf_counter(), record.getMessage()))


async def answered(llm: AsyncLLM, ids: list[int], params: SamplingParams) -> None:
    async for _ in llm.generate(ids, params, domain="of this benchmark"):
        pass


def burst(rng: random.Random, heads: list[list[int]], vocab: int, room: int) -> list[tuple[list[int], SamplingParams]]:
    """Requests that arrive together."""
    found = []
    for _ in range(rng.choice((1, 2, 3, 5, 9, 17, 26, 33, 48))):
        own = [rng.randrange(vocab) for _ in range(rng.choice((1, 7, 30, 90, 200, 700)))]
        way = rng.choice(WAYS) if rng.random() < 0.4 else {}
        params = SamplingParams(max_tokens=rng.choice((3, 4, 12)), ignore_eos=True, **way)
        found.append(([*rng.choice(heads), *own][:room], params))
    return found


async def run(args: argparse.Namespace, lines: Lines) -> None:
    llm = await AsyncLLM.start(EngineConfig(model=args.model, **args.settings), relay_log=True)
    began = time.perf_counter()
    await warm_up(llm)
    done = time.perf_counter()
    rng, vocab, room = random.Random(args.seed), llm.info.vocab_size, llm.info.max_model_len - 16
    heads = [[], [], *([rng.randrange(vocab) for _ in range(n)] for n in (96, 512, 1500))]
    long = SamplingParams(max_tokens=min(2000, room - 8), ignore_eos=True)
    rows = [asyncio.create_task(answered(llm, [1, 2, 3 + i], long)) for i in range(6)]
    waits = []
    while time.perf_counter() - done < args.seconds:
        at = time.perf_counter()
        await asyncio.gather(*(answered(llm, ids, params) for ids, params in burst(rng, heads, vocab, room)))
        waits.append(time.perf_counter() - at)
    for row in rows:
        row.cancel()
    await asyncio.gather(*rows, return_exceptions=True)
    await llm.close(grace=1)
    told = [(at - done, line) for at, line in lines.kept if at > done and TOLD.search(line)]
    kernels, graphs = sum(" the kernel " in line for _, line in told), sum("captured" in line for _, line in told)
    print(f"warm-up {done - began:.1f} s; then {len(waits)} bursts, the slowest {max(waits):.2f} s; since the warm-up:")
    print(f"{kernels} kernels compiled or fetched, {graphs} graphs captured, {len(told) - kernels - graphs} steps of over 100 ms")
    for at, line in told:
        print(f"  {at:+6.2f} s {line[:150]}")


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])  # type: ignore[union-attr]
    parser.add_argument("model")
    parser.add_argument("--seconds", type=float, default=10.0)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--settings", type=json.loads, default={}, help="fields of the engine's configuration, as JSON")
    lines = Lines()
    os.environ["OCTAVO_LOG_LEVEL"] = "debug"  # of the engine's process
    logging.basicConfig(level="DEBUG", handlers=[lines], force=True)
    asyncio.run(run(parser.parse_args(), lines))


if __name__ == "__main__":
    main()
