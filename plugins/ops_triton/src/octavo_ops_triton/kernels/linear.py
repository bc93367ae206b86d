"""A Linear of few rows: read the weight once, at the speed of memory. One to four rows here, five to 32 in skinny.py.

A program holds BLOCK_N whole rows of the weight in registers: all its loads are in flight at once and there is
no loop to start up. They are issued before the wait for the preceding kernel (weights are written by no step),
so with programmatic dependent launch the weight arrives while the input is still being computed.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_ops_triton.kernels import skinny
from octavo_ops_triton.launch import Launcher, begin, rows

MAX_ROWS = 4
MOST_OUTPUTS = 4096
"""Of five to 32 rows: cuBLAS fills the device by itself where there are more."""
MAX_K = 16384
HELD = 8192
"""Weight values that a program of four warps holds, 64 a thread."""


@triton.jit
def linear_kernel(
    x_ptr, weight_ptr, out_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all M rows."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    mask = (n < N)[:, None] & (k < K)[None, :]
    weight = tl.load(weight_ptr + n.to(tl.int64)[:, None] * WEIGHT_STRIDE + k[None, :], mask=mask, other=0.0)
    begin(PDL)
    for m in tl.static_range(M):
        x = tl.load(x_ptr + m * X_STRIDE + k, mask=k < K, other=0.0).to(tl.float32)
        y = tl.sum(weight.to(tl.float32) * x[None, :], axis=1)
        tl.store(out_ptr + m * N + n, y.to(out_ptr.dtype.element_ty), mask=n < N)


def wins(m: int, n: int, k: int) -> bool:
    """Whether `small_linear` takes the shape and is faster there than cuBLAS, after the measurements in
    benchmarks/RESULTS.md: always for one row, less often the more rows there are, because each is another pass over
    the registers. Never for three: no graph has so many, and the kernel would be compiled when a prompt first brings them."""
    if m == 1:
        return k <= MAX_K
    if m > MAX_ROWS:
        return m <= skinny.MAX_ROWS and n <= MOST_OUTPUTS and k >= 2048
    if m == 2:
        return k <= HELD and (n <= 4096 or k >= 4096)
    return m == MAX_ROWS and n <= 2048 and k <= HELD


def _tile(block_k: int) -> tuple[int, int]:
    """(rows of the weight, warps) of a program."""
    return max(1, min(16, HELD // block_k)), 8 if block_k > HELD else 4


class SmallLinear:
    """The operator `small_linear`; `wins(M, N, K)` says where it pays, so that who asks need not import this plugin."""

    wins = staticmethod(wins)

    def __init__(self, launch: Launcher) -> None:
        self._launch = launch
        self._arrived: Tensor | None = None  # of skinny.py: zero before and after every launch

    def __call__(self, x: Tensor, weight: Tensor, dtype: torch.dtype | None = None) -> Tensor:
        """x [M, K] times weight [N, K] transposed: a new tensor [M, N] of `dtype` (default x's), summed in float32.

        M is 1 to 4 and K at most 16384, or M is 5 to 32 and N at most 4096: `wins` says where it pays. weight must have
        been written before the preceding kernel was launched."""
        (m, k), n = x.shape, weight.shape[0]
        if MAX_ROWS < m <= skinny.MAX_ROWS and n <= MOST_OUTPUTS and weight.shape[1] == k:
            if self._arrived is None:
                self._arrived = torch.zeros(MOST_OUTPUTS, dtype=torch.int32, device=x.device)
            return skinny.skinny(self._launch, x, weight, dtype or x.dtype, self._arrived, skinny.tile(n, k))
        if not (0 < m <= MAX_ROWS and k <= MAX_K and weight.shape[1] == k):
            raise ValueError(
                f"small_linear: x {list(x.shape)}, weight {list(weight.shape)}: 1 to {MAX_ROWS} rows of up to {MAX_K} are taken, "
                f"and up to {skinny.MAX_ROWS} rows for up to {MOST_OUTPUTS} outputs"
            )
        out = torch.empty((m, n), dtype=dtype or x.dtype, device=x.device)
        block_k = triton.next_power_of_2(k)
        block_n, warps = _tile(block_k)
        constants = (m, n, k, rows(x, "small_linear"), rows(weight, "small_linear"), block_n, block_k)
        self._launch(linear_kernel, (triton.cdiv(n, block_n), 1), (x, weight, out), (), constants, warps=warps)
        return out
