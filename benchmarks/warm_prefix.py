"""Time to the first token with and without a warm prefix, on one engine in this process.

    python benchmarks/warm_prefix.py [MODEL] [--prefix 2048 8192] [--suffix 32] [--repeats 5]

Cold and warm runs take turns: each pair forgets the prefix cache, asks cold, and asks again with another end. What is
printed are medians, and by how much the warm one is below the cold one; a line for each prefix and suffix.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import time
from typing import Any

import numpy as np
from octavo.cache.prefix import PUBLIC
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.engine.engine import Engine
from octavo.plugins import discover
from octavo.request import Request, SamplingParams


def first_token(engine: Engine, name: str, prompt: list[int], domain: str = "") -> tuple[float, int]:
    """(seconds from the request to its first token, prompt tokens that were cached)."""
    params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
    began = time.perf_counter()
    engine.add(Request(id=name, prompt=prompt, params=params, domain=domain))
    cached = 0
    seconds = 0.0
    while engine.busy:
        for event in engine.step().events:
            if event.tokens:
                seconds, cached = time.perf_counter() - began, event.cached_tokens
    return seconds, cached


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("model", nargs="?", default="demo")
    parser.add_argument("--load-format", default="auto")
    parser.add_argument("--prefix", type=int, nargs="+", default=[2048])
    parser.add_argument("--suffix", type=int, nargs="+", default=[32])
    parser.add_argument("--repeats", type=int, default=5)
    args = parser.parse_args()
    length = max(args.prefix) + max(args.suffix) + 64
    config = EngineConfig(model=args.model, load_format=args.load_format, max_model_len=length)
    engine = build_engine(config, discover(config.plugins))
    gc.collect()
    gc.freeze()  # as the engine's process does
    for prefix in args.prefix:
        for suffix in args.suffix:
            print(json.dumps({"model": args.model, **compare(engine, prefix, suffix, args.repeats)}))


def compare(engine: Engine, prefix_tokens: int, suffix_tokens: int, repeats: int) -> dict[str, Any]:
    """Medians of `repeats` pairs, one more of which comes first and does not count."""
    random = np.random.default_rng(0)
    prefix = random.integers(100, 4000, prefix_tokens).tolist()
    cold, warm, found = [], [], 0
    for turn in range(repeats + 1):
        engine.prefixes.reset()
        ends = random.integers(100, 4000, (2, suffix_tokens)).tolist()
        seconds, cached = first_token(engine, f"cold{turn}", prefix + ends[0])
        assert cached == 0
        engine.prefixes.reset()
        first_token(engine, f"warmer{turn}", prefix, PUBLIC)
        again, found = first_token(engine, f"warm{turn}", prefix + ends[1])
        if turn:
            cold.append(seconds)
            warm.append(again)
    return {
        "device": engine.explain["device"]["type"],
        "prompt": prefix_tokens + suffix_tokens,
        "cached": found,
        "cold_ms": round(1e3 * statistics.median(cold), 2),
        "warm_ms": round(1e3 * statistics.median(warm), 2),
        "warm_below_cold": round(1 - statistics.median(warm) / statistics.median(cold), 3),
    }


if __name__ == "__main__":
    main()
