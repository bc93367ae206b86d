"""Paged causal attention of chunks: several new tokens a row, over the row's cached prefix and the chunk itself.

A program's BLOCK_M matrix rows are BLOCK_M // GROUP tokens times the GROUP query heads of one KV head, so that
even a short chunk fills a tile and K and V are read once a group. Tiles wholly visible carry no mask; only
tiles that the diagonal or a window's edge crosses do; tiles outside are not loaded. The tile list comes longest first.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_attention_triton.kernels.tile import accumulate, load_tile, scores

TILE = 8
"""int32 values of a tile record: first token, tokens, position of the first, state-table row, the sequence's end, 3 spare."""

LN2 = tl.constexpr(0.6931471805599453)


@triton.jit
def _masked(
    start, stop, q, position, m, den, acc, cache_ptr, table, first, last, head, page_stride, scale, softcap, window,
    K_DIM: tl.constexpr, V_DIM: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_BASE: tl.constexpr, V_TRANSPOSED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, WINDOW: tl.constexpr, SOFTCAP: tl.constexpr,
):  # fmt: skip
    """Tiles of [start, stop), each key compared with each query's position."""
    n = tl.arange(0, BLOCK_N)
    for at in tl.range(start, stop, BLOCK_N, num_stages=1):
        k = load_tile(cache_ptr, table, at, first, last, head, page_stride,
                      K_ROW, K_DIM, BLOCK_K, BLOCK_N, PAGE, 0, False, True)  # fmt: skip
        v = load_tile(cache_ptr, table, at, first, last, head, page_stride,
                      V_ROW, V_DIM, BLOCK_V, BLOCK_N, PAGE, V_BASE, V_TRANSPOSED, True)  # fmt: skip
        s = scores(q, k, scale, softcap, SOFTCAP, PRECISION)
        key = (at + n)[None, :]
        visible = key <= position[:, None]
        if WINDOW:
            visible = visible & (key > position[:, None] - window)
        s = tl.where(visible, s, float("-inf"))
        held = (at + n >= first) & (at + n < last)
        m, den, acc = accumulate(s, v, held, m, den, acc, DOT, V_TRANSPOSED, PRECISION, True)
    return m, den, acc


@triton.jit(do_not_specialize=["table_stride", "lse_stride_t", "window"])
def prefill_kernel(
    q_ptr, out_ptr, lse_ptr, cache_ptr, table_ptr, tiles_ptr, sinks_ptr,
    scale_log2, softcap, v_scale, window,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, table_stride, page_stride,
    GROUP: tl.constexpr, K_DIM: tl.constexpr, V_DIM: tl.constexpr,
    BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, BLOCK_V: tl.constexpr,
    PAGE: tl.constexpr, K_ROW: tl.constexpr, V_ROW: tl.constexpr, V_BASE: tl.constexpr, V_TRANSPOSED: tl.constexpr,
    DOT: tl.constexpr, PRECISION: tl.constexpr, NORMALISE: tl.constexpr,
    WINDOW: tl.constexpr, SOFTCAP: tl.constexpr, SINKS: tl.constexpr, LSE: tl.constexpr, STAGES: tl.constexpr,
):  # fmt: skip
    tile = tl.program_id(0)
    head = tl.program_id(1)
    token0 = tl.load(tiles_ptr + tile * 8)
    tokens = tl.load(tiles_ptr + tile * 8 + 1)
    position0 = tl.load(tiles_ptr + tile * 8 + 2)
    row = tl.load(tiles_ptr + tile * 8 + 3)
    table = table_ptr + row.to(tl.int64) * table_stride

    lane = tl.arange(0, BLOCK_M)
    t = lane // GROUP
    h = head * GROUP + lane % GROUP
    dk = tl.arange(0, BLOCK_K)
    dv = tl.arange(0, BLOCK_V)
    live = t < tokens
    # A padding lane takes the last token's position: its row is computed and never stored.
    position = position0 + tl.minimum(t, tokens - 1)
    token = (token0 + t).to(tl.int64)
    q = tl.load(
        q_ptr + token[:, None] * q_stride_t + h[:, None] * q_stride_h + dk[None, :],
        mask=live[:, None] & (dk < K_DIM)[None, :], other=0.0,
    )  # fmt: skip
    scale = scale_log2
    if NORMALISE:
        # See decode: a bfloat16 query against FP8 keys becomes float16, scaled to +-1.
        size = tl.max(tl.abs(q.to(tl.float32)), 1)
        size = tl.where(size > 0, size, 1.0)
        q = q.to(tl.float32) / size[:, None]
        scale = scale_log2 * size[:, None]
    q = q.to(DOT)

    m = tl.full([BLOCK_M], float("-inf"), tl.float32)
    den = tl.zeros([BLOCK_M], tl.float32)
    acc = tl.zeros([BLOCK_M, BLOCK_V], tl.float32)

    last = position0 + tokens  # one past the newest key that any query here sees
    full = (position0 + 1) // BLOCK_N * BLOCK_N  # every query sees every key before it
    first = 0
    body = 0
    if WINDOW:
        first = tl.maximum(position0 - window + 1, 0)
        edge = tl.cdiv(tl.maximum(last - window, 0), BLOCK_N) * BLOCK_N  # from here every query's window is open
        start = first // BLOCK_N * BLOCK_N
        body = tl.minimum(tl.maximum(edge, start), tl.cdiv(last, BLOCK_N) * BLOCK_N)
        m, den, acc = _masked(
            start, body, q, position, m, den, acc, cache_ptr, table, first, last, head, page_stride, scale, softcap, window,
            K_DIM, V_DIM, BLOCK_N, BLOCK_K, BLOCK_V, PAGE, K_ROW, V_ROW, V_BASE, V_TRANSPOSED, DOT, PRECISION, WINDOW, SOFTCAP,
        )  # fmt: skip
    for at in tl.range(body, full, BLOCK_N, num_stages=STAGES):
        k = load_tile(cache_ptr, table, at, first, last, head, page_stride,
                      K_ROW, K_DIM, BLOCK_K, BLOCK_N, PAGE, 0, False, False)  # fmt: skip
        v = load_tile(cache_ptr, table, at, first, last, head, page_stride,
                      V_ROW, V_DIM, BLOCK_V, BLOCK_N, PAGE, V_BASE, V_TRANSPOSED, False)  # fmt: skip
        s = scores(q, k, scale, softcap, SOFTCAP, PRECISION)
        # A lane whose window left it nothing yet still holds -inf.
        m, den, acc = accumulate(s, v, dv, m, den, acc, DOT, V_TRANSPOSED, PRECISION, False)
    m, den, acc = _masked(
        tl.maximum(body, full), last, q, position, m, den, acc,
        cache_ptr, table, first, last, head, page_stride, scale, softcap, window,
        K_DIM, V_DIM, BLOCK_N, BLOCK_K, BLOCK_V, PAGE, K_ROW, V_ROW, V_BASE, V_TRANSPOSED, DOT, PRECISION, WINDOW, SOFTCAP,
    )  # fmt: skip

    if SINKS:
        sink = tl.load(sinks_ptr + h, mask=live, other=float("-inf")).to(tl.float32) * 1.4426950408889634
        top = tl.maximum(m, sink)
        den = den * tl.exp2(m - top) + tl.exp2(sink - top)
        acc = acc * tl.exp2(m - top)[:, None]
        m = top
    o = acc * (v_scale / den)[:, None]
    tl.store(
        out_ptr + token[:, None] * out_stride_t + h[:, None] * out_stride_h + dv[None, :],
        o.to(out_ptr.dtype.element_ty), mask=live[:, None] & (dv < V_DIM)[None, :],
    )  # fmt: skip
    if LSE:
        tl.store(lse_ptr + token * lse_stride_t + h, (m + tl.log2(den)) * LN2, mask=live)
