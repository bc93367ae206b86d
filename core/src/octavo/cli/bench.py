"""`octavo bench ...`: flags in, one of octavo.bench's measurements run, its record printed.

Owns no measurement and no definition. stdout gets the record (`--json`) or a short table; progress
goes to stderr.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from typing import Any

from octavo.bench.workloads import SHAPES, WORKLOADS, workload, write_shape
from octavo.cli.console import Stages
from octavo.cli.flags import add_flags, add_model, read
from octavo.config import EngineConfig
from octavo.errors import ConfigError


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        usage="octavo bench {offline,serve,startup,step,shape,allocator,memory,kernel,perplexity} ...",
        description="Measure. Every benchmark takes --json, which prints each figure with settings, versions and commit.",
    )
    kinds = parser.add_subparsers(metavar="BENCHMARK", required=True, title="benchmarks", dest="benchmark")
    _offline(kinds)
    _serve(kinds)
    _startup(kinds)
    _step(kinds)
    _shape(kinds)
    _allocator(kinds)
    _memory(kinds)
    _kernel(kinds)
    _perplexity(kinds)


def _offline(kinds: Any) -> None:
    parser = kinds.add_parser(
        "offline",
        help="throughput of the engine in this process, on a fixed workload",
        usage="octavo bench offline [MODEL] --workload NAME [--against transformers] [--json] [options]",
        description="Throughput of the engine in this process. MODEL may also be a shape "
        f"({', '.join(SHAPES)}) with --load-format dummy.",
    )
    add_model(parser)
    parser.add_argument(
        "--workload", default="cpu-bs1", metavar="NAME", help=f"One of {', '.join(WORKLOADS)}. [default: cpu-bs1]"
    )
    parser.add_argument("--repeats", type=_count, default=3, metavar="N", help="Timed passes; medians are reported. [default: 3]")
    parser.add_argument(
        "--against", choices=["transformers"], help="Also run transformers on the same weights, in turn with ours, at its best."
    )
    _json_flag(parser)
    add_flags(parser, EngineConfig)
    parser.set_defaults(func=_run_offline)


def _run_offline(args: argparse.Namespace) -> int:
    config, chosen = read(EngineConfig, args), workload(args.workload)
    from octavo.bench.offline import measure

    with Stages() as stages:
        record = measure(config, chosen, repeats=args.repeats, against=args.against, tell=stages.tell)
    if args.json:
        return _print_json(record)
    ours, lines = record["ours"], [f"{record['model']}, {chosen.name}: {chosen.summary}", ""]
    lines.append(f"{'':<16}{'output tok/s':>14}{'input tok/s':>14}{'wall s':>10}")
    lines.append(f"{'octavo':<16}{ours['output_tok_s']:>14.1f}{ours['input_tok_s']:>14.1f}{ours['wall_s']:>10.2f}")
    if theirs := record.get("baseline"):
        lines.append(
            f"{'transformers':<16}{theirs['output_tok_s']:>14.1f}{theirs['input_tok_s']:>14.1f}{theirs['wall_s']:>10.2f}"
        )
        lines += ["", f"transformers at its best: {theirs['call']}, {theirs['dtype']}, {theirs['threads']} threads"]
        lines.append(f"ratio {record['ratio']:.2f} ({record['ratio_of']})")
    return _print_table([*lines, ""], ours["latency"])


def _serve(kinds: Any) -> None:
    parser = kinds.add_parser(
        "serve",
        help="latency and throughput of any OpenAI-compatible server",
        usage="octavo bench serve [--base-url URL] [--request-rate R] [--num-prompts N] [options]",
        description="Send requests to any OpenAI-compatible server and report latencies, throughput, errors and goodput.",
    )
    parser.add_argument("--base-url", default="http://127.0.0.1:8000", metavar="URL", help="[default: http://127.0.0.1:8000]")
    parser.add_argument("--model", help="Model to ask for; default is the first that the server lists.")
    parser.add_argument("--endpoint", default="/v1/completions", choices=["/v1/completions", "/v1/chat/completions"],
                        help="Completions send token ids; a chat sends as many common words. [default: /v1/completions]")  # fmt: skip
    parser.add_argument("--workload", metavar="NAME", help=f"One of {', '.join(WORKLOADS)}, instead of random lengths.")
    parser.add_argument("--num-prompts", type=_count, metavar="N", help="Requests. [default: 100, or the workload's]")
    parser.add_argument("--random-input-len", type=_count, default=256, metavar="N", help="Prompt tokens. [default: 256]")
    parser.add_argument("--random-output-len", type=_count, default=64, metavar="N", help="Output tokens. [default: 64]")
    parser.add_argument("--random-range-ratio", type=_share, default=0.0, metavar="X",
                        help="Lengths vary by this share around the two. [default: 0]")  # fmt: skip
    parser.add_argument("--vocab-size", type=_count, default=40_000, metavar="N",
                        help="Random token ids are below this; at most the model's vocabulary. [default: 40000]")  # fmt: skip
    parser.add_argument("--request-rate", type=_rate, default=float("inf"), metavar="R",
                        help="Requests a second, with exponential gaps; inf sends all at once. [default: inf]")  # fmt: skip
    parser.add_argument("--max-concurrency", type=_count, default=256, metavar="N", help="Requests at a time. [default: 256]")
    parser.add_argument(
        "--timeout", type=_rate, default=600.0, metavar="S", help="Longest silence of one request. [default: 600]"
    )
    parser.add_argument("--api-key", metavar="TEXT", help="Key to send; default is OPENAI_API_KEY.")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="[default: 1]")
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
                        help="Ask for full lengths; off for servers that do not know the field. [default: on]")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of lengths, ids and gaps. [default: 0]")
    parser.add_argument("--goodput", action="append", default=[], metavar="NAME:MS",
                        help="Limit that a good request keeps: ttft:500, tpot:50 or e2el:5000 (repeatable).")  # fmt: skip
    _json_flag(parser)
    parser.set_defaults(func=_run_serve)


def _run_serve(args: argparse.Namespace) -> int:
    import os

    from octavo.bench import serve

    if args.workload:
        asks = workload(args.workload).asks(args.vocab_size)[: args.num_prompts]
    else:
        spread = args.random_range_ratio
        asks = serve.random_asks(
            args.num_prompts or 100,
            args.random_input_len,
            args.random_output_len,
            spread=spread,
            vocab=args.vocab_size,
            seed=args.seed,
        )
    key = args.api_key or os.environ.get("OPENAI_API_KEY")
    load = serve.Load(
        base_url=args.base_url.rstrip("/").removesuffix("/v1"),
        model=args.model or serve.served_model(args.base_url.rstrip("/").removesuffix("/v1"), key),
        asks=asks,
        endpoint=args.endpoint,
        rate=args.request_rate,
        concurrency=args.max_concurrency,
        timeout=args.timeout,
        api_key=key,
        temperature=args.temperature,
        ignore_eos=args.ignore_eos,
        seed=args.seed,
        goodput=serve.parse_goodput(args.goodput),
    )
    with Stages() as stages:
        record = serve.measure(load, stages.tell)
    if args.json:
        return _print_json(record)
    lines = [f"{load.model} at {load.base_url}{load.endpoint}", ""]
    lines.append(f"requests        {record['completed']} done, {record['errors']['count']} failed, {record['wall_s']:.2f} s")
    lines += [f"                {count} x {kind}" for kind, count in record["errors"]["kinds"].items()]
    lines.append(f"throughput      {record['requests_per_s']:.2f} requests/s")
    lines.append(f"                {record['input_tok_s']:.1f} input tok/s, {record['output_tok_s']:.1f} output tok/s")
    if good := record["goodput"]:
        lines.append(f"goodput         {good['requests_per_s']:.2f} requests/s ({good['requests']} requests kept every limit)")
    _print_table([*lines, ""], record["latency"])
    return 0 if record["completed"] else 1


def _startup(kinds: Any) -> None:
    parser = kinds.add_parser(
        "startup",
        help="time from `octavo serve` to the first token, and memory",
        usage="octavo bench startup [MODEL] [--repeats N] [--json] [-- flags of octavo serve]",
        description="Start `octavo serve MODEL` on a free port, ask it one question, end it.",
    )
    parser.add_argument("model", nargs="?", default="demo", metavar="MODEL")
    parser.rest = "flags"
    parser.add_argument("--repeats", type=_count, default=1, metavar="N", help="Starts; medians are reported. [default: 1]")
    _json_flag(parser)
    parser.set_defaults(func=_run_startup)


def _run_startup(args: argparse.Namespace) -> int:
    from octavo.bench import startup

    with Stages() as stages:
        record = startup.measure(args.model, args.flags, repeats=args.repeats, tell=stages.tell)
    if args.json:
        return _print_json(record)
    return _print_table(
        [
            f"ready          {record['ready_s']:.2f} s",
            f"first token    {record['first_token_s']:.2f} s",
            f"memory         {record['resident_mib']:.0f} MiB resident, {record['proportional_mib']:.0f} MiB with shared pages counted once",
        ],
        {},
    )


def _step(kinds: Any) -> None:
    parser = kinds.add_parser(
        "step",
        help="one decode step: its time, and what the device does in it",
        usage="octavo bench step [MODEL] [--batch N] [--context N] [--profile] [--json] [options]",
        description="Time decode steps of a full batch; with --profile also the device's busy and idle time and its operations. "
        f"MODEL may also be a shape ({', '.join(SHAPES)}) with --load-format dummy.",
    )
    add_model(parser)
    parser.add_argument("--batch", type=_count, default=16, metavar="N", help="Sequences that decode together. [default: 16]")
    parser.add_argument("--context", type=_count, default=256, metavar="N", help="Tokens that each holds. [default: 256]")
    parser.add_argument("--steps", type=_count, default=20, metavar="N", help="Steps that are measured. [default: 20]")
    parser.add_argument("--phase", choices=["decode", "prefill"], default="decode",
                        help="Decoding sequences, or prompts being computed, as many as a step takes. [default: decode]")  # fmt: skip
    parser.add_argument("--profile", action="store_true", help="Also run steps under torch's profiler.")
    _json_flag(parser)
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
    return _print_json(record) if args.json else _print_table(step.table(record), {})


def _shape(kinds: Any) -> None:
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


def _allocator(kinds: Any) -> None:
    parser = kinds.add_parser(
        "allocator",
        help="microseconds a block of the block allocator",
        usage="octavo bench allocator [--json]",
        description="Time the block allocator on 256 sequences: reserve + release, and with hashing, publishing and matching.",
    )
    _json_flag(parser)
    parser.set_defaults(func=_run_allocator)


def _run_allocator(args: argparse.Namespace) -> int:
    from octavo.bench import allocator
    from octavo.bench.record import surroundings

    record = surroundings() | {"benchmark": "allocator"} | dict(allocator.run())
    if args.json:
        return _print_json(record)
    return _print_table(
        [f"{record['us_per_block']:.3f} us a block", f"{record['us_per_block_hashed']:.3f} us with hash, publish and match"], {}
    )


def _memory(kinds: Any) -> None:
    parser = kinds.add_parser(
        "memory",
        help="fragmentation, use and fairness of the KV cache, simulated without a model",
        usage="octavo bench memory [--mix NAME ...] [--block-size N ...] [--requests N] [--plot FILE.svg] [--json]",
        description="Run core's allocator and scheduler on realistic lengths of requests, without a model.",
    )
    parser.add_argument(
        "--mix", action="append", choices=["chat", "documents", "mixed"], help="Default is documents (repeatable)."
    )
    parser.add_argument(
        "--block-size",
        action="append",
        type=_count,
        metavar="N",
        help="Tokens per block; default is 16, 64 and 128 (repeatable).",
    )
    parser.add_argument("--requests", type=_count, default=20_000, metavar="N", help="Requests of each run. [default: 20000]")
    parser.add_argument(
        "--pool-tokens", type=_count, default=524_288, metavar="N", help="Size of the KV cache. [default: 524288]"
    )
    parser.add_argument("--host-tokens", type=int, default=0, metavar="N", help="Size of the swap space. [default: 0]")
    parser.add_argument("--max-num-seqs", type=_count, default=512, metavar="N", help="Sequences in one step. [default: 512]")
    parser.add_argument("--plot", metavar="FILE.svg", help="Also draw the runs (needs octavo[bench]).")
    _json_flag(parser)
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
        for mix in args.mix or ["documents"]
        for size in args.block_size or [16, 64, 128]
    ]
    if args.plot:
        memory.plot(runs, args.plot)
    if args.json:
        return _print_json(surroundings() | {"benchmark": "memory", "runs": runs})
    head = f"{'mix':<12}{'block':>6}{'fragmentation':>15}{'at most':>9}{'use':>8}{'preempted':>11}{'swapped':>9}{'fairness':>10}"
    lines = [
        f"{r['mix']:<12}{r['block_size']:>6}{100 * r['fragmentation']['mean']:>14.2f}%{100 * r['fragmentation']['max']:>8.2f}%"
        f"{100 * r['usage']['mean']:>7.1f}%{r['preemptions']:>11}{r['swapped_out']:>9}{r['fairness']:>10.3f}"
        for r in runs
    ]
    return _print_table([head, *lines], {})


def _kernel(kinds: Any) -> None:
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
    parser.add_argument("--block-size", type=_count, metavar="N", help="Tokens per block; default is what each backend prefers.")
    parser.add_argument("--enable", action="append", default=[], metavar="DISTRIBUTION", help="Plugin to enable (repeatable).")
    parser.add_argument("--plot", type=Path, metavar="FILE.svg", help="Also draw the roofline (needs octavo[bench]).")
    _json_flag(parser)
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
    return _print_json(record) if args.json else 0


def _perplexity(kinds: Any) -> None:
    parser = kinds.add_parser(
        "perplexity",
        help="how well a model predicts a text: what a weight format or a KV dtype costs",
        usage="octavo bench perplexity [MODEL] --text FILE [--window N] [--limit N] [--json] [options]",
        description="Perplexity of a text through the engine, in windows that do not overlap.",
    )
    add_model(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="The text, UTF-8.")
    parser.add_argument("--window", type=_count, default=1024, metavar="N", help="Tokens of context. [default: 1024]")
    parser.add_argument("--limit", type=_count, metavar="N", help="Windows at most; default is the whole text.")
    _json_flag(parser)
    add_flags(parser, EngineConfig)
    parser.set_defaults(func=_run_perplexity)


def _run_perplexity(args: argparse.Namespace) -> int:
    config = read(EngineConfig, args)
    try:
        text = Path(args.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {args.text}: cannot be read as UTF-8 text: {error}") from error
    from octavo.bench.perplexity import measure

    with Stages() as stages:
        record = measure(config, text, window=args.window, limit=args.limit, tell=stages.tell)
    if args.json:
        return _print_json(record)
    return _print_table([f"perplexity {record['perplexity']:.4f} over {record['tokens']} tokens, {record['wall_s']:.1f} s"], {})


def _json_flag(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--json", action="store_true", help="Print the whole record as JSON.")


def _print_json(record: dict[str, Any]) -> int:
    print(json.dumps(record, indent=2))
    return 0


def _print_table(lines: list[str], latencies: dict[str, Any]) -> int:
    from octavo.bench.latency import table

    print("\n".join([*lines, *table(latencies)]).rstrip())
    return 0


def _count(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be an integer of at least 1")
    return int(text)


def _rate(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not value > 0:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be a number greater than 0, or inf")
    return value


def _share(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = -1.0
    if not 0 <= value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} is not allowed; it must be a number of at least 0 and less than 1")
    return value
