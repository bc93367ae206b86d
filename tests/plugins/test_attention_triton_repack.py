"""Prefill over an e4m3 cache with products in FP8: every byte of K and V lies in its tile, V in the order that products want.

The Hopper kernel that reads the tiles needs a GPU (tests/gpu/test_attention_triton.py); the kernel that packs them runs under
Triton's interpreter.
"""

from __future__ import annotations

from importlib.util import find_spec

import pytest

from tests.plugins.interpreter import PRELUDE, interpreted

if find_spec("triton") is None:
    pytest.skip("triton is not installed: the kernels cannot be interpreted", allow_module_level=True)

SCRIPT = (
    PRELUDE
    + """
import sys
import numpy as np
import torch
from octavo.interfaces import KVSpec, StepHost
from octavo_attention_triton import widening
from octavo_attention_triton.geometry import PageGeometry
from octavo_attention_triton.kernels.repack import repack_kernel

def order(count):
    # Of 16 tokens, those of a left operand's four bytes in turn: two of the first eight columns of sums, two of the next.
    return [16 * x + 8 * b + 2 * t + e for x in range(count // 16) for t in range(4) for b in range(2) for e in range(2)]

def packed(page, tile=128):
    torch.manual_seed(page)
    lengths, new, rows, blocks = [200, 40, 131, 301], [50, 1, 131, 10], [3, 1, 0, 5], 20
    g = PageGeometry.of(KVSpec("full", 2, 128, 128, "float8_e4m3fn"), page, row_align=16, v_transposed=True)
    cache = torch.randint(0, 256, (blocks, g.elements), dtype=torch.uint8)
    table = torch.full((6, 6), -1, dtype=torch.int32)
    free = iter(torch.randperm(blocks).tolist())
    for row, n in zip(rows, lengths):
        used = -(-n // page)
        table[row, :used] = torch.tensor([next(free) for _ in range(used)])
    step = StepHost(np.array(new), np.array(lengths), np.array(rows), max(new), sum(new), max(lengths))
    capacity, seen = 5, []
    for batch in widening.batches(step, 2, g.heads, 3, None, tile, capacity, torch.device("cpu")):
        out = torch.full((capacity, 2, g.heads, tile * 128), 77, dtype=torch.uint8)
        repack_kernel[(len(batch.pages), g.heads)](
            cache.view(torch.int16), table, batch.pages, out.view(torch.int16), table.stride(0), cache.stride(0),
            HEADS=g.heads, DIM=128, PAGE=page, TOKENS=tile, K_ROW=g.k_row, V_BASE=g.v_base)
        for i, (row, column, count) in enumerate(batch.pages.tolist()):
            index = rows.index(row)
            seen.append((index, column))
            used = -(-lengths[index] // page)
            k, v = g.unpack(cache[table[row, :used].long()], lengths[index])
            first = column * tile
            assert count == min(tile, lengths[index] - first)
            right = torch.zeros(2, g.heads, tile, 128, dtype=torch.uint8)
            right[0, :, :count], right[1, :, :count] = (x[first : first + count].transpose(0, 1) for x in (k, v))
            assert torch.equal(out[i, 0].view(g.heads, tile, 128), right[0])
            assert torch.equal(out[i, 1].view(g.heads, 128, tile), right[1][:, order(tile)].transpose(1, 2))
    assert sorted(seen) == [(0, 0), (0, 1), (2, 0), (2, 1), (3, 0), (3, 1), (3, 2)], seen

packed(int(sys.argv[1]))
"""
)


@pytest.mark.parametrize("page", [64, 128])
def test_tiles_hold_every_byte_of_their_tokens_and_zeros_behind_the_last(page: int) -> None:
    interpreted(SCRIPT, str(page), plugins=("attention_triton", "ops_triton"))
