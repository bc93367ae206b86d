"""W4A16 for tens of rows and more on Hopper: the launches of warpgroup.cu.

Owns compiled variants. Compiling happens when a variant is first asked for, which must be before a graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import torch
from octavo.cuda import Function
from torch import Tensor

from octavo_quant_awq.kernels.cuda_driver import Matrix, compile_file, header, multiply
from octavo_quant_awq.kernels.variant import Variant, stage_bytes

PROCESSORS = 132
"""Multiprocessors of the GPU that shapes were measured on; others take the same."""


@dataclass(frozen=True, slots=True)
class WarpgroupShape:
    """tokens: rows of x a block; tiles: of 64 outputs, a warpgroup; groups: warpgroups; stages: blocks of 128 inputs in
    flight; cluster: blocks that share K; exact: products of a group are scaled in float32, instead of weights in 16 bits; min_blocks that a
    multiprocessor must hold; push: sums go straight to the block that adds them
    up; slots of left operands, of 32 inputs each, in registers; registers of a thread that multiplies, taken
    from those that copy (0: all have the same)."""

    tokens: int
    tiles: int
    groups: int
    stages: int
    cluster: int
    exact: bool
    min_blocks: int = 1
    push: bool = False
    slots: int = 2
    units: int = 2
    registers: int = 0

    @property
    def rows(self) -> int:
        return 64 * self.tiles * self.groups

    @property
    def threads(self) -> int:
        return 128 * self.groups + (128 if self.registers else 32)

    @property
    def compiled(self) -> tuple[tuple[str, int], ...]:
        """The macros."""
        return (
            ("TOKENS", self.tokens), ("TILES", self.tiles), ("GROUPS", self.groups), ("STAGES", self.stages),
            ("EXACT", int(self.exact)), ("SLOTS", self.slots), ("UNITS", self.units), ("PUSH", int(self.push)), ("MIN_BLOCKS", self.min_blocks), ("REGISTERS", self.registers),
        )  # fmt: skip

    def shared(self, variant: Variant) -> int:
        """Bytes: the ring, or afterwards the sums."""
        ring = self.stages * stage_bytes(self.rows, self.tokens, variant, align=1024)
        if (
            self.push
        ):  # what blocks of a cluster of 8 send each other: the limit on memory is the function's, whatever the cluster
            return ring + 64 * self.tokens * (self.rows // 16 + 7)
        return max(ring, 4 * self.tokens * (self.rows + 4))


def fills(rows: int) -> bool:
    """Whether a matrix has outputs enough for blocks of 128 on all multiprocessors."""
    return rows > 128 * PROCESSORS


def choose_shape(m: int, rows: int, inputs: int) -> WarpgroupShape:
    """The shape for m rows of x times a matrix [rows, inputs], more than 32 where it does not fill the GPU: K is divided among blocks where there
    are few."""
    strips = -(-rows // 128)
    if m > 64:
        return _many(m, strips)
    tokens = max(8, 1 << (m - 1).bit_length())
    if fills(rows):
        return _wide(tokens)
    shape, most = _deep(inputs)
    cluster = 1
    while cluster < 8 and 2 * cluster * -(-rows // shape.rows) <= most and 512 * cluster <= inputs:
        cluster *= 2
    return replace(shape, cluster=cluster)


def shapes(rows: int, inputs: int, first: int, last: int) -> set[WarpgroupShape]:
    """All that `choose_shape` gives for `first` to `last` rows."""
    ends = {m for m in (8, 16, 32, 64, *range(128, last + 128, 128)) if m >= first}
    return {choose_shape(min(m, last), rows, inputs) for m in ends}


def _wide(tokens: int) -> WarpgroupShape:
    """Up to 64 rows, and outputs enough for all multiprocessors."""
    if tokens <= 16:
        return WarpgroupShape(tokens, 1, 7, 4, 2, True, push=True, units=1)
    if tokens == 32:
        return WarpgroupShape(32, 1, 4, 4, 1, True, push=True, units=1)
    return WarpgroupShape(64, 2, 2, 3, 1, False, push=True)


def _deep(inputs: int) -> tuple[WarpgroupShape, float]:
    """33 to 64 rows, and fewer outputs: the shape of a block, and how many blocks there may be when K is divided."""
    return WarpgroupShape(64, 1, 2, 4, 1, False, 2), (2 if inputs >= 8192 else 1.5) * PROCESSORS


def _many(m: int, strips: int) -> WarpgroupShape:
    """More than 64 rows, `strips` times 128 outputs: blocks of 256 rows of x or of 256 outputs, which do more with what they read, where those of
    128 would not end sooner."""
    small, large = strips * -(-m // 128), strips * -(-m // 256)
    if m <= 128 and strips > PROCESSORS:
        return WarpgroupShape(128, 2, 2, 4, 1, False, registers=232)
    if m > 128 and large >= PROCESSORS * 2 // 3 and 12 * -(-large // PROCESSORS) <= 7 * -(-small // PROCESSORS):
        return WarpgroupShape(256, 1, 2, 3, 1, False, registers=232)
    return WarpgroupShape(128, 1, 2, 5, 2 if 2 * small <= PROCESSORS else 1, False)


@cache
def _module(variant: Variant, macros: tuple[tuple[str, int], ...], tokens: int, device: torch.device) -> Any:
    return compile_file(
        "warpgroup.cu",
        variant.defines | dict(macros),
        device,
        features="a",
        before=header("cluster.cuh") + _instruction(tokens, variant.bf16),
    )


@cache
def function(variant: Variant, shape: WarpgroupShape, device: torch.device) -> Function:
    """The compiled kernel; the first call compiles."""
    module = _module(variant, shape.compiled, shape.tokens, device)
    return Function(
        module,
        "warpgroup",
        threads=shape.threads,
        cluster=shape.cluster,
        shared=shape.shared(variant),
        dependent=True,
    )


def _instruction(tokens: int, bf16: bool) -> str:
    """The functions wgmma: c [64, tokens] += a b, a in registers, b in shared memory; and wgmma_new: c = a b. The upper half
    of b's descriptor says 128-byte swizzle, and 1024 bytes between eight rows."""
    count, kind = tokens // 2, "bf16" if bf16 else "f16"
    listed = ", ".join(f"%{i}" for i in range(count))
    a, b = ", ".join(f"%{count + i}" for i in range(4)), f"%{count + 4}"
    text = ""
    for name, constraint, add in (("wgmma", "+f", 1), ("wgmma_new", "=f", 0)):
        results = ", ".join(f'"{constraint}"(c[{i}])' for i in range(count))
        text += (
            f"__device__ __forceinline__ void {name}(float (&c)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, u32 b) {{\n"
            f'    asm volatile("{{\\n.reg .b64 d;\\nmov.b64 d, {{{b}, {1 << 30 | 64}}};\\n'
            f"wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{kind}.{kind} "
            f'{{{listed}}}, {{{a}}}, d, {add}, 1, 1, 0;\\n}}"\n'
            f'        : {results} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "r"(b));\n}}\n'
        )
    return text


def launch(
    call: Function, shape: WarpgroupShape, matrix: Matrix, x: Tensor, bias: Tensor | None, out: Tensor, group_step: int
) -> Tensor:
    """As `multiply`."""
    return multiply(
        call, -(-out.shape[1] // shape.rows) * -(-len(x) // shape.tokens), matrix, x, bias, out, group_step, box=shape.tokens
    )
