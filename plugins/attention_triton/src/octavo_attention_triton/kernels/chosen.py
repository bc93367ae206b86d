"""Attention over a latent cache where every token has keys of its own: chosen ones, those of a window, or the first so many.

A program takes one token, BLOCK_H of its query heads and one of SPLITS parts of its keys. Keys are addressed one by one through
the block table, for chosen ones lie anywhere. What the token sees is worked out from its position and `select` alone, and the
grid from the number of tokens, so a captured graph serves any lengths.

A token of one part writes its output, its sink included; parts of several leave normalised partial outputs and base-2
log-sum-exps for `decode.merge_kernel`, part s of token t in place t * SPLITS + s.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_attention_triton.kernels.tile import accumulate

LN2 = tl.constexpr(0.6931471805599453)
LOG2E = tl.constexpr(1.4426950408889634)


@triton.jit
def _keys_of(select, position, j, COUNT: tl.constexpr, WINDOW: tl.constexpr, EVERY: tl.constexpr):
    """The positions of the token's keys number j, [N], -1 where there is none."""
    if COUNT > 0:
        return tl.load(select + j, mask=j < COUNT, other=-1)
    if WINDOW > 0:
        at = tl.maximum(position - WINDOW + 1, 0) + j
        return tl.where(at <= position, at, -1)
    return tl.where(j < (position + 1) // EVERY, j, -1)


@triton.jit(do_not_specialize=["table_stride", "lse_stride_t", "select_stride"])
def chosen_kernel(
    q_ptr, out_ptr, lse_ptr, cache_ptr, table_ptr, rows_ptr, positions_ptr, select_ptr, sinks_ptr, part_ptr, part_lse_ptr, scale, v_scale,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, table_stride, page_stride, select_stride,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr,
    BLOCK_R: tl.constexpr, PAGE: tl.constexpr, EVERY: tl.constexpr, WINDOW: tl.constexpr, COUNT: tl.constexpr, SPLITS: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """Program (b, t, s). rows, positions int64 [T]; select int32 [T, COUNT] (COUNT 0: not by choice); PAGE: entries of a page;
    EVERY: tokens of an entry. scale: softmax scale * log2(e), times what the cache's values are multiplied by, as v_scale is.
    BLOCK_R 0: the key is no longer than the value."""
    token = tl.program_id(1).to(tl.int64)
    part = tl.program_id(2)
    position = tl.load(positions_ptr + token).to(tl.int32)
    table = table_ptr + tl.load(rows_ptr + token) * table_stride
    select = select_ptr + token * select_stride

    h = tl.program_id(0) * BLOCK_H + tl.arange(0, BLOCK_H)
    n = tl.arange(0, BLOCK_N)
    dv = tl.arange(0, BLOCK_V)
    query = q_ptr + token * q_stride_t + h[:, None] * q_stride_h
    q = tl.load(query + dv[None, :], mask=(h < HEADS)[:, None] & (dv < V_DIM)[None, :], other=0.0)
    if BLOCK_R > 0:
        dr = tl.arange(0, BLOCK_R)
        qr = tl.load(query + V_DIM + dr[None, :], mask=(h < HEADS)[:, None] & (dr < K_DIM - V_DIM)[None, :], other=0.0)

    total = COUNT
    if WINDOW > 0:
        total = tl.minimum(position + 1, WINDOW)
    elif COUNT == 0:
        total = (position + 1) // EVERY
    tiles = tl.cdiv(total, BLOCK_N)
    m = tl.full([BLOCK_H], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_H], tl.float32)
    acc = tl.zeros([BLOCK_H, BLOCK_V], tl.float32)
    for tile in tl.range(tiles * part // SPLITS, tiles * (part + 1) // SPLITS, num_stages=STAGES):
        at = _keys_of(select, position, tile * BLOCK_N + n, COUNT, WINDOW, EVERY)
        held = at >= 0
        # Where there is no key nothing is read: its score is replaced, and its value is 0.
        page = tl.load(table + at // PAGE, mask=held, other=0).to(tl.int64)
        entry = cache_ptr + page * page_stride + tl.where(held, at % PAGE, 0) * K_DIM
        k = tl.load(entry[:, None] + dv[None, :], mask=held[:, None] & (dv < V_DIM)[None, :], other=0.0).to(q.dtype)
        s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
        if BLOCK_R > 0:
            kr = tl.load(entry[:, None] + V_DIM + dr[None, :], mask=held[:, None] & (dr < K_DIM - V_DIM)[None, :], other=0.0).to(
                q.dtype
            )
            s = tl.dot(qr, tl.trans(kr), s, input_precision=PRECISION)
        s = tl.where(held[None, :], s * scale, float("-inf"))
        m, den, acc = accumulate(s, k, held, m, den, acc, q.dtype, False, PRECISION, True)

    live = h < HEADS
    if SPLITS == 1:
        if SINKS:
            sink = tl.load(sinks_ptr + h, mask=live, other=0.0).to(tl.float32) * LOG2E
            top = tl.maximum(m, sink)
            keep = tl.exp2(m - top)
            den = den * keep + tl.exp2(sink - top)
            acc = acc * keep[:, None]
            m = top
        o = acc * (v_scale / tl.where(den == 0.0, 1.0, den))[:, None]
        target = out_ptr + token * out_stride_t + h[:, None] * out_stride_h + dv[None, :]
        tl.store(target, o.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dv < V_DIM)[None, :])
        if LSE:
            tl.store(lse_ptr + token * lse_stride_t + h, (m + tl.log2(den)) * LN2, mask=live)
    else:
        o = acc * (v_scale / tl.where(den == 0.0, 1.0, den))[:, None]
        place = (token * SPLITS + part) * HEADS + h
        tl.store(part_ptr + place[:, None] * V_DIM + dv[None, :], o, mask=live[:, None] & (dv < V_DIM)[None, :])
        tl.store(part_lse_ptr + place, m + tl.log2(den), mask=live)
