"""The next token of each row, from its logits: the likeliest, or one drawn at its temperature.

The draw is that of `octavo.sampling.truncation.draw`: the token where the running sum of the softmax passes a uniform number,
found by blocks of 256 and then within one. The same number gives the same token, but where rounding decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache

from octavo_ops_cpu.jit.compiler import Kernel, compile_kernel
from octavo_ops_cpu.jit.emitter import F64, I1, I8, I32, Emitter, Value, Variable

BLOCK = 256


@cache
def draw() -> Kernel:
    """(logits, row bytes, temperature, uniform, tokens, failed, rows, vocab): float32 logits, temperature float32 [rows]
    (0: the likeliest, of equals the first), uniform float64 [rows] in [0, 1) -> tokens int32 [rows], failed bool [rows]."""
    return compile_kernel("draw", 8, _draw)


def _draw(
    e: Emitter, thread: Value, threads: Value,
    logits: Value, distance: Value, temperature: Value, uniform: Value, tokens: Value, failed: Value, rows: Value, vocab: Value,
) -> None:  # fmt: skip
    first, end = e.share(rows, thread, threads)
    blocks = (vocab + (BLOCK - 1)) // BLOCK
    masses = e.stack(blocks * 8)
    with e.loop(first, end) as row:
        line = logits + row * distance
        best, bad = _largest(e, line, vocab)
        warmth = e.load_one(temperature + row * 4, "float32")
        token = Variable(e, e.i64(0))
        bad = bad | best.equals(math.inf) | best.equals(-math.inf)
        with e.when(e.not_(bad)):
            with e.when(warmth <= 0.0):
                token.set(_find(e, line, vocab, best))
            with e.when(warmth > 0.0):
                total = _masses(e, line, vocab, blocks, best, warmth, masses)
                wanted = e.load_raw(uniform + row * 8, F64, 8) * total
                block, rest = _locate(e, wanted, blocks, lambda i: e.load_raw(masses + i * 8, F64, 8))
                begin = block * BLOCK

                def mass(i: Value, begin: Value = begin) -> Value:
                    return e.double(e.exp((e.load_one(line + (begin + i) * 4, "float32") - best) / warmth))

                inside = e.smaller(vocab - begin, BLOCK)
                place, _ = _locate(e, rest, inside, mass)
                token.set(begin + place)
        e.store_raw(e.narrow(token.get(), I32), tokens + row * 4, 4)
        e.store_raw(e.select(bad, Value(e, I8(1)), Value(e, I8(0))), failed + row)


def _largest(e: Emitter, line: Value, vocab: Value) -> tuple[Value, Value]:
    """The largest logit, and whether any is NaN."""
    whole = vocab // e.lanes * e.lanes
    most, nan = Variable(e, e.splat(-math.inf)), Variable(e, e.splat(Value(e, I1(0))))
    with e.loop(0, whole, e.lanes) as i:
        value = e.load(line + i * 4, "float32")
        most.set(e.maximum(most.get(), value))
        nan.set(nan.get() | e.is_nan(value))
    best, bad = Variable(e, most.get().max()), Variable(e, e.any(nan.get()))
    with e.loop(whole, vocab) as i:
        value = e.load_one(line + i * 4, "float32")
        best.set(e.maximum(best.get(), value))
        bad.set(bad.get() | e.is_nan(value))
    return best.get(), bad.get()


def _find(e: Emitter, line: Value, vocab: Value, best: Value) -> Value:
    """The first place that holds `best`."""
    whole = vocab // e.lanes * e.lanes
    place = Variable(e, vocab)

    def look(i: Value) -> None:
        here = e.load_one(line + i * 4, "float32").equals(best)
        place.set(e.select(here, e.smaller(place.get(), i), place.get()))

    with e.loop(0, whole, e.lanes) as i:
        among = e.any(e.load(line + i * 4, "float32").equals(best))
        with e.when(among & place.get().equals(vocab)), e.loop(i, i + e.lanes) as j:
            look(j)
    with e.loop(whole, vocab) as i:
        look(i)
    return place.get()


def _masses(e: Emitter, line: Value, vocab: Value, blocks: Value, best: Value, warmth: Value, masses: Value) -> Value:
    """Of each block of the row the sum of e^((logit - best) / warmth), float64, into masses; and their sum."""
    total = Variable(e, Value(e, F64(0.0)))
    with e.loop(0, blocks) as block:
        begin = block * BLOCK
        stop = e.smaller(begin + BLOCK, vocab)
        whole = begin + (stop - begin) // e.lanes * e.lanes
        sums = Variable(e, e.splat(0.0))
        with e.loop(begin, whole, e.lanes) as i:
            sums.set(sums.get() + e.exp((e.load(line + i * 4, "float32") - best) / warmth))
        mass = Variable(e, sums.get().sum())
        with e.loop(whole, stop) as i:
            mass.set(mass.get() + e.exp((e.load_one(line + i * 4, "float32") - best) / warmth))
        wide = e.double(mass.get())
        e.store_raw(wide, masses + block * 8, 8)
        total.set(total.get() + wide)
    return total.get()


def _locate(e: Emitter, wanted: Value, count: Value, mass: Callable[[Value], Value]) -> tuple[Value, Value]:
    """The first of `count` places whose running sum passes `wanted`, or the last that has a mass, if rounding leaves none;
    and how far into it `wanted` lies. A place without mass is never it."""
    none = Value(e, F64(0.0))
    place, rest, running = Variable(e, e.i64(0)), Variable(e, none), Variable(e, none)
    with e.loop(0, count) as i, e.when(running.get() <= wanted):
        mine = mass(i)
        with e.when(mine > 0.0):
            place.set(i)
            rest.set(wanted - running.get())
        running.set(running.get() + mine)
    return place.get(), rest.get()
