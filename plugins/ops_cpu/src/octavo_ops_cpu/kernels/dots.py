"""Small products in registers with the instruction VDPBF16PS: rows of a left operand times blocks of a packed right one.

Owns the inner loop that linear layers and the attention of prompts share. A packed operand is a stream of vectors, one for
each pair of inputs, which holds that pair of 16 outputs side by side. Sums are float32.
"""

from __future__ import annotations

from dataclasses import dataclass

from llvmlite import ir

from octavo_ops_cpu.jit.emitter import F32, I32, BFloat, Emitter, Value, Variable

BLOCK = 16
"""Outputs of one vector."""

VECTOR = 4 * BLOCK
"""Bytes of a stream for one pair of inputs."""

PAIRS = ir.VectorType(BFloat(), 2 * BLOCK)
SUMS = ir.VectorType(F32, BLOCK)

UNROLL = 4
"""Pairs of inputs of one turn of the loop."""


@dataclass(frozen=True, slots=True)
class Left:
    """Rows of bfloat16 pairs: the pair p of row r is at address + r * row + p * pair (bytes)."""

    address: Value
    rows: int
    row: int
    pair: int


def dots(
    e: Emitter,
    left: Left,
    streams: list[Value],
    pairs: Value,
    *,
    first: list[list[Value]] | None = None,
    split: int = 1,
    ahead: int = 0,
) -> list[list[Value]]:
    """For each stream (the address of its first pair) and each row 16 sums over `pairs` pairs, a multiple of UNROLL, added to
    `first`. split: sums over every split-th pair apart, so that one row does not wait for its own last addition. ahead:
    bytes of the first stream that are asked for in advance."""
    zero = e.splat(0.0, BLOCK)
    held = [
        [[Variable(e, first[b][r] if first and not part else zero) for r in range(left.rows)] for b in range(len(streams))]
        for part in range(split)
    ]
    with e.loop(0, pairs, UNROLL) as begin:
        for u in range(UNROLL):
            pair = begin + u
            right = [e.load_raw(stream + pair * VECTOR, PAIRS, 64) for stream in streams]
            if ahead:
                e.prefetch(streams[0] + pair * VECTOR + ahead)
            for r in range(left.rows):
                source = left.address + pair * left.pair + r * left.row
                mine = e.bits(e.splat(e.load_raw(source, I32, 4), BLOCK), PAIRS)
                for b, block in enumerate(right):
                    variable = held[u % split][b][r]
                    sums = e.call("llvm.x86.avx512bf16.dpbf16ps.512", SUMS, [variable.get(), block, mine])
                    variable.set(sums)
    return [
        [sum((part[b][r].get() for part in held[1:]), held[0][b][r].get()) for r in range(left.rows)] for b in range(len(streams))
    ]
