"""`octavo bench ...`: flags in, one of octavo.bench's measurements run, its record printed.

Owns no measurement and no definition. stdout gets the record (`--json`) or a short table; progress
goes to stderr.
"""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from octavo.bench.workloads import SHAPES, WORKLOADS, workload
from octavo.cli import bench_parts
from octavo.cli.bench_output import count, json_flag, print_json, print_table, rate, share
from octavo.cli.console import Stages
from octavo.cli.flags import add_flags, add_model, read
from octavo.config import EngineConfig
from octavo.errors import ConfigError
from octavo.wording import unreadable


def add_parser(subparsers: Any) -> None:
    parser = subparsers.add_parser(
        "bench",
        usage="octavo bench {offline,serve,startup,step,shape,allocator,memory,kernel,perplexity} ...",
        description="Measure. Every benchmark takes --json, which prints each figure with settings, versions and commit.",
    )
    kinds = parser.add_subparsers(metavar="BENCHMARK", required=True, title="benchmarks", dest="benchmark", prog="octavo bench")
    _offline(kinds)
    _serve(kinds)
    _startup(kinds)
    bench_parts.step(kinds)
    bench_parts.shape(kinds)
    bench_parts.allocator(kinds)
    bench_parts.memory(kinds)
    bench_parts.kernel(kinds)
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
    parser.add_argument("--repeats", type=count, default=3, metavar="N", help="Timed passes; medians are reported. [default: 3]")
    parser.add_argument(
        "--against", choices=["transformers"], help="Also run transformers on the same weights, in turn with ours, at its best."
    )
    json_flag(parser)
    add_flags(parser, EngineConfig)
    parser.set_defaults(func=_run_offline)


def _run_offline(args: argparse.Namespace) -> int:
    config, chosen = read(EngineConfig, args), workload(args.workload)
    from octavo.bench.offline import measure

    with Stages() as stages:
        record = measure(config, chosen, repeats=args.repeats, against=args.against, tell=stages.tell)
    if args.json:
        return print_json(record)
    ours, lines = record["ours"], [f"{record['model']}, {chosen.name}: {chosen.summary}", ""]
    lines.append(f"{'':<16}{'output tok/s':>14}{'input tok/s':>14}{'wall s':>10}")
    lines.append(f"{'octavo':<16}{ours['output_tok_s']:>14.1f}{ours['input_tok_s']:>14.1f}{ours['wall_s']:>10.2f}")
    if theirs := record.get("baseline"):
        lines.append(
            f"{'transformers':<16}{theirs['output_tok_s']:>14.1f}{theirs['input_tok_s']:>14.1f}{theirs['wall_s']:>10.2f}"
        )
        lines += ["", f"transformers at its best: {theirs['call']}, {theirs['dtype']}, {theirs['threads']} threads"]
        lines.append(f"ratio {record['ratio']:.2f} ({record['ratio_of']})")
    return print_table([*lines, ""], ours["latency"])


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
    parser.add_argument("--num-prompts", type=count, metavar="N", help="Requests. [default: 100, or the workload's]")
    parser.add_argument("--random-input-len", type=count, default=256, metavar="N", help="Prompt tokens. [default: 256]")
    parser.add_argument("--random-output-len", type=count, default=64, metavar="N", help="Output tokens. [default: 64]")
    parser.add_argument("--random-range-ratio", type=share, default=0.0, metavar="X",
                        help="Lengths vary by this share around the two. [default: 0]")  # fmt: skip
    parser.add_argument("--vocab-size", type=count, default=40_000, metavar="N",
                        help="Random token ids are below this; at most the model's vocabulary. [default: 40000]")  # fmt: skip
    parser.add_argument("--request-rate", type=rate, default=float("inf"), metavar="R",
                        help="Requests a second, with exponential gaps; inf sends all at once. [default: inf]")  # fmt: skip
    parser.add_argument("--max-concurrency", type=count, default=256, metavar="N", help="Requests at a time. [default: 256]")
    parser.add_argument("--timeout", type=rate, default=600.0, metavar="S", help="Longest silence of one request. [default: 600]")
    parser.add_argument("--api-key", metavar="TEXT", help="Key to send; default is OPENAI_API_KEY.")
    parser.add_argument("--temperature", type=float, default=1.0, metavar="X", help="[default: 1]")
    parser.add_argument("--ignore-eos", action=argparse.BooleanOptionalAction, default=True,
                        help="Ask for full lengths; off for servers that do not know the field. [default: on]")  # fmt: skip
    parser.add_argument("--seed", type=int, default=0, metavar="N", help="Of lengths, ids and gaps. [default: 0]")
    parser.add_argument("--goodput", action="append", default=[], metavar="NAME:MS",
                        help="Limit that a good request keeps: ttft:500, tpot:50 or e2el:5000 (repeatable).")  # fmt: skip
    json_flag(parser)
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
        return print_json(record)
    lines = [f"{load.model} at {load.base_url}{load.endpoint}", ""]
    lines.append(f"requests        {record['completed']} done, {record['errors']['count']} failed, {record['wall_s']:.2f} s")
    lines += [f"                {count} x {kind}" for kind, count in record["errors"]["kinds"].items()]
    lines.append(f"throughput      {record['requests_per_s']:.2f} requests/s")
    lines.append(f"                {record['input_tok_s']:.1f} input tok/s, {record['output_tok_s']:.1f} output tok/s")
    if good := record["goodput"]:
        lines.append(f"goodput         {good['requests_per_s']:.2f} requests/s ({good['requests']} requests kept every limit)")
    print_table([*lines, ""], record["latency"])
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
    parser.add_argument("--repeats", type=count, default=1, metavar="N", help="Starts; medians are reported. [default: 1]")
    json_flag(parser)
    parser.set_defaults(func=_run_startup)


def _run_startup(args: argparse.Namespace) -> int:
    from octavo.bench import startup

    with Stages() as stages:
        record = startup.measure(args.model, args.flags, repeats=args.repeats, tell=stages.tell)
    if args.json:
        return print_json(record)
    return print_table(
        [
            f"ready          {record['ready_s']:.2f} s",
            f"first token    {record['first_token_s']:.2f} s",
            f"memory         {record['resident_mib']:.0f} MiB resident, {record['proportional_mib']:.0f} MiB with shared pages counted once",
        ],
        {},
    )


def _perplexity(kinds: Any) -> None:
    parser = kinds.add_parser(
        "perplexity",
        help="how well a model predicts a text: what a weight format or a KV dtype costs",
        usage="octavo bench perplexity [MODEL] --text FILE [--window N] [--limit N] [--json] [options]",
        description="Perplexity of a text through the engine, in windows that do not overlap.",
    )
    add_model(parser)
    parser.add_argument("--text", required=True, metavar="FILE", help="The text, UTF-8.")
    parser.add_argument("--window", type=count, default=1024, metavar="N", help="Tokens of context. [default: 1024]")
    parser.add_argument("--limit", type=count, metavar="N", help="Windows at most; default is the whole text.")
    json_flag(parser)
    add_flags(parser, EngineConfig)
    parser.set_defaults(func=_run_perplexity)


def _run_perplexity(args: argparse.Namespace) -> int:
    config = read(EngineConfig, args)
    try:
        text = Path(args.text).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--text {args.text}: {unreadable(error)}") from error
    from octavo.bench.perplexity import measure

    with Stages() as stages:
        record = measure(config, text, window=args.window, limit=args.limit, tell=stages.tell)
    if args.json:
        return print_json(record)
    return print_table([f"perplexity {record['perplexity']:.4f} over {record['tokens']} tokens, {record['wall_s']:.1f} s"], {})
