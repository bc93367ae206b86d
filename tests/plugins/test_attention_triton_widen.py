"""Prefill over an FP8 cache by way of 16-bit pages: a token is found with its exact value.

The Hopper kernel that reads the pages needs a GPU (tests/gpu/test_attention_triton.py); the kernel that writes them runs under
Triton's interpreter.
"""

from __future__ import annotations

import json
from importlib.util import find_spec
from typing import Any

import pytest

from tests.plugins.interpreter import PRELUDE, interpreted

if find_spec("triton") is None:
    pytest.skip("triton is not installed: the kernels cannot be interpreted", allow_module_level=True)

SCRIPT = (
    PRELUDE
    + """
import json, sys
import numpy as np
import torch
from octavo.interfaces import KVSpec, StepHost
from octavo_attention_triton import widening
from octavo_attention_triton.geometry import PageGeometry
from octavo_attention_triton.kernels.widen import widen_kernel

def host(lengths, new, rows):
    lengths, new = np.array(lengths), np.array(new)
    return StepHost(new, lengths, np.array(rows), int(new.max()), int(new.sum()), int(lengths.max()))

def widened(page, dtype, transposed, window):
    # Rows 3, 0 and 5 of the state table hold chunks, row 1 a decoding sequence that nobody widens.
    torch.manual_seed(page)
    lengths, new, rows, blocks = [200, 40, 131, 300], [50, 1, 131, 10], [3, 1, 0, 5], 64
    g = PageGeometry.of(KVSpec("full", 2, 64, 64, dtype), page, row_align=16, v_transposed=transposed)
    cache = torch.randn(blocks, g.elements)
    cache[cache.abs() < 2.0**-6] = 0.0  # the interpreter converts subnormals wrongly
    cache = cache.to(getattr(torch, dtype))
    table = torch.full((6, 40), -1, dtype=torch.int32)
    order = iter(torch.randperm(blocks).tolist())
    step = host(lengths, new, rows)
    for row, n in zip(rows, lengths):
        used = -(-n // page)
        table[row, :used] = torch.tensor([next(order) for _ in range(used)])
    low = 0 if window is None else max(0, 290 - window + 1) // page
    table[5, :low] = -1  # given back, since no window reaches them
    capacity = -(-300 // page) + 1
    found = widening.batches(step, 2, g.heads, 3, window, page, capacity, torch.device("cpu"))
    seen = []
    for batch in found:
        out = torch.full((capacity, g.heads * page * 128), float("nan"), dtype=torch.float16)
        widen_kernel[(len(batch.pages), g.heads)](
            cache, table, batch.pages, out, table.stride(0), cache.stride(0), HEADS=g.heads, K_DIM=64, V_DIM=64, BLOCK_K=64, BLOCK_V=64,
            BLOCK_P=1 << (page - 1).bit_length(), PAGE=page, K_ROW=g.k_row, V_ROW=g.v_row, V_BASE=g.v_base, V_TRANSPOSED=g.v_transposed)
        wide = PageGeometry.of(KVSpec("full", 2, 64, 64, "float16"), page, row_align=16, v_transposed=False)
        tiles = batch.items.records[batch.items.records[:, 5] == 0]
        for i in sorted(set(tiles[:, 3].tolist())):
            tile = tiles[tiles[:, 3] == i]
            index = lengths.index(int(tile[0, 4]))
            seen.append(index)
            assert int(tile[:, 1].sum()) == new[index] and int(tile[:, 2].min()) == lengths[index] - new[index]
            count, first = -(-lengths[index] // page), 0 if window is None else max(0, lengths[index] - new[index] - window + 1)
            k, v = wide.unpack(out[batch.table[i, :count].long()], lengths[index])
            right = g.unpack(cache[table[rows[index], :count].long()], lengths[index])
            assert torch.equal(k[first:].double(), right[0][first:].double()) and torch.equal(v[first:].double(), right[1][first:].double())
    assert sorted(seen) == [0, 2, 3], seen

widened(**json.loads(sys.argv[1]))
"""
)


def run(**facts: Any) -> None:
    """The script's check, in a process that interprets kernels."""
    interpreted(SCRIPT, json.dumps(facts), plugins=("attention_triton", "ops_triton"))


@pytest.mark.parametrize(
    ("page", "dtype", "transposed", "window"),
    [(64, "float8_e4m3fn", True, None), (16, "float8_e5m2", False, None), (64, "float8_e4m3fn", True, 70), (16, "float8_e4m3fn", False, 100)],
)  # fmt: skip
def test_every_token_of_a_chunk_is_found_with_its_exact_value(
    page: int, dtype: str, transposed: bool, window: int | None
) -> None:
    run(page=page, dtype=dtype, transposed=transposed, window=window)
