"""`octavo bench {step,shape,allocator,memory,kernel}`: measurements of one part rather than of a whole server.

Owns their flags and tables; the measurements are octavo.bench's.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.bench.workloads import SHAPES, write_shape
from octavo.cli.bench_output import count, json_flag, print_json, print_table
from octavo.cli.console import Stages
from octavo.cli.flags import add_flags, add_model, read
from octavo.config import EngineConfig


def step(kinds: Any) -> None:
    parser = kinds.add_parser(
        "step",
        help="one decode step: its time, and what the device does in it",
        usage="octavo bench step [MODEL] [--batch N] [--context N] [--profile] [--json] [options]",
        description="Time decode steps of a full batch; with --profile also the device's busy and idle time and its operations. "
        f"MODEL may also be a shape ({', '.join(SHAPES)}) with --load-format dummy.",
    )
    add_model(parser)
    parser.add_argument("--batch", type=count, default=16, metavar="N", help="Sequences that decode together. [default: 16]")
    parser.add_argument("--context", type=count, default=256, metavar="N", help="Tokens that each holds. [default: 256]")
    parser.add_argument("--steps", type=count, default=20, metavar="N", help="Steps that are measured. [default: 20]")
    parser.add_argument("--phase", choices=["decode", "prefill"], default="decode",
                        help="Decoding sequences, or prompts being computed, as many as a step takes. [default: decode]")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="Also run steps under torch's profiler.")
    json_flag(parser)
    add_flags(parser, EngineConfig)
    parser.set_defaults(func=_run_step)


def _run_step(args: argparse.Namespace) -> int:
    from octavo.bench import step

    config = read(EngineConfig, args)
    with Stages() as stages:
        record = step.measure(
            config,
            batch=args.batch,
            context=args.context,
            steps=args.steps,
            profile=args.profile,
            prefill=args.phase == "prefill",
            tell=stages.tell,
        )
    return print_json(record) if args.json else print_table(step.table(record), {})


def shape(kinds: Any) -> None:
    parser = kinds.add_parser(
        "shape",
        help="write a model folder of a public shape, to serve with random weights",
        usage="octavo bench shape NAME FOLDER",
        description="Write config.json of a public shape and a made-up tokenizer; serve the folder with --load-format dummy.",
    )
    parser.add_argument("name", choices=sorted(SHAPES), metavar="NAME", help=f"One of {', '.join(SHAPES)}.")
    parser.add_argument("folder", type=Path, metavar="FOLDER")
    parser.set_defaults(func=_run_shape)


def _run_shape(args: argparse.Namespace) -> int:
    print(f"octavo serve {write_shape(args.name, args.folder, tokenizer=True)} --load-format dummy")
    return 0


def allocator(kinds: Any) -> None:
    parser = kinds.add_parser(
        "allocator",
        help="microseconds a block of the block allocator",
        usage="octavo bench allocator [--json]",
        description="Time the block allocator on 256 sequences: reserve + release, and with hashing, publishing and matching.",
    )
    json_flag(parser)
    parser.set_defaults(func=_run_allocator)


def _run_allocator(args: argparse.Namespace) -> int:
    from octavo.bench import allocator
    from octavo.bench.record import surroundings

    record = surroundings() | {"benchmark": "allocator"} | dict(allocator.run())
    if args.json:
        return print_json(record)
    return print_table(
        [f"{record['us_per_block']:.3f} us a block", f"{record['us_per_block_hashed']:.3f} us with hash, publish and match"], {}
    )


def memory(kinds: Any) -> None:
    parser = kinds.add_parser(
        "memory",
        help="fragmentation, use and fairness of the KV cache, simulated without a model",
        usage="octavo bench memory [--mix NAME ...] [--block-size N ...] [--requests N] [--plot FILE.svg] [--json]",
        description="Run core's allocator and scheduler on realistic lengths of requests, without a model.",
    )
    parser.add_argument(
        "--mix", action="append", choices=["chat", "documents", "mixed"], help="Default is all three (repeatable)."
    )
    parser.add_argument(
        "--block-size",
        action="append",
        type=count,
        metavar="N",
        help="Tokens per block; default is 16, 64 and 128 (repeatable).",
    )
    parser.add_argument("--requests", type=count, default=20_000, metavar="N", help="Requests of each run. [default: 20000]")
    parser.add_argument("--pool-tokens", type=count, default=524_288, metavar="N", help="Size of the KV cache. [default: 524288]")
    parser.add_argument("--host-tokens", type=int, default=0, metavar="N", help="Size of the swap space. [default: 0]")
    parser.add_argument("--max-num-seqs", type=count, default=512, metavar="N", help="Sequences in one step. [default: 512]")
    parser.add_argument("--plot", metavar="FILE.svg", help="Also draw the runs (needs octavo[bench]).")
    json_flag(parser)
    parser.set_defaults(func=_run_memory)


def _run_memory(args: argparse.Namespace) -> int:
    from octavo.bench import memory
    from octavo.bench.record import surroundings

    runs = [
        memory.run(
            requests=args.requests,
            mix=mix,
            block_size=size,
            pool_tokens=args.pool_tokens,
            host_tokens=args.host_tokens,
            max_num_seqs=args.max_num_seqs,
        )
        for mix in args.mix or list(memory.MIXES)
        for size in args.block_size or [16, 64, 128]
    ]
    if args.plot:
        memory.plot(runs, args.plot)
    if args.json:
        return print_json(surroundings() | {"benchmark": "memory", "runs": runs})
    head = f"{'mix':<12}{'block':>6}{'holds':>9}{'fragmentation':>15}{'p95':>8}{'at most':>9}{'use':>8}{'preempted':>11}{'swapped':>9}{'fairness':>10}"
    lines = [
        f"{r['mix']:<12}{r['block_size']:>6}{r['holds']:>9}{100 * r['fragmentation']['mean']:>14.2f}%{100 * r['fragmentation']['p95']:>7.2f}%"
        f"{100 * r['fragmentation']['max']:>8.2f}%"
        f"{100 * r['usage']['mean']:>7.1f}%{r['preemptions']:>11}{r['swapped_out']:>9}{r['fairness']:>10.3f}"
        for r in runs
    ]
    return print_table([head, *lines], {})


def kernel(kinds: Any) -> None:
    parser = kinds.add_parser(
        "kernel",
        help="attention backends on a GPU, against the device's ceilings",
        usage="octavo bench kernel BACKEND ... [--shapes SET] [--kv-dtype DTYPE] [--enable DISTRIBUTION] [--json]",
        description="Time attention backends, by name, on decode and prefill shapes. Needs a CUDA device.",
    )
    parser.add_argument("backends", nargs="+", metavar="BACKEND", help="Names of attention backends (octavo plugins list).")
    parser.add_argument(
        "--shapes", action="append", choices=["decode", "ragged", "prefill"], help="Default is all three (repeatable)."
    )
    parser.add_argument(
        "--kv-dtype", action="append", metavar="DTYPE", help="Precision of the cache (repeatable). [default: bfloat16]"
    )
    parser.add_argument("--block-size", type=count, metavar="N", help="Tokens per block; default is what each backend prefers.")
    parser.add_argument("--enable", action="append", default=[], metavar="DISTRIBUTION", help="Plugin to enable (repeatable).")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="Also draw the roofline (needs octavo[bench]).")
    json_flag(parser)
    parser.set_defaults(func=_run_kernel)


def _run_kernel(args: argparse.Namespace) -> int:
    import sys

    from octavo.bench import kernel
    from octavo.plugins import discover

    record = kernel.run(
        args.backends,
        [shape for name in args.shapes or kernel.SETS for shape in kernel.SETS[name]],
        catalog=discover({"enable": args.enable}),
        kv_dtypes=args.kv_dtype or ["bfloat16"],
        block_size=args.block_size,
        log=lambda text: print(text, file=sys.stderr if args.json else sys.stdout, flush=True),
    )
    if args.plot is not None:
        from octavo.bench.roofline import draw

        draw(record, args.plot)
    return print_json(record) if args.json else 0
