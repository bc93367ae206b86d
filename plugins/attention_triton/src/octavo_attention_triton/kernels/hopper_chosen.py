"""Attention over chosen entries of a latent cache on Hopper, in Gluon: the consumers of `hopper_latent`, fed by a gather.

Chosen entries lie anywhere, so there are no tiles for the tensor memory accelerator to copy: four producer warps look up the page of
every entry and copy it 16 bytes at a time. In the place of no entry the token's own is read, which has been written: its score is
replaced, and its value must be a number for its weight of 0 to erase it.
"""

from __future__ import annotations

from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import async_copy, fence_async_shared, mbarrier

from octavo_attention_triton.kernels.hopper_latent import LATENT, ROPE, ROWS, STAGES, TILE, _consume


@gluon.jit
def _gather(
    cache_ptr, select_ptr, rows_ptr, positions_ptr, table_ptr, items_ptr, table_stride, page_stride, select_stride,
    k_smem, r_smem, at_smem, full, empty, PAGE: gl.constexpr,
):  # fmt: skip
    layout: gl.constexpr = gl.BlockedLayout([1, 8], [4, 8], [4, 1], [1, 0])
    record = items_ptr + gl.program_id(1) * 8
    token = gl.load(record).to(gl.int64)
    first = gl.load(record + 2)
    last = gl.load(record + 3)
    select = select_ptr + token * select_stride
    table = table_ptr + gl.load(rows_ptr + token) * table_stride
    own = gl.load(positions_ptr + token).to(gl.int32)
    n = gl.arange(0, TILE, gl.SliceLayout(1, layout))
    d = gl.arange(0, 64, gl.SliceLayout(0, layout))
    begin = first // TILE
    for tile in range(begin, (last + TILE - 1) // TILE):
        count = tile - begin
        stage = count % STAGES
        at = gl.load(select + tile * TILE + n, mask=tile * TILE + n < last, other=-1)
        place = gl.where(at >= 0, at, own)
        page = gl.load(table + place // PAGE).to(gl.int64)
        entry = cache_ptr + (page * page_stride + place % PAGE * (LATENT + ROPE))
        mbarrier.wait(empty.index(stage), ((count // STAGES) & 1) ^ 1)
        at_smem.index(stage).store(at)
        for c in gl.static_range(LATENT // 64):
            target = k_smem.index(stage).slice(c * 64, 64, 1)
            async_copy.async_copy_global_to_shared(target, entry[:, None] + (c * 64 + d)[None, :])
        async_copy.async_copy_global_to_shared(r_smem.index(stage), entry[:, None] + (LATENT + d)[None, :])
        async_copy.commit_group()
        async_copy.wait_group(0)
        fence_async_shared()
        gl.thread_barrier()
        mbarrier.arrive(full.index(stage), count=1)


@gluon.jit(do_not_specialize=["table_stride", "lse_stride_t", "select_stride"])
def hopper_chosen_kernel(
    q_ptr, out_ptr, lse_ptr, cache_ptr, table_ptr, rows_ptr, positions_ptr, select_ptr, items_ptr, part_ptr, part_lse_ptr, scale,
    q_stride_t, q_stride_h, out_stride_t, out_stride_h, lse_stride_t, table_stride, page_stride, select_stride,
    HEADS: gl.constexpr, BLOCK_H: gl.constexpr, PAGE: gl.constexpr, LSE: gl.constexpr,
):  # fmt: skip
    """Program (b, i): heads [b * BLOCK_H, (b + 1) * BLOCK_H) of item i: one token and a range of its line of select. rows,
    positions int64 [T]; select int32 [T, at least as much as the items say]. scale: softmax scale * log2(e)."""
    dtype: gl.constexpr = cache_ptr.dtype.element_ty
    wide: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    q_smem = gl.allocate_shared_memory(dtype, [ROWS, LATENT], wide)
    qr_smem = gl.allocate_shared_memory(dtype, [ROWS, ROPE], wide)
    k_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, LATENT], wide)
    r_smem = gl.allocate_shared_memory(dtype, [STAGES, TILE, ROPE], wide)
    p_smem = gl.allocate_shared_memory(dtype, [ROWS, TILE], wide)
    at_smem = gl.allocate_shared_memory(gl.int32, [STAGES, TILE], gl.SwizzledSharedLayout(1, 1, 1, [0]))
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
                        q_smem, qr_smem, k_smem, r_smem, p_smem, at_smem, full, empty, HEADS, BLOCK_H, False, LSE, True)),
            (_gather, (cache_ptr, select_ptr, rows_ptr, positions_ptr, table_ptr, items_ptr, table_stride, page_stride, select_stride,
                       k_smem, r_smem, at_smem, full, empty, PAGE)),
        ],
        [4],
        [56],
    )  # fmt: skip
