"""y = x W^T for x in 16 bits and FP8 weights: the weight is widened in registers and multiplied in x's dtype.

For weight-only FP8, and for devices without FP8 units.
"""

from __future__ import annotations

import triton
import triton.language as tl
from octavo_ops_triton.launch import begin

from octavo_quant_fp8.kernels.widen import widened


@triton.jit(do_not_specialize=["M"])
def mixed_kernel(
    x_ptr, weight_ptr, scale_ptr, row_ptr, bias_ptr, out_ptr,
    M,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, BLOCKS: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs of BM rows; neighbouring programs share a tile of the weight. scale is a value a row of the weight, or, with
    BLOCKS (then BK is 128), [block rows, ceil(K / 128)] of which int32 row [N] names an output's."""
    columns: tl.constexpr = (K + BK - 1) // BK
    tiles_m = tl.cdiv(M, BM)
    tile = tl.program_id(0)
    n = (tile // tiles_m) * BN + tl.arange(0, BN)
    m = (tile % tiles_m) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    weights = weight_ptr + n.to(tl.int64)[None, :] * K + k[:, None]
    inputs = x_ptr + m[:, None].to(tl.int64) * X_STRIDE + k[None, :]
    scales = scale_ptr + (tl.load(row_ptr + n, mask=n < N, other=0) * columns if BLOCKS else n)
    begin(PDL)
    acc = tl.zeros((BM, BN), tl.float32)
    for step in range(columns):
        at = step * BK
        if N % BN == 0 and K % BK == 0:
            w = tl.load(weights + at)
            x = tl.load(inputs + at, mask=(m < M)[:, None], other=0.0)
        else:
            w = tl.load(weights + at, mask=(n < N)[None, :] & (k + at < K)[:, None], other=0.0)
            x = tl.load(inputs + at, mask=(m < M)[:, None] & (k + at < K)[None, :], other=0.0)
        if BLOCKS:
            acc += tl.dot(x, widened(w, x.dtype)) * tl.load(scales + step)[None, :]
        else:
            acc = tl.dot(x, widened(w, x.dtype), acc)
    if not BLOCKS:
        acc *= tl.load(scales, mask=n < N, other=0.0)[None, :]
    if BIAS:
        acc += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    out = out_ptr + m[:, None].to(tl.int64) * N + n[None, :]
    tl.store(out, acc.to(out_ptr.dtype.element_ty), mask=(m < M)[:, None] & (n < N)[None, :])
