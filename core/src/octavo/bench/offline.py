"""Throughput of the engine in this process, on a fixed workload; optionally beside transformers.

Owns how a run is timed: every request is queued at once, the clock stops with the last token,
end-of-sequence is ignored, sampling is at temperature 1, text is decoded where the model has a
tokenizer, and cached prefixes are forgotten between runs. Repeats of both sides are interleaved,
so that a busy moment of the machine does not fall on one of them; ratios are of medians.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import TYPE_CHECKING, Any

from octavo.bench.latency import Timeline, report
from octavo.bench.record import surroundings
from octavo.bench.workloads import SHAPES, Ask, Workload, write_shape
from octavo.config import EngineConfig
from octavo.errors import ConfigError, OctavoError
from octavo.request import Request, SamplingParams, check_request

if TYPE_CHECKING:
    from octavo.bench.baseline import Transformers
    from octavo.text.output import OutputProcessor

Tell = Callable[..., None]
"""tell(stage, done=0, total=0)"""


@dataclass(frozen=True, slots=True)
class Run:
    """One timed pass over a workload."""

    wall: float
    prompt_tokens: int
    output_tokens: int
    timelines: tuple[Timeline, ...] = ()

    @property
    def rates(self) -> dict[str, float]:
        """Tokens per second of wall time, prefill and decode together."""
        return {"input_tok_s": self.prompt_tokens / self.wall, "output_tok_s": self.output_tokens / self.wall}


class Ours:
    """The engine under test, built once."""

    def __init__(self, config: EngineConfig, tell: Tell) -> None:
        import torch

        from octavo.engine.build import build_engine
        from octavo.plugins import discover

        began = time.perf_counter()
        self.engine = build_engine(config, discover(config.plugins), progress=tell)
        self.build_seconds = time.perf_counter() - began
        self.threads = torch.get_num_threads()
        self._processor = _processor(config)
        self._count = 0

    @property
    def detokenises(self) -> bool:
        return self._processor is not None

    def run(self, asks: Sequence[Ask]) -> Run:
        """Queue everything, step until all are done. Raises OctavoError if a request fails."""
        import torch

        torch.set_num_threads(self.threads)  # the baseline may have set its own
        self.engine.allocator.reset()
        requests = [self._request(ask) for ask in asks]
        timelines: dict[str, Timeline] = {}
        began = time.perf_counter()
        for request in requests:
            timelines[request.id] = Timeline(began)
            self.engine.add(request)
            if self._processor is not None:
                self._processor.add(request, None, final_only=True)
        while self.engine.busy:
            events = self.engine.step().events
            if self._processor is not None:
                self._processor.process(events)
            now = time.perf_counter()
            for event in events:
                if event.error:
                    raise OctavoError(f"request {event.request_id} of the workload failed: {event.error}")
                if event.tokens:
                    timelines[event.request_id].arrivals.append(now)
                    timelines[event.request_id].tokens += len(event.tokens)
        wall = time.perf_counter() - began
        if self._processor is not None:
            for request in requests:
                self._processor.remove(request.id)
        wanted, got = sum(a.output for a in asks), sum(t.tokens for t in timelines.values())
        if got != wanted:
            raise OctavoError(f"the workload asks for {wanted} output tokens and {got} came: the figures would mean nothing")
        return Run(wall, sum(len(a.prompt) for a in asks), got, tuple(timelines.values()))

    def queue(self, asks: Sequence[Ask]) -> None:
        """Queue requests for a caller that steps the engine itself."""
        self.engine.allocator.reset()
        for ask in asks:
            self.engine.add(self._request(ask))

    def _request(self, ask: Ask) -> Request:
        self._count += 1
        params = SamplingParams(temperature=1.0, ignore_eos=True, max_tokens=ask.output)
        checked = check_request(ask.prompt, params, self.engine.info)
        return Request(id=f"bench-{self._count}", prompt=ask.prompt, params=checked, eos_token_ids=self.engine.info.eos_token_ids)


def _processor(config: EngineConfig) -> OutputProcessor | None:
    if config.model in SHAPES or (Path(config.model).is_dir() and not any(Path(config.model).glob("tokenizer*"))):
        return None
    from octavo.model.source import resolve_source
    from octavo.text.output import OutputProcessor
    from octavo.text.tokenizer import Tokenizer

    return OutputProcessor(Tokenizer.from_source(resolve_source(config.model, config.revision), config))


def _warm_up(asks: Sequence[Ask], device: str) -> list[Ask]:
    """What runs before the clock: on a GPU the whole workload, since each new batch size captures a graph and
    each new shape compiles a kernel; elsewhere a few short requests."""
    return list(asks) if device == "cuda" else [Ask(ask.prompt[:64], min(ask.output, 4)) for ask in asks[:16]]


def measure(
    config: EngineConfig, workload: Workload, *, repeats: int, against: str | None = None, tell: Tell = lambda *_: None
) -> dict[str, Any]:
    """Run `workload` `repeats` times, interleaved with the baseline if there is one; the whole record.

    Raises ConfigError for a workload that the model's context cannot hold.
    """
    record = surroundings()
    with shape_folder(config) as resolved:
        ours = Ours(resolved, tell)
        vocab = ours.engine.info.vocab_size
        asks = workload.asks(vocab)
        longest = max(len(a.prompt) + a.output for a in asks)
        if longest > ours.engine.info.max_model_len:
            raise ConfigError(
                f"--workload: {workload.name} needs a context of {longest} tokens, and the model has {ours.engine.info.max_model_len}"
            )
        theirs = _baseline(against, resolved, asks, tell)
        tell("warming up")
        cold = ours.run(_warm_up(asks, ours.engine.explain["device"]["type"]))
        mine: list[Run] = []
        other: list[Run] = []
        for i in range(repeats):
            tell(f"run {i + 1} of {repeats}")
            mine.append(ours.run(asks))
            if theirs is not None:
                tell(f"run {i + 1} of {repeats}: transformers")
                other.append(theirs.run())
        info = ours.engine.info
        record |= {
            "benchmark": "offline",
            "model": config.model,
            "workload": {"name": workload.name, "summary": workload.summary, "requests": len(asks), "vocab": workload.bound(vocab)},
            "settings": config.model_dump(exclude_defaults=True) | {"model": config.model},
            "engine": {"dtype": info.dtype, "threads": ours.threads, "block_size": info.block_size, "kv_cache_tokens": info.kv_cache_tokens,
                       "detokenised": ours.detokenises, "build_seconds": round(ours.build_seconds, 3), "warm_up_seconds": round(cold.wall, 3)},
            "ours": _summary(mine) | {"latency": report([t for run in mine for t in run.timelines])},
        }  # fmt: skip
        ours.engine.close()
    if theirs is not None:
        key = "input_tok_s" if theirs.forward else "output_tok_s"
        record["baseline"] = theirs.settings | _summary(other)
        record["ratio"] = round(record["ours"][key] / record["baseline"][key], 3)
        record["ratio_of"] = f"{key}: octavo on the whole workload over {theirs.what}"
    return record


def shape_folder(config: EngineConfig) -> AbstractContextManager[EngineConfig]:
    """The configuration with a shape's name replaced by a folder that holds its config.json."""
    if config.model not in SHAPES or Path(config.model).exists():
        return nullcontext(config)
    if config.load_format != "dummy":
        raise ConfigError(f"MODEL: {config.model!r} is a shape without weights; add --load-format dummy for random ones")
    return _ShapeFolder(config)


class _ShapeFolder(AbstractContextManager[EngineConfig]):
    def __init__(self, config: EngineConfig) -> None:
        self._config, self._folder = config, TemporaryDirectory(prefix="octavo-shape-")

    def __enter__(self) -> EngineConfig:
        path = write_shape(self._config.model, Path(self._folder.name) / self._config.model)
        return self._config.model_copy(update={"model": str(path)})

    def __exit__(self, *exc: object) -> None:
        self._folder.cleanup()


def _baseline(name: str | None, config: EngineConfig, asks: Sequence[Ask], tell: Tell) -> Transformers | None:
    if name is None:
        return None
    from octavo.bench.baseline import Transformers

    return Transformers(config, asks, tell)


def _summary(runs: Sequence[Run]) -> dict[str, Any]:
    """Medians over the repeats, and every repeat's wall time."""
    rates = [run.rates for run in runs]
    middle = {key: round(statistics.median(r[key] for r in rates), 3) for key in rates[0]}
    return middle | {
        "wall_s": round(statistics.median(run.wall for run in runs), 4),
        "walls_s": [round(run.wall, 4) for run in runs],
        "prompt_tokens": runs[0].prompt_tokens,
        "output_tokens": runs[0].output_tokens,
    }
