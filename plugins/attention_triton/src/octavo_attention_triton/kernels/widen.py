"""FP8 pages to 16-bit pages: what the Hopper prefill kernel reads in place of an FP8 cache. Exact: every FP8 value is a 16-bit one.

Reads the layout of write.py; writes pages of K [kv_head, slot, K_DIM], then V [kv_head, slot, V_DIM]. Scales stay out of it.
"""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def _wide(x, dtype: tl.constexpr):
    # By way of float16 and float32: the machine has one instruction for float16 to bfloat16, at an eighth of the rate.
    x = x.to(tl.float16)
    if dtype == tl.bfloat16:
        x = x.to(tl.float32)
    return x.to(dtype)


@triton.jit(do_not_specialize=["table_stride"])
def widen_kernel(
    cache_ptr, table_ptr, pages_ptr, out_ptr, table_stride, page_stride,
    HEADS: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_P: tl.constexpr,
    PAGE: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_BASE: tl.constexpr, V_TRANSPOSED: tl.constexpr,
):  # fmt: skip
    """Page i of out is page pages[i] = (row, column, ...) of the block table; one program widens one head of it. An unassigned one (-1)
    is left as it is: nothing in it counts."""
    i = tl.program_id(0)
    head = tl.program_id(1)
    row = tl.load(pages_ptr + 3 * i).to(tl.int64)
    page = tl.load(table_ptr + row * table_stride + tl.load(pages_ptr + 3 * i + 1)).to(tl.int64)
    if page < 0:
        return
    dtype: tl.constexpr = out_ptr.dtype.element_ty
    source = cache_ptr + page * page_stride
    target = out_ptr + i.to(tl.int64) * (HEADS * PAGE * (K_DIM + V_DIM))
    slot = tl.arange(0, BLOCK_P)[:, None]
    d = tl.arange(0, BLOCK_K)[None, :]
    mask = (slot < PAGE) & (d < K_DIM)
    k = tl.load(source + (head * PAGE + slot) * K_ROW + d, mask=mask)
    tl.store(target + (head * PAGE + slot) * K_DIM + d, _wide(k, dtype), mask=mask)
    d = tl.arange(0, BLOCK_V)[None, :]
    mask = (slot < PAGE) & (d < V_DIM)
    if V_TRANSPOSED:
        rows, columns = tl.arange(0, BLOCK_V)[:, None], tl.arange(0, BLOCK_P)[None, :]
        v = tl.load(source + V_BASE + (head * V_DIM + rows) * PAGE + columns, mask=(rows < V_DIM) & (columns < PAGE))
        v = tl.trans(_wide(v, dtype))
    else:
        v = _wide(tl.load(source + V_BASE + (head * PAGE + slot) * V_ROW + d, mask=mask), dtype)
    tl.store(target + HEADS * PAGE * K_DIM + (head * PAGE + slot) * V_DIM + d, v, mask=mask)
