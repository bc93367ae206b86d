"""Attention over a latent cache on Hopper, in Gluon: 64 query heads of a token against one shared head of 512 + 64.

K and V are the same bytes: the scores take all of an entry, the sums its first part. A producer warp walks the block
table and has the tensor memory accelerator copy tiles of 64 entries into two buffers in shared memory; two warpgroups
share the rest. Each computes half of the tile's scores, passes its probabilities through shared memory, and owns
half of the output's columns: 64 x 512 float32 are half of a multiprocessor's registers, so neither could hold all.

`latent.py` does what this does not: other shapes and dtypes, other devices. Items and partial results are its, too.
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

LATENT, ROPE = gl.constexpr(512), gl.constexpr(64)
ROWS = gl.constexpr(64)
TILE = gl.constexpr(64)
STAGES = gl.constexpr(2)
LN2 = gl.constexpr(0.6931471805599453)
LOG2E = gl.constexpr(1.4426950408889634)


@gluon.jit
def _produce(
    desc, table_ptr, items_ptr, table_stride, rows_per_page, k_smem, r_smem, full, empty, BOX: gl.constexpr, PAGE: gl.constexpr
):
    record = items_ptr + gl.program_id(1) * 8
    first = gl.load(record + 2)
    last = gl.load(record + 3)
    table = table_ptr + gl.load(record + 1).to(gl.int64) * table_stride
    begin = first // TILE
    for tile in range(begin, (last + TILE - 1) // TILE):
        count = tile - begin
        stage = count % STAGES
        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        bar = full.index(stage)
        mbarrier.expect(bar, TILE * (LATENT + ROPE) * 2)
        for b in gl.static_range(TILE // BOX):
            token = tile * TILE + b * BOX
            page = gl.load(table + token // PAGE, mask=token < last, other=0)
            row = gl.maximum(page, 0) * rows_per_page + token % PAGE
            tma.async_copy_global_to_shared(desc, [row, LATENT], bar, r_smem.index(stage).slice(b * BOX, BOX, 0))
            for c in gl.static_range(LATENT // 64):
                target = k_smem.index(stage).slice(b * BOX, BOX, 0).slice(c * 64, 64, 1)
                tma.async_copy_global_to_shared(desc, [row, c * 64], bar, target)


@gluon.jit
def _zero_from(v, tile, last):
    """Zero the entries of tokens from `last` on: memory past a sequence's end may hold NaN, which no weight of 0 erases."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [1, 32], [8, 1], [1, 0])
    for i in gl.static_range(TILE // 16):
        token = tile * TILE + i * 16 + gl.arange(0, 16, gl.SliceLayout(1, layout))
        part = v.slice(i * 16, 16, 0)
        part.store(gl.where((token < last)[:, None], part.load(layout), 0.0))
    fence_async_shared()
    gl.thread_barrier()


@gluon.jit
def _load_q(q_ptr, target, token0, tokens, head0, q_stride_t, q_stride_h, HEADS: gl.constexpr, BLOCK_H: gl.constexpr,
            FROM: gl.constexpr, WIDTH: gl.constexpr):  # fmt: skip
    """Columns [FROM, FROM + WIDTH) of the item's queries into shared memory; rows that are not the item's keep what was there."""
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [8, 1], [1, 0])
    lane = gl.arange(0, ROWS, gl.SliceLayout(1, layout))
    d = FROM + gl.arange(0, WIDTH, gl.SliceLayout(0, layout))
    token = (token0 + lane // BLOCK_H).to(gl.int64)
    h = head0 + lane % BLOCK_H
    live = (lane // BLOCK_H < tokens) & (h < HEADS)
    pointers = q_ptr + token[:, None] * q_stride_t + h[:, None] * q_stride_h + d[None, :]
    async_copy.async_copy_global_to_shared(target, pointers, mask=live[:, None])


@gluon.jit
def _consume(
    q_ptr, out_ptr, lse_ptr, items_ptr, part_ptr, part_lse_ptr, scale,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t,
    q_smem, qr_smem, k_smem, r_smem, p_smem, at_smem, full, empty,
    HEADS: gl.constexpr, BLOCK_H: gl.constexpr, PACKED: gl.constexpr, LSE: gl.constexpr, CHOSEN: gl.constexpr,
):  # fmt: skip
    """The consumers. CHOSEN: keys are those that at_smem [STAGES, TILE] has a position for, at least 0; else all of the item's, up
    to each lane's own."""
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, TILE // 2, 16])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 2], [16, LATENT // 2, 16])
    s_rows: gl.constexpr = gl.SliceLayout(1, s_layout)
    o_rows: gl.constexpr = gl.SliceLayout(1, o_layout)
    item = gl.program_id(1)
    head0 = gl.program_id(0) * BLOCK_H
    record = items_ptr + item * 8
    token0 = gl.load(record)
    first = gl.load(record + 2)
    last = gl.load(record + 3)
    splits = gl.load(record + 5)
    tokens = 1
    if PACKED:
        tokens = gl.load(record + 7)

    _load_q(q_ptr, q_smem, token0, tokens, head0, q_stride_t, q_stride_h, HEADS, BLOCK_H, 0, LATENT)
    _load_q(q_ptr, qr_smem, token0, tokens, head0, q_stride_t, q_stride_h, HEADS, BLOCK_H, LATENT, ROPE)
    async_copy.commit_group()
    async_copy.wait_group(0)
    fence_async_shared()
    gl.thread_barrier()

    # Lane i is token i // BLOCK_H of the item, which sees the keys up to its own: `last` is one past the newest token's.
    position = last - tokens + gl.minimum(gl.arange(0, ROWS, s_rows) // BLOCK_H, tokens - 1)
    m = gl.full([ROWS], float("-inf"), gl.float32, s_rows)
    den = gl.zeros([ROWS, TILE], gl.float32, s_layout)  # summed over columns at the end
    o = gl.zeros([ROWS, LATENT], gl.float32, o_layout)
    whole = (last - tokens + 1) // TILE
    begin = first // TILE
    for tile in range(begin, (last + TILE - 1) // TILE):
        count = tile - begin
        stage = count % STAGES
        mbarrier.wait(full.index(stage), (count // STAGES) & 1)
        k = k_smem.index(stage)
        s = gl.zeros([ROWS, TILE], gl.float32, s_layout)
        s = warpgroup_mma(q_smem, k.permute((1, 0)), s, use_acc=False, is_async=True)
        s = warpgroup_mma(qr_smem, r_smem.index(stage).permute((1, 0)), s, is_async=True)
        s = warpgroup_mma_wait(0, deps=[s])
        if CHOSEN:
            chosen = at_smem.index(stage).load(gl.SliceLayout(0, s_layout)) >= 0
            s = gl.where(chosen[None, :], s, float("-inf"))
        elif tile >= whole:
            key = tile * TILE + gl.arange(0, TILE, gl.SliceLayout(0, s_layout))
            s = gl.where(key[None, :] <= position[:, None], s, float("-inf"))
            if (tile + 1) * TILE > last:
                _zero_from(k, tile, last)
        # Every lane sees the first tile's first key, so that m is finite from the first tile on; but of chosen ones there may be none.
        top = gl.maximum(m, gl.max(s, 1) * scale)
        shift = gl.where(top == float("-inf"), 0.0, top) if CHOSEN else top
        p = gl.exp2(s * scale - shift[:, None])
        keep = gl.exp2(m - shift)
        m = top
        den = den * keep[:, None] + p
        p_smem.store(p.to(p_smem.dtype))
        fence_async_shared()
        gl.thread_barrier()
        o = o * gl.convert_layout(keep, o_rows)[:, None]
        o = warpgroup_mma(p_smem, k, o, is_async=True)
        o = warpgroup_mma_wait(0, deps=[o])
        mbarrier.arrive(empty.index(stage), count=1)

    total = gl.sum(den, 1)
    total = gl.where(total == 0.0, 1.0, total)  # a padding row of length 0 gives zeros
    o = o * gl.convert_layout(1.0 / total, o_rows)[:, None]
    lane = gl.arange(0, ROWS, o_rows)
    d = gl.arange(0, LATENT, gl.SliceLayout(0, o_layout))
    h = head0 + lane % BLOCK_H
    live = (lane // BLOCK_H < tokens) & (h < HEADS)
    lane_s = gl.arange(0, ROWS, s_rows)
    h_s = head0 + lane_s % BLOCK_H
    live_s = (lane_s // BLOCK_H < tokens) & (h_s < HEADS)
    if splits == 1:
        token = (token0 + lane // BLOCK_H).to(gl.int64)
        pointers = out_ptr + token[:, None] * out_stride_t + h[:, None] * out_stride_h + d[None, :]
        gl.store(pointers, o.to(out_ptr.dtype.element_ty), mask=live[:, None])
        if LSE:
            token_s = (token0 + lane_s // BLOCK_H).to(gl.int64)
            gl.store(lse_ptr + token_s * lse_stride_t + h_s, (m + gl.log2(total)) * LN2, mask=live_s)
    else:
        gl.store(part_ptr + (item.to(gl.int64) * HEADS + h)[:, None] * LATENT + d[None, :], o, mask=live[:, None])
        gl.store(part_lse_ptr + item.to(gl.int64) * HEADS + h_s, m + gl.log2(total), mask=live_s)


@gluon.jit(do_not_specialize=["table_stride", "lse_stride_t"])
def hopper_latent_kernel(
    q_ptr, out_ptr, lse_ptr, desc, table_ptr, items_ptr, part_ptr, part_lse_ptr, scale,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, table_stride, rows_per_page,
    HEADS: gl.constexpr, BLOCK_H: gl.constexpr, BOX: gl.constexpr, PAGE: gl.constexpr, PACKED: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Program (b, i): heads [b * BLOCK_H, (b + 1) * BLOCK_H) of item i (latent.py says what an item is). desc: the cache as
    [entries, 576], copied in boxes of [BOX, 64]. scale: softmax scale * log2(e). PACKED: items may have several tokens."""
    if gl.load(items_ptr + gl.program_id(1) * 8) < 0:
        return
    dtype: gl.constexpr = desc.dtype
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(dtype, [ROWS, LATENT], wide)
    qr_smem = gl.allocate_shared_memory(dtype, [ROWS, ROPE], wide)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, LATENT], wide)
    r_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, ROPE], wide)
    p_smem = gl.allocate_shared_memory(dtype, [ROWS, TILE], wide)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=1)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (q_ptr, out_ptr, lse_ptr, items_ptr, part_ptr, part_lse_ptr, scale,
                        q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t,
                        q_smem, qr_smem, k_smem, r_smem, p_smem, p_smem, full, empty, HEADS, BLOCK_H, PACKED, LSE, False)),
            (_produce, (desc, table_ptr, items_ptr, table_stride, rows_per_page, k_smem, r_smem, full, empty, BOX, PAGE)),
        ],
        [1],
        [24],
    )  # fmt: skip


def descriptor(cache: torch.Tensor, page: int) -> TensorDescriptor:
    """The whole cache of a layer as a matrix [entries, 576], copied in boxes of [page or tile, 64]."""
    layout = gl.NVMMASharedLayout(128, 16, 2)
    return TensorDescriptor.from_tensor(cache.view(-1, LATENT.value + ROPE.value), [min(page, TILE.value), 64], layout)
