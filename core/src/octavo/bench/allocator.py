"""Micro-benchmark of block bookkeeping: microseconds of Python a block costs over its whole life.

Owns the workload and what is counted. 256 sequences with prompts of 100 to 1,024 tokens are
prefilled under a token budget and decode 64 to 256 tokens each, all rows in one call per step, as
the scheduler calls an allocator. Touches no tensor and no device.

    us_per_block          prefix cache off: admit, reserve, drain, commit and release, over all blocks taken
    us_per_block_hashed   prefix cache on: the same with every full block hashed and published; and then every
                          prompt admitted again, which hashes its blocks again, matches and verifies them

Telling the allocator of sampled tokens (extend) and the second release are in the split and not
in the totals: the first is paid by the token, the second would count releases twice.

The calls of a repetition are always the same, so each call counts with its best time over the
repetitions, and a stall caused by other load on the machine, which only ever adds time, is not
taken for the allocator's. The medians of whole repetitions stand beside them.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable
from typing import Any

import numpy as np

from octavo.cache.allocator import BlockAllocator
from octavo.interfaces import Allocator, AllocatorParts, KVGroup, KVSpec

BAR = 1.0
"""Microseconds a block may cost without the prefix cache."""
BAR_HASHED = 4.0
"""Microseconds a block may cost with it."""

UNCOUNTED = ("extend", "release again")
BUDGET = 8192  # tokens of a prefill step
KNOWN_EVERY = 8  # sampled tokens are told to the allocator in bunches

Make = Callable[[AllocatorParts], Allocator]


def core_allocator(parts: AllocatorParts) -> Allocator:
    """Core's own, with default options."""
    return BlockAllocator(None, parts)


def run(
    *, sequences: int = 256, block_size: int = 16, repetitions: int = 9, seed: int = 0, make: Make = core_allocator
) -> dict[str, Any]:
    """Measure an allocator. Returns us_per_block and us_per_block_hashed, their medians, their split by
    call in microseconds a block, the bars and the workload's numbers."""
    work = Workload(sequences, block_size, seed)
    found: dict[str, Any] = {}
    for name, prefix_caching in (("us_per_block", False), ("us_per_block_hashed", True)):
        lives = [work.life(make, prefix_caching=prefix_caching) for _ in range(repetitions)]
        labels, best = lives[0].labels, np.min([life.seconds for life in lives], axis=0)
        split = dict.fromkeys(labels, 0.0)
        for label, seconds in zip(labels, best.tolist(), strict=True):
            split[label] += seconds / work.blocks * 1e6
        found[name] = round(sum(value for label, value in split.items() if label not in UNCOUNTED), 3)
        found[f"median_{name}"] = round(statistics.median(life.counted() for life in lives) / work.blocks * 1e6, 3)
        found[f"split_{name}"] = {label: round(value, 3) for label, value in split.items()}
    return found | {
        "bars": {"us_per_block": BAR, "us_per_block_hashed": BAR_HASHED},
        "sequences": sequences,
        "block_size": block_size,
        "blocks": work.blocks,
        "repetitions": repetitions,
    }


class Workload:
    """The sequences, the same for every repetition."""

    def __init__(self, sequences: int, block_size: int, seed: int) -> None:
        random = np.random.default_rng(seed)
        lengths = random.integers(100, 1025, sequences)
        self.prompts = [random.integers(0, 50_000, n).astype(np.int32) for n in lengths]
        self.decodes = random.integers(64, 257, sequences)
        self.block_size = block_size
        self.longest = int((lengths + self.decodes).max())
        self.blocks = int((-(-(lengths + self.decodes) // block_size)).sum())

    def life(self, make: Make, *, prefix_caching: bool) -> _Watch:
        """One whole run, every call timed."""
        spec = KVSpec("full", 8, 128, 128, "bfloat16")
        group = KVGroup(0, spec, tuple(range(32)), self.block_size, 4096 * self.block_size)
        parts = AllocatorParts((group,), self.blocks, len(self.prompts), self.longest, prefix_caching)
        watch = _Watch(make(parts))
        rows = np.arange(len(self.prompts), dtype=np.int32)
        lengths = np.array([len(p) for p in self.prompts], np.int64)
        self._prefill(watch, lengths)
        self._decode(watch, rows, lengths)
        if prefix_caching:
            for row, prompt in enumerate(self.prompts):
                watch.call("admit", row, prompt, "tenant", label="admit again")
            for ended in rows.reshape(-1, 1):
                watch.call("release", ended, label="release again")
        return watch

    def _prefill(self, watch: _Watch, lengths: np.ndarray) -> None:
        row = 0
        while row < len(lengths):
            end = row + 1
            while end < len(lengths) and int(lengths[row : end + 1].sum()) <= BUDGET:
                end += 1
            for one in range(row, end):
                watch.call("admit", one, self.prompts[one], "tenant")
            rows = np.arange(row, end, dtype=np.int32)
            watch.step(rows, np.zeros(end - row, np.int64), lengths[row:end])
            row = end

    def _decode(self, watch: _Watch, rows: np.ndarray, lengths: np.ndarray) -> None:
        for step in range(int(self.decodes.max())):
            rows = rows[self.decodes[rows] > step]
            start = lengths[rows] + step
            if step % KNOWN_EVERY == 0:
                for row in rows.tolist():
                    watch.call("extend", row, np.arange(step, min(step + KNOWN_EVERY, self.decodes[row]), dtype=np.int32))
            watch.step(rows, start, start + 1)
            for ended in rows[self.decodes[rows] == step + 1].reshape(-1, 1):
                watch.call("release", ended)


class _Watch:
    """An allocator with a stop-watch on every call."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.labels: list[str] = []
        self.seconds: list[float] = []

    def call(self, name: str, *arguments: Any, label: str = "") -> Any:
        method = getattr(self.allocator, name)
        began = time.perf_counter()
        answer = method(*arguments)
        self.seconds.append(time.perf_counter() - began)
        self.labels.append(label or name)
        return answer

    def counted(self) -> float:
        """Seconds of all calls that belong to the totals."""
        return sum(spent for label, spent in zip(self.labels, self.seconds, strict=True) if label not in UNCOUNTED)

    def step(self, rows: np.ndarray, start: np.ndarray, upto: np.ndarray) -> None:
        if not self.call("reserve", rows, start, upto):
            raise RuntimeError("the benchmark's pool holds all of its sequences, and reserve said that it does not")
        self.call("drain")
        self.call("commit", rows, upto)
