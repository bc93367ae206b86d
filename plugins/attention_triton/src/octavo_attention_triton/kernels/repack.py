"""FP8 pages to tiles for products in FP8: what `hopper_prefill_fp8.py` reads in place of an FP8 cache.

Reads the layout of write.py where V lies transposed; writes tiles of TOKENS tokens: K [kv_head, token, DIM], then V [kv_head, DIM, place]. The
matrix unit takes a left operand of bytes from registers in another order than it leaves sums in: V's tokens are in that order.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit(do_not_specialize=["table_stride"])
def repack_kernel(
    cache_ptr, table_ptr, tiles_ptr, out_ptr, table_stride, page_stride,
    HEADS: tl.constexpr, DIM: tl.constexpr, PAGE: tl.constexpr, TOKENS: tl.constexpr, K_ROW: tl.constexpr, V_BASE: tl.constexpr,
):  # fmt: skip
    """Tile i of out is of tiles[i] = (row of the block table, tile of the row, tokens that it has); one program packs one head of it. Bytes
    go in pairs, as uint16: what is past the tokens becomes 0, since memory there may hold NaN, which no weight of 0 erases. PAGE is at most
    TOKENS; strides, K_ROW and V_BASE are in bytes."""
    i = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(tiles_ptr + 3 * i).to(tl.int64)
    tile = tl.load(tiles_ptr + 3 * i + 1)
    count = tl.load(tiles_ptr + 3 * i + 2)
    target = out_ptr + i.to(tl.int64) * (HEADS * TOKENS * DIM) + head * (TOKENS * DIM // 2)
    pair = tl.arange(0, PAGE // 2)
    place = pair // 8 * 8 + pair % 2 * 4 + pair % 8 // 2  # the pair of tokens that lies at `pair`
    slot = tl.arange(0, PAGE)
    for part in tl.static_range(TOKENS // PAGE):
        left = count - part * PAGE
        page = tl.load(table_ptr + row * table_stride + tile * (TOKENS // PAGE) + part, mask=left > 0, other=0).to(tl.int64)
        source = cache_ptr + tl.maximum(page, 0) * (page_stride // 2)
        d = tl.arange(0, DIM // 2)[None, :]
        k = tl.load(source + (head * PAGE + slot)[:, None] * (K_ROW // 2) + d, mask=(slot < left)[:, None], other=0)
        tl.store(target + (part * PAGE + slot)[:, None] * (DIM // 2) + d, k)
        d = tl.arange(0, DIM)[:, None]
        v = tl.load(
            source + V_BASE // 2 + (head * DIM + d) * (PAGE // 2) + place[None, :], mask=(2 * place < left)[None, :], other=0
        )
        v = tl.where((2 * place + 1 < left)[None, :], v, v & 0xFF)
        tl.store(target + HEADS * TOKENS * DIM // 2 + d * (TOKENS // 2) + part * PAGE // 2 + pair[None, :], v)
