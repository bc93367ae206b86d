"""One engine step under the glass: what it costs, and what the device does meanwhile.

Owns the situation (so many sequences of one context, all decoding; or prompts of that length being
computed, as many as a step takes) and the reading of torch's profiler. The step's wall time is taken without the profiler,
which slows the host; the device's busy and idle time and the list of operations come from a profiled stretch of steps. The
profiler takes time on the device too, before each kernel of a graph; so what lies between the graphs of steps is measured
once more without it, by events.
"""

from __future__ import annotations

import random
import statistics
import time
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

from octavo.bench.offline import Ours, shape_folder
from octavo.bench.record import surroundings
from octavo.bench.workloads import FIRST_TOKEN, Ask
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError

if TYPE_CHECKING:
    from octavo.engine.engine import Engine

Tell = Callable[..., None]
"""tell(stage, done=0, total=0)"""

TOP = 25
"""Operations that the record lists."""

GAP = 5.0
"""Microseconds: kernels of one graph follow each other within two; a longer gap is the device waiting for the host."""


def measure(
    config: EngineConfig,
    *,
    batch: int,
    context: int,
    steps: int,
    profile: bool,
    prefill: bool = False,
    tell: Tell = lambda *_: None,
) -> dict[str, Any]:
    """The record of `steps` decode steps of `batch` sequences that each hold about `context` tokens; with
    `prefill` of steps that compute prompts of `context` tokens (`batch` is then not used).

    Raises ConfigError where the model's context, --max-num-seqs or the KV cache cannot hold them.
    """
    record = surroundings()
    with shape_folder(config) as resolved:
        ours = Ours(resolved, tell)
        engine = ours.engine
        budget = int(engine.explain["values"]["max_num_batched_tokens"]["value"])
        if prefill:
            batch, output = 2 + 2 * (steps + 2) * budget // context, 1
        else:
            # The first sequence decodes while the prompts of the others are computed.
            output = 4 * steps + 16 + 2 * batch * context // budget
            _check(engine, batch, context + output)
        draw = random.Random(0)
        asks = [Ask([draw.randrange(FIRST_TOKEN, engine.info.vocab_size) for _ in range(context)], output) for _ in range(batch)]
        tell("warming up")
        ours.run([Ask(ask.prompt, 4) for ask in asks])
        tell("filling the cache")
        ours.queue(asks)
        engine.step()
        while not prefill and (engine.stats().waiting or _prefilling(engine)):
            engine.step()
        running = engine.stats().running
        tell("timing")
        walls = _timed(engine, steps)
        record |= {
            "benchmark": "step",
            "model": config.model,
            "phase": "prefill" if prefill else "decode",
            "batch": batch,
            "context": context,
            "steps": steps,
            "settings": config.model_dump(exclude_defaults=True) | {"model": config.model},
            "step_us": round(statistics.median(walls) * 1e6, 1),
            "step_us_mean": round(statistics.fmean(walls) * 1e6, 1),
            "tokens_per_s": round((budget if prefill else batch) / statistics.fmean(walls), 1),
        }
        if profile:
            tell("timing graphs")
            record |= _between_graphs(engine, steps)
            tell("profiling")
            record["profile"] = _profiled(engine, steps)
        if engine.stats().step_tokens < budget if prefill else engine.stats().running < running:
            raise OctavoError("sequences ended while steps were measured: the figures would mean nothing")
        engine.close()
    return record


def _check(engine: Engine, batch: int, tokens: int) -> None:
    info = engine.info
    if batch > info.max_num_seqs:
        raise ConfigError(f"--batch {batch}: the engine runs {info.max_num_seqs} sequences at most; raise --max-num-seqs")
    if tokens > info.max_model_len:
        raise ConfigError(
            f"--context: with the tokens that are measured it needs {tokens}, and the model's context is {info.max_model_len}"
        )
    if batch * tokens > info.kv_cache_tokens:
        raise ConfigError(f"--batch {batch} of {tokens} tokens need more than the KV cache's {info.kv_cache_tokens:,} tokens")


def _prefilling(engine: Engine) -> bool:
    """Whether the last step computed more tokens than it has sequences."""
    stats = engine.stats()
    return stats.step_tokens != stats.running


def _timed(engine: Engine, steps: int) -> list[float]:
    walls = []
    engine.step()
    for _ in range(steps):
        began = time.perf_counter()
        engine.step()
        walls.append(time.perf_counter() - began)
    return walls


def _between_graphs(engine: Engine, steps: int) -> dict[str, float]:
    """Median microseconds from the end of a step's graph to the begin of the next one's, and their share of both; nothing where
    steps are no graphs. Results and inputs are copied in that time, and the host may be late."""
    import torch

    if engine.explain["device"]["type"] != "cuda":
        return {}
    with _marked_replays() as marks:
        for _ in range(steps):
            engine.step()
        torch.cuda.synchronize()
    inside = [1e3 * begin.elapsed_time(end) for begin, end in marks]
    between = [1e3 * marks[i][1].elapsed_time(marks[i + 1][0]) for i in range(len(marks) - 1)]
    if len(marks) < steps:
        return {}
    return {
        "between_graphs_us": round(statistics.median(between), 1),
        "between_graphs_share": round(sum(between) / (sum(between) + sum(inside)), 4),
    }


@contextmanager
def _marked_replays() -> Iterator[list[tuple[Any, Any]]]:
    """Events of the device before and after each replay of a graph."""
    import torch

    marks: list[tuple[Any, Any]] = []
    replay = torch.cuda.CUDAGraph.replay

    def marked(graph: Any) -> None:
        begin, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))  # type: ignore[no-untyped-call]
        begin.record()
        replay(graph)
        end.record()
        marks.append((begin, end))

    torch.cuda.CUDAGraph.replay = marked  # type: ignore[assignment, method-assign]
    try:
        yield marks
    finally:
        torch.cuda.CUDAGraph.replay = replay  # type: ignore[method-assign]


def _profiled(engine: Engine, steps: int) -> dict[str, Any]:
    """Busy and idle time of the device, and operations by their own time; on a CPU the operators of torch."""
    import torch
    from torch.profiler import ProfilerActivity, profile

    cuda = engine.explain["device"]["type"] == "cuda"
    kinds = [ProfilerActivity.CUDA] if cuda else [ProfilerActivity.CPU]
    with profile(activities=kinds) as profiler:
        for _ in range(steps):
            engine.step()
        if cuda:
            torch.cuda.synchronize()
    if not cuda:
        own = [(str(e.key), float(e.self_cpu_time_total), int(e.count)) for e in profiler.key_averages()]
        return {"operations": _largest(own, steps)}
    device = torch.autograd.DeviceType.CUDA  # type: ignore[attr-defined]
    ran = [e for e in profiler.events() or () if e.device_type == device]
    if not ran:
        raise OctavoError("torch's profiler saw no kernel; another profiler may hold the device")
    times: dict[str, float] = defaultdict(float)
    counts: Counter[str] = Counter()
    for event in ran:
        times[event.name] += event.time_range.elapsed_us()
        counts[event.name] += 1
    span, busy, waiting = busy_time([(e.time_range.start, e.time_range.end) for e in ran])
    return {
        "span_us": round(span / steps, 1),
        "busy_us": round(busy / steps, 1),
        "idle_share": round(1 - busy / span, 4),
        "waiting_share": round(waiting / span, 4),
        "kernels": round(len(ran) / steps, 1),
        "operations": _largest([(name, times[name], counts[name]) for name in times], steps),
    }


def busy_time(intervals: Iterable[tuple[float, float]]) -> tuple[float, float, float]:
    """(from the first start to the last end, time within it that some interval covers, time in gaps over GAP)."""
    ordered = sorted(intervals)
    first, reached = ordered[0][0], ordered[0][0]
    busy = waiting = 0.0
    for start, end in ordered:
        if start - reached > GAP:
            waiting += start - reached
        if end > reached:
            busy += end - max(start, reached)
            reached = end
    return reached - first, busy, waiting


def _largest(rows: Sequence[tuple[str, float, int]], steps: int) -> list[dict[str, Any]]:
    ordered = sorted(rows, key=lambda row: -row[1])[:TOP]
    return [{"name": name, "us": round(us / steps, 2), "calls": round(count / steps, 2)} for name, us, count in ordered]


def table(record: dict[str, Any]) -> list[str]:
    """The record as lines for a terminal."""
    lines = [
        f"{record['model']}, {record['phase']}: {record['batch']} sequences of about {record['context']} tokens",
        "",
        f"step       {record['step_us']:.0f} us (median; mean {record['step_us_mean']:.0f}), {record['tokens_per_s']:,.0f} tokens/s",
    ]
    if "between_graphs_us" in record:
        share = record["between_graphs_share"]
        lines.append(
            f"graphs     {record['between_graphs_us']:.0f} us from one to the next, {share:.1%} of the time (no profiler)"
        )
    if found := record.get("profile"):
        if "busy_us" in found:
            lines.append(
                f"device     {found['busy_us']:.0f} us busy, idle {found['idle_share']:.1%} of the time (waiting for the host {found['waiting_share']:.1%}), {found['kernels']:.0f} kernels a step"
            )
        lines += ["", f"{'us a step':>10}{'calls':>8}  operation"]
        lines += [f"{row['us']:>10.1f}{row['calls']:>8.1f}  {row['name'][:100]}" for row in found["operations"]]
    return lines
