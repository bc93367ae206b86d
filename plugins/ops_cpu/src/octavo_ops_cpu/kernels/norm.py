"""RMS norm of rows, alone or after the sum with the residual stream: one pass over memory, float32 arithmetic.

A row that does not fit the first-level cache twice is read twice. Sums are over the vector's lanes first: a row's result
depends on the row alone.
"""

from __future__ import annotations

from functools import cache, partial

from octavo_ops_cpu.jit.compiler import Kernel, compile_kernel
from octavo_ops_cpu.jit.emitter import ITEM, Dtype, Emitter, Value, Variable


@cache
def rms_norm(x: Dtype, result: Dtype) -> Kernel:
    """(x, row bytes, weight float32 [width], out, rows, width, eps): x's rows, any distance apart, normalised into dense out."""
    return compile_kernel(f"rms_norm_{x}_{result}", 7, partial(_rms_norm, x, result))


@cache
def add_rms_norm(dtype: Dtype) -> Kernel:
    """(x, residual, weight, out, rows, width, eps): residual float32 += x, and its norm into out; x and out are of dtype."""
    return compile_kernel(f"add_rms_norm_{dtype}", 7, partial(_add_rms_norm, dtype))


def _rms_norm(
    source: Dtype, result: Dtype, e: Emitter, thread: Value, threads: Value,
    x: Value, distance: Value, weight: Value, out: Value, rows: Value, width: Value, eps: Value,
) -> None:  # fmt: skip
    first, end = e.share(rows, thread, threads)
    with e.loop(first, end) as row:
        line = x + row * distance
        squares = Variable(e, e.splat(0.0))
        with e.loop(0, width, e.lanes) as i:
            value = e.load(line + i * ITEM[source], source)
            squares.set(e.fma(value, value, squares.get()))
        scale = _scale(e, squares.get().sum(), width, eps)
        with e.loop(0, width, e.lanes) as i:
            value = e.load(line + i * ITEM[source], source) * scale * e.load(weight + i * 4, "float32")
            e.store(value, out + (row * width + i) * ITEM[result], result)


def _add_rms_norm(
    dtype: Dtype, e: Emitter, thread: Value, threads: Value,
    x: Value, residual: Value, weight: Value, out: Value, rows: Value, width: Value, eps: Value,
) -> None:  # fmt: skip
    first, end = e.share(rows, thread, threads)
    with e.loop(first, end) as row:
        squares = Variable(e, e.splat(0.0))
        with e.loop(0, width, e.lanes) as i:
            at = row * width + i
            value = e.load(residual + at * 4, "float32") + e.load(x + at * ITEM[dtype], dtype)
            e.store(value, residual + at * 4, "float32")
            squares.set(e.fma(value, value, squares.get()))
        scale = _scale(e, squares.get().sum(), width, eps)
        with e.loop(0, width, e.lanes) as i:
            at = row * width + i
            value = e.load(residual + at * 4, "float32") * scale * e.load(weight + i * 4, "float32")
            e.store(value, out + at * ITEM[dtype], dtype)


def _scale(e: Emitter, squares: Value, width: Value, eps: Value) -> Value:
    """1 / sqrt(mean + eps)."""
    return 1.0 / e.sqrt(squares / e.to_float(width) + e.number(eps))
