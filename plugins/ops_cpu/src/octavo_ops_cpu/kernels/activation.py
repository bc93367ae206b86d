"""act(gate) * up of a row that holds both halves side by side, for products that do not do it themselves."""

from __future__ import annotations

import math
from collections.abc import Callable
from functools import cache, partial

from octavo_ops_cpu.jit.compiler import Kernel, compile_kernel
from octavo_ops_cpu.jit.emitter import ITEM, Dtype, Emitter, Value


@cache
def gated(act: str, dtype: Dtype) -> Kernel:
    """(x [rows, 2 width], out [rows, width], rows, width), both of dtype."""
    return compile_kernel(f"{act}_mul_{dtype}", 4, partial(_gated, act, dtype))


def _gated(
    act: str, dtype: Dtype, e: Emitter, thread: Value, threads: Value, x: Value, out: Value, rows: Value, width: Value
) -> None:
    first, end = e.share(rows, thread, threads)
    with e.loop(first, end) as row, e.loop(0, width, e.lanes) as i:
        gate = x + (row * width * 2 + i) * ITEM[dtype]
        value = ACTIVATIONS[act](e, e.load(gate, dtype)) * e.load(gate + width * ITEM[dtype], dtype)
        e.store(value, out + (row * width + i) * ITEM[dtype], dtype)


def silu(e: Emitter, x: Value) -> Value:
    """x / (1 + e^-x); below -87 the quotient is nothing beside float32's other values."""
    return x / (e.exp(e.least(-x, 87.0)) + 1.0)


def gelu_tanh(e: Emitter, x: Value) -> Value:
    """x / 2 (1 + tanh u) with u = sqrt(2 / pi) (x + 0.044715 x^3), which is x / (1 + e^-2u)."""
    u = x * (x * x * 0.044715 + 1.0) * math.sqrt(2 / math.pi)
    return x / (e.exp(e.least(u * -2.0, 87.0)) + 1.0)


ACTIVATIONS: dict[str, Callable[[Emitter, Value], Value]] = {"silu": silu, "gelu_tanh": gelu_tanh}
