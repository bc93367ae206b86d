"""Attention of rows with several new tokens over the paged cache, in bfloat16 with the instruction VDPBF16PS.

A task is a chunk of a row's new tokens and a KV head with the q heads of its group; each pair of a token and a q head is a
*line*. Keys and values come in tiles, which are packed once for all lines of the task; the softmax is kept as a running
maximum and sum in float32, its weights are rounded to bfloat16 for the product with the values.
"""

from __future__ import annotations

from functools import cache, partial, reduce
from itertools import chain
from math import inf

from llvmlite import ir

from octavo_ops_cpu.jit.compiler import Kernel, compile_kernel
from octavo_ops_cpu.jit.emitter import I16, I32, I64, Emitter, Value
from octavo_ops_cpu.kernels.decode import Pages, Rows, capped
from octavo_ops_cpu.kernels.dots import BLOCK, VECTOR, Left, dots

LINES = 12
"""Lines whose sums are in registers: times two blocks."""

TILE = 128
"""Keys of a tile."""

TASK_VALUES = 24576
"""Values of q that a task holds: with as many sums and two tiles it fits the second-level cache."""


def chunk_of(shape: Rows) -> int:
    """New tokens of a task, at most."""
    return max(1, TASK_VALUES // shape.width // shape.group)


@cache
def prompt(shape: Rows) -> Kernel:
    """(q, q row bytes, out, stats, cache, table, columns, chunks, count, scale, sinks), of which chunks int64 [count, 4] holds of
    each chunk its first token in the step, the row's line of the table, the first token's position, and its tokens; the
    others as in `decode`. Threads take chunks in turn: they should come longest first."""
    name = f"prompt_{shape.heads}_{shape.kv_heads}_{shape.width}_{shape.block}"
    return compile_kernel(name, 11, partial(_prompt, shape), BLOCK)


def _prompt(
    shape: Rows, e: Emitter, thread: Value, threads: Value,
    q: Value, distance: Value, out: Value, stats: Value, cache: Value, table: Value, columns: Value, chunks: Value,
    count: Value, scale: Value, sinks: Value,
) -> None:  # fmt: skip
    width, group, row_bytes = shape.width, shape.group, shape.row_bytes
    lines_held = chunk_of(shape) * group + LINES
    queries, sums = e.scratch(lines_held * width // 2), e.scratch(lines_held * width)
    best, total = e.scratch(lines_held), e.scratch(lines_held)
    keys, values = e.scratch(TILE * width // 2), e.scratch(TILE * width // 2)
    scores, weights, shrinks = e.scratch(LINES * TILE), e.scratch(LINES * TILE // 2), e.scratch(LINES)
    with e.loop(thread, count * shape.kv_heads, threads) as task:
        chunk, kv_head = chunks + task // shape.kv_heads * 32, task % shape.kv_heads
        token, line, position, tokens = (e.index(chunk + at, I64) for at in (0, 8, 16, 24))
        head, lines, end = kv_head * group, tokens * group, position + tokens
        with e.loop(0, lines + (LINES - 1)) as m:
            i = e.smaller(m, lines - 1)  # what a tile has too many repeats the last line
            source = q + (token + i // group) * distance + (head + i % group) * row_bytes
            with e.loop(0, width, BLOCK) as at:
                e.store_raw(e.load_raw(source + at * 2, ir.VectorType(I16, BLOCK), 2), queries + (m * width + at) * 2, 2)
                e.store(e.splat(0.0), sums + (m * width + at) * 4, "float32")
            e.store(
                e.load_one(sinks + (head + i % group) * 4, "float32") if shape.sinks else e.f32(-inf), best + m * 4, "float32"
            )
            e.store(e.f32(1.0 if shape.sinks else 0.0), total + m * 4, "float32")

        seen = e.larger(position + 1 - shape.window, 0) if shape.window else e.i64(0)
        pages = Pages(shape, e, cache, table + line * columns * 4, kv_head, seen, end)
        with e.loop(seen // TILE * TILE, end, TILE) as tile:
            _pack(pages, tile, keys, values)
            # Lines before the first that sees a key of the tile are passed over.
            with e.loop(e.larger(tile - position, 0) * group // LINES * LINES, lines, LINES) as m:
                _score(e, width, queries + m * row_bytes, keys, scores)
                with e.loop(0, LINES) as r:
                    i = e.smaller(m + r, lines - 1)
                    visible = position + i // group + 1 - tile
                    kept = best + (m + r) * 4, total + (m + r) * 4, shrinks + r * 4
                    _weigh(shape, e, scores + r * (TILE * 4), visible, scale, weights + r * (TILE * 2), *kept)
                _add(e, width, weights, values, shrinks, sums + m * (width * 4))

        with e.loop(0, lines) as m:
            share = 1.0 / e.load_one(total + m * 4, "float32")
            place = (token + m // group) * shape.heads + head + m % group
            with e.loop(0, width, BLOCK) as at:
                e.store(e.load(sums + (m * width + at) * 4, "float32") * share, out + (place * width + at) * 2, "bfloat16")
            with e.when(stats > 0):
                e.store(e.load_one(best + m * 4, "float32"), stats + place * 8, "float32")
                e.store(e.load_one(total + m * 4, "float32"), stats + place * 8 + 4, "float32")


def _pack(pages: Pages, tile: Value, keys: Value, values: Value) -> None:
    """The keys of a tile as streams [TILE / 16, width / 2], its values as streams [width / 16, TILE / 2]. Past the keys that are
    held, and before those that are seen, the nearest is repeated."""
    e, width = pages.e, pages.shape.width
    half, whole = ir.VectorType(I16, BLOCK), ir.VectorType(I32, BLOCK)
    with e.loop(0, TILE, 2) as first:
        rows = [pages.at(e.larger(e.smaller(tile + first + i, pages.keys - 1), pages.seen)) for i in (0, 1)]
        for i, (key, _) in enumerate(rows):
            at = first + i
            target = keys + at // BLOCK * (width // 2 * VECTOR) + at % BLOCK * 4
            with e.loop(0, width // 2, BLOCK // 2) as pair:
                for p in range(BLOCK // 2):
                    e.store_raw(e.load_raw(key + (pair + p) * 4, I32, 4), target + (pair + p) * VECTOR, 4)
        with e.loop(0, width // BLOCK) as block:
            low, high = (Value(e, e.b.zext(e.load_raw(value + block * 2 * BLOCK, half, 2).ir, whole)) for _, value in rows)
            e.store_raw(low | (high << 16), values + block * (TILE // 2 * VECTOR) + first * (VECTOR // 2), 64)


def _score(e: Emitter, width: int, queries: Value, keys: Value, scores: Value) -> None:
    """scores [LINES, TILE] = queries . keys."""
    left = Left(queries, LINES, row=2 * width, pair=4)
    with e.loop(0, TILE // BLOCK, 2) as block:
        streams = [keys + (block + i) * (width // 2 * VECTOR) for i in (0, 1)]
        for i, column in enumerate(dots(e, left, streams, e.i64(width // 2))):
            for r, value in enumerate(column):
                e.store(value, scores + (block + i) * (4 * BLOCK) + r * (TILE * 4), "float32")


def _weigh(
    shape: Rows, e: Emitter, scores: Value, visible: Value, scale: Value, weights: Value, best: Value, total: Value, shrink: Value
) -> None:
    """Of one line: weights bfloat16 [TILE] of its scores relative to the running maximum, and by how much what was summed
    before shrinks. It sees the first `visible` keys of the tile, of which a window leaves the last."""
    count = e.splat(e.narrow(visible, I32), BLOCK)
    part = []
    for at in range(0, TILE, BLOCK):
        score = e.load(scores + at * 4, "float32") * e.number(scale)
        if shape.softcap:
            score = capped(e, score, shape.softcap)
        index = Value(e, ir.Constant(count.type, [ir.Constant(I32, at + lane) for lane in range(BLOCK)]))
        sees = index < count
        if shape.window:
            sees = sees & (index >= count - shape.window)
        part.append(e.select(sees, score, e.splat(-inf, BLOCK)))
    before = e.load_one(best, "float32")
    now = e.maximum(before, reduce(e.maximum, part).max())
    base = e.select(now.equals(-inf), 0.0, now)  # a line that has seen no key yet
    mass = e.splat(0.0, BLOCK)
    for i, score in enumerate(part):
        weight = e.exp(score - base)
        mass = mass + weight
        e.store(weight, weights + i * (2 * BLOCK), "bfloat16")
    change = e.exp(before - base)
    e.store(change, shrink, "float32")
    e.store(e.load_one(total, "float32") * change + mass.sum(), total, "float32")
    e.store(now, best, "float32")


def _add(e: Emitter, width: int, weights: Value, values: Value, shrinks: Value, sums: Value) -> None:
    """sums [LINES, width] = sums * shrinks + weights . values."""
    left = Left(weights, LINES, row=2 * TILE, pair=4)

    def add(block: Value, count: int) -> None:
        places = [[sums + (r * width + (block + i) * BLOCK) * 4 for r in range(LINES)] for i in range(count)]
        before = [
            [e.load(place, "float32") * e.load_one(shrinks + r * 4, "float32") for r, place in enumerate(column)]
            for column in places
        ]
        streams = [values + (block + i) * (TILE // 2 * VECTOR) for i in range(count)]
        found = dots(e, left, streams, e.i64(TILE // 2), first=before)
        for value, place in zip(chain.from_iterable(found), chain.from_iterable(places), strict=True):
            e.store(value, place, "float32")

    blocks = width // BLOCK
    with e.loop(0, blocks // 2 * 2, 2) as block:
        add(block, 2)
    if blocks % 2:
        add(e.i64(blocks - 1), 1)
