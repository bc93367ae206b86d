"""Simulation of the KV cache under load: core's real allocator and scheduler, and no model.

Owns the workloads and what is counted. Requests of realistic lengths arrive faster than they can be
served; every step computes nothing and answers with one token a row, so that a million requests take
minutes. Touches no tensor.

    fragmentation   1 - tokens held / tokens that the used blocks could hold: what the ends of sequences waste.
                    There is no other kind: any free block serves any sequence. A step's blocks are counted when it is
                    submitted, after what was reserved and not used has come back
    holds           tokens that a sequence in the pool holds on average: half a block beside so many is the waste
    usage           used blocks / all blocks
    preemptions     sequences that gave up their blocks (swapped: those that went to host memory)
    fairness        tokens per weight of each tenant's finished requests, smallest / largest. What was computed twice
                    after a preemption counts once

Means are over steps, of the time during which requests wait: filling up and draining are not counted.
"""

from __future__ import annotations

import itertools
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from octavo.cache.allocator import BlockAllocator
from octavo.cache.tier import Parcel
from octavo.errors import ConfigError
from octavo.interfaces import AllocatorParts, KVGroup, KVSpec, Limits, SchedulerParts
from octavo.request import Batch, Request, Result, SamplingParams
from octavo.scheduling.scheduler import ContinuousScheduler, SchedulerOptions

TENANTS = {"one": 1.0, "another": 1.0, "double": 2.0}
"""Weights."""

BACKLOG = 96
"""Requests of every tenant that wait for their first step, so that the pool is always asked for more than it has."""

LONGEST = 65_536 + 1024
RAMP = 20
"""Steps until the pool is filled, which are not counted."""

SAMPLES = 400
"""Points of the curves that are kept for a plot."""

VOCAB = 1024


@dataclass(frozen=True, slots=True)
class Mix:
    """Lengths of requests. chats: share of chat turns, the others are documents."""

    name: str
    summary: str
    chats: float

    def draw(self, random: np.random.Generator, count: int) -> np.ndarray:
        """(prompt, output) tokens of `count` requests, int64 [count, 2]. Chat turns are log-normal, as public traces of
        assistants have them (median prompt 150, output 130, long tails); documents are prompts of 64K tokens
        among ones of 256 and 512."""
        output = np.clip(random.lognormal(np.log(130), 0.8, count), 1, 1024)
        chat = np.clip(random.lognormal(np.log(150), 1.3, count), 8, 16_384)
        document = random.choice([256, 512, 65_536], count, p=[0.49, 0.49, 0.02])
        prompt = np.where(random.random(count) < self.chats, chat, document)
        return np.stack([prompt, output], 1).astype(np.int64)


MIXES = {
    "chat": Mix("chat", "chat turns: log-normal prompts (median 150) and outputs (median 130)", 1.0),
    "documents": Mix("documents", "prompts of 64K tokens (2%), 512 (49%) and 256 (49%), outputs of median 130", 0.0),
    "mixed": Mix("mixed", "three chat turns to every document", 0.75),
}


def run(
    *,
    requests: int = 20_000,
    mix: str = "documents",
    block_size: int = 16,
    pool_tokens: int = 524_288,
    host_tokens: int = 0,
    max_num_seqs: int = 512,
    budget: int = 8192,
    seed: int = 0,
) -> dict[str, Any]:
    """One simulation; the record has every number and the curves."""
    world = _World(MIXES[mix], block_size, pool_tokens, host_tokens, max_num_seqs, budget, seed)
    began = time.perf_counter()
    world.serve(requests)
    return {
        "mix": mix,
        "requests": requests,
        "block_size": block_size,
        "blocks": world.blocks,
        "host_slots": world.host_slots,
        "max_num_seqs": max_num_seqs,
        "seconds": round(time.perf_counter() - began, 1),
        **world.figures(),
    }


class _Counting(BlockAllocator):
    """Core's allocator, which also says how many tokens each row holds."""

    def __init__(self, options: Any, parts: AllocatorParts) -> None:
        super().__init__(options, parts)
        self.held = np.zeros(parts.max_rows, np.int64)

    def commit(self, rows: np.ndarray, computed: np.ndarray) -> None:
        super().commit(rows, computed)
        self.held[rows] = computed

    def release(self, rows: np.ndarray) -> None:
        super().release(rows)
        self.held[rows] = 0

    def swap_out(self, row: int) -> Parcel | None:
        parcel = super().swap_out(row)
        if parcel is not None:
            self.held[row] = 0
        return parcel


class _World:
    """A scheduler over an allocator, requests that arrive, and steps that compute nothing."""

    def __init__(
        self, mix: Mix, block_size: int, pool_tokens: int, host_tokens: int, max_num_seqs: int, budget: int, seed: int
    ) -> None:
        self.blocks, self.host_slots = pool_tokens // block_size, host_tokens // block_size
        self._block_size = block_size
        self._random = np.random.default_rng(seed)
        self._mix = mix
        group = KVGroup(0, KVSpec("full", 1, 1, 1, "float16"), (0,), block_size, block_size * 4)
        limits = Limits(max_num_seqs, budget, LONGEST)
        self._allocator = _Counting(
            None, AllocatorParts((group,), self.blocks, max_num_seqs, LONGEST, True, budget, self.host_slots)
        )
        self._clock = 0.0
        self._scheduler = ContinuousScheduler(
            SchedulerOptions(),
            SchedulerParts(
                allocator=self._allocator,
                limits=limits,
                policy="fcfs",
                max_queued=0,
                chunked_prefill=True,
                hard_blocks=False,
                clock=lambda: self._clock,
                seeds=lambda: 0,
                salt=lambda bound: "",
                swap_pays=lambda tokens, blocks: True,
            ),
        )
        self._text = self._random.integers(0, VOCAB, LONGEST).tolist()
        self._serial = itertools.count()
        self._samples: list[tuple[float, float, float]] = []  # of saturated steps: usage, fragmentation, tokens a sequence
        self._served = dict.fromkeys(TENANTS, 0)
        self._open: dict[str, tuple[str, int]] = {}  # of live requests: tenant and tokens
        self._queued: dict[int, str] = {}  # requests that have never run, by serial: their tenants
        self._backlog = dict.fromkeys(TENANTS, 0)  # how many of those each tenant has
        self._waits: list[float] = []
        self._steps = self._requests = 0

    def serve(self, requests: int) -> None:
        """Send that many requests, and step until all have ended."""
        arrivals = {name: self._arrivals(name) for name in TENANTS}
        self._requests = requests
        while requests or self._scheduler.unfinished:
            for name in TENANTS:
                while requests and self._backlog[name] < BACKLOG:
                    self._scheduler.add(next(arrivals[name]))
                    self._backlog[name] += 1
                    requests -= 1
            self._step(saturated=requests > 0)
        self._allocator.check()
        usage = self._allocator.usage()
        assert usage.used == 0 and usage.free + usage.cached == usage.total, f"blocks were lost: {usage}"

    def _arrivals(self, tenant: str) -> Iterator[Request]:
        while True:
            for prompt, output in self._mix.draw(self._random, 1024).tolist():
                serial = next(self._serial)
                own = [serial % VOCAB, serial // VOCAB % VOCAB, serial // VOCAB**2]  # nobody shares a prefix by chance
                self._open[str(serial)] = (tenant, prompt + output)
                self._queued[serial] = tenant
                yield Request(
                    id=str(serial),
                    prompt=own + self._text[: prompt - 3],
                    params=SamplingParams(max_tokens=output, ignore_eos=True),
                    tenant=tenant,
                    weight=TENANTS[tenant],
                    domain=tenant,
                )

    def _step(self, *, saturated: bool) -> None:
        batch = self._scheduler.schedule()
        assert batch is not None, "requests wait and nothing can run"
        self._clock += 0.01 + batch.num_tokens * 20e-6  # a step of a mid-sized model on one GPU, roughly
        self._steps += 1
        for admission in batch.admissions:
            serial = sum(token * VOCAB**place for place, token in enumerate(admission.tokens[:3].tolist()))
            if (tenant := self._queued.pop(serial, None)) is not None:
                self._backlog[tenant] -= 1
        if saturated and self._steps > RAMP:
            self._sample()
        for event in self._scheduler.commit(batch, _answer(batch)):
            if event.queue_seconds:
                self._waits.append(event.queue_seconds)
            if event.finish is not None:
                tenant, tokens = self._open.pop(event.request_id)
                self._served[tenant] += tokens if saturated else 0

    def _sample(self) -> None:
        """After a step is submitted a row holds exactly the blocks of what it has computed."""
        usage, computed = self._allocator.usage(), self._allocator.held
        held, rows = int(computed.sum()), int(np.count_nonzero(computed))
        self._samples.append((usage.used / usage.total, 1 - held / (usage.used * self._block_size), held / rows))

    def figures(self) -> dict[str, Any]:
        if not self._samples:
            raise ConfigError(
                f"--requests {self._requests}: all were sent before the first {RAMP} steps were over, from which on the load is "
                "steady and counts; raise it (1000 is enough with the other defaults) or lower --max-num-seqs"
            )
        usage, waste, holds = np.array(self._samples).T
        stats = self._scheduler.stats()
        each = {name: self._served[name] / TENANTS[name] for name in TENANTS}
        keep = np.linspace(0, len(usage) - 1, min(SAMPLES, len(usage))).astype(int)
        return {
            "steps": self._steps,
            "fragmentation": {
                "mean": round(float(waste.mean()), 4),
                "p95": round(float(np.percentile(waste, 95)), 4),
                "max": round(float(waste.max()), 4),
            },
            "holds": round(float(holds.mean())),
            "usage": {"mean": round(float(usage.mean()), 4), "max": round(float(usage.max()), 4)},
            "preemptions": stats.preemptions,
            "swapped_out": stats.swapped_out,
            "swapped_in": stats.swapped_in,
            "generated_tokens": stats.generation_tokens,
            "fairness": round(min(each.values()) / max(each.values()), 4),
            "tokens_per_weight": {name: round(value) for name, value in each.items()},
            "queue_seconds_p99": round(float(np.percentile(self._waits, 99)), 2) if self._waits else 0.0,
            "curves": {"usage": usage[keep].round(4).tolist(), "fragmentation": waste[keep].round(4).tolist()},
        }


def _answer(batch: Batch) -> Result:
    """One token for each sampled row."""
    sampled = batch.sample
    return Result(
        tokens=np.full((len(sampled), 1), 9, np.int32),
        counts=sampled.astype(np.int32),
        failed=np.zeros(len(sampled), bool),
    )


def plot(records: list[dict[str, Any]], path: str) -> None:
    """Usage and fragmentation over the course of each simulation, as an SVG. Needs matplotlib (octavo[bench])."""
    try:
        import matplotlib
    except ImportError as error:
        raise ConfigError(f"--plot needs matplotlib ({error}): pip install 'octavo[bench]'") from error
    matplotlib.use("svg")
    matplotlib.rcParams["svg.hashsalt"] = "octavo"  # the same figures give the same file
    from matplotlib import pyplot

    figure, (top, bottom) = pyplot.subplots(2, 1, figsize=(8, 5), sharex=True, layout="constrained")
    for record in records:
        label = f"{record['mix']}, blocks of {record['block_size']}"
        at = np.linspace(0, 100, len(record["curves"]["usage"]))
        top.plot(at, 100 * np.array(record["curves"]["usage"]), linewidth=0.8, label=label)
        bottom.plot(at, 100 * np.array(record["curves"]["fragmentation"]), linewidth=0.8, label=label)
    top.set_ylabel("used blocks, %")
    bottom.set_ylabel("fragmentation, %")
    bottom.set_xlabel("course of the simulation, % of its steps")
    bottom.axhline(5, color="black", linewidth=0.6, linestyle="--")
    top.legend(fontsize="small", ncols=2)
    figure.savefig(path, metadata={"Date": None})
    pyplot.close(figure)
