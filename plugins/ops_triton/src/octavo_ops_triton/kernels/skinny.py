"""A Linear of five to 32 rows: the weight as the tall side of a matrix product, its depth cut over programs.

A program takes BLOCK_N outputs and one of SPLITS parts of the depth. The rows of x are the narrow side of the product
(16 or 32 wide), so few multiply for nothing. Parts of an output are added up by the last program to arrive, in the
order of the parts: the sum does not depend on who came last.

The number of rows is a constant, which is worth 2 to 7 percent where there are few outputs. Only multiples of EIGHT are
compiled, the sizes of captured steps: prompts bring any number of rows to the last layer, and everybody would wait for a kernel of
its own for each. Other numbers are rounded up, by a copy.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_ops_triton.launch import Launcher, begin, rows

MAX_ROWS = 32
EIGHT = 8


@dataclass(frozen=True, slots=True)
class Tile:
    """Outputs and depth of a turn, parts of the depth, turns in flight, warps."""

    n: int
    k: int
    splits: int
    stages: int
    warps: int


def tile(n: int, k: int) -> Tile:
    """After a sweep on an H200 (benchmarks/RESULTS.md): all multiprocessors busy, and three or more turns in flight."""
    if n <= 2048:
        return Tile(16, 512, 2, 4, 4)
    return Tile(64, 256, 2, 3, 8) if k <= 8192 else Tile(128, 128, 2, 5, 8)


@triton.jit
def skinny_kernel(
    x_ptr, weight_ptr, out_ptr, part_ptr, arrived_ptr,
    M: tl.constexpr, N: tl.constexpr, K: tl.constexpr, X_STRIDE: tl.constexpr, WEIGHT_STRIDE: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, SPLITS: tl.constexpr, STAGES: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    column = tl.program_id(0)
    part = tl.program_id(1)
    n = column * BLOCK_N + tl.arange(0, BLOCK_N)
    m = tl.arange(0, BLOCK_M)
    d = tl.arange(0, BLOCK_K)
    TURNS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    first = TURNS * part // SPLITS * BLOCK_K
    last = TURNS * (part + 1) // SPLITS * BLOCK_K
    weights = weight_ptr + n.to(tl.int64)[:, None] * WEIGHT_STRIDE
    begin(PDL)
    acc = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
    for k0 in tl.range(first, last, BLOCK_K, num_stages=STAGES):
        k = k0 + d
        inside = k < K
        w = tl.load(weights + k[None, :], mask=(n < N)[:, None] & inside[None, :], other=0.0)
        x = tl.load(x_ptr + m[:, None] * X_STRIDE + k[None, :], mask=(m < M)[:, None] & inside[None, :], other=0.0)
        acc = tl.dot(w, tl.trans(x), acc)
    mask = (n < N)[:, None] & (m < M)[None, :]
    place = m[None, :] * N + n[:, None]
    if SPLITS == 1:
        tl.store(out_ptr + place, acc.to(out_ptr.dtype.element_ty), mask=mask)
    else:
        tl.store(part_ptr + part * (M * N) + place, acc, mask=mask)
        # Every thread's stores come before the one arrival; the last to arrive sees all of them.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + column, 1, sem="acq_rel", scope="gpu")
        if arrived == SPLITS - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + column, 0)  # ready for the next launch
            total = tl.zeros([BLOCK_N, BLOCK_M], tl.float32)
            for i in tl.static_range(SPLITS):
                total += tl.load(part_ptr + i * (M * N) + place, mask=mask, other=0.0)
            tl.store(out_ptr + place, total.to(out_ptr.dtype.element_ty), mask=mask)


def skinny(launch: Launcher, x: Tensor, weight: Tensor, dtype: torch.dtype, arrived: Tensor, tile: Tile) -> Tensor:
    """x [M, K] times weight [N, K] transposed, M up to 32. arrived int32 [>= ceil(N / tile.n)], zero."""
    (given, k), n = x.shape, weight.shape[0]
    m = triton.cdiv(given, EIGHT) * EIGHT
    if m != given:  # rows that nobody reads may hold anything
        padded = x.new_empty((m, k))
        padded[:given] = x
        x = padded
    out = torch.empty((m, n), dtype=dtype, device=x.device)
    part = torch.empty((tile.splits, m, n), dtype=torch.float32, device=x.device) if tile.splits > 1 else out
    constants = (
        *(m, n, k, rows(x, "small_linear"), rows(weight, "small_linear")),
        *(16 if m <= 16 else 32, tile.n, tile.k, tile.splits, tile.stages),
    )
    grid = (triton.cdiv(n, tile.n), tile.splits)
    launch(skinny_kernel, grid, (x, weight, out, part, arrived), (), constants, warps=tile.warps)
    return out[:given]
