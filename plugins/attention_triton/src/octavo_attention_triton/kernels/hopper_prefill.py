"""Prefill on Hopper: warp specialised, in Gluon. For 16-bit caches of dim 64 or 128, and FP8 caches whose pages `widen.py` has
widened; `prefill.py` does the rest.

Three partitions share a program. A producer warp walks the tiles of K and V through the block table and has the
tensor memory accelerator copy them, box by box, into rings in shared memory; two consumer warpgroups of 64 matrix rows each
(tokens times the query heads of one KV head) multiply and normalise. A consumer issues Q.K of tile j together with
P.V of tile j - 1 and computes the softmax of j while the latter runs.
Programs are persistent: each takes its items of the list (`prefill_tiles.Items`), so K, V and Q of the next item are on their
way during an epilogue.

The pool's cache is read as one matrix of rows of DIM elements, which needs rows without padding.
"""

from __future__ import annotations

import torch
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    async_copy,
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo_attention_triton.tuning import HOPPER_TOKENS

LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _bounds(record, window, BLOCK_N: gl.constexpr, WINDOW: gl.constexpr):
    """Of a tile record: first token, tokens, first position, and its KV tiles: first, first unmasked, masked again, end."""
    token0 = gl.load(record)
    tokens = gl.load(record + 1)
    position0 = gl.load(record + 2)
    last = position0 + tokens
    end = (last + BLOCK_N - 1) // BLOCK_N
    full = (position0 + 1) // BLOCK_N
    first = 0
    open_ = 0
    if WINDOW:
        first = gl.maximum(position0 - window + 1, 0) // BLOCK_N
        open_ = gl.maximum((gl.maximum(last - window, 0) + BLOCK_N - 1) // BLOCK_N, first)
    return token0, tokens, position0, first, open_, full, end


@gluon.jit
def _fetch(
    desc, table, tile, end_token, row0, barrier, target, rows_per_page,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, PAGE: gl.constexpr,
):  # fmt: skip
    """Copy one tile [BLOCK_N, DIM]; row0: of the head in a page. Boxes past the sequence's end read block 0."""
    mbarrier.expect(barrier, BLOCK_N * DIM * 2)
    for b in gl.static_range(BLOCK_N // BOX):
        token = tile * BLOCK_N + b * BOX
        page = gl.load(table + token // PAGE, mask=token < end_token, other=0)
        row = gl.maximum(page, 0) * rows_per_page + row0 + token % PAGE
        for c in gl.static_range(DIM // 64):
            tma.async_copy_global_to_shared(desc, [row, c * 64], barrier, target.slice(b * BOX, BOX, 0).slice(c * 64, 64, 1))


@gluon.jit
def _produce(
    desc, table_ptr, items_ptr, starts_ptr, heads, table_stride, window, rows_per_page,
    k_smem, v_smem, k_full, v_full, k_empty, v_empty,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr, WINDOW: gl.constexpr,
):  # fmt: skip
    count = 0
    for item in range(gl.load(starts_ptr + gl.program_id(0)), gl.load(starts_ptr + gl.program_id(0) + 1)):
        record = items_ptr + item * 8
        _, _, _, first, _, _, end = _bounds(record, window, BLOCK_N, WINDOW)
        table = table_ptr + gl.load(record + 3).to(gl.int64) * table_stride
        end_token = gl.load(record + 4)
        row0 = gl.load(record + 5) * PAGE
        for tile in range(first, end):
            stage = count % STAGES
            phase = (count // STAGES) & 1
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            _fetch(desc, table, tile, end_token, row0, k_full.index(stage), k_smem.index(stage), rows_per_page,
                   DIM, BLOCK_N, BOX, PAGE)  # fmt: skip
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            _fetch(desc, table, tile, end_token, row0 + heads * PAGE, v_full.index(stage), v_smem.index(stage), rows_per_page,
                   DIM, BLOCK_N, BOX, PAGE)  # fmt: skip
            count += 1


@gluon.jit
def _tanh(x):
    e = gl.exp2(-2.8853900817779268 * gl.abs(x))
    t = (1.0 - e) / (1.0 + e)
    return gl.where(x < 0, -t, t)


@gluon.jit
def _softmax(
    s, m, den, tile, position, scale, softcap, window,
    BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr, SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Raw scores to base-2 probabilities; returns them with the new maximum, the new sum and the factor of the old one."""
    if SOFTCAP:
        s = softcap * _tanh(s * (scale / softcap))
        factor = 1.0
    else:
        factor = scale
    if MASKED:
        key = (tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT)))[None, :]
        visible = key <= position[:, None]
        if WINDOW:
            visible = visible & (key > position[:, None] - window)
        s = gl.where(visible, s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1) * factor)
    shift = top
    if MASKED:
        shift = gl.where(top == float("-inf"), 0.0, top)
    p = gl.exp2(s * factor - shift[:, None])
    keep = gl.exp2(m - shift)
    return p, top, den * keep + gl.sum(p, 1), keep


@gluon.jit
def _zero_outside(v, tile, low, high, BLOCK_N: gl.constexpr, DIM: gl.constexpr):
    """Zero the values of tokens outside [low, high): past the sequence's end, or before a window in blocks that have been
    given back, memory may hold NaN, which a probability of zero does not erase. Both consumers write the same bytes here,
    so neither needs to know how far the other is."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    for i in gl.static_range(BLOCK_N // 16):
        token = tile * BLOCK_N + i * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        part = v.slice(i * 16, 16, 0)
        part.store(gl.where(((token >= low) & (token < high))[:, None], part.load(layout), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _rows(token0, tokens, head, HALF: gl.constexpr, GROUP: gl.constexpr, LAYOUT: gl.constexpr):
    """Of a consumer's 64 matrix rows: token, query head, and whether the row is one of the item's."""
    lane = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, LAYOUT))
    return (token0 + lane // GROUP).to(gl.int64), head * GROUP + lane % GROUP, lane // GROUP < tokens


@gluon.jit
def _load_q(q_ptr, target, record, q_stride_t, q_stride_h, HALF: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr):
    """Start copying an item's queries; rows that are not the item's keep what was there."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    token, h, live = _rows(gl.load(record), gl.load(record + 1), gl.load(record + 5), HALF, GROUP, layout)
    d = gl.arange(0, DIM, gl.SliceLayout(0, layout))
    pointers = q_ptr + token[:, None] * q_stride_t + h[:, None] * q_stride_h + d[None, :]
    async_copy.async_copy_global_to_shared(target, pointers, mask=live[:, None])
    async_copy.commit_group()


@gluon.jit
def _step(
    q, p, m, den, o, tile, count, position, scale, softcap, window, k_smem, v_smem, k_full, v_full, k_empty, v_empty,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr,
    SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Tile `tile` (number `count` of the ring) against Q, while P of the tile before it meets its V."""
    stage = count % STAGES
    before = (count - 1) % STAGES
    mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    mbarrier.wait(v_full.index(before), ((count - 1) // STAGES) & 1)
    o = warpgroup_mma(p, v_smem.index(before), o, is_async=True)
    s = warpgroup_mma_wait(1, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    pf, m, den, keep = _softmax(s, m, den, tile, position, scale, softcap, window, BLOCK_N, S_LAYOUT, SOFTCAP, WINDOW, MASKED)
    o = warpgroup_mma_wait(0, deps=[o])
    mbarrier.arrive(v_empty.index(before), count=1)
    o = o * gl.convert_layout(keep, gl.SliceLayout(1, O_LAYOUT))[:, None]
    p = gl.convert_layout(pf.to(p.dtype), gl.DotOperandLayout(0, O_LAYOUT, 2))
    return p, m, den, o


@gluon.jit
def _consume(
    common, HALF: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    (q_ptr, out_ptr, lse_ptr, items_ptr, starts_ptr, sinks_ptr, window, scale, softcap, v_scale,
     q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t,
     q_smem, k_smem, v_smem, k_full, v_full, k_empty, v_empty) = common  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 16])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = q_smem.dtype
    count = 0
    turn = 0
    start = gl.load(starts_ptr + gl.program_id(0))
    stop = gl.load(starts_ptr + gl.program_id(0) + 1)
    _load_q(q_ptr, q_smem.index(HALF * 2), items_ptr + start * 8, q_stride_t, q_stride_h, HALF, GROUP, DIM)
    for item in range(start, stop):
        record = items_ptr + item * 8
        head = gl.load(record + 5)
        token0, tokens, position0, first, open_, full, end = _bounds(record, window, BLOCK_N, WINDOW)
        end_token = gl.load(record + 4)
        q = q_smem.index(HALF * 2 + turn)
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        turn = turn ^ 1
        if item + 1 < stop:
            _load_q(q_ptr, q_smem.index(HALF * 2 + turn), record + 8, q_stride_t, q_stride_h, HALF, GROUP, DIM)

        lane = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
        position = position0 + gl.minimum(lane // GROUP, tokens - 1)
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        den = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))

        # The first tile has no P.V beside it; it is masked whether or not it must be.
        stage = count % STAGES
        mbarrier.wait(k_full.index(stage), (count // STAGES) & 1)
        s = warpgroup_mma(
            q, k_smem.index(stage).permute((1, 0)), gl.zeros([64, BLOCK_N], gl.float32, s_layout), use_acc=False, is_async=True
        )
        s = warpgroup_mma_wait(0, deps=[s])
        mbarrier.arrive(k_empty.index(stage), count=1)
        pf, m, den, _ = _softmax(s, m, den, first, position, scale, softcap, window, BLOCK_N, s_layout, SOFTCAP, WINDOW, True)
        p = gl.convert_layout(pf.to(dtype), gl.DotOperandLayout(0, o_layout, 2))
        if WINDOW:
            low = position0 - window + 1
            if low > first * BLOCK_N:
                mbarrier.wait(v_full.index(stage), (count // STAGES) & 1)
                _zero_outside(v_smem.index(stage), first, low, end_token, BLOCK_N, DIM)
        count += 1

        o = gl.zeros([64, DIM], gl.float32, o_layout)
        body = gl.minimum(gl.maximum(first + 1, open_), end)
        if WINDOW:
            for tile in range(first + 1, body):
                p, m, den, o = _step(
                    q, p, m, den, o, tile, count, position, scale, softcap, window, k_smem, v_smem, k_full, v_full,
                    k_empty, v_empty, DIM, BLOCK_N, STAGES, s_layout, o_layout, SOFTCAP, WINDOW, True,
                )  # fmt: skip
                count += 1
        for tile in range(body, full):
            p, m, den, o = _step(
                q, p, m, den, o, tile, count, position, scale, softcap, window, k_smem, v_smem, k_full, v_full,
                k_empty, v_empty, DIM, BLOCK_N, STAGES, s_layout, o_layout, SOFTCAP, WINDOW, False,
            )  # fmt: skip
            count += 1
        for tile in range(gl.maximum(body, full), end):
            p, m, den, o = _step(
                q, p, m, den, o, tile, count, position, scale, softcap, window, k_smem, v_smem, k_full, v_full,
                k_empty, v_empty, DIM, BLOCK_N, STAGES, s_layout, o_layout, SOFTCAP, WINDOW, True,
            )  # fmt: skip
            count += 1
        stage = (count - 1) % STAGES
        mbarrier.wait(v_full.index(stage), ((count - 1) // STAGES) & 1)
        if end * BLOCK_N > end_token:
            _zero_outside(v_smem.index(stage), end - 1, 0, end_token, BLOCK_N, DIM)
        o = warpgroup_mma(p, v_smem.index(stage), o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(v_empty.index(stage), count=1)

        if SINKS or LSE:
            token, h, live = _rows(token0, tokens, head, HALF, GROUP, s_layout)
            if SINKS:
                sink = gl.load(sinks_ptr + h, mask=live, other=0.0).to(gl.float32) * LOG2E
                top = gl.maximum(m, sink)
                keep = gl.exp2(m - top)
                den = den * keep + gl.exp2(sink - top)
                o = o * gl.convert_layout(keep, gl.SliceLayout(1, o_layout))[:, None]
                m = top
            if LSE:
                gl.store(lse_ptr + token * lse_stride_t + h, (m + gl.log2(den)) * LN2, mask=live)
        o = o * gl.convert_layout(v_scale / den, gl.SliceLayout(1, o_layout))[:, None]
        # Through the queries' memory, which is free now, so that stores to device memory are 16 bytes wide.
        q.store(o.to(dtype))
        gl.thread_barrier()
        token, h, live = _rows(token0, tokens, head, HALF, GROUP, wide)
        d = gl.arange(0, DIM, gl.SliceLayout(0, wide))
        pointers = out_ptr + token[:, None] * out_stride_t + h[:, None] * out_stride_h + d[None, :]
        gl.store(pointers, q.load(wide), mask=live[:, None])


@gluon.jit(do_not_specialize=["heads", "window", "table_stride", "lse_stride_t"])
def hopper_prefill_kernel(
    desc, q_ptr, out_ptr, lse_ptr, table_ptr, items_ptr, starts_ptr, sinks_ptr,
    heads, window, scale, softcap, v_scale, table_stride,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, rows_per_page,
    GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, BOX: gl.constexpr, PAGE: gl.constexpr, STAGES: gl.constexpr,
    SOFTCAP: gl.constexpr, WINDOW: gl.constexpr, SINKS: gl.constexpr, LSE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """desc: the cache as [rows, DIM], boxes of [BOX, 64]. PDL is the launcher's last constant; this kernel is always launched to start
    when the one before it has ended."""
    dtype: gl.constexpr = desc.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(dtype, [4, 64, DIM], wide)  # two consumers, this item and the next
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], wide)
    v_smem = gl.allocate_shared_memory(dtype, [STAGES, BLOCK_N, DIM], wide)
    k_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    k_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    v_empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(k_full.index(i), count=1)
        mbarrier.init(v_full.index(i), count=1)
        mbarrier.init(k_empty.index(i), count=2)
        mbarrier.init(v_empty.index(i), count=2)
    fence_async_shared()
    common = (q_ptr, out_ptr, lse_ptr, items_ptr, starts_ptr, sinks_ptr, window, scale, softcap, v_scale,
              q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t,
              q_smem, k_smem, v_smem, k_full, v_full, k_empty, v_empty)  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (common, 0, GROUP, DIM, BLOCK_N, STAGES, SOFTCAP, WINDOW, SINKS, LSE)),
            (_consume, (common, 1, GROUP, DIM, BLOCK_N, STAGES, SOFTCAP, WINDOW, SINKS, LSE)),
            (_produce, (desc, table_ptr, items_ptr, starts_ptr, heads, table_stride, window, rows_per_page, k_smem, v_smem,
                        k_full, v_full, k_empty, v_empty, DIM, BLOCK_N, BOX, PAGE, STAGES, WINDOW)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


BLOCK_N = HOPPER_TOKENS
STAGES = 2


def descriptor(cache: torch.Tensor, dim: int, page: int) -> TensorDescriptor:
    """The whole cache of a layer as a matrix [rows, dim], copied in boxes of [page or tile, 64]."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor.from_tensor(cache.view(-1, dim), [min(page, BLOCK_N), 64], layout)
