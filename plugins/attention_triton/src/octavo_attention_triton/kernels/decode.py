"""Paged decode: one new token a row, the KV of a row cut into items that run side by side (split-KV).

All query heads of one KV head are one matrix operand (GQA packing), so K and V are read once. One program
attends one item of one KV head. A row of a single item writes its output at once; the items of a split row
leave normalised partial outputs and base-2 log-sum-exps, which the last of them to arrive adds up (MERGE
"fused") or a second kernel does (MERGE "kernel"). Lengths, tables and the work map are read through pointers and
the grid is fixed, so a captured graph serves any lengths.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_attention_triton.kernels.tile import accumulate, finite16, load_tile, scores

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def merge_parts(
    token, first_item, splits, head,
    part_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, v_scale, out_stride_t, out_stride_h, lse_stride_t,
    HEADS: tl.constexpr, GROUP: tl.constexpr, V_DIM: tl.constexpr, BLOCK_G: tl.constexpr, BLOCK_V: tl.constexpr,
    CHUNK: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
):  # fmt: skip
    """Add up the partial outputs of one row's GROUP heads: out = sum_s 2^(lse_s - top) o_s / sum_s 2^(lse_s - top)."""
    g = tl.arange(0, BLOCK_G)
    d = tl.arange(0, BLOCK_V)
    c = tl.arange(0, CHUNK)
    h = head * GROUP + g
    top = tl.full([BLOCK_G], float("-inf"), tl.float32)
    total = tl.zeros([BLOCK_G], tl.float32)
    acc = tl.zeros([BLOCK_G, BLOCK_V], tl.float32)
    if SINKS:
        top = tl.load(sinks_ptr + h, mask=g < GROUP, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        total += tl.where(top == float("-inf"), 0.0, 1.0)
    for s0 in range(0, splits, CHUNK):
        # Both loads of a chunk are in flight together: few splits cost one trip to memory.
        place = (first_item + s0 + c).to(tl.int64)[:, None] * HEADS + h[None, :]
        live = (s0 + c < splits)[:, None] & (g < GROUP)[None, :]
        lse = tl.load(part_lse_ptr + place, mask=live, other=float("-inf"))
        part = tl.load(
            part_ptr + place[:, :, None] * V_DIM + d[None, None, :], mask=live[:, :, None] & (d < V_DIM)[None, None, :], other=0.0
        )
        higher = tl.maximum(top, tl.max(lse, 0))
        shift = tl.where(higher == float("-inf"), 0.0, higher)
        weight = tl.exp2(lse - shift[None, :])
        keep = tl.exp2(top - shift)
        total = total * keep + tl.sum(weight, 0)
        acc = acc * keep[:, None] + tl.sum(part * weight[:, :, None], 0)
        top = higher
    o = acc * (v_scale / tl.where(total == 0.0, 1.0, total))[:, None]
    tl.store(
        out_ptr + token.to(tl.int64) * out_stride_t + h[:, None] * out_stride_h + d[None, :],
        o.to(out_ptr.dtype.element_ty), mask=(g < GROUP)[:, None] & (d < V_DIM)[None, :],
    )  # fmt: skip
    if LSE:
        tl.store(lse_ptr + token.to(tl.int64) * lse_stride_t + h, (top + tl.log2(total)) * LN2, mask=g < GROUP)


@triton.jit
def _attend(
    q, m, den, acc, cache_ptr, table, start, first, last, head, page_stride, scale, softcap,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_BASE: tl.constexpr, V_TRANSPOSED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr, FINITE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """One tile of tokens; a MASKED one counts only those in [first, last), with FINITE through `tile.finite16`."""
    k = load_tile(cache_ptr, table, start, first, last, head, page_stride,
                  K_ROW, K_DIM, BLOCK_K, BLOCK_N, PAGE, 0, False, MASKED)  # fmt: skip
    v = load_tile(cache_ptr, table, start, first, last, head, page_stride,
                  V_ROW, V_DIM, BLOCK_V, BLOCK_N, PAGE, V_BASE, V_TRANSPOSED, MASKED)  # fmt: skip
    return _weigh(
        q, k, v, m, den, acc, start, first, last, scale, softcap, BLOCK_N, V_TRANSPOSED, DOT, PRECISION, SOFTCAP, FINITE, MASKED
    )


@triton.jit
def _weigh(
    q, k, v, m, den, acc, start, first, last, scale, softcap,
    BLOCK_N: tl.constexpr, V_TRANSPOSED: tl.constexpr, DOT: tl.constexpr, PRECISION: tl.constexpr, SOFTCAP: tl.constexpr,
    FINITE: tl.constexpr, MASKED: tl.constexpr,
):  # fmt: skip
    """What `_attend` does with a tile once it is there."""
    s = scores(q, k, scale, softcap, SOFTCAP, PRECISION)
    token = start + tl.arange(0, BLOCK_N)
    visible = (token >= first) & (token < last)
    if MASKED:
        s = tl.where(visible[None, :], s, float("-inf"))
    if MASKED and FINITE:
        v = finite16(v)
    return accumulate(s, v, visible, m, den, acc, DOT, V_TRANSPOSED, PRECISION, MASKED, FINITE)


@triton.jit
def _query(raw, scale_log2, BLOCK_M: tl.constexpr, DOT: tl.constexpr, NORMALISE: tl.constexpr):
    """Queries [M, D] as the dot takes them, and what multiplies their scores [M, 1]."""
    q = raw
    scale = tl.full([BLOCK_M, 1], 1.0, tl.float32) * scale_log2
    if NORMALISE:
        # FP8 keys are read as float16, so a bfloat16 query must be one too: scaled to +-1 it cannot overflow.
        size = tl.max(tl.abs(q.to(tl.float32)), 1)
        size = tl.where(size > 0, size, 1.0)
        q = q.to(tl.float32) / size[:, None]
        scale = scale * size[:, None]
    q = q.to(DOT)
    return q, scale


@triton.jit(do_not_specialize=["table_stride", "lse_stride_t"])
def decode_kernel(
    q_ptr, out_ptr, lse_ptr, cache_ptr, table_ptr, items_ptr, part_ptr, part_lse_ptr, arrived_ptr, sinks_ptr,
    scale_log2, softcap, v_scale, table_stride,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, page_stride,
    HEADS: tl.constexpr, GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr, BLOCK_G: tl.constexpr,
    PAGE: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_BASE: tl.constexpr, V_TRANSPOSED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, NORMALISE: tl.constexpr, FINITE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr,
    FUSED: tl.constexpr, CHUNK: tl.constexpr, STAGES: tl.constexpr, MASK_ALL: tl.constexpr, SHORT: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    head = tl.program_id(0)
    item = tl.program_id(1)
    token = tl.load(items_ptr + item * 8)
    row = tl.load(items_ptr + item * 8 + 1)
    first = tl.load(items_ptr + item * 8 + 2)
    last = tl.load(items_ptr + item * 8 + 3)
    first_item = tl.load(items_ptr + item * 8 + 4)
    splits = tl.load(items_ptr + item * 8 + 5)
    if PDL:
        # May be launched while its predecessor ends. The work map is older than that (see the backend); queries and cache are not.
        tl.extra.cuda.gdc_wait()
        tl.extra.cuda.gdc_launch_dependents()
    if token < 0:
        return
    table = table_ptr + row.to(tl.int64) * table_stride

    m_lane = tl.arange(0, BLOCK_M)
    dk = tl.arange(0, BLOCK_K)
    dv = tl.arange(0, BLOCK_V)
    h = head * GROUP + m_lane
    raw = tl.load(
        q_ptr + token.to(tl.int64) * q_stride_t + h[:, None] * q_stride_h + dk[None, :],
        mask=(m_lane < GROUP)[:, None] & (dk < K_DIM)[None, :], other=0.0,
    )  # fmt: skip

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    short = False
    if SHORT:
        short = (last - first <= BLOCK_N) & (first % BLOCK_N == 0)
    if short:
        # One tile: no pipeline is set up, and its loads are on their way while the query is made ready.
        k = load_tile(cache_ptr, table, first, first, last, head, page_stride,
                      K_ROW, K_DIM, BLOCK_K, BLOCK_N, PAGE, 0, False, True)  # fmt: skip
        v = load_tile(cache_ptr, table, first, first, last, head, page_stride,
                      V_ROW, V_DIM, BLOCK_V, BLOCK_N, PAGE, V_BASE, V_TRANSPOSED, True)  # fmt: skip
        q, scale = _query(raw, scale_log2, BLOCK_M, DOT, NORMALISE)
        m, den, acc = _weigh(
            q, k, v, m, den, acc, first, first, last, scale, softcap, BLOCK_N, V_TRANSPOSED, DOT, PRECISION, SOFTCAP, FINITE, True
        )
    else:
        q, scale = _query(raw, scale_log2, BLOCK_M, DOT, NORMALISE)
        body = first
        if WINDOW:
            # Only a window can make an item start inside a tile.
            body = tl.cdiv(first, BLOCK_N) * BLOCK_N
            for start in tl.range(first // BLOCK_N * BLOCK_N, tl.minimum(body, last), BLOCK_N, num_stages=1):
                m, den, acc = _attend(
                    q, m, den, acc, cache_ptr, table, start, first, last, head, page_stride, scale, softcap, K_DIM, V_DIM, BLOCK_N, BLOCK_K,
                    BLOCK_V, PAGE, K_ROW, V_ROW, V_BASE, V_TRANSPOSED, DOT, PRECISION, SOFTCAP, FINITE, True,
                )  # fmt: skip
        # Short rows: their last tile, rarely a whole one, goes through the pipeline with the others, all of them masked. Apart, it is loaded
        # when all else is done, and nothing is under way meanwhile.
        whole = last
        if not MASK_ALL:
            whole = last // BLOCK_N * BLOCK_N
        for start in tl.range(body, whole, BLOCK_N, num_stages=STAGES):
            m, den, acc = _attend(
                q, m, den, acc, cache_ptr, table, start, first, last, head, page_stride, scale, softcap, K_DIM, V_DIM, BLOCK_N, BLOCK_K,
                BLOCK_V, PAGE, K_ROW, V_ROW, V_BASE, V_TRANSPOSED, DOT, PRECISION, SOFTCAP, FINITE, MASK_ALL,
            )  # fmt: skip
        if not MASK_ALL:
            for start in tl.range(tl.maximum(whole, body), last, BLOCK_N, num_stages=1):
                m, den, acc = _attend(
                    q, m, den, acc, cache_ptr, table, start, first, last, head, page_stride, scale, softcap, K_DIM, V_DIM, BLOCK_N, BLOCK_K,
                    BLOCK_V, PAGE, K_ROW, V_ROW, V_BASE, V_TRANSPOSED, DOT, PRECISION, SOFTCAP, FINITE, True,
                )  # fmt: skip

    held = (m_lane < GROUP)[:, None] & (dv < V_DIM)[None, :]
    if splits == 1:
        if SINKS:
            sink = tl.load(sinks_ptr + h, mask=m_lane < GROUP, other=float("-inf")).to(tl.float32) * 1.4426950408889634
            top = tl.maximum(m, sink)
            shift = tl.where(top == float("-inf"), 0.0, top)
            den = den * tl.exp2(m - shift) + tl.exp2(sink - shift)
            acc = acc * tl.exp2(m - shift)[:, None]
            m = top
        o = acc * (v_scale / tl.where(den == 0.0, 1.0, den))[:, None]
        tl.store(
            out_ptr + token.to(tl.int64) * out_stride_t + h[:, None] * out_stride_h + dv[None, :],
            o.to(out_ptr.dtype.element_ty), mask=held,
        )  # fmt: skip
        if LSE:
            tl.store(lse_ptr + token.to(tl.int64) * lse_stride_t + h, (m + tl.log2(den)) * LN2, mask=m_lane < GROUP)
    else:
        place = item.to(tl.int64) * HEADS + h
        tl.store(part_ptr + place[:, None] * V_DIM + dv[None, :], acc / tl.where(den == 0.0, 1.0, den)[:, None], mask=held)
        tl.store(part_lse_ptr + place, m + tl.log2(den), mask=m_lane < GROUP)
        if FUSED:
            # Every thread's stores come before the one arrival; the last to arrive sees all of them.
            tl.debug_barrier()
            counter = arrived_ptr + first_item * (HEADS // GROUP) + head
            arrived = tl.atomic_add(counter, 1, sem="acq_rel", scope="gpu")
            if arrived == splits - 1:
                tl.debug_barrier()
                tl.store(counter, 0)  # ready for the next launch
                merge_parts(
                    token, first_item, splits, head,
                    part_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, v_scale, out_stride_t, out_stride_h, lse_stride_t,
                    HEADS, GROUP, V_DIM, BLOCK_G, BLOCK_V, CHUNK, SINKS, LSE,
                )  # fmt: skip


@triton.jit(do_not_specialize=["lse_stride_t"])
def merge_kernel(
    cuts_ptr, part_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, v_scale, out_stride_t, out_stride_h, lse_stride_t,
    HEADS: tl.constexpr, V_DIM: tl.constexpr, BLOCK_V: tl.constexpr, FEW: tl.constexpr, CHUNK: tl.constexpr,
    SINKS: tl.constexpr, LSE: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """One program adds up one query head of one row, if it was split: up to FEW parts at once, else CHUNK at a time."""
    head = tl.program_id(0)
    row = tl.program_id(1)
    # The work map is older than the decode kernel, which waited for it: it may be read before the wait.
    token = tl.load(cuts_ptr + row * 4)
    first_item = tl.load(cuts_ptr + row * 4 + 1)
    splits = tl.load(cuts_ptr + row * 4 + 2)
    # After one short row comes a product that asks for its weights before it waits, while memory idles. After longer rows it does not, and
    # programs that only wait would take room.
    early = (splits <= FEW) & (tl.num_programs(1) == 1)
    if PDL:
        if early:
            tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()
        if not early:
            tl.extra.cuda.gdc_launch_dependents()
    if splits <= 1:
        return
    # Few parts in a small chunk: places that hold none cost registers and instructions, a good part of what a short row takes.
    if splits <= FEW:
        merge_parts(
            token, first_item, splits, head,
            part_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, v_scale, out_stride_t, out_stride_h, lse_stride_t,
            HEADS, 1, V_DIM, 1, BLOCK_V, FEW, SINKS, LSE,
        )  # fmt: skip
    else:
        merge_parts(
            token, first_item, splits, head,
            part_ptr, part_lse_ptr, out_ptr, lse_ptr, sinks_ptr, v_scale, out_stride_t, out_stride_h, lse_stride_t,
            HEADS, 1, V_DIM, 1, BLOCK_V, CHUNK, SINKS, LSE,
        )  # fmt: skip
