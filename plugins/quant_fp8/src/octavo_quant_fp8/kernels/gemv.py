"""y = x W^T for one row: no matrix unit, every weight is read and used once.

Both kernels take x in 16 bits, or in FP8 with its scale. `held_kernel` loads all of its weights before it waits for the
kernel before it (no step writes weights), so that they arrive while x is still being computed; `loop_kernel` is for
rows that are too long to hold, where x would be read too often.
"""

from __future__ import annotations

import triton
import triton.language as tl
from octavo_ops_triton.launch import begin

from octavo_quant_fp8.kernels.widen import widened


@triton.jit
def held_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, PLAIN: tl.constexpr, GATED: tl.constexpr, BIAS: tl.constexpr,
    BN: tl.constexpr, BK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BN rows of the weight; BK is at least K. GATED: the rows are gates [N / 2], then values [N / 2], and an output is silu(gate) * value."""
    r = tl.arange(0, BN)
    if GATED:
        at = tl.program_id(0) * (BN // 2) + r // 2
        n = at + r % 2 * (N // 2)
        live = at < N // 2
    else:
        n = tl.program_id(0) * BN + r
        live = n < N
    k = tl.arange(0, BK)
    mask = live[:, None]
    if BK != K:
        mask = mask & (k < K)[None, :]
    w = tl.load(weight_ptr + n.to(tl.int64)[:, None] * K + k[None, :], mask=mask, other=0.0, eviction_policy="evict_first")
    scale = tl.load(scale_ptr + n, mask=live, other=0.0)
    begin(PDL)
    x = tl.load(x_ptr + k, mask=k < K, other=0.0).to(tl.float32)
    y = tl.sum(widened(w, tl.float32) * x[None, :], 1) * scale
    if GATED:
        y = _finished(y, x_scale_ptr, bias_ptr, n, live, PLAIN, BIAS)
        gate, value = tl.split(tl.reshape(y, (BN // 2, 2)))
        out = tl.program_id(0) * (BN // 2) + tl.arange(0, BN // 2)
        tl.store(out_ptr + out, (gate / (1.0 + tl.exp(-gate)) * value).to(out_ptr.dtype.element_ty), mask=out < N // 2)
    else:
        _store(y, x_scale_ptr, bias_ptr, out_ptr, n, N, PLAIN, BIAS)


@triton.jit
def loop_kernel(
    x_ptr, x_scale_ptr, weight_ptr, scale_ptr, bias_ptr, out_ptr,
    N: tl.constexpr, K: tl.constexpr, PLAIN: tl.constexpr, BIAS: tl.constexpr, HELD: tl.constexpr, BN: tl.constexpr, BK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """BN outputs: the first HELD of K at once, loaded before the wait, then BK at a time. K is at least HELD."""
    n = tl.program_id(0) * BN + tl.arange(0, BN)
    k = tl.arange(0, BK)
    rows = weight_ptr + n.to(tl.int64)[:, None] * K
    scale = tl.load(scale_ptr + n, mask=n < N, other=0.0)
    h = tl.arange(0, HELD)
    held = tl.load(rows + h[None, :], mask=(n < N)[:, None], other=0.0, eviction_policy="evict_first")
    begin(PDL)
    y = tl.sum(widened(held, tl.float32) * tl.load(x_ptr + h).to(tl.float32)[None, :], 1)
    acc = tl.zeros((BN, BK), tl.float32)
    for at in range(HELD, K, BK):
        if N % BN == 0 and (K - HELD) % BK == 0:
            w = tl.load(rows + (at + k)[None, :], eviction_policy="evict_first")
            x = tl.load(x_ptr + at + k)
        else:
            w = tl.load(
                rows + (at + k)[None, :], mask=(n < N)[:, None] & (k + at < K)[None, :], other=0.0, eviction_policy="evict_first"
            )
            x = tl.load(x_ptr + at + k, mask=k + at < K, other=0.0)
        acc += widened(w, tl.float32) * x.to(tl.float32)[None, :]
    _store((y + tl.sum(acc, 1)) * scale, x_scale_ptr, bias_ptr, out_ptr, n, N, PLAIN, BIAS)


@triton.jit
def _store(y, x_scale_ptr, bias_ptr, out_ptr, n, N: tl.constexpr, PLAIN: tl.constexpr, BIAS: tl.constexpr):
    y = _finished(y, x_scale_ptr, bias_ptr, n, n < N, PLAIN, BIAS)
    tl.store(out_ptr + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


@triton.jit
def _finished(y, x_scale_ptr, bias_ptr, n, live, PLAIN: tl.constexpr, BIAS: tl.constexpr):
    if not PLAIN:
        y = y * tl.load(x_scale_ptr)
    if BIAS:
        y += tl.load(bias_ptr + n, mask=live, other=0.0).to(tl.float32)
    return y
