"""Rows of the embedding table, widened to the float32 residual stream."""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_ops_triton.launch import Launcher, begin, rows

BLOCK = 1024


@triton.jit
def embedding_kernel(
    ids_ptr, weight_ptr, out_ptr,
    WEIGHT_STRIDE: tl.constexpr, VOCAB: tl.constexpr, SIZE: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK values of one row."""
    row = tl.program_id(0).to(tl.int64)
    d = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    token = tl.load(ids_ptr + row).to(tl.int64)
    known = (token >= 0) & (token < VOCAB)
    # An id outside the table has no row. It must not read another's memory, and must not pass for one that has.
    value = tl.load(weight_ptr + token * WEIGHT_STRIDE + d, mask=known & (d < SIZE), other=float("nan"))
    tl.store(out_ptr + row * SIZE + d, value.to(tl.float32), mask=d < SIZE)


def embedding(launch: Launcher, token_ids: Tensor, weight: Tensor) -> Tensor:
    """`octavo.model.operators.embedding`; the row of an id outside the table is NaN, which sampling reports as failed."""
    vocab, size = weight.shape
    out = torch.empty((len(token_ids), size), dtype=torch.float32, device=weight.device)
    constants = (rows(weight, "embedding"), vocab, size, BLOCK)
    launch(embedding_kernel, (len(token_ids), triton.cdiv(size, BLOCK)), (token_ids, weight, out), (), constants, warps=4)
    return out
