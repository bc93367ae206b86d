"""What a decode step needs of the state table: each row's token, length and cache slot, in one kernel a KV group.

A program takes some rows. Must never read past a row's position: what lies there belongs to no token yet.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_ops_triton.launch import Launcher, begin

BLOCK = 128


@triton.jit(do_not_specialize=["count"])
def inputs_kernel(
    rows_ptr, positions_ptr, tokens_ptr, bound_ptr, table_ptr, ids_ptr, after_ptr, lengths_ptr, bounds_ptr, slots_ptr, count,
    TOKENS_STRIDE: tl.constexpr, TABLE_STRIDE: tl.constexpr, SIZE: tl.constexpr, FIRST: tl.constexpr, BLOCK: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """SIZE: tokens of a block. FIRST: also what does not depend on the group."""
    i = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    mask = i < count
    begin(PDL)
    row = tl.load(rows_ptr + i, mask=mask, other=0)
    position = tl.load(positions_ptr + i, mask=mask, other=0)
    block = tl.load(table_ptr + row * TABLE_STRIDE + position // SIZE, mask=mask, other=0).to(tl.int64)
    tl.store(slots_ptr + i, block * SIZE + position % SIZE, mask=mask)
    if FIRST:
        token = tl.load(tokens_ptr + row * TOKENS_STRIDE + position, mask=mask, other=0)
        tl.store(ids_ptr + i, token.to(tl.int64), mask=mask)
        tl.store(after_ptr + i, position + 1, mask=mask)
        tl.store(lengths_ptr + i, (position + 1).to(tl.int32), mask=mask)
        tl.store(bounds_ptr + i, tl.load(bound_ptr + row, mask=mask, other=0), mask=mask)


def decode_inputs(
    launch: Launcher,
    rows: Tensor,
    positions: Tensor,
    tokens: Tensor,
    bound: Tensor,
    tables: Sequence[Tensor],
    block_sizes: Sequence[int],
) -> tuple[Tensor, Tensor, Tensor, Tensor, tuple[Tensor, ...]]:
    """`octavo.engine.inputs.decode_inputs`."""
    count, device = len(rows), rows.device
    ids, after, bounds = (torch.empty(count, dtype=torch.int64, device=device) for _ in range(3))
    lengths = torch.empty(count, dtype=torch.int32, device=device)
    slots = tuple(torch.empty(count, dtype=torch.int64, device=device) for _ in tables)
    for group, (table, size) in enumerate(zip(tables, block_sizes, strict=True)):
        launch(
            inputs_kernel,
            (triton.cdiv(count, BLOCK), 1),
            (rows, positions, tokens, bound, table, ids, after, lengths, bounds, slots[group]),
            (count,),
            (tokens.stride(0), table.stride(0), size, group == 0, BLOCK),
            warps=4,
        )
    return ids, after, lengths, bounds, slots
