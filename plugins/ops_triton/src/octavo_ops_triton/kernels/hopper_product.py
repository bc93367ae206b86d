"""The gated product of many rows on Hopper, in Gluon: act(x G^T) * (x V^T), without the trip of both products through memory.

Three partitions share a program: a producer warp has tiles of x and of G above V copied by the tensor memory accelerator into a ring in
shared memory, two consumer warpgroups of 64 rows each multiply. A tile is BLOCK_N columns of either, so that the thread that holds a
gate holds its value too. Programs are persistent: the next tile is on its way during an epilogue, and a
consumer may be as far ahead of the other as the ring is long, so that one's epilogue falls into the other's products.
"""

from __future__ import annotations

import torch
import triton
from torch import Tensor
from triton.experimental import gluon
from triton.experimental.gluon import language as gl
from triton.experimental.gluon.language.nvidia.hopper import (
    fence_async_shared,
    mbarrier,
    tma,
    warpgroup_mma,
    warpgroup_mma_wait,
)
from triton.experimental.gluon.nvidia.hopper import TensorDescriptor

from octavo_ops_triton.launch import Launcher, constants_of, rows

BLOCK_M = 128
BLOCK_N = 128
"""Columns of the result that a tile computes: as many of the gate and as many of the value."""
BLOCK_K = 64
STAGES = 4
GROUP = 16
"""Row tiles that neighbouring programs share columns with: their x and the weights of some columns stay in the L2."""


@gluon.jit
def _place(item, tiles_m, tiles_n, GROUP: gl.constexpr):
    """Row and column tile of an item: column after column of GROUP row tiles."""
    width = GROUP * tiles_n
    first = item // width * GROUP
    size = gl.minimum(tiles_m - first, GROUP)
    inside = item % width
    return first + inside % size, inside // size


@gluon.jit
def _produce(
    x, w, tiles_m, tiles_n, turns, columns, x_smem, w_smem, full, empty,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr,
):  # fmt: skip
    stage = 0
    phase = 1
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(item, tiles_m, tiles_n, GROUP)
        for k in range(turns):
            mbarrier.wait(empty.index(stage), phase)
            barrier = full.index(stage)
            mbarrier.expect(barrier, (BLOCK_M + 2 * BLOCK_N) * BLOCK_K * 2)
            target = w_smem.index(stage)
            tma.async_copy_global_to_shared(x, [m * BLOCK_M, k * BLOCK_K], barrier, x_smem.index(stage))
            tma.async_copy_global_to_shared(w, [n * BLOCK_N, k * BLOCK_K], barrier, target.slice(0, BLOCK_N, 0))
            tma.async_copy_global_to_shared(w, [columns + n * BLOCK_N, k * BLOCK_K], barrier, target.slice(BLOCK_N, BLOCK_N, 0))
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1


@gluon.jit
def _consume(
    out, tiles_m, tiles_n, turns, x_smem, w_smem, out_smem, full, empty,
    HALF: gl.constexpr, BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, GELU: gl.constexpr,
):  # fmt: skip
    ROWS: gl.constexpr = BLOCK_M // 2
    wide: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, 2 * BLOCK_N, 16])
    narrow: gl.constexpr = gl.NVMMADistributedLayout([3, 0], [4, 1], [16, BLOCK_N, 16])
    target = out_smem.index(HALF)
    stage = 0
    phase = 0
    for item in range(gl.program_id(0), tiles_m * tiles_n, gl.num_programs(0)):
        m, n = _place(item, tiles_m, tiles_n, GROUP)
        acc = gl.zeros([ROWS, 2 * BLOCK_N], gl.float32, wide)
        for k in range(turns):
            mbarrier.wait(full.index(stage), phase)
            part = x_smem.index(stage).slice(HALF * ROWS, ROWS, 0)
            acc = warpgroup_mma(part, w_smem.index(stage).permute((1, 0)), acc, is_async=True)
            # The product before this one is done: its stage is free.
            acc = warpgroup_mma_wait(1, deps=[acc])
            mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1, pred=k > 0)
            stage += 1
            if stage == STAGES:
                stage = 0
                phase = phase ^ 1
        acc = warpgroup_mma_wait(0, deps=[acc])
        mbarrier.arrive(empty.index((stage + STAGES - 1) % STAGES), count=1)
        gate, value = gl.split(acc.reshape([ROWS, 2, BLOCK_N]).permute((0, 2, 1)))
        slope = gate
        if GELU:
            slope = 1.5957691216057308 * (gate + 0.044715 * gate * gate * gate)
        y = gate / (1.0 + gl.exp2(slope * -1.4426950408889634)) * value
        # Through shared memory, once the tile before has left it.
        tma.store_wait(0)
        gl.thread_barrier()
        target.store(gl.convert_layout(y.to(target.dtype), narrow))
        fence_async_shared()
        gl.thread_barrier()
        tma.async_copy_shared_to_global(out, [m * BLOCK_M + HALF * ROWS, n * BLOCK_N], target)
    tma.store_wait(0)


@gluon.jit(do_not_specialize=["tiles_m", "tiles_n", "turns"])
def gated_product_kernel(
    x, w, out, tiles_m, tiles_n, turns, columns,
    BLOCK_M: gl.constexpr, BLOCK_N: gl.constexpr, BLOCK_K: gl.constexpr, STAGES: gl.constexpr, GROUP: gl.constexpr, GELU: gl.constexpr,
    PDL: gl.constexpr,
):  # fmt: skip
    """x [M, K] in boxes of [BLOCK_M, BLOCK_K], w [2 columns, K] of [BLOCK_N, BLOCK_K], out [M, columns] of [BLOCK_M / 2, BLOCK_N]; turns:
    boxes of K. GELU: its tanh form instead of SiLU. PDL is the launcher's last constant; this kernel starts when its predecessor has ended."""
    swizzled: gl.constexpr = gl.NVMMASharedLayout(128, 16, 2)
    x_smem = gl.allocate_shared_memory(x.dtype, [STAGES, BLOCK_M, BLOCK_K], swizzled)
    w_smem = gl.allocate_shared_memory(x.dtype, [STAGES, 2 * BLOCK_N, BLOCK_K], swizzled)
    out_smem = gl.allocate_shared_memory(x.dtype, [2, BLOCK_M // 2, BLOCK_N], swizzled)
    full = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    empty = gl.allocate_shared_memory(gl.int64, [STAGES, 1], mbarrier.MBarrierLayout())
    for i in gl.static_range(STAGES):
        mbarrier.init(full.index(i), count=1)
        mbarrier.init(empty.index(i), count=2)
    fence_async_shared()
    gl.warp_specialize(
        [
            (_consume, (out, tiles_m, tiles_n, turns, x_smem, w_smem, out_smem, full, empty, 0, BLOCK_M, BLOCK_N, STAGES, GROUP, GELU)),
            (_consume, (out, tiles_m, tiles_n, turns, x_smem, w_smem, out_smem, full, empty, 1, BLOCK_M, BLOCK_N, STAGES, GROUP, GELU)),
            (_produce, (x, w, tiles_m, tiles_n, turns, columns, x_smem, w_smem, full, empty, BLOCK_M, BLOCK_N, BLOCK_K, STAGES, GROUP)),
        ],
        [4, 1],
        [240, 24],
    )  # fmt: skip


_LAYOUT = gl.NVMMASharedLayout(128, 16, 2)


class GatedProduct:
    """act(x G^T) * (x V^T) for a 16-bit weight [2 N, K], G above V; activation is "silu" or "gelu_tanh".

    N and K are multiples of 8. Sums and the activation are float32 and rounded once."""

    def __init__(self, launch: Launcher, weight: Tensor, activation: str) -> None:
        self._launch, self._weight = launch, weight
        self._programs = torch.cuda.get_device_properties(weight.device).multi_processor_count
        self._box = TensorDescriptor.from_tensor(weight, [BLOCK_N, BLOCK_K], _LAYOUT)
        self._constants = constants_of(
            gated_product_kernel, BLOCK_M=BLOCK_M, BLOCK_N=BLOCK_N, BLOCK_K=BLOCK_K, STAGES=STAGES, GROUP=GROUP,
            GELU={"silu": False, "gelu_tanh": True}[activation],
        )  # fmt: skip

    def __call__(self, x: Tensor) -> Tensor:
        """x [M, K] with dense rows, of the weight's dtype -> a new tensor [M, N]."""
        columns, k = self._weight.shape[0] // 2, self._weight.shape[1]
        if x.shape[1] != k or x.dtype != self._weight.dtype or rows(x, "gated product") % 8:
            raise ValueError(
                f"gated product: x {list(x.shape)} of {x.dtype}, strides {x.stride()}: rows of {k} {self._weight.dtype} that begin at "
                "multiples of 16 bytes are taken"
            )
        out = torch.empty((x.shape[0], columns), dtype=x.dtype, device=x.device)
        tiles_m, tiles_n = triton.cdiv(x.shape[0], BLOCK_M), triton.cdiv(columns, BLOCK_N)
        boxes = (
            TensorDescriptor.from_tensor(x, [BLOCK_M, BLOCK_K], _LAYOUT),
            self._box,
            TensorDescriptor.from_tensor(out, [BLOCK_M // 2, BLOCK_N], _LAYOUT),
        )
        self._launch(
            gated_product_kernel, (min(self._programs, tiles_m * tiles_n), 1), (), (tiles_m, tiles_n, triton.cdiv(k, BLOCK_K)),
            (columns, *self._constants), warps=4, overlap=False, descriptors=boxes,
        )  # fmt: skip
        return out
