"""Prefill on Hopper with products in FP8, in Gluon: of dim 128 over an e4m3 cache, whose pages `repack.py` has packed into tiles.

The partitions are those of `hopper_prefill.py`, with half the bytes to copy and products at twice the rate, so that exponentials and sums beside
them count as much. A consumer's two products follow one another: the other consumer's fill the tensor cores meanwhile. Queries are rounded to e4m3
under a scale a token and head, and weights as 256 times what they are beside the row's largest so far. The unit adds up FP8 products with fewer
bits than float32 has, so each tile's sums are taken out of it and added in float32: sums that stayed in it would lose more, the longer the row.
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

from octavo_attention_triton.kernels.hopper_prefill import LN2, _bounds, _load_q, _rows
from octavo_attention_triton.tuning import HOPPER_TOKENS

BLOCK_N = HOPPER_TOKENS
DIM = 128
STAGES = 3


@gluon.jit
def _produce(
    desc, table_ptr, items_ptr, starts_ptr, heads, table_stride, k_smem, v_smem, k_full, v_full, k_empty, v_empty,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr,
):  # fmt: skip
    count = 0
    for item in range(gl.load(starts_ptr + gl.program_id(0)), gl.load(starts_ptr + gl.program_id(0) + 1)):
        record = items_ptr + item * 8
        _, _, _, first, _, _, end = _bounds(record, 0, BLOCK_N, False)
        table = table_ptr + gl.load(record + 3).to(gl.int64) * table_stride
        head = gl.load(record + 5)
        for tile in range(first, end):
            stage = count % STAGES
            phase = (count // STAGES) & 1
            row = gl.load(table + tile) * (heads * (BLOCK_N + DIM)) + head * BLOCK_N
            mbarrier.wait(k_empty.index(stage), phase ^ 1)
            mbarrier.expect(k_full.index(stage), BLOCK_N * DIM)
            tma.async_copy_global_to_shared(desc, [row, 0], k_full.index(stage), k_smem.index(stage))
            mbarrier.wait(v_empty.index(stage), phase ^ 1)
            mbarrier.expect(v_full.index(stage), BLOCK_N * DIM)
            tma.async_copy_global_to_shared(desc, [row + heads * BLOCK_N, 0], v_full.index(stage), v_smem.index(stage))
            count += 1


@gluon.jit
def _ordered(p, BLOCK_N: gl.constexpr):
    """Columns as the registers that hold them are those of a left operand of bytes: the places of V's tokens."""
    return p.reshape([64, BLOCK_N // 16, 2, 4, 2]).permute((0, 1, 3, 2, 4)).reshape([64, BLOCK_N])


@gluon.jit
def _softmax(s, m, den, tile, position, factor, BLOCK_N: gl.constexpr, LAYOUT: gl.constexpr, MASKED: gl.constexpr):
    """Raw scores, which `factor` [64] makes scores to base 2, to weights; with the new maximum, the new sum and the factor of the old one.
    Every row sees the first key of all, so that the maximum is finite from the first tile on."""
    if MASKED:
        key = (tile * BLOCK_N + gl.arange(0, BLOCK_N, gl.SliceLayout(0, LAYOUT)))[None, :]
        s = gl.where(key <= position[:, None], s, float("-inf"))
    top = gl.maximum(m, gl.max(s, 1) * factor)
    p = gl.exp2(s * factor[:, None] - (top - 8.0)[:, None])
    keep = gl.exp2(m - top)
    return p, top, den * keep + gl.sum(p, 1), keep


@gluon.jit
def _step(
    q, m, den, o, tile, count, position, factor, k_smem, v_smem, k_full, v_full, k_empty, v_empty,
    DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, S_LAYOUT: gl.constexpr, O_LAYOUT: gl.constexpr, MASKED: gl.constexpr,
):  # fmt: skip
    """Tile `tile`, number `count` of the ring."""
    stage = count % STAGES
    phase = (count // STAGES) & 1
    mbarrier.wait(k_full.index(stage), phase)
    zero = gl.zeros([64, BLOCK_N], gl.float32, S_LAYOUT)
    s = warpgroup_mma(q, k_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    s = warpgroup_mma_wait(0, deps=[s])
    mbarrier.arrive(k_empty.index(stage), count=1)
    weights, m, den, keep = _softmax(s, m, den, tile, position, factor, BLOCK_N, S_LAYOUT, MASKED)
    p = gl.convert_layout(_ordered(weights.to(q.dtype), BLOCK_N), gl.DotOperandLayout(0, O_LAYOUT, 4))
    mbarrier.wait(v_full.index(stage), phase)
    zero = gl.zeros([64, DIM], gl.float32, O_LAYOUT)
    part = warpgroup_mma(p, v_smem.index(stage).permute((1, 0)), zero, use_acc=False, is_async=True)
    part = warpgroup_mma_wait(0, deps=[part])
    mbarrier.arrive(v_empty.index(stage), count=1)
    return m, den, o * gl.convert_layout(keep, gl.SliceLayout(1, O_LAYOUT))[:, None] + part


@gluon.jit
def _consume(
    common, HALF: gl.constexpr, GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    (q_ptr, out_ptr, lse_ptr, items_ptr, starts_ptr, scale, v_scale, q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t,
     given_smem, q_smem, k_smem, v_smem, k_full, v_full, k_empty, v_empty) = common  # fmt: skip
    s_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 32])
    o_layout: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, DIM, 32])
    wide: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    dtype: gl.constexpr = given_smem.dtype
    count = 0
    start = gl.load(starts_ptr + gl.program_id(0))
    stop = gl.load(starts_ptr + gl.program_id(0) + 1)
    given = given_smem.index(HALF)
    q = q_smem.index(HALF)
    _load_q(q_ptr, given, items_ptr + start * 8, q_stride_t, q_stride_h, HALF, GROUP, DIM)
    for item in range(start, stop):
        record = items_ptr + item * 8
        head = gl.load(record + 5)
        token0, tokens, position0, first, _, full, end = _bounds(record, 0, BLOCK_N, False)
        async_copy.wait_group(0)
        gl.thread_barrier()
        x = given.load(wide).to(gl.float32)
        peak = gl.maximum(gl.max(gl.abs(x), 1), 1e-12)
        q.store((x * (448.0 / peak)[:, None]).to(q.dtype))
        fence_async_shared()
        gl.thread_barrier()
        if item + 1 < stop:
            _load_q(q_ptr, given, record + 8, q_stride_t, q_stride_h, HALF, GROUP, DIM)

        factor = gl.convert_layout(peak, gl.SliceLayout(1, s_layout)) * (scale / 448.0)
        lane = HALF * 64 + gl.arange(0, 64, gl.SliceLayout(1, s_layout))
        position = position0 + gl.minimum(lane // GROUP, tokens - 1)
        m = gl.full([64], float("-inf"), gl.float32, gl.SliceLayout(1, s_layout))
        den = gl.full([64], 0.0, gl.float32, gl.SliceLayout(1, s_layout))
        o = gl.zeros([64, DIM], gl.float32, o_layout)
        body = gl.minimum(full, end)
        for tile in range(first, body):
            m, den, o = _step(
                q, m, den, o, tile, count, position, factor, k_smem, v_smem, k_full, v_full, k_empty, v_empty,
                DIM, BLOCK_N, STAGES, s_layout, o_layout, False,
            )  # fmt: skip
            count += 1
        for tile in range(gl.maximum(body, first), end):
            m, den, o = _step(
                q, m, den, o, tile, count, position, factor, k_smem, v_smem, k_full, v_full, k_empty, v_empty,
                DIM, BLOCK_N, STAGES, s_layout, o_layout, True,
            )  # fmt: skip
            count += 1

        if LSE:
            token, h, live = _rows(token0, tokens, head, HALF, GROUP, s_layout)
            gl.store(lse_ptr + token * lse_stride_t + h, (m + gl.log2(den) - 8.0) * LN2, mask=live)
        o = o * gl.convert_layout(v_scale / den, gl.SliceLayout(1, o_layout))[:, None]
        token, h, live = _rows(token0, tokens, head, HALF, GROUP, wide)
        d = gl.arange(0, DIM, gl.SliceLayout(0, wide))
        pointers = out_ptr + token[:, None] * out_stride_t + h[:, None] * out_stride_h + d[None, :]
        gl.store(pointers, gl.convert_layout(o.to(dtype), wide), mask=live[:, None])


@gluon.jit(do_not_specialize=["heads", "table_stride", "lse_stride_t"])
def hopper_prefill_fp8_kernel(
    desc, q_ptr, out_ptr, lse_ptr, table_ptr, items_ptr, starts_ptr, heads, scale, v_scale, table_stride,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t,
    GROUP: gl.constexpr, DIM: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, LSE: gl.constexpr, PDL: gl.constexpr,
):  # fmt: skip
    """desc: the tiles as [rows, DIM], boxes of [BLOCK_N, DIM]. PDL is the launcher's last constant; this kernel is always launched to start
    when the one before it has ended."""
    fp8: gl.constexpr = desc.dtype
    dtype: gl.constexpr = q_ptr.dtype.element_ty
    narrow: gl.constexpr = gl.NVMMASharedLayout(128, 8, 2)
    given_smem = gl.allocate_shared_memory(dtype, [2, 64, DIM], gl.NVMMASharedLayout(128, 16, 2))
    q_smem = gl.allocate_shared_memory(fp8, [2, 64, DIM], narrow)
    k_smem = gl.allocate_shared_memory(fp8, [STAGES, BLOCK_N, DIM], narrow)
    v_smem = gl.allocate_shared_memory(fp8, [STAGES, DIM, BLOCK_N], narrow)
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
    common = (q_ptr, out_ptr, lse_ptr, items_ptr, starts_ptr, scale, v_scale, q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t,
              given_smem, q_smem, k_smem, v_smem, k_full, v_full, k_empty, v_empty)  # fmt: skip
    gl.warp_specialize(
        [
            (_consume, (common, 0, GROUP, DIM, BLOCK_N, STAGES, LSE)),
            (_consume, (common, 1, GROUP, DIM, BLOCK_N, STAGES, LSE)),
            (_produce, (desc, table_ptr, items_ptr, starts_ptr, heads, table_stride, k_smem, v_smem, k_full, v_full, k_empty, v_empty,
                        DIM, BLOCK_N, STAGES)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


def descriptor(tiles: torch.Tensor) -> TensorDescriptor:
    """Of e4m3 tiles, as a matrix [rows, DIM] copied in boxes of [BLOCK_N, DIM]."""
    return TensorDescriptor.from_tensor(tiles.view(-1, DIM), [BLOCK_N, DIM], gl.NVMMASharedLayout(128, 8, 2))
