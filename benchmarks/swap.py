"""Swapping to host memory on a GPU: the copies alone, and a whole engine whose pool is too small.

    python benchmarks/swap.py copies [--blocks 256] [--slots 512] [--layers 32]
    python benchmarks/swap.py engine MODEL [--mode recompute swap auto] [--requests 24] [--prompt 3000] [--out 700]

copies: bytes a second each way for scattered blocks, the time that submitting them takes the host, and when the compute
stream is free again. engine: tokens a second of requests that do not fit together, under each --preemption-mode in turn.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from typing import Any

import numpy as np
import torch
from octavo.cache.pool import Pool
from octavo.cache.swap import make_swap_space
from octavo.config import EngineConfig
from octavo.engine.build import build_engine
from octavo.interfaces import CacheLayout, KVGroup, KVSpec
from octavo.plugins import discover
from octavo.request import FROM_HOST, TO_HOST, Request, SamplingParams

TOKENS, HEADS, DIM = 64, 8, 128
"""A block of Llama-3.1-8B: 64 tokens of 8 KV heads of 128 in bfloat16, 256 KiB a layer."""


def copies(args: argparse.Namespace) -> dict[str, Any]:
    spec = KVSpec("full", HEADS, DIM, DIM, "bfloat16")
    page = TOKENS * HEADS * 2 * DIM * 2
    group = KVGroup(0, spec, tuple(range(args.layers)), TOKENS, page)
    pool = Pool((group,), (CacheLayout("bfloat16", (page // 2,), page, "flat"),), 2 * args.blocks, "cuda")
    began = time.perf_counter()
    space = make_swap_space(pool, args.slots, args.staging_mib << 20)
    answer: dict[str, Any] = {
        "block_bytes": page * args.layers,
        "pinned_gib": space.nbytes / 2**30,
        "pin_s": time.perf_counter() - began,
    }
    random = np.random.default_rng(0)
    for count in (args.blocks, 48):
        for name, kind in (("out", TO_HOST), ("in", FROM_HOST)):
            rows = [one_copy(space, kind, random, args, count) for _ in range(args.repeats + 1)][1:]
            host, compute, whole = (statistics.median(row[i] for row in rows) for i in range(3))
            answer[f"{name}_{count}"] = {
                "gb_s": round(count * page * args.layers / whole / 1e9, 1),
                "host_ms": round(1e3 * host, 2),
                "compute_free_ms": round(1e3 * compute, 2),
                "done_ms": round(1e3 * whole, 2),
            }
    return answer


def one_copy(
    space: Any, kind: int, random: np.random.Generator, args: argparse.Namespace, count: int
) -> tuple[float, float, float]:
    """Seconds until submitted, until the compute stream is free, and until the last byte is there."""
    blocks = random.permutation(2 * args.blocks)[:count]
    slots = random.permutation(args.slots)[:count] if args.scattered else np.arange(count)
    free = torch.cuda.Event()
    torch.cuda.synchronize()
    began = time.perf_counter()
    space.copy(kind, *((blocks, slots) if kind == TO_HOST else (slots, blocks)))
    submitted = time.perf_counter() - began
    free.record()
    free.synchronize()
    compute = time.perf_counter() - began
    torch.cuda.synchronize()
    return submitted, compute, time.perf_counter() - began


def engine(args: argparse.Namespace) -> dict[str, Any]:
    answer: dict[str, Any] = {}
    for mode in args.mode:
        config = EngineConfig(
            model=args.model,
            load_format=args.load_format,
            max_model_len=args.prompt + args.out + 64,
            block_size=TOKENS,
            num_gpu_blocks_override=args.pool // TOKENS,
            enable_prefix_caching=False,
            swap_space=args.swap_space,
            preemption_mode=mode,
            seed=1,
        )
        built = build_engine(config, discover(config.plugins))
        work(built, args, 0, 16)  # graphs are captured and kernels compiled
        answer[mode] = [work(built, args, turn, args.out) for turn in range(1, args.repeats + 1)]
        built.close()
        del built
        torch.cuda.empty_cache()
    return answer


def work(built: Any, args: argparse.Namespace, turn: int, out: int) -> dict[str, Any]:
    random = np.random.default_rng(turn)
    params = SamplingParams(max_tokens=out, temperature=1.0, ignore_eos=True, seed=turn)
    before = built.stats()
    counts = before.preemptions, before.swapped_out
    began = time.perf_counter()
    for i in range(args.requests):
        built.add(Request(id=f"{turn}-{i}", prompt=random.integers(100, 4000, args.prompt).tolist(), params=params))
    tokens = 0
    while built.busy:
        tokens += sum(len(event.tokens) for event in built.step().events)
    seconds = time.perf_counter() - began
    after = built.stats()
    return {
        "tok_s": round(tokens / seconds, 1),
        "preempted": after.preemptions - counts[0],
        "swapped_out": after.swapped_out - counts[1],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parts = parser.add_subparsers(dest="part", required=True)
    alone = parts.add_parser("copies")
    alone.add_argument("--blocks", type=int, default=256)
    alone.add_argument("--slots", type=int, default=512)
    alone.add_argument("--layers", type=int, default=32)
    alone.add_argument(
        "--staging-mib", type=int, default=512, help="of all staging buffers; an engine takes a 256th of the device"
    )
    alone.add_argument("--repeats", type=int, default=5)
    alone.add_argument("--scattered", action="store_true", help="host slots in random order too")
    whole = parts.add_parser("engine")
    whole.add_argument("model")
    whole.add_argument("--mode", nargs="+", default=["recompute", "swap", "auto"])
    whole.add_argument("--load-format", default="auto")
    whole.add_argument("--requests", type=int, default=24)
    whole.add_argument("--prompt", type=int, default=3000)
    whole.add_argument("--out", type=int, default=700)
    whole.add_argument("--pool", type=int, default=40_000, help="tokens")
    whole.add_argument("--swap-space", type=float, default=8.0)
    whole.add_argument("--repeats", type=int, default=1)
    args = parser.parse_args()
    if args.part == "copies" and not torch.cuda.is_available():
        parser.error("this measures on a CUDA device, and torch finds none")
    print(json.dumps(copies(args) if args.part == "copies" else engine(args)))


if __name__ == "__main__":
    main()
