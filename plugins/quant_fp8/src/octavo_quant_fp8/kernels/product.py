"""y = x W^T, both FP8: for few rows the weight is read once, at the speed of memory.

The weight is the left operand of the dot (64 of its rows fill a matrix unit) and the tokens, padded to BM, are its
columns. Where N / BN programs do not fill the device, K is cut into SPLIT parts: each program leaves its sums in
`part`, and the last one of a tile to arrive adds them in a fixed order and finishes. `count` is zero between launches.
"""

from __future__ import annotations

import triton
import triton.language as tl
from octavo_ops_triton.launch import begin


@triton.jit(do_not_specialize=["M"])
def product_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr, part_ptr, count_ptr,
    M,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr, SPLIT: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs of BM rows, over one part of K. Grid: (tiles of N * tiles of M, SPLIT)."""
    tiles: tl.constexpr = (N + BN - 1) // BN
    steps: tl.constexpr = (K + BK * SPLIT - 1) // (BK * SPLIT)
    tile = tl.program_id(0)
    n = (tile % tiles) * BN + tl.arange(0, BN)
    m = (tile // tiles) * BM + tl.arange(0, BM)
    k = tl.program_id(1) * (steps * BK) + tl.arange(0, BK)
    weights = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    inputs = x_ptr + m[None, :] * X_STRIDE + k[:, None]
    begin(PDL)
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(steps):
        at = step * BK
        if N % BN == 0 and K % (BK * SPLIT) == 0:
            w = tl.load(weights + at, eviction_policy="evict_first")
            x = tl.load(inputs + at, mask=(m < M)[None, :], other=0.0)
        else:
            w = tl.load(weights + at, mask=(n < N)[:, None] & (k + at < K)[None, :], other=0.0, eviction_policy="evict_first")
            x = tl.load(inputs + at, mask=(m < M)[None, :] & (k + at < K)[:, None], other=0.0)
        acc = tl.dot(w, x, acc)
    y = tl.trans(acc)
    mask = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None] * N + n[None, :]
    if SPLIT == 1:
        _finish(y, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, m, n, at, mask, M, N, BIAS)
    else:
        own = part_ptr + (tile * SPLIT) * (BM * BN) + tl.arange(0, BM)[:, None] * BN + tl.arange(0, BN)[None, :]
        tl.store(own + tl.program_id(1) * (BM * BN), y)
        tl.debug_barrier()  # every thread's sums are written before one of them says so
        if tl.atomic_add(count_ptr + tile, 1, sem="acq_rel") == SPLIT - 1:
            tl.store(count_ptr + tile, 0)
            y = tl.zeros((BM, BN), tl.float32)
            for s in tl.static_range(SPLIT):
                y += tl.load(own + s * (BM * BN), cache_modifier=".cg")
            _finish(y, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, m, n, at, mask, M, N, BIAS)


@triton.jit
def _finish(
    y, x_scale_ptr, scale_ptr, bias_ptr, out_ptr, m, n, at, mask, M, N: tl.constexpr, BIAS: tl.constexpr
):  # fmt: skip
    y = y * tl.load(scale_ptr + n, mask=n < N, other=0.0)[None, :]
    y = y * tl.load(x_scale_ptr + m, mask=m < M, other=0.0)[:, None]
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    tl.store(out_ptr + at, y.to(out_ptr.dtype.element_ty), mask=mask)


@triton.jit(do_not_specialize=["M"])
def block_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, row_ptr, bias_ptr, out_ptr,
    M,
    N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, ALIGNED: tl.constexpr, BIAS: tl.constexpr,
    BM: tl.constexpr, BN: tl.constexpr, GROUP: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """Weights with a scale for every 128 x 128 block: each 128 of K are scaled before they are added.

    scale [block rows, ceil(K / 128)]; row int32 [N] names the block row of an output, read unless they are ALIGNED:
    n // 128. x_scale [M, ceil(K / 128)]. Programs run through GROUP tiles of M for one of N before they go on,
    so that the weight stays in the L2.
    """
    BK: tl.constexpr = 128
    columns: tl.constexpr = (K + BK - 1) // BK
    tiles_n: tl.constexpr = (N + BN - 1) // BN
    tiles_m = tl.cdiv(M, BM)
    tile = tl.program_id(0)
    group = tile // (GROUP * tiles_n)
    high = tl.minimum(tiles_m - group * GROUP, GROUP)
    within = tile % (GROUP * tiles_n)
    n = (within // high) * BN + tl.arange(0, BN)
    m = (group * GROUP + within % high) * BM + tl.arange(0, BM)
    k = tl.arange(0, BK)
    weights = weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :]
    inputs = x_ptr + m[None, :].to(tl.int64) * X_STRIDE + k[:, None]
    if ALIGNED:
        scales = scale_ptr + ((within // high) * BN // BK) * columns
    else:
        scales = scale_ptr + tl.load(row_ptr + n, mask=n < N, other=0) * columns
    begin(PDL)
    acc = tl.zeros((BN, BM), tl.float32)
    for step in range(columns):
        at = step * BK
        if N % BN == 0 and K % BK == 0:
            w = tl.load(weights + at)
            x = tl.load(inputs + at, mask=(m < M)[None, :], other=0.0)
        else:
            w = tl.load(weights + at, mask=(n < N)[:, None] & (k + at < K)[None, :], other=0.0)
            x = tl.load(inputs + at, mask=(m < M)[None, :] & (k + at < K)[:, None], other=0.0)
        scale = tl.load(scales + step)
        if not ALIGNED:
            scale = scale[:, None]
        rows = tl.load(x_scale_ptr + m * columns + step, mask=m < M, other=0.0)
        acc += tl.dot(w, x) * (scale * rows[None, :])
    y = tl.trans(acc)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=n < N, other=0.0).to(tl.float32)[None, :]
    mask = (m < M)[:, None] & (n < N)[None, :]
    tl.store(out_ptr + m[:, None].to(tl.int64) * N + n[None, :], y.to(out_ptr.dtype.element_ty), mask=mask)
