"""Attention of rows with one new token over the paged cache, which is read where it lies.

A task is a row and a KV head with the q heads of its group. Keys come in parts of up to PART; the softmax is
kept as a running maximum and sum (Milakov and Gimelshein, 2018), in float32 whatever the cache holds. A row's
result depends on its own keys only: not on the other rows, nor on the number of threads.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache, partial, reduce

from octavo_ops_cpu.jit.compiler import Kernel, compile_kernel, lanes
from octavo_ops_cpu.jit.emitter import I32, I64, ITEM, Dtype, Emitter, Value, Variable

PART = 64
"""Keys whose scores are held at a time, at most: enough that the softmax of one part is worked out while keys and values of the
next are on their way."""

LANES = 16
"""Scores of one vector; a part's are whole vectors, -inf where there is no key."""

IN_REGISTERS = 16
"""Vectors of sums that are kept in registers at once: heads of a group are taken in turns of as many as fit."""


@dataclass(frozen=True, slots=True)
class Rows:
    """What a kernel is compiled for. block: tokens of a block. dtype: q's, the cache's and the result's."""

    heads: int
    kv_heads: int
    width: int
    block: int
    dtype: Dtype
    window: int = 0
    softcap: float = 0.0
    sinks: bool = False

    @property
    def lanes(self) -> int:
        """Of the widest vector that a head is whole vectors of."""
        return math.gcd(lanes(), self.width)

    @property
    def group(self) -> int:
        return self.heads // self.kv_heads

    @property
    def run(self) -> int:
        """Keys that lie one after the other: of one block, at most a part."""
        return min(self.block, PART)

    @property
    def part(self) -> int:
        """Keys of a part: whole runs."""
        return PART // self.run * self.run

    @property
    def row_bytes(self) -> int:
        """Of one key or value of one head."""
        return self.width * ITEM[self.dtype]

    def turns(self, e: Emitter, body: Callable[[Value, range], None]) -> None:
        """body(first head, those after it) for the group's heads, as many at a time as have their sums in registers."""
        size = min(self.group, max(1, IN_REGISTERS // (self.width // self.lanes)))
        whole = self.group // size * size
        with e.loop(0, whole, size) as head:
            body(head, range(size))
        if whole < self.group:
            body(e.i64(whole), range(self.group - whole))


@cache
def decode(shape: Rows) -> Kernel:
    """(q, q row bytes, out, stats, cache, table, columns, rows, count, scale, sinks).

    q [tokens, heads, width], heads dense; out [tokens, heads, width] dense; table int32 [any, columns]; rows int64 [count, 3]:
    of each row its token, its line of the table and its keys; sinks float32 [heads]. stats, unless 0: float32
    [tokens, heads, 2], the maximum and the sum of the softmax."""
    name = f"decode_{shape.heads}_{shape.kv_heads}_{shape.width}_{shape.block}_{shape.dtype}"
    return compile_kernel(name, 11, partial(_decode, shape), shape.lanes)


def _decode(
    shape: Rows, e: Emitter, thread: Value, threads: Value,
    q: Value, distance: Value, out: Value, stats: Value, cache: Value, table: Value, columns: Value, rows: Value,
    count: Value, scale: Value, sinks: Value,
) -> None:  # fmt: skip
    item, group = ITEM[shape.dtype], shape.group
    queries, sums, scores = e.scratch(group * shape.width), e.scratch(group * shape.width), e.scratch(group * PART)
    best, total = e.scratch(group), e.scratch(group)
    first, end = e.share(count * shape.kv_heads, thread, threads)
    with e.loop(first, end) as task:
        pages = _pages(shape, e, cache, table, columns, rows, task)
        following = _pages(shape, e, cache, table, columns, rows, e.smaller(task + 1, end - 1))
        keys, head = pages.keys, pages.kv_head * group
        token = e.index(rows + task // shape.kv_heads * 24, I64)
        with e.loop(0, group * shape.width, e.lanes) as i:
            value = e.load(q + token * distance + (head * shape.width + i) * item, shape.dtype)
            e.store(value * e.number(scale), queries + i * 4, "float32")
            e.store(e.splat(0.0), sums + i * 4, "float32")
        with e.loop(0, group) as h:
            e.store(e.load_one(sinks + (head + h) * 4, "float32") if shape.sinks else e.f32(-math.inf), best + h * 4, "float32")
            e.store(e.f32(1.0 if shape.sinks else 0.0), total + h * 4, "float32")

        with e.loop(pages.begin, keys, shape.part) as at:
            _score(pages, at, queries, scores)
            _weigh(shape, e, scores, best, total, sums)
            _add(pages, following, at, scores, sums)

        with e.loop(0, group) as h:
            share = 1.0 / e.load_one(total + h * 4, "float32")
            target = out + ((token * shape.heads + head + h) * shape.width) * item
            with e.loop(0, shape.width, e.lanes) as i:
                e.store(e.load(sums + (h * shape.width + i) * 4, "float32") * share, target + i * item, shape.dtype)
            with e.when(stats > 0):
                pair = stats + (token * shape.heads + head + h) * 8
                e.store(e.load_one(best + h * 4, "float32"), pair, "float32")
                e.store(e.load_one(total + h * 4, "float32"), pair + 4, "float32")


@dataclass(slots=True)
class Pages:
    """A row's keys [seen, keys) of one KV head; table: the address of its line."""

    shape: Rows
    e: Emitter
    cache: Value
    table: Value
    kv_head: Value
    seen: Value
    keys: Value

    @property
    def begin(self) -> Value:
        """Where the part of the first key begins: parts begin at multiples of their length, whatever is seen."""
        return self.seen // self.shape.part * self.shape.part

    def at(self, position: Value) -> tuple[Value, Value]:
        """Addresses of the key and the value at a position."""
        shape, e = self.shape, self.e
        block = e.index(self.table + position // shape.block * 4, I32)
        plane = shape.block * shape.row_bytes
        key = self.cache + (block * (2 * shape.kv_heads) + self.kv_head) * plane + position % shape.block * shape.row_bytes
        return key, key + shape.kv_heads * plane

    @contextmanager
    def runs(self, part: Value) -> Iterator[tuple[Value, Value, Value]]:
        """Of each run of the part at this position: where it begins, and which of its keys [low, high) are seen."""
        shape, e = self.shape, self.e
        with e.loop(part, e.smaller(part + shape.part, self.keys), shape.run) as run:
            yield run, e.larger(self.seen - run, 0), e.smaller(self.keys - run, shape.run)

    def prefetch(self, address: Value, key: Value) -> None:
        """Ask for the row `key` of a run that begins at an address."""
        for line in range(0, self.shape.row_bytes, 64):
            self.e.prefetch(address + key * self.shape.row_bytes + line)


def _pages(shape: Rows, e: Emitter, cache: Value, table: Value, columns: Value, rows: Value, task: Value) -> Pages:
    """Those of a task."""
    entry = rows + task // shape.kv_heads * 24
    line, keys = e.index(entry + 8, I64), e.index(entry + 16, I64)
    seen = e.larger(keys - shape.window, 0) if shape.window else e.i64(0)
    return Pages(shape, e, cache, table + line * columns * 4, task % shape.kv_heads, seen, keys)


def _score(pages: Pages, part: Value, queries: Value, scores: Value) -> None:
    """scores [group, PART] = queries . keys, -inf where there is no key. Asks for the part's values meanwhile."""
    e, shape, item = pages.e, pages.shape, ITEM[pages.shape.dtype]
    with e.loop(0, shape.group * PART, LANES) as i:
        e.store_raw(e.splat(-math.inf, LANES), scores + i * 4, 64)

    def score(head: Value, turn: range) -> None:
        with pages.runs(part) as (run, low, high):
            keys, values = pages.at(run)
            with e.loop(low, high) as key:
                pages.prefetch(values, key)
                source = keys + key * shape.row_bytes
                sums: dict[int, Value] = {}
                for i in range(0, shape.width, e.lanes):
                    value = e.load(source + i * item, shape.dtype)
                    for h in turn:
                        query = e.load(queries + ((head + h) * shape.width + i) * 4, "float32")
                        sums[h] = e.fma(query, value, sums[h]) if i else query * value
                for h in turn:
                    e.store(sums[h].sum(), scores + (run - part + key + (head + h) * PART) * 4, "float32")

    shape.turns(e, score)


def _weigh(shape: Rows, e: Emitter, scores: Value, best: Value, total: Value, sums: Value) -> None:
    """scores become weights relative to the running maximum; what was summed before is brought to it."""
    vector = e.splat(0.0, LANES).type
    with e.loop(0, shape.group) as h:
        places = [scores + (h * PART + i) * 4 for i in range(0, PART, LANES)]
        part = [e.load_raw(place, vector, 64) for place in places]
        if shape.softcap:
            part = [capped(e, score, shape.softcap) for score in part]
        before = e.load_one(best + h * 4, "float32")
        now = e.maximum(before, reduce(e.maximum, part).max())
        weights = [e.exp(score - now) for score in part]
        for place, weight in zip(places, weights, strict=True):
            e.store_raw(weight, place, 64)
        shrink = e.exp(before - now)
        mass = sum(weights[1:], weights[0]).sum()
        e.store(e.load_one(total + h * 4, "float32") * shrink + mass, total + h * 4, "float32")
        e.store(now, best + h * 4, "float32")
        with e.when(before < now):
            for i in range(0, shape.width, e.lanes):
                at = sums + (h * shape.width + i) * 4
                e.store(e.load(at, "float32") * shrink, at, "float32")


def capped(e: Emitter, score: Value, cap: float) -> Value:
    """cap * tanh(score / cap); -inf, which is no key, stays."""
    grown = e.exp(e.least(score * (2 / cap), 87.0))
    return e.select(score.equals(-math.inf), score, cap - 2 * cap / (grown + 1.0))


def _add(pages: Pages, after: Pages, part: Value, weights: Value, sums: Value) -> None:
    """sums [group, width] += weights . values. Asks for the next part's keys meanwhile, which may be those of the task after."""
    e, shape, item = pages.e, pages.shape, ITEM[pages.shape.dtype]

    def add(head: Value, turn: range) -> None:
        places = {(h, i): sums + ((head + h) * shape.width + i) * 4 for h in turn for i in range(0, shape.width, e.lanes)}
        held = {at: Variable(e, e.load(place, "float32")) for at, place in places.items()}
        with pages.runs(part) as (run, low, high):
            _, values = pages.at(run)
            here, _ = pages.at(e.smaller(run + shape.part, pages.keys - 1))
            there, _ = after.at(e.smaller(after.begin + (run - part), after.keys - 1))
            following = e.select(run + shape.part < pages.keys, here, there)
            with e.loop(low, high) as key:
                pages.prefetch(following, key)
                source = values + key * shape.row_bytes
                weight = {h: e.splat(e.load_one(weights + (run - part + key + (head + h) * PART) * 4, "float32")) for h in turn}
                for i in range(0, shape.width, e.lanes):
                    value = e.load(source + i * item, shape.dtype)
                    for h in turn:
                        held[h, i].set(e.fma(weight[h], value, held[h, i].get()))
        for at, place in places.items():
            e.store(held[at].get(), place, "float32")

    shape.turns(e, add)
