"""Micro-benchmark of block bookkeeping: microseconds of Python a block costs over its whole life.

Owns the workload and what is counted. 256 sequences with prompts of 100 to 1,024 tokens are
prefilled under a token budget and decode 64 to 256 tokens each, all rows in one call per step, as
the scheduler calls an allocator. Touches no tensor and no device.

    us_per_block          prefix cache off: admit, reserve, commit, drain and release, over all blocks taken
    us_per_block_hashed   prefix cache on: the same with every full block hashed and published, and then
                          every prompt admitted again, which hashes it again and matches and verifies its blocks

Each is the best of several repetitions (other load on the machine only ever adds time); the
medians stand beside them.
"""

from __future__ import annotations

import json as _json
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

BUDGET = 8192  # tokens of a prefill step
KNOWN_EVERY = 8  # sampled tokens are told to the allocator in bunches

Make = Callable[[AllocatorParts], Allocator]


def core_allocator(parts: AllocatorParts) -> Allocator:
    """Core's own, with default options."""
    return BlockAllocator(None, parts)


def run(
    *, sequences: int = 256, block_size: int = 16, repetitions: int = 7, seed: int = 0, make: Make = core_allocator
) -> dict[str, Any]:
    """Measure an allocator. Returns us_per_block and us_per_block_hashed (best), their medians, the
    split of the best repetition by call in microseconds a block, and the workload's numbers."""
    work = Workload(sequences, block_size, seed)
    plain = [work.life(make, prefix_caching=False) for _ in range(repetitions)]
    hashed = [work.life(make, prefix_caching=True) for _ in range(repetitions)]
    return {
        "us_per_block": _total(_best(plain)),
        "us_per_block_hashed": _total(_best(hashed)),
        "median_us_per_block": round(statistics.median(sum(split.values()) for split in plain), 3),
        "median_us_per_block_hashed": round(statistics.median(sum(split.values()) for split in hashed), 3),
        "bars": {"us_per_block": BAR, "us_per_block_hashed": BAR_HASHED},
        "split": {name: round(value, 3) for name, value in _best(plain).items()},
        "split_hashed": {name: round(value, 3) for name, value in _best(hashed).items()},
        "sequences": sequences,
        "block_size": block_size,
        "blocks": work.blocks,
        "repetitions": repetitions,
    }


def main(json: bool = False) -> None:
    """Run and print, as JSON or as lines for people."""
    found = run()
    if json:
        print(_json.dumps(found))
        return
    print(
        f"{found['sequences']} sequences, {found['blocks']} blocks of {found['block_size']} tokens, best of {found['repetitions']}"
    )
    for name, label in (("us_per_block", "reserve + release"), ("us_per_block_hashed", "with hash, publish and match")):
        median = found[f"median_{name}"]
        print(f"  {label:<30} {found[name]:6.3f} us a block   (median {median:.3f}, bar {found['bars'][name]:.1f})")


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

    def life(self, make: Make, *, prefix_caching: bool) -> dict[str, float]:
        """One whole run: microseconds a block, by call."""
        spec = KVSpec("full", 8, 128, 128, "bfloat16")
        group = KVGroup(0, spec, tuple(range(32)), self.block_size, 4096 * self.block_size)
        parts = AllocatorParts((group,), self.blocks, len(self.prompts), self.longest, prefix_caching)
        watch = _Watch(make(parts))
        rows = np.arange(len(self.prompts), dtype=np.int32)
        lengths = np.array([len(p) for p in self.prompts], np.int32)
        self._prefill(watch, lengths)
        self._decode(watch, rows, lengths)
        watch.call("release", rows)
        if prefix_caching:
            for row, prompt in enumerate(self.prompts):
                watch.call("admit", row, prompt, "tenant", label="admit again")
            watch.call("release", rows, label="release again")
        return {name: seconds / self.blocks * 1e6 for name, seconds in watch.seconds.items()}

    def _prefill(self, watch: _Watch, lengths: np.ndarray) -> None:
        row = 0
        while row < len(lengths):
            end = row + 1
            while end < len(lengths) and int(lengths[row : end + 1].sum()) <= BUDGET:
                end += 1
            for one in range(row, end):
                watch.call("admit", one, self.prompts[one], "tenant")
            rows = np.arange(row, end, dtype=np.int32)
            watch.step(rows, np.zeros(end - row, np.int32), lengths[row:end])
            row = end

    def _decode(self, watch: _Watch, rows: np.ndarray, lengths: np.ndarray) -> None:
        for step in range(int(self.decodes.max())):
            rows = rows[self.decodes[rows] > step]
            start = lengths[rows] + step
            if step % KNOWN_EVERY == 0:
                for row in rows.tolist():
                    watch.call("extend", row, np.arange(step, min(step + KNOWN_EVERY, self.decodes[row]), dtype=np.int32))
            watch.step(rows, start, start + 1)


class _Watch:
    """An allocator with a stop-watch on every call."""

    def __init__(self, allocator: Allocator) -> None:
        self.allocator = allocator
        self.seconds: dict[str, float] = {}

    def call(self, name: str, *arguments: Any, label: str = "") -> Any:
        method = getattr(self.allocator, name)
        began = time.perf_counter()
        answer = method(*arguments)
        spent = time.perf_counter() - began
        self.seconds[label or name] = self.seconds.get(label or name, 0.0) + spent
        return answer

    def step(self, rows: np.ndarray, start: np.ndarray, upto: np.ndarray) -> None:
        if not self.call("reserve", rows, start, upto):
            raise RuntimeError("the benchmark's pool holds all of its sequences, and reserve said that it does not")
        self.call("drain")
        self.call("commit", rows, upto)


def _best(splits: list[dict[str, float]]) -> dict[str, float]:
    return min(splits, key=lambda split: sum(split.values()))


def _total(split: dict[str, float]) -> float:
    return round(sum(split.values()), 3)
