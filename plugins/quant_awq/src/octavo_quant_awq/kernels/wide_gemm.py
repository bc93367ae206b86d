"""W4A16 for tens to hundreds of rows on Hopper: the launches of wide.cu, and weights made 16 bits wide by the same file.

Owns compiled variants and the rearranged copy of x that a call makes. Compiling happens when a variant is first asked for,
which must be before a graph is captured.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cache
from importlib import resources

import torch
from torch import Tensor

from octavo_quant_awq.kernels.cuda_driver import CudaFunction, compile_source
from octavo_quant_awq.kernels.cuda_gemm import Variant

MAX_ROWS = 256
"""Rows up to which it beats dequantising and cuBLAS, on the matrices of an 8B model together."""
TOKENS = (64, 128)
"""Rows of x that an instruction may take."""


@dataclass(frozen=True, slots=True)
class WideShape:
    """tokens: rows of x that an instruction takes (32, 64 or 128 were measured); groups: warpgroups of 64 outputs; stages: blocks of x in flight;
    cluster: blocks that share K; depth: blocks of weights in flight a warp."""

    tokens: int
    groups: int
    stages: int
    cluster: int
    depth: int = 2

    @property
    def rows(self) -> int:
        return 64 * self.groups

    @property
    def shared(self) -> int:
        """Bytes: x in flight, or afterwards the sums."""
        return max(self.stages * self.tokens * 256, 4 * self.tokens * (self.rows + 4))


@dataclass(frozen=True, slots=True)
class WideFunctions:
    """The compiled kernels of one shape."""

    arrange: CudaFunction
    multiply: CudaFunction
    dequantise: CudaFunction


def choose_shape(m: int, rows: int, inputs: int) -> WideShape:
    """The shape for m rows of x times a matrix [rows, inputs]."""
    tokens = next((t for t in TOKENS if t >= m), TOKENS[-1])
    strips, blocks = -(-rows // 128), -(-inputs // 128)
    if tokens == TOKENS[0]:
        groups, cluster = (1, 4) if strips < 40 else (2, 2) if strips < 100 else (1, 2)
    elif m <= tokens and strips < 40 and blocks >= 64:
        groups, cluster = 1, 2
    else:
        groups, cluster = 2, 1 if strips * -(-m // tokens) >= 96 else 2
    while cluster > 1 and 2 * cluster > blocks:
        cluster //= 2
    return WideShape(tokens, groups, 4 if tokens == TOKENS[0] else 3, cluster)


def supported(device: torch.device) -> bool:
    """Whether the device has the warpgroup instructions."""
    return torch.cuda.get_device_capability(device)[0] == 9


@cache
def functions(variant: Variant, shape: WideShape, device: torch.device) -> WideFunctions:
    """The compiled kernels; the first call compiles."""
    defines = {
        "BF16": int(variant.bf16), "SCALE_BF16": int(variant.scale_bf16), "ZEROS": int(variant.zeros), "SUB": variant.sub,
        "TOKENS": shape.tokens, "GROUPS": shape.groups, "STAGES": shape.stages,
        "DEPTH": shape.depth,
    }  # fmt: skip
    source = _instruction(shape.tokens, variant.bf16) + resources.files(__package__).joinpath("wide.cu").read_text()
    module = compile_source(source, defines, device, features="a")
    threads = 128 * shape.groups + 32
    return WideFunctions(
        CudaFunction(module, "arrange", threads=256, cluster=1, shared=0, dependent=True),
        CudaFunction(module, "wide", threads=threads, cluster=shape.cluster, shared=shape.shared, dependent=True),
        CudaFunction(module, "dequantise", threads=256, cluster=1, shared=0, dependent=False),
    )


def _instruction(tokens: int, bf16: bool) -> str:
    """The function wgmma: c [64, tokens] += a b, a in registers, b in shared memory."""
    count, kind = tokens // 2, "bf16" if bf16 else "f16"
    listed = ", ".join(f"%{i}" for i in range(count))
    results = ", ".join(f'"+f"(c[{i}])' for i in range(count))
    a, b = ", ".join(f"%{count + i}" for i in range(4)), f"%{count + 4}"
    return (
        "typedef unsigned int u32;\n"
        f"__device__ __forceinline__ void wgmma(float (&c)[{count}], u32 a0, u32 a1, u32 a2, u32 a3, unsigned long long b) {{\n"
        f'    asm volatile("wgmma.mma_async.sync.aligned.m64n{tokens}k16.f32.{kind}.{kind} {{{listed}}}, {{{a}}}, {b}, 1, 1, 1, 0;"\n'
        f'        : {results} : "r"(a0), "r"(a1), "r"(a2), "r"(a3), "l"(b));\n}}\n'
    )


def launch(
    made: WideFunctions, shape: WideShape, words: Tensor, scales: Tensor, zeros: Tensor | None, x: Tensor, bias: Tensor | None,
    out: Tensor, group_step: int,
) -> Tensor:  # fmt: skip
    """out [M, N] = x [M, K] W^T + bias. x's rows must be dense and start at multiples of 16 bytes."""
    (m, k), n = x.shape, out.shape[1]
    token_blocks, blocks = -(-m // shape.tokens), -(-k // 128)
    arranged = torch.empty(token_blocks * blocks * shape.tokens * 128, dtype=x.dtype, device=x.device)
    units = token_blocks * shape.tokens * blocks * 4
    made.arrange(-(-units // 256), 1, (x.data_ptr(), arranged.data_ptr()), (m, k, x.stride(0)))
    pointers = (words.data_ptr(), scales.data_ptr(), zeros.data_ptr() if zeros is not None else 0, arranged.data_ptr(),
                bias.data_ptr() if bias is not None else 0, out.data_ptr())  # fmt: skip
    made.multiply(-(-n // shape.rows), token_blocks, pointers, (m, n, k, group_step))
    return out


def dequantise(
    made: WideFunctions,
    words: Tensor,
    scales: Tensor,
    zeros: Tensor | None,
    out: Tensor,
    *,
    first: int,
    rows: int,
    group_step: int,
) -> Tensor:
    """out [count, K]: that many rows of W, which has `rows`, from `first` on, each weight computed in float32 and rounded once."""
    count, k = out.shape
    pointers = (words.data_ptr(), scales.data_ptr(), zeros.data_ptr() if zeros is not None else 0, out.data_ptr())
    made.dequantise(-(-count * 4 // 256), 1, pointers, (first, count, rows, k, group_step), y=-(-k // 128))
    return out
