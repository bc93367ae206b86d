"""Attention over a latent cache, anywhere: every query head against the one shared head, whose V is the first part of its K.

An item is ITEM int32 values, those of the decode work map (plan.py), the spare one being its query tokens where they may be
several: first query token, state-table row, first key, one past the newest key, first item of its row, splits of its row, row
of the step, tokens. A program takes one item and BLOCK_H heads; its BLOCK_M matrix rows are tokens times heads, so that a
prompt of a model with few heads fills them too. Token i of n sees keys before `last` - n + 1 + i.

A row of a single item writes its output; those of a split row leave normalised partial outputs and base-2 log-sum-exps for
`decode.merge_kernel`.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_attention_triton.kernels.tile import accumulate, load_tile

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def store_kernel(
    k_ptr, cache_ptr, slots_ptr, k_stride_t, page_stride, inverse,
    K_DIM: tl.constexpr, PAGE: tl.constexpr, EVERY: tl.constexpr, BLOCK_K: tl.constexpr, LIMIT: tl.constexpr,
):  # fmt: skip
    """One program stores one token's entry; a negative slot is written nowhere. Where an entry stands for EVERY tokens (PAGE counts
    entries), that of the last of them is stored. A float8 cache (LIMIT: its largest value) takes the entry times `inverse`."""
    token = tl.program_id(0).to(tl.int64)
    slot = tl.load(slots_ptr + token)
    if slot < 0:
        return
    if EVERY > 1:
        if (slot + 1) % EVERY != 0:
            return
        slot = slot // EVERY
    d = tl.arange(0, BLOCK_K)
    entry = tl.load(k_ptr + token * k_stride_t + d, mask=d < K_DIM)
    if LIMIT > 0:
        entry = tl.clamp(entry.to(tl.float32) * inverse, -LIMIT, LIMIT)
    target = cache_ptr + (slot // PAGE).to(tl.int64) * page_stride + slot % PAGE * K_DIM + d
    tl.store(target, entry.to(cache_ptr.dtype.element_ty), mask=d < K_DIM)


@triton.jit
def _attend(
    q, qr, m, den, acc, position, cache_ptr, table, start, first, last, page_stride, scale,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr,
    PAGE: tl.constexpr, PRECISION: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of keys; a MASKED one is compared with each lane's position."""
    k = load_tile(cache_ptr, table, start, first, last, 0, page_stride,
                  K_DIM, V_DIM, BLOCK_V, BLOCK_N, PAGE, 0, False, MASKED).to(q.dtype)  # fmt: skip
    kr = load_tile(cache_ptr, table, start, first, last, 0, page_stride,
                   K_DIM, K_DIM - V_DIM, BLOCK_R, BLOCK_N, PAGE, V_DIM, False, MASKED).to(q.dtype)  # fmt: skip
    s = tl.dot(q, tl.trans(k), input_precision=PRECISION)
    s = tl.dot(qr, tl.trans(kr), s, input_precision=PRECISION) * scale
    token = start + tl.arange(0, BLOCK_N)
    held = (token >= first) & (token < last)
    if MASKED:
        s = tl.where((token >= first)[None, :] & (token[None, :] <= position[:, None]), s, float("-inf"))
        k = tl.where(held[:, None], k, 0.0)  # what was never written may be NaN, which no weight of 0 erases
    return accumulate(s, k, held, m, den, acc, k.dtype, False, PRECISION, MASKED)


@triton.jit(do_not_specialize=["table_stride", "lse_stride_t"])
def latent_kernel(
    q_ptr, out_ptr, lse_ptr, cache_ptr, table_ptr, items_ptr, part_ptr, part_lse_ptr, scale, v_scale,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, table_stride, page_stride,
    HEADS: tl.constexpr, BLOCK_H: tl.constexpr, BLOCK_M: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_N: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_R: tl.constexpr, PAGE: tl.constexpr, PACKED: tl.constexpr,
    LSE: tl.constexpr, PRECISION: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    """scale: softmax scale * log2(e), so that every exponential is an exp2, times what the cache's values are multiplied by, as
    v_scale is."""
    item = tl.program_id(1)
    record = items_ptr + item * 8
    token0 = tl.load(record)
    if token0 < 0:
        return
    table = table_ptr + tl.load(record + 1).to(tl.int64) * table_stride
    first = tl.load(record + 2)
    last = tl.load(record + 3)
    splits = tl.load(record + 5)
    tokens = 1
    if PACKED:
        tokens = tl.load(record + 7)

    lane = tl.arange(0, BLOCK_M)
    dv = tl.arange(0, BLOCK_V)
    dr = tl.arange(0, BLOCK_R)
    t = lane // BLOCK_H
    h = tl.program_id(0) * BLOCK_H + lane % BLOCK_H
    live = (t < tokens) & (h < HEADS)
    token = (token0 + t).to(tl.int64)
    position = last - tokens + tl.minimum(t, tokens - 1)
    query = q_ptr + token[:, None] * q_stride_t + h[:, None] * q_stride_h
    q = tl.load(query + dv[None, :], mask=live[:, None] & (dv < V_DIM)[None, :], other=0.0)
    qr = tl.load(query + V_DIM + dr[None, :], mask=live[:, None] & (dr < K_DIM - V_DIM)[None, :], other=0.0)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)
    whole = tl.maximum(last - tokens + 1, first) // BLOCK_N * BLOCK_N  # every lane sees every key before it
    for start in tl.range(first, whole, BLOCK_N, num_stages=STAGES):
        m, den, acc = _attend(q, qr, m, den, acc, position, cache_ptr, table, start, first, last, page_stride, scale,
                              K_DIM, V_DIM, BLOCK_N, BLOCK_V, BLOCK_R, PAGE, PRECISION, False)  # fmt: skip
    for start in tl.range(tl.maximum(whole, first), last, BLOCK_N, num_stages=1):
        m, den, acc = _attend(q, qr, m, den, acc, position, cache_ptr, table, start, first, last, page_stride, scale,
                              K_DIM, V_DIM, BLOCK_N, BLOCK_V, BLOCK_R, PAGE, PRECISION, True)  # fmt: skip

    o = acc * (v_scale / tl.where(den == 0.0, 1.0, den))[:, None]
    held = live[:, None] & (dv < V_DIM)[None, :]
    if splits == 1:
        target = out_ptr + token[:, None] * out_stride_t + h[:, None] * out_stride_h + dv[None, :]
        tl.store(target, o.to(out_ptr.dtype.element_ty), mask=held)
        if LSE:
            tl.store(lse_ptr + token * lse_stride_t + h, (m + tl.log2(den)) * LN2, mask=live)
    else:
        place = item.to(tl.int64) * HEADS + h
        tl.store(part_ptr + place[:, None] * V_DIM + dv[None, :], o, mask=held)
        tl.store(part_lse_ptr + place, m + tl.log2(den), mask=live)
