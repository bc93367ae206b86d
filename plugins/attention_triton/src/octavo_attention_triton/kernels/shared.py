"""Decode over a prefix that many rows share (cascade): the prefix is read once for all of them, not once a row.

The decode kernel attends what a row has of its own and leaves output and log-sum-exp; `shared_kernel` attends
the prefix, with the query heads of many rows as the rows of one matrix operand; `combine_kernel` adds the parts up by
their log-sum-exps. Prefixes are whole pages and whole tiles, so nothing is masked. Grids are fixed and who
shares what is read through pointers: a captured graph serves any grouping.
"""

from __future__ import annotations

import triton
import triton.language as tl
from octavo_ops_triton.launch import begin

from octavo_attention_triton.kernels.tile import accumulate, load_tile, scores

BLOCK_M, BLOCK_N = 64, 64
MAX_PARTS = 4
FEW_ROWS, FEW_ROWS_PARTS = 64, 16
"""In how many parts a prefix is read at the most. A step of few rows has few tiles, and only many parts of each keep the
device busy: a part is read by one program a KV head, tile after tile."""
INFO = 4
"""int32 values of a tile record: state-table row of a member, tokens of the prefix, parts that it is read in, spare."""


@triton.jit(do_not_specialize=["table_stride", "part_stride", "lse_stride"])
def shared_kernel(
    q_ptr, part_ptr, part_lse_ptr, cache_ptr, table_ptr, tiles_ptr, members_ptr, scale_log2, softcap, v_scale,
    q_stride_t, q_stride_h, table_stride, page_stride, part_stride, lse_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_BASE: tl.constexpr, V_TRANSPOSED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, NORMALISE: tl.constexpr, SOFTCAP: tl.constexpr, STAGES: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """One part of the prefix for BLOCK_M // GROUP rows and one KV head."""
    begin(PDL)
    ROWS: tl.constexpr = BLOCK_M // GROUP
    tile = tl.program_id(0)
    head = tl.program_id(1)
    part = tl.program_id(2)
    row = tl.load(tiles_ptr + tile * 4)
    tokens = tl.load(tiles_ptr + tile * 4 + 1)
    parts = tl.load(tiles_ptr + tile * 4 + 2)
    if part >= parts:  # an idle tile has none
        return
    blocks = tokens // BLOCK_N
    first = blocks * part // parts * BLOCK_N
    last = blocks * (part + 1) // parts * BLOCK_N
    table = table_ptr + row.to(tl.int64) * table_stride

    lane = tl.arange(0, BLOCK_M)
    t = lane // GROUP
    h = head * GROUP + lane % GROUP
    token = tl.load(members_ptr + tile * ROWS + t, mask=t < ROWS, other=-1)
    live = token >= 0
    token = token.to(tl.int64)
    dk = tl.arange(0, BLOCK_K)
    dv = tl.arange(0, BLOCK_V)
    q = tl.load(
        q_ptr + token[:, None] * q_stride_t + h[:, None] * q_stride_h + dk[None, :],
        mask=live[:, None] & (dk < K_DIM)[None, :], other=0.0,
    )  # fmt: skip
    scale = tl.full([BLOCK_M, 1], 1.0, tl.float32) * scale_log2
    if NORMALISE:
        # See decode: a bfloat16 query against FP8 keys becomes float16, scaled to +-1.
        size = tl.max(tl.abs(q.to(tl.float32)), 1)
        size = tl.where(size > 0, size, 1.0)
        q = q.to(tl.float32) / size[:, None]
        scale = scale * size[:, None]
    q = q.to(DOT)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    for at in tl.range(first, last, BLOCK_N, num_stages=STAGES):
        k = load_tile(cache_ptr, table, at, first, last, head, page_stride,
                      K_ROW, K_DIM, BLOCK_K, BLOCK_N, PAGE, 0, False, False)  # fmt: skip
        v = load_tile(cache_ptr, table, at, first, last, head, page_stride,
                      V_ROW, V_DIM, BLOCK_V, BLOCK_N, PAGE, V_BASE, V_TRANSPOSED, False)  # fmt: skip
        s = scores(q, k, scale, softcap, SOFTCAP, PRECISION)
        m, den, acc = accumulate(s, v, dv, m, den, acc, DOT, V_TRANSPOSED, PRECISION, False)
    o = acc * (v_scale / den)[:, None]
    place = token * HEADS + h
    tl.store(
        part_ptr + part.to(tl.int64) * part_stride + place[:, None] * V_DIM + dv[None, :],
        o, mask=live[:, None] & (dv < V_DIM)[None, :],
    )  # fmt: skip
    tl.store(part_lse_ptr + part.to(tl.int64) * lse_stride + place, (m + tl.log2(den)) * 0.6931471805599453, mask=live)


@triton.jit(do_not_specialize=["part_stride", "lse_stride"])
def combine_kernel(
    own_ptr, own_lse_ptr, part_ptr, part_lse_ptr, parts_ptr, out_ptr, lse_ptr, part_stride, lse_stride, out_stride_t, out_stride_h,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_V: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK_H heads of one row: what it has of its own and the parts of its prefix (none: parts is 0)."""
    begin(PDL)
    token = tl.program_id(0).to(tl.int64)
    h = tl.program_id(1) * BLOCK_H + tl.arange(0, BLOCK_H)
    d = tl.arange(0, BLOCK_V)
    live = h < HEADS
    mask = live[:, None] & (d < V_DIM)[None, :]
    place = token * HEADS + h
    at = place[:, None] * V_DIM + d[None, :]
    parts = tl.load(parts_ptr + token)
    top = tl.load(own_lse_ptr + place, mask=live, other=0.0)
    acc = tl.load(own_ptr + at, mask=mask, other=0.0)
    total = tl.full([BLOCK_H], 1.0, tl.float32)
    for i in range(0, parts, 4):
        for j in tl.static_range(4):  # their loads are on their way together; a part that there is not weighs nothing
            part = i + j
            lse = tl.load(part_lse_ptr + part * lse_stride + place, mask=live & (part < parts), other=float("-inf"))
            o = tl.load(part_ptr + part * part_stride + at, mask=mask & (part < parts), other=0.0)
            higher = tl.maximum(top, lse)
            keep, weight = tl.exp(top - higher), tl.exp(lse - higher)
            acc = acc * keep[:, None] + o * weight[:, None]
            total = total * keep + weight
            top = higher
    tl.store(
        out_ptr + token * out_stride_t + h[:, None] * out_stride_h + d[None, :],
        (acc / total[:, None]).to(out_ptr.dtype.element_ty), mask=mask,
    )  # fmt: skip
    if LSE:
        tl.store(lse_ptr + place, top + tl.log(total), mask=live)
