"""Vector code as Python: an Emitter builds LLVM IR, a Value is a number that exists when the code runs.

Owns the few operations that the kernels are written in: 64-bit integers, float32 vectors, loads and stores
of the dtypes that models have, counted loops and branches. A Python loop in a kernel unrolls; `Emitter.loop` runs.
Knows no kernel and calls no compiler.

Addresses are integers in bytes. Floating-point operations are exact in order: nothing is reassociated but
what `Value.sum` says, so a row's result does not depend on how the compiler saw it.
"""

from __future__ import annotations

import math
import struct
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any, Literal

from llvmlite import ir

Dtype = Literal["bfloat16", "float32"]

I1, I8, I16, I32, I64 = (ir.IntType(bits) for bits in (1, 8, 16, 32, 64))
F32, F64 = ir.FloatType(), ir.DoubleType()
ITEM: dict[Dtype, int] = {"bfloat16": 2, "float32": 4}
"""Bytes of an element."""


@cache
def float_bits(value: float) -> int:
    """A float32 as the integer that a kernel takes."""
    bits: int = struct.unpack("<i", struct.pack("<f", value))[0]
    return bits


class BFloat(ir.types.Type):
    """LLVM's bfloat, which llvmlite has no name for; only as the element of an operand of a bfloat16 dot product."""

    def _to_string(self) -> str:
        return "bfloat"

    def __eq__(self, other: object) -> bool:
        return isinstance(other, BFloat)

    def __hash__(self) -> int:
        return hash(BFloat)


class Value:
    """An integer, a float32, or a vector of either. Operators take Values and Python numbers alike; a scalar beside a
    vector is spread over its lanes. Comparisons are signed and give I1 (or a vector of it)."""

    __slots__ = ("emitter", "ir")

    def __init__(self, emitter: Emitter, value: ir.Value) -> None:
        self.emitter, self.ir = emitter, value

    @property
    def type(self) -> ir.Type:
        return self.ir.type

    @property
    def floating(self) -> bool:
        return (self.type.element if isinstance(self.type, ir.VectorType) else self.type) in (F32, F64)

    def _binary(self, other: Any, integer: str, floating: str, swap: bool = False) -> Value:
        a, b = self.emitter.alike(self, other)
        if swap:
            a, b = b, a
        made = getattr(self.emitter.b, floating if a.floating else integer)(a.ir, b.ir)
        return Value(self.emitter, made)

    def __add__(self, other: Any) -> Value:
        return self._binary(other, "add", "fadd")

    def __radd__(self, other: Any) -> Value:
        return self._binary(other, "add", "fadd")

    def __sub__(self, other: Any) -> Value:
        return self._binary(other, "sub", "fsub")

    def __rsub__(self, other: Any) -> Value:
        return self._binary(other, "sub", "fsub", swap=True)

    def __mul__(self, other: Any) -> Value:
        return self._binary(other, "mul", "fmul")

    def __rmul__(self, other: Any) -> Value:
        return self._binary(other, "mul", "fmul")

    def __truediv__(self, other: Any) -> Value:
        return self._binary(other, "", "fdiv")

    def __rtruediv__(self, other: Any) -> Value:
        return self._binary(other, "", "fdiv", swap=True)

    def __floordiv__(self, other: Any) -> Value:
        """Of integers that are not negative."""
        return self._binary(other, "udiv", "")

    def __mod__(self, other: Any) -> Value:
        return self._binary(other, "urem", "")

    def __and__(self, other: Any) -> Value:
        return self._binary(other, "and_", "")

    def __or__(self, other: Any) -> Value:
        return self._binary(other, "or_", "")

    def __lshift__(self, other: Any) -> Value:
        return self._binary(other, "shl", "")

    def __rshift__(self, other: Any) -> Value:
        return self._binary(other, "lshr", "")

    def __neg__(self) -> Value:
        return Value(self.emitter, self.emitter.b.fneg(self.ir))

    def _compare(self, sign: str, other: Any) -> Value:
        a, b = self.emitter.alike(self, other)
        compare = self.emitter.b.fcmp_ordered if a.floating else self.emitter.b.icmp_signed
        return Value(self.emitter, compare(sign, a.ir, b.ir))

    def __lt__(self, other: Any) -> Value:
        return self._compare("<", other)

    def __le__(self, other: Any) -> Value:
        return self._compare("<=", other)

    def __gt__(self, other: Any) -> Value:
        return self._compare(">", other)

    def __ge__(self, other: Any) -> Value:
        return self._compare(">=", other)

    def equals(self, other: Any) -> Value:
        return self._compare("==", other)

    def sum(self) -> Value:
        """The sum of a float32 vector's lanes, in the order of a binary tree."""
        return self.emitter.call(
            f"llvm.vector.reduce.fadd.{_mangled(self.type)}", F32, [self.emitter.f32(-0.0), self], ("reassoc",)
        )

    def max(self) -> Value:
        """The largest lane; NaN lanes are passed over."""
        return self.emitter.call(f"llvm.vector.reduce.fmax.{_mangled(self.type)}", F32, [self])


def _mangled(type: ir.Type) -> str:
    """LLVM's suffix for an overloaded intrinsic."""
    if isinstance(type, ir.VectorType):
        return f"v{type.count}{_mangled(type.element)}"
    return "f32" if type == F32 else "f64" if type == F64 else f"i{type.width}"


class Variable:
    """A Value that changes: what a loop carries. It lives in a register once the compiler is done."""

    def __init__(self, emitter: Emitter, first: Value) -> None:
        self._emitter = emitter
        with emitter.b.goto_entry_block():
            self._slot = emitter.b.alloca(first.type)
        self.set(first)

    def get(self) -> Value:
        return Value(self._emitter, self._emitter.b.load(self._slot))

    def set(self, value: Value) -> None:
        self._emitter.b.store(value.ir, self._slot)


class Emitter:
    """Writes one function. lanes: float32 lanes of the vectors that kernels use."""

    def __init__(self, builder: ir.IRBuilder, lanes: int) -> None:
        self.b, self.lanes = builder, lanes
        self.vector = ir.VectorType(F32, lanes)

    # ------------------------------------------------------------ constants and types

    def i64(self, value: int) -> Value:
        return Value(self, ir.Constant(I64, value))

    def f32(self, value: float) -> Value:
        return Value(self, ir.Constant(F32, value))

    def splat(self, value: Any, lanes: int | None = None) -> Value:
        """A scalar (a Python number is a float32) in every lane."""
        scalar = value if isinstance(value, Value) else self.f32(float(value))
        vector = ir.VectorType(scalar.type, lanes or self.lanes)
        if isinstance(scalar.ir, ir.Constant):
            return Value(self, ir.Constant(vector, [scalar.ir.constant] * vector.count))
        undefined = ir.Constant(vector, ir.Undefined)
        one = self.b.insert_element(undefined, scalar.ir, ir.Constant(I32, 0))
        zeros = ir.Constant(ir.VectorType(I32, vector.count), [0] * vector.count)
        return Value(self, self.b.shuffle_vector(one, undefined, zeros))

    def alike(self, a: Value, b: Any) -> tuple[Value, Value]:
        """Both with the type of the wider; a Python number takes the other's."""
        if not isinstance(b, Value):
            element = a.type.element if isinstance(a.type, ir.VectorType) else a.type
            b = Value(self, ir.Constant(element, float(b) if element in (F32, F64) else int(b)))
        wide_a, wide_b = isinstance(a.type, ir.VectorType), isinstance(b.type, ir.VectorType)
        if wide_a and not wide_b:
            b = self.splat(b, a.type.count)
        elif wide_b and not wide_a:
            a = self.splat(a, b.type.count)
        return a, b

    def bits(self, value: Value, type: ir.Type) -> Value:
        """The same bits as another type."""
        return Value(self, self.b.bitcast(value.ir, type))

    def call(self, name: str, result: ir.Type, arguments: Sequence[Value], flags: tuple[str, ...] = ()) -> Value:
        """A function by name: an intrinsic, or a symbol that the compiler was given."""
        module = self.b.module
        function = module.globals.get(name)
        if function is None:
            function = ir.Function(module, ir.FunctionType(result, [a.type for a in arguments]), name)
        return Value(self, self.b.call(function, [a.ir for a in arguments], fastmath=flags))

    # ------------------------------------------------------------ arithmetic

    def fma(self, a: Value, b: Value, c: Value) -> Value:
        """a * b + c, rounded once."""
        a, b = self.alike(a, b)
        a, c = self.alike(a, c)
        a, b = self.alike(a, b)
        return self.call(f"llvm.fma.{_mangled(a.type)}", a.type, [a, b, c])

    def maximum(self, a: Value, b: Any) -> Value:
        """The larger; a NaN gives way to the other."""
        a, b = self.alike(a, b)
        return self.call(f"llvm.maxnum.{_mangled(a.type)}", a.type, [a, b])

    def least(self, a: Value, b: Any) -> Value:
        """The smaller of two floats; a NaN gives way to the other."""
        a, b = self.alike(a, b)
        return self.call(f"llvm.minnum.{_mangled(a.type)}", a.type, [a, b])

    def smaller(self, a: Value, b: Any) -> Value:
        """Of two integers."""
        a, b = self.alike(a, b)
        return self.select(a < b, a, b)

    def larger(self, a: Value, b: Any) -> Value:
        a, b = self.alike(a, b)
        return self.select(a < b, b, a)

    def select(self, condition: Value, yes: Any, no: Any) -> Value:
        if not isinstance(yes, Value):
            no, yes = self.alike(no, yes)
        yes, no = self.alike(yes, no)
        return Value(self, self.b.select(condition.ir, yes.ir, no.ir))

    def sqrt(self, x: Value) -> Value:
        return self.call(f"llvm.sqrt.{_mangled(x.type)}", x.type, [x])

    def to_float(self, x: Value) -> Value:
        """A whole number as float32."""
        return Value(self, self.b.sitofp(x.ir, F32))

    def double(self, x: Value) -> Value:
        return Value(self, self.b.fpext(x.ir, F64))

    def number(self, bits: Value) -> Value:
        """The float32 whose bits came as an argument (`float_bits`)."""
        return Value(self, self.b.bitcast(self.b.trunc(bits.ir, I32), F32))

    def narrow(self, x: Value, type: ir.Type) -> Value:
        return Value(self, self.b.trunc(x.ir, type))

    def index(self, address: Value, type: ir.Type) -> Value:
        """An integer of this type in memory, as 64 bits."""
        found = self.load_raw(address, type, type.width // 8)
        return found if type == I64 else Value(self, self.b.sext(found.ir, I64))

    def not_(self, x: Value) -> Value:
        return Value(self, self.b.not_(x.ir))

    def any(self, lanes: Value) -> Value:
        """Whether a vector of I1 has one that is set."""
        return Value(
            self,
            self.b.icmp_unsigned("!=", self.b.bitcast(lanes.ir, ir.IntType(lanes.type.count)), ir.IntType(lanes.type.count)(0)),
        )

    def is_nan(self, x: Value) -> Value:
        return Value(self, self.b.fcmp_unordered("uno", x.ir, x.ir))

    def exp(self, x: Value) -> Value:
        """e^x of float32 x <= 88, to 2 units in the last place; 0 below -87.3 (float32's normal range); NaN of NaN.

        x = n ln 2 + r with |r| <= ln 2 / 2, ln 2 in two parts (Cody and Waite); e^r by its Taylor polynomial of degree 7,
        whose error there is 2^-27; 2^n by adding n to the exponent's bits. n is what adding 1.5 * 2^23 leaves in the lowest bits."""
        whole = ir.VectorType(I32, x.type.count) if isinstance(x.type, ir.VectorType) else I32
        shifted = self.fma(x, self._like(x, math.log2(math.e)), self._like(x, 1.5 * 2**23))
        n = shifted - 1.5 * 2**23
        r = self.fma(n, self._like(x, -0.693359375), x)
        r = self.fma(n, self._like(x, 2.12194440e-4), r)
        y = self._like(x, 1 / 5040)
        for term in (1 / 720, 1 / 120, 1 / 24, 1 / 6, 1 / 2, 1.0, 1.0):
            y = self.fma(y, r, self._like(x, term))
        scaled = self.bits(self.bits(y, whole) + (self.bits(shifted, whole) << 23), x.type)
        return self.select(x < -87.33, self._like(x, 0.0), scaled)

    def _like(self, x: Value, number: float) -> Value:
        return self.alike(x, number)[1]

    # ------------------------------------------------------------ memory

    def pointer(self, address: Value, type: ir.Type) -> ir.Value:
        return self.b.inttoptr(address.ir, type.as_pointer())

    def load_raw(self, address: Value, type: ir.Type, align: int = 1) -> Value:
        """A value of this very type."""
        return Value(self, self.b.load(self.pointer(address, type), align=align))

    def store_raw(self, value: Value, address: Value, align: int = 1) -> None:
        self.b.store(value.ir, self.pointer(address, value.type), align=align)

    def load(self, address: Value, dtype: Dtype) -> Value:
        """A vector of elements of this dtype, as float32."""
        if dtype == "float32":
            return self.load_raw(address, self.vector, 4)
        return self._widen(self.load_raw(address, ir.VectorType(I16, self.lanes), 2), ir.VectorType(I32, self.lanes), self.vector)

    def load_one(self, address: Value, dtype: Dtype) -> Value:
        """One element, as float32."""
        if dtype == "float32":
            return self.load_raw(address, F32, 4)
        return self._widen(self.load_raw(address, I16, 2), I32, F32)

    def _widen(self, halves: Value, whole: ir.Type, result: ir.Type) -> Value:
        return self.bits(Value(self, self.b.zext(halves.ir, whole)) << 16, result)

    def store(self, value: Value, address: Value, dtype: Dtype) -> None:
        """A float32 vector (or scalar) as elements of this dtype."""
        if dtype == "float32":
            self.store_raw(value, address, 4)
        else:
            self.store_raw(self.round_to_bf16(value), address, 2)

    def round_to_bf16(self, value: Value) -> Value:
        """The bits of the nearest bfloat16, ties to even; a NaN stays one."""
        wide = isinstance(value.type, ir.VectorType)
        whole, half = (ir.VectorType(t, value.type.count) if wide else t for t in (I32, I16))
        bits = self.bits(value, whole)
        rounded = bits + ((bits >> 16) & 1) + 0x7FFF
        kept = self.select(self.is_nan(value), bits | 0x400000, rounded)
        return Value(self, self.b.trunc((kept >> 16).ir, half))

    def scratch(self, count: int) -> Value:
        """The address of `count` float32 on the stack, 64-byte aligned."""
        with self.b.goto_entry_block():
            slot = self.b.alloca(ir.ArrayType(F32, count))
            slot.align = 64
            return Value(self, self.b.ptrtoint(slot, I64))

    def stack(self, size: Value) -> Value:
        """The address of `size` bytes on the stack until the function returns, 64-byte aligned. Not in a loop."""
        slot = self.b.alloca(ir.IntType(8), size=size.ir)
        slot.align = 64
        return Value(self, self.b.ptrtoint(slot, I64))

    def prefetch(self, address: Value) -> None:
        """Ask for the cache line at an address, which need not be mapped, into the second-level cache."""
        byte = ir.IntType(8).as_pointer()
        numbers = [Value(self, ir.Constant(I32, n)) for n in (0, 2, 1)]  # for reading, to the second level, data
        self.call("llvm.prefetch.p0", ir.VoidType(), [Value(self, self.b.inttoptr(address.ir, byte)), *numbers])

    # ------------------------------------------------------------ control

    @contextmanager
    def loop(self, start: Any, stop: Any, step: Any = 1) -> Iterator[Value]:
        """for i in range(start, stop, step), step positive."""
        begin = start if isinstance(start, Value) else self.i64(start)
        end = stop if isinstance(stop, Value) else self.i64(stop)
        counter = Variable(self, begin)
        head, body, done = (self.b.append_basic_block(name) for name in ("loop", "body", "done"))
        self.b.branch(head)
        self.b.position_at_end(head)
        self.b.cbranch((counter.get() < end).ir, body, done)
        self.b.position_at_end(body)
        yield counter.get()
        counter.set(counter.get() + step)
        self.b.branch(head)
        self.b.position_at_end(done)

    @contextmanager
    def when(self, condition: Value) -> Iterator[None]:
        with self.b.if_then(condition.ir):
            yield

    def share(self, total: Value, thread: Value, threads: Value) -> tuple[Value, Value]:
        """[first, end) of the items that thread `thread` of `threads` takes of `total`: equal shares, in order."""
        return total * thread // threads, total * (thread + 1) // threads
