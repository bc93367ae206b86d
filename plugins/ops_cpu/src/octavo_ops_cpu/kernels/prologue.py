"""From packed QKV to the cache: norm of the heads, RoPE, and the store of K and V at their slots, in one pass.

Cache lines are those of core's torch backend, [block][K or V][kv_head][slot][width]: prompts are read back by it.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache, partial

from octavo_ops_cpu.jit.compiler import Kernel, compile_kernel, lanes
from octavo_ops_cpu.jit.emitter import I64, ITEM, Dtype, Emitter, Value, Variable


@dataclass(frozen=True, slots=True)
class Heads:
    """What a kernel is compiled for: heads of `width` values, the first `rotary` of them turned; block: the cache's
    tokens of a block; norm: dtype of the weights of the heads' norm, None where there is none."""

    heads: int
    kv_heads: int
    width: int
    rotary: int
    block: int
    dtype: Dtype
    norm: Dtype | None

    @property
    def lanes(self) -> int:
        """Of the widest vector that half of the turned part, and the rest, is whole vectors of."""
        count = lanes()
        while (self.rotary // 2) % count or (self.width - self.rotary) % count:
            count //= 2
        return count


@cache
def prologue(shape: Heads) -> Kernel:
    """(qkv, weight, eps, cos, sin, slots int64 [tokens], cache, tokens): qkv [tokens, heads + 2 kv_heads, width] dense, its q
    heads turned in place; weight [heads + kv_heads, width]; cos and sin [tokens, rotary] as the operator "rope" takes them."""
    name = f"prologue_{shape.heads}_{shape.kv_heads}_{shape.width}_{shape.rotary}_{shape.dtype}_{shape.norm}"
    return compile_kernel(name, 8, partial(_prologue, shape), shape.lanes)


def _prologue(
    shape: Heads, e: Emitter, thread: Value, threads: Value,
    qkv: Value, weight: Value, eps: Value, cos: Value, sin: Value, slots: Value, cache: Value, tokens: Value,
) -> None:  # fmt: skip
    item, every = ITEM[shape.dtype], shape.heads + 2 * shape.kv_heads
    first, end = e.share(tokens, thread, threads)
    with e.loop(first, end) as token:
        slot = e.index(slots + token * 8, I64)
        page = cache + slot // shape.block * (2 * shape.kv_heads * shape.block * shape.width * item)
        line = page + slot % shape.block * (shape.width * item)
        head_bytes = shape.block * shape.width * item
        turn = token * (shape.rotary * item)
        start = qkv + token * (every * shape.width * item)
        with e.loop(0, shape.heads + shape.kv_heads) as head:
            source = start + head * (shape.width * item)
            key = line + (head - shape.heads) * head_bytes
            turned = _turned(shape, e, source, weight, head, eps, cos + turn, sin + turn)
            target = e.select(head < shape.heads, source, key)
            for at, value in turned:
                e.store(value, target + at * item, shape.dtype)
        with e.loop(0, shape.kv_heads) as head:
            source = start + (head + shape.heads + shape.kv_heads) * (shape.width * item)
            target = line + (head + shape.kv_heads) * head_bytes
            for at in range(0, shape.width, e.lanes):
                e.store(e.load(source + at * item, shape.dtype), target + at * item, shape.dtype)


def _turned(
    shape: Heads, e: Emitter, source: Value, weight: Value, head: Value, eps: Value, cos: Value, sin: Value
) -> list[tuple[int, Value]]:
    """(offset, values) of a head, normalised and turned."""
    item, half = ITEM[shape.dtype], shape.rotary // 2
    offsets = range(0, shape.width, e.lanes)
    values = {at: e.load(source + at * item, shape.dtype) for at in offsets}
    if shape.norm is not None:
        squares = Variable(e, e.splat(0.0))
        for value in values.values():
            squares.set(e.fma(value, value, squares.get()))
        scale = 1.0 / e.sqrt(squares.get().sum() * (1 / shape.width) + e.number(eps))
        own = weight + head * (shape.width * ITEM[shape.norm])
        values = {at: value * scale * e.load(own + at * ITEM[shape.norm], shape.norm) for at, value in values.items()}
    turned = []
    for at, value in values.items():
        if at < shape.rotary:
            partner = values[at + half if at < half else at - half]
            value = value * e.load(cos + at * item, shape.dtype) + partner * e.load(sin + at * item, shape.dtype)
        turned.append((at, value))
    return turned
