"""W4A16 in Triton: out = x W^T for 1 to 64 rows of x, for GPUs and installations without the CUDA kernel.

A word holds eight inputs of a row and eight products of [rows, 16] with [16, outputs] use one nibble each, so that nothing
is rearranged on the way to the tensor cores: contraction order is free as long as x follows it. Products of a group are
summed apart and scaled in float32. K is split over programs; a second kernel adds up, in a fixed order.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor


def choose(m: int, rows: int, inputs: int) -> dict[str, int]:
    """block_n, splits, warps and stages for m rows times a matrix [rows, inputs]."""
    block_n, blocks = 64, -(-inputs // 128)
    splits = 1
    while splits < 8 and -(-rows // block_n) * splits < 528 and 4 * splits <= blocks:
        splits *= 2
    return {"block_n": block_n, "splits": splits, "warps": 4, "stages": 3}


@triton.jit(do_not_specialize=["M", "GROUP_STEP"])
def _partial_kernel(
    words_ptr, scales_ptr, zeros_ptr, x_ptr, bias_ptr, out_ptr, sums_ptr,
    M, N, K, ROWS, X_STRIDE, GROUP_STEP,
    SUB: tl.constexpr, ZEROS: tl.constexpr, BIAS: tl.constexpr, SPLITS: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """BLOCK_N outputs of all rows, over every SPLITS-th block of 128 inputs; to out if there is one split, else to sums
    [SPLITS, M, N]. Word c of a row, at 4 * lane + step, holds inputs 32 * step + 2 * lane + 8 * p and the next, for p of 0 to 3."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    split = tl.program_id(1)
    m = tl.arange(0, BLOCK_M)
    c = tl.arange(0, 16)
    first = 32 * (c % 4) + 2 * (c // 4)
    rows = tl.minimum(n, N - 1)
    place = rows // 16 * 16 + rows % 8 * 2 + rows % 16 // 8  # of a row's scale: see packing.paired
    blocks = tl.cdiv(K, 128)
    acc = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
    for block in tl.range(split, blocks, SPLITS):
        words = tl.load(words_ptr + (block * ROWS + rows.to(tl.int64))[None, :] * 16 + c[:, None], eviction_policy="evict_first")
        for u in tl.static_range(SUB):
            group = block * GROUP_STEP if SUB == 1 else block * SUB + u
            scale = tl.load(scales_ptr + group * ROWS + place).to(tl.float32)
            zero = tl.load(zeros_ptr + group * ROWS + place).to(tl.int32) if ZEROS else 8
            mine = (c % 4) // (4 // SUB) == u
            part = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
            for i in tl.static_range(8):
                k = block * 128 + first + 8 * (i % 4) + i // 4
                inside = (m < M)[:, None] & ((k < K) & mine)[None, :]
                x = tl.load(x_ptr + m[:, None] * X_STRIDE + k[None, :], mask=inside, other=0.0)
                q = ((words >> (4 * i)) & 15) - (zero[None, :] if ZEROS else 8)
                part = tl.dot(x, q.to(x.dtype), part)
            acc += part * scale[None, :]
    inside = (m < M)[:, None] & (n < N)[None, :]
    at = m[:, None] * N + n[None, :]
    if SPLITS == 1:
        if BIAS:
            acc += tl.load(bias_ptr + rows).to(tl.float32)[None, :]
        tl.store(out_ptr + at, acc.to(out_ptr.dtype.element_ty), mask=inside)
    else:
        tl.store(sums_ptr + split * M * N + at, acc, mask=inside)


@triton.jit(do_not_specialize=["TOTAL"])
def _add_kernel(sums_ptr, bias_ptr, out_ptr, TOTAL, N, SPLITS: tl.constexpr, BIAS: tl.constexpr, BLOCK: tl.constexpr):
    """out [M, N] from sums [SPLITS, M, N]."""
    at = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    total = tl.zeros((BLOCK,), tl.float32)
    for split in tl.static_range(SPLITS):
        total += tl.load(sums_ptr + split * TOTAL + at, mask=at < TOTAL, other=0.0)
    if BIAS:
        total += tl.load(bias_ptr + at % N, mask=at < TOTAL, other=0.0).to(tl.float32)
    tl.store(out_ptr + at, total.to(out_ptr.dtype.element_ty), mask=at < TOTAL)


def multiply(
    words: Tensor, scales: Tensor, zeros: Tensor | None, x: Tensor, bias: Tensor | None, out: Tensor, *,
    block_n: int, splits: int, warps: int, stages: int, sub: int, group_step: int,
) -> Tensor:  # fmt: skip
    """out [M, N] = x [M, K] W^T + bias, W, scales and zeros as `packing` lays them out."""
    (m, k), n = x.shape, out.shape[1]
    sums = torch.empty((splits, m, n), dtype=torch.float32, device=x.device) if splits > 1 else out
    _partial_kernel[triton.cdiv(n, block_n), splits](
        words, scales, scales if zeros is None else zeros, x, out if bias is None else bias, out, sums,
        m, n, k, words.shape[1], x.stride(0), group_step,
        SUB=sub, ZEROS=zeros is not None, BIAS=bias is not None, SPLITS=splits,
        BLOCK_M=max(16, triton.next_power_of_2(m)), BLOCK_N=block_n, num_warps=warps, num_stages=stages,
    )  # fmt: skip
    if splits > 1:
        block = 1024
        _add_kernel[(triton.cdiv(m * n, block),)](
            sums, out if bias is None else bias, out, m * n, n, SPLITS=splits, BIAS=bias is not None, BLOCK=block
        )
    return out


@triton.jit(do_not_specialize=["FIRST", "COUNT", "GROUP_STEP"])
def _dequantise_kernel(
    words_ptr, scales_ptr, zeros_ptr, out_ptr, FIRST, COUNT, ROWS, K, GROUP_STEP,
    SUB: tl.constexpr, ZEROS: tl.constexpr, BLOCK_N: tl.constexpr,
):  # fmt: skip
    """out [COUNT, K]: one block of 128 inputs of BLOCK_N of the rows from FIRST on."""
    n = tl.program_id(0) * BLOCK_N + tl.arange(0, BLOCK_N)
    block = tl.program_id(1)
    k = tl.arange(0, 128)
    place = 4 * (k % 8 // 2) + k // 32  # of the word of input k
    bits = 4 * (k // 8 % 4 + 4 * (k % 2))
    rows = tl.minimum(FIRST + n, ROWS - 1)
    words = tl.load(words_ptr + (block * ROWS + rows.to(tl.int64))[:, None] * 16 + place[None, :])
    group = (block * GROUP_STEP + 0 * k) if SUB == 1 else block * SUB + k // (128 // SUB)
    inside = (n < COUNT)[:, None] & (block * 128 + k < K)[None, :]
    at = group[None, :] * ROWS + (rows // 16 * 16 + rows % 8 * 2 + rows % 16 // 8)[:, None]
    scale = tl.load(scales_ptr + at, mask=inside, other=0.0).to(tl.float32)
    zero = tl.load(zeros_ptr + at, mask=inside, other=0).to(tl.int32) if ZEROS else 8
    w = (((words >> bits[None, :]) & 15) - zero).to(tl.float32) * scale
    tl.store(out_ptr + n.to(tl.int64)[:, None] * K + block * 128 + k[None, :], w.to(out_ptr.dtype.element_ty), mask=inside)


def dequantise(
    words: Tensor, scales: Tensor, zeros: Tensor | None, out: Tensor, *, first: int, sub: int, group_step: int
) -> Tensor:
    """out [rows, K], 16 or 32 bits: the weights of that many rows from `first` on, each computed in float32 and rounded once."""
    count, k = out.shape
    block_n = 32
    _dequantise_kernel[triton.cdiv(count, block_n), triton.cdiv(k, 128)](
        words, scales, scales if zeros is None else zeros, out, first, count, words.shape[1], k, group_step,
        SUB=sub, ZEROS=zeros is not None, BLOCK_N=block_n, num_warps=4,
    )  # fmt: skip
    return out
