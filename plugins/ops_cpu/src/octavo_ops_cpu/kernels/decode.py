"""Attention of rows with one new token over the paged cache, which is read where it lies.

A task is a row and a KV head with the q heads of its group. Keys come by PART at most of one block; the softmax is
kept as a running maximum and sum (Milakov and Gimelshein, 2018), in float32 whatever the cache holds. A row's
result depends on its own keys only: not on the other rows, nor on the number of threads.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from functools import cache, partial

from octavo_ops_cpu.jit.compiler import Kernel, compile_kernel, lanes
from octavo_ops_cpu.jit.emitter import I32, I64, ITEM, Dtype, Emitter, Value, Variable

PART = 16
"""Keys whose scores are held at a time."""

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


@cache
def decode(shape: Rows) -> Kernel:
    """(q, q row bytes, out, stats, cache, table, columns, rows, count, scale, sinks).

    q [tokens, heads, width], heads dense; out [tokens, heads, width] dense; table int32 [any, columns]; rows int64 [count, 3]:
    of each row its token, its line of the table and its keys; sinks float32 [heads]. stats, unless 0: float32
    [count, heads, 2], the maximum and the sum of the softmax."""
    name = f"decode_{shape.heads}_{shape.kv_heads}_{shape.width}_{shape.block}_{shape.dtype}"
    return compile_kernel(name, 11, partial(_decode, shape), shape.lanes)


def _decode(
    shape: Rows, e: Emitter, thread: Value, threads: Value,
    q: Value, distance: Value, out: Value, stats: Value, cache: Value, table: Value, columns: Value, rows: Value,
    count: Value, scale: Value, sinks: Value,
) -> None:  # fmt: skip
    item, group = ITEM[shape.dtype], shape.heads // shape.kv_heads
    queries, sums, scores = e.scratch(group * shape.width), e.scratch(group * shape.width), e.scratch(group * PART)
    best, total = e.scratch(group), e.scratch(group)
    page_bytes = 2 * shape.kv_heads * shape.block * shape.width * item
    head_bytes = shape.block * shape.width * item
    first, end = e.share(count * shape.kv_heads, thread, threads)
    with e.loop(first, end) as task:
        row, kv_head = task // shape.kv_heads, task % shape.kv_heads
        token, line, keys = (e.index(rows + row * 24 + at, I64) for at in (0, 8, 16))
        head = kv_head * group
        with e.loop(0, group * shape.width, e.lanes) as i:
            value = e.load(q + token * distance + (head * shape.width + i) * item, shape.dtype)
            e.store(value * e.number(scale), queries + i * 4, "float32")
            e.store(e.splat(0.0), sums + i * 4, "float32")
        with e.loop(0, group) as h:
            e.store(e.load_one(sinks + (head + h) * 4, "float32") if shape.sinks else e.f32(-math.inf), best + h * 4, "float32")
            e.store(e.f32(1.0 if shape.sinks else 0.0), total + h * 4, "float32")

        seen = e.larger(keys - shape.window, 0) if shape.window else e.i64(0)
        begin = seen // PART * PART
        with e.loop(begin, keys, min(PART, shape.block)) as at:
            block = e.index(table + (line * columns + at // shape.block) * 4, I32)
            page = cache + block * page_bytes + kv_head * head_bytes + at % shape.block * (shape.width * item)
            low = e.larger(seen - at, 0)
            high = e.smaller(keys - at, min(PART, shape.block))
            part = _Part(shape, e, page, page + shape.kv_heads * head_bytes, low, high)
            _score(part, queries, scores)
            _weigh(part, scores, best, total, sums)
            _add(part, scores, sums)

        with e.loop(0, group) as h:
            share = 1.0 / e.load_one(total + h * 4, "float32")
            target = out + ((token * shape.heads + head + h) * shape.width) * item
            with e.loop(0, shape.width, e.lanes) as i:
                e.store(e.load(sums + (h * shape.width + i) * 4, "float32") * share, target + i * item, shape.dtype)
            with e.when(stats > 0):
                pair = stats + (row * shape.heads + head + h) * 8
                e.store(e.load_one(best + h * 4, "float32"), pair, "float32")
                e.store(e.load_one(total + h * 4, "float32"), pair + 4, "float32")


@dataclass(slots=True)
class _Part:
    """Keys [low, high) of up to PART in one block; keys and values: addresses of the first."""

    shape: Rows
    e: Emitter
    keys: Value
    values: Value
    low: Value
    high: Value

    @property
    def group(self) -> int:
        return self.shape.heads // self.shape.kv_heads

    @property
    def row_bytes(self) -> int:
        return self.shape.width * ITEM[self.shape.dtype]

    def turns(self) -> list[range]:
        """The group's heads, as many at a time as have their sums in registers."""
        size = max(1, IN_REGISTERS // (self.shape.width // self.e.lanes))
        return [range(at, min(at + size, self.group)) for at in range(0, self.group, size)]


def _score(part: _Part, queries: Value, scores: Value) -> None:
    """scores [group, PART] = queries . keys, -inf where there is no key."""
    e, shape, item = part.e, part.shape, ITEM[part.shape.dtype]
    nothing = e.splat(-math.inf, PART)
    for h in range(part.group):
        e.store_raw(nothing, scores + h * PART * 4, 64)
    for turn in part.turns():
        with e.loop(part.low, part.high) as key:
            source = part.keys + key * part.row_bytes
            sums: dict[int, Value] = {}
            for i in range(0, shape.width, e.lanes):
                value = e.load(source + i * item, shape.dtype)
                for h in turn:
                    query = e.load(queries + (h * shape.width + i) * 4, "float32")
                    sums[h] = e.fma(query, value, sums[h]) if i else query * value
            for h in turn:
                e.store(sums[h].sum(), scores + (key + h * PART) * 4, "float32")


def _weigh(part: _Part, scores: Value, best: Value, total: Value, sums: Value) -> None:
    """scores become weights relative to the running maximum; what was summed before is brought to it."""
    e, shape = part.e, part.shape
    vector = e.splat(0.0, PART).type
    for h in range(part.group):
        score = e.load_raw(scores + h * PART * 4, vector, 64)
        if shape.softcap:
            score = _capped(e, score, shape.softcap)
        before = e.load_one(best + h * 4, "float32")
        now = e.maximum(before, score.max())
        weights = e.exp(score - now)
        e.store_raw(weights, scores + h * PART * 4, 64)
        shrink = e.exp(before - now)
        e.store(e.load_one(total + h * 4, "float32") * shrink + weights.sum(), total + h * 4, "float32")
        e.store(now, best + h * 4, "float32")
        with e.when(before < now):
            for i in range(0, shape.width, e.lanes):
                at = sums + (h * shape.width + i) * 4
                e.store(e.load(at, "float32") * shrink, at, "float32")


def _capped(e: Emitter, score: Value, cap: float) -> Value:
    """cap * tanh(score / cap); -inf, which is no key, stays."""
    grown = e.exp(e.least(score * (2 / cap), 87.0))
    return e.select(score.equals(-math.inf), score, cap - 2 * cap / (grown + 1.0))


def _add(part: _Part, weights: Value, sums: Value) -> None:
    """sums [group, width] += weights . values."""
    e, shape, item = part.e, part.shape, ITEM[part.shape.dtype]
    for turn in part.turns():
        places = [(h, i) for h in turn for i in range(0, shape.width, e.lanes)]
        held = {(h, i): Variable(e, e.load(sums + (h * shape.width + i) * 4, "float32")) for h, i in places}
        with e.loop(part.low, part.high) as key:
            source = part.values + key * part.row_bytes
            weight = {h: e.splat(e.load_one(weights + (key + h * PART) * 4, "float32")) for h in turn}
            for i in range(0, shape.width, e.lanes):
                value = e.load(source + i * item, shape.dtype)
                for h in turn:
                    held[h, i].set(e.fma(weight[h], value, held[h, i].get()))
        for h, i in places:
            e.store(held[h, i].get(), sums + (h * shape.width + i) * 4, "float32")
