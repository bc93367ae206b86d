"""4-bit weights made 16 bits wide, for products that a library's kernel takes: the launches of dequantise.cu."""

from __future__ import annotations

from functools import cache

import torch
from octavo.cuda import Function
from torch import Tensor

from octavo_quant_awq.kernels.cuda_driver import compile_file
from octavo_quant_awq.kernels.variant import Variant

_THREADS = 256


@cache
def function(variant: Variant, device: torch.device) -> Function:
    """The compiled kernel; the first call compiles."""
    module = compile_file("dequantise.cu", variant.defines, device)
    return Function(module, "dequantise", threads=_THREADS, cluster=1, shared=0, dependent=False)


def dequantise(
    call: Function,
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
    call((-(-count * 4 // _THREADS), -(-k // 128), 1), pointers, (first, count, rows, k, group_step))
    return out
