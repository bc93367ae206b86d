"""x W^T in bfloat16 on a processor with AVX512_BF16: the weight's layout, and the kernels over it.

Owns the packed layout: [out / 16, in / 2, 16, 2], blocks of 16 outputs, each a stream of `octavo_ops_cpu.kernels.dots`. A
matrix is read once, front to back, for up to 16 rows: few rows are bound by memory. Sums are float32; the result is
rounded once.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial
from itertools import chain

from octavo_ops_cpu.jit.compiler import Kernel, compile_kernel
from octavo_ops_cpu.jit.emitter import I32, ITEM, Dtype, Emitter, Value
from octavo_ops_cpu.kernels.activation import ACTIVATIONS
from octavo_ops_cpu.kernels.dots import BLOCK, Left, dots

AHEAD = 12 << 10
"""Bytes of the matrix that few rows ask for in advance, to the second-level cache. The processor's own prefetcher stops at
each 4 KiB page and is late where a line is read only every 8 cycles: 16 rows took twice as long without."""

L2_BYTES = 256 << 10
"""Bytes of x that are computed at a time: such a part stays in the second-level cache for all of the matrix."""


REGISTERS = 28
"""Vectors of sums that are held at once, of 32 that there are."""


@dataclass(frozen=True, slots=True)
class Tile:
    """rows x blocks sums are held in registers (at most REGISTERS); split as `dots` takes it."""

    rows: int
    blocks: int = 1
    split: int = 1


FEW = (Tile(1, 1, 4), Tile(2, 1, 4), Tile(3, 1, 2), Tile(4, 1, 2), Tile(6), Tile(8), Tile(12), Tile(16))
MANY = (Tile(12, 2), Tile(14, 2), Tile(10, 2), Tile(8, 2))


@cache
def tile_for(rows: int) -> Tile:
    """The tile for so many rows of x. Up to 16 the matrix is read once, by the smallest tile that takes them all; up to 128
    the tile that leaves the fewest of its rows empty."""
    few = next((tile for tile in FEW if tile.rows >= rows), None)
    return few or (min(MANY, key=lambda tile: -rows % tile.rows) if rows <= 128 else MANY[0])


@cache
def product(tile: Tile, dtype: Dtype, gate: str = "", bias: bool = False) -> Kernel:
    """(x, out, weight, bias, rows, outputs, inputs) -> x [rows, inputs] bfloat16 times the packed weight, plus bias
    float32 [outputs], stored as dtype in out [rows, outputs]; with a gate out is [rows, outputs / 2], gate(left) * right."""
    name = f"linear_{tile.rows}x{tile.blocks}_{dtype}{gate and '_' + gate}{'_bias' * bias}"
    return compile_kernel(name, 7, partial(_body, tile, dtype, gate, bias))


def _body(
    tile: Tile,
    dtype: Dtype,
    gate: str,
    with_bias: bool,
    e: Emitter,
    thread: Value,
    threads: Value,
    x: Value,
    out: Value,
    weight: Value,
    bias: Value,
    rows: Value,
    outputs: Value,
    inputs: Value,
) -> None:
    """Threads take equal shares of the result's blocks. What a tile has too many, of rows or of
    blocks, repeats its last."""
    width = outputs // 2 if gate else outputs
    first, end = e.share(width // BLOCK, thread, threads)
    stream = inputs * (2 * BLOCK)  # bytes of a block of the weight
    per_tile = inputs * (2 * tile.rows)
    cut = e.larger(e.i64(L2_BYTES) // per_tile, 1) if tile in MANY else e.i64(1)  # tiles at a time
    panel = e.stack(cut * per_tile) if tile.rows > 1 else x
    halves = 2 if gate else 1
    columns = max(1, tile.blocks // halves)  # of the result, in one tile
    sums = e.scratch(columns * halves * tile.rows * BLOCK)

    def finish(row: Value, column: int, block: Value) -> Value:
        """Of a row of the tile and a block of the result: its sums (and those of its partner), with what follows them."""
        parts = [e.load(sums + (row + (column + i * columns) * tile.rows) * (BLOCK * 4), "float32") for i in range(halves)]
        if with_bias:
            parts = [part + e.load(bias + (block * BLOCK + i * width) * 4, "float32") for i, part in enumerate(parts)]
        return ACTIVATIONS[gate](e, parts[0]) * parts[1] if gate else parts[0]

    with e.loop(0, rows, cut * tile.rows) as top:
        bottom = e.smaller(top + cut * tile.rows, rows)
        if tile.rows > 1:
            _pack(e, tile, x, panel, top, bottom, rows, inputs)
        with e.loop(first, end, columns) as block, e.loop(top, bottom, tile.rows) as row:
            blocks = [e.smaller(block + c, end - 1) for c in range(columns)]
            source = panel + (row - top) * inputs * 2
            streams = [weight + b * stream for b in blocks]
            if gate:
                streams += [s + width // BLOCK * stream for s in streams]
            # All blocks of a tile in one pass over x, or, where they would not fit into registers, one after the other.
            at_once = len(streams) if len(streams) * tile.rows <= REGISTERS else 1
            left = Left(source, tile.rows, row=4, pair=4 * tile.rows)
            ahead = 0 if tile in MANY else AHEAD
            for i in range(0, len(streams), at_once):
                found = dots(e, left, streams[i : i + at_once], inputs // 2, split=tile.split, ahead=ahead)
                for j, value in enumerate(chain.from_iterable(found)):
                    e.store(value, sums + (i * tile.rows + j) * (BLOCK * 4), "float32")
            with e.loop(0, e.smaller(rows - row, tile.rows)) as r:
                for c, b in enumerate(blocks):
                    e.store(finish(r, c, b), out + ((row + r) * width + b * BLOCK) * ITEM[dtype], dtype)


def _pack(e: Emitter, tile: Tile, x: Value, panel: Value, top: Value, bottom: Value, rows: Value, inputs: Value) -> None:
    """Rows [top, bottom) of x as [tiles, inputs / 2, tile.rows, 2]: what a tile reads is one stream."""
    with e.loop(top, bottom, tile.rows) as row:
        target = panel + (row - top) * inputs * 2
        sources = [x + e.smaller(row + r, rows - 1) * inputs * 2 for r in range(tile.rows)]
        with e.loop(0, inputs // 2) as pair:
            for r, source in enumerate(sources):
                e.store_raw(e.load_raw(source + pair * 4, I32, 4), target + (pair * tile.rows + r) * 4, 4)
