"""Kernels of a mixture of experts: which rows an expert takes, its two matrix products, and the sum over a token's experts.

A *pair* is (token, place): token t's j-th expert, numbered t * TOP + j. Few pairs (a decoding step) are found by every program
on its own, by comparing the ids of all with its expert: no list is built, no kernel runs before. Many pairs (a prompt) are sorted by
expert first, in `count` and `order`. Grids depend on the number of pairs only, so everything can be captured in a graph.
"""

from __future__ import annotations

import triton
import triton.language as tl

from octavo_ops_triton.launch import begin

UNSCALED, BY_BLOCK, BY_ROW = 0, 1, 2
"""How weights are scaled: as they are; one float32 a block of 128 x 128; one a row."""
BY_PAIR, BY_EXPERT, SORTED = 0, 1, 2
"""What a program's second index is: a pair, which works for all pairs of its expert if it is the first of them; an expert; a tile
of sorted pairs."""


SCALE_BLOCK = tl.constexpr(128)
CHUNK = tl.constexpr(128)
"""Ids that a program looks at together."""


@triton.jit
def _work(ids_ptr, counts_ptr, index, P, MODE: tl.constexpr, E: tl.constexpr, E_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr):
    """(expert, its first and last slot that this program takes, where its pairs start in the sorted list). Nothing to do: last <= first."""
    if MODE == 2:
        e = tl.arange(0, E_BLOCK)
        counts = tl.load(counts_ptr + e, mask=e < E, other=0)
        tiles = (counts + BLOCK_M - 1) // BLOCK_M
        expert = tl.sum((tl.cumsum(tiles) <= index).to(tl.int32))
        before = e < expert
        first = (index - tl.sum(tl.where(before, tiles, 0))) * BLOCK_M
        count = tl.sum(tl.where(e == expert, counts, 0))  # 0 past the last tile
        last = tl.minimum(count, first + BLOCK_M)
        start = tl.sum(tl.where(before, counts, 0))
    else:
        expert = index
        if MODE == 0:
            expert = tl.load(ids_ptr + index)
        first, start, last, earlier = 0, 0, 0, 0
        for at in range(0, P, CHUNK):
            p = at + tl.arange(0, CHUNK)
            mine = tl.load(ids_ptr + p, mask=p < P, other=-1) == expert
            last += tl.sum(mine.to(tl.int32))
            earlier += tl.sum((mine & (p < index)).to(tl.int32))
        if MODE == 0:
            last = tl.where(earlier == 0, last, 0)
    return expert, first, last, start


@triton.jit
def _pairs(ids_ptr, order_ptr, expert, first, last, start, P, MODE: tl.constexpr, BLOCK_M: tl.constexpr):
    """The pairs in the slots [first, first + BLOCK_M) of an expert: int32 [BLOCK_M], -1 where there are no more."""
    slot = first + tl.arange(0, BLOCK_M)
    if MODE == 2:
        pair = tl.load(order_ptr + start + slot, mask=slot < last, other=-1)
    else:
        pair = tl.full((BLOCK_M,), -1, tl.int32)
        seen = 0
        for at in range(0, P, CHUNK):
            p = at + tl.arange(0, CHUNK)
            mine = (tl.load(ids_ptr + p, mask=p < P, other=-1) == expert).to(tl.int32)
            place = tl.where(mine == 1, seen + tl.cumsum(mine) - 1, -1)
            pair += tl.sum(tl.where(place[None, :] == slot[:, None], p[None, :] + 1, 0), axis=1)
            seen += tl.sum(mine)
    return pair


@triton.jit
def _as(weight, x):
    """weight in x's dtype. e4m3 becomes bfloat16 by way of float32: the machine has one instruction for float16 to
    bfloat16, at an eighth of the rate of the three that this takes."""
    if weight.dtype == tl.float8e4nv:
        weight = weight.to(tl.float16)
        if x.dtype == tl.bfloat16:
            weight = weight.to(tl.float32)
    return weight.to(x.dtype)


@triton.jit
def _place(N: tl.constexpr, BLOCK_N: tl.constexpr, GROUP: tl.constexpr):
    """(tile of N, second index) of a program: GROUP neighbours of the second index share a tile of weights in turn."""
    tiles: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    pid = tl.program_id(1) * tiles + tl.program_id(0)
    within = pid % (GROUP * tiles)
    return within // GROUP, pid // (GROUP * tiles) * GROUP + within % GROUP


@triton.jit(do_not_specialize=["P"])
def gate_up_kernel(
    x_ptr, ids_ptr, order_ptr, counts_ptr, weight_ptr, scale_ptr, bias_ptr, inner_ptr, P,
    MODE: tl.constexpr, E: tl.constexpr, TOP: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr, X_STRIDE: tl.constexpr,
    ALPHA: tl.constexpr, LIMIT: tl.constexpr, OFFSET: tl.constexpr, SCALES: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr,
    E_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """inner [P, INNER]: BLOCK_N columns of the gated halves, of the rows of one expert. Block scales lie as
    [E, 2, ceil(INNER / 128), ceil(H / 128)], row scales as [E, 2 INNER]."""
    tile, index = _place(INNER, BLOCK_N, GROUP)
    begin(PDL)
    expert, first, last, start = _work(ids_ptr, counts_ptr, index, P, MODE, E, E_BLOCK, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    matrix = weight_ptr + expert.to(tl.int64) * (2 * INNER * H)
    SCALE_COLUMNS: tl.constexpr = (H + SCALE_BLOCK - 1) // SCALE_BLOCK
    HALF: tl.constexpr = (INNER + SCALE_BLOCK - 1) // SCALE_BLOCK * SCALE_COLUMNS
    scales = scale_ptr + expert * (2 * HALF) + tile * BLOCK_N // SCALE_BLOCK * SCALE_COLUMNS
    for slot in range(first, last, BLOCK_M):
        pair = _pairs(ids_ptr, order_ptr, expert, slot, last, start, P, MODE, BLOCK_M)
        x_row = x_ptr + (pair // TOP).to(tl.int64)[:, None] * X_STRIDE + k[None, :]
        gate_row = matrix + n[:, None] * H + k[None, :]
        up_row = gate_row + INNER * H
        gate = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        up = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for at in range(0, H, BLOCK_K):
            inside = (n < INNER)[:, None] & (k < H - at)[None, :]
            x = tl.load(x_row + at, mask=(pair >= 0)[:, None] & (k < H - at)[None, :], other=0.0)
            g = tl.load(gate_row + at, mask=inside, other=0.0, eviction_policy="evict_first")
            u = tl.load(up_row + at, mask=inside, other=0.0, eviction_policy="evict_first")
            if SCALES == 1:
                gate += tl.dot(x, tl.trans(_as(g, x)), input_precision=PRECISION) * tl.load(scales + at // SCALE_BLOCK)
                up += tl.dot(x, tl.trans(_as(u, x)), input_precision=PRECISION) * tl.load(scales + HALF + at // SCALE_BLOCK)
            else:
                gate = tl.dot(x, tl.trans(_as(g, x)), gate, input_precision=PRECISION)
                up = tl.dot(x, tl.trans(_as(u, x)), up, input_precision=PRECISION)
        if SCALES == 2:
            rows = scale_ptr + expert * (2 * INNER) + n
            gate *= tl.load(rows, mask=n < INNER, other=0.0)[None, :]
            up *= tl.load(rows + INNER, mask=n < INNER, other=0.0)[None, :]
        if BIAS:
            bias = bias_ptr + expert * (2 * INNER)
            gate += tl.load(bias + n, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
            up += tl.load(bias + INNER + n, mask=n < INNER, other=0.0).to(tl.float32)[None, :]
        if LIMIT > 0.0:
            gate = tl.minimum(gate, LIMIT)
            up = tl.minimum(tl.maximum(up, -LIMIT), LIMIT)
        y = gate / (1.0 + tl.exp(-ALPHA * gate)) * (up + OFFSET)
        to = inner_ptr + pair.to(tl.int64)[:, None] * INNER + n[None, :]
        tl.store(to, y.to(inner_ptr.dtype.element_ty), mask=(pair >= 0)[:, None] & (n < INNER)[None, :])


@triton.jit(do_not_specialize=["P"])
def down_kernel(
    inner_ptr, ids_ptr, order_ptr, counts_ptr, weight_ptr, scale_ptr, bias_ptr, share_ptr, out_ptr, base_ptr, sum_ptr, arrived_ptr, P,
    MODE: tl.constexpr, E: tl.constexpr, H: tl.constexpr, INNER: tl.constexpr,
    SCALES: tl.constexpr, BIAS: tl.constexpr, PRECISION: tl.constexpr, TOP: tl.constexpr, BASE: tl.constexpr,
    E_BLOCK: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr, GROUP: tl.constexpr,
    PDL: tl.constexpr,
):  # fmt: skip
    """out [P, H]: BLOCK_N columns of what one expert gives, times its shares. Block scales lie as
    [E, ceil(H / 128), ceil(INNER / 128)], row scales as [E, H].

    TOP > 0: the step is one token, whose TOP pairs are all there are (MODE 0), and the last of the programs of a tile to arrive adds
    up its columns in sum [H], as `combine_kernel` would, and of base [H] where there is one. arrived is zero before and after."""
    tile, index = _place(H, BLOCK_N, GROUP)
    begin(PDL)
    expert, first, last, start = _work(ids_ptr, counts_ptr, index, P, MODE, E, E_BLOCK, BLOCK_M)
    n = tile * BLOCK_N + tl.arange(0, BLOCK_N)
    k = tl.arange(0, BLOCK_K)
    weight_row = weight_ptr + expert.to(tl.int64) * (H * INNER) + n[:, None] * INNER + k[None, :]
    SCALE_COLUMNS: tl.constexpr = (INNER + SCALE_BLOCK - 1) // SCALE_BLOCK
    SCALE_ROWS: tl.constexpr = (H + SCALE_BLOCK - 1) // SCALE_BLOCK
    scales = scale_ptr + (expert * SCALE_ROWS + tile * BLOCK_N // SCALE_BLOCK) * SCALE_COLUMNS
    for slot in range(first, last, BLOCK_M):
        pair = _pairs(ids_ptr, order_ptr, expert, slot, last, start, P, MODE, BLOCK_M)
        row = inner_ptr + pair.to(tl.int64)[:, None] * INNER + k[None, :]
        y = tl.zeros((BLOCK_M, BLOCK_N), tl.float32)
        for at in range(0, INNER, BLOCK_K):
            x = tl.load(row + at, mask=(pair >= 0)[:, None] & (k < INNER - at)[None, :], other=0.0)
            inside = (n < H)[:, None] & (k < INNER - at)[None, :]
            w = tl.load(weight_row + at, mask=inside, other=0.0, eviction_policy="evict_first")
            if SCALES == 1:
                y += tl.dot(x, tl.trans(_as(w, x)), input_precision=PRECISION) * tl.load(scales + at // SCALE_BLOCK)
            else:
                y = tl.dot(x, tl.trans(_as(w, x)), y, input_precision=PRECISION)
        if SCALES == 2:
            y *= tl.load(scale_ptr + expert * H + n, mask=n < H, other=0.0)[None, :]
        if BIAS:
            y += tl.load(bias_ptr + expert * H + n, mask=n < H, other=0.0).to(tl.float32)[None, :]
        y *= tl.load(share_ptr + pair, mask=pair >= 0, other=0.0)[:, None]
        to = out_ptr + pair.to(tl.int64)[:, None] * H + n[None, :]
        tl.store(to, y.to(out_ptr.dtype.element_ty), mask=(pair >= 0)[:, None] & (n < H)[None, :])
    if TOP > 0:
        # Every thread's stores come before the one arrival; the last to arrive sees all of them.
        tl.debug_barrier()
        arrived = tl.atomic_add(arrived_ptr + tile, 1, sem="acq_rel", scope="gpu")
        if arrived == TOP - 1:
            tl.debug_barrier()
            tl.store(arrived_ptr + tile, 0)  # ready for the next launch
            total = tl.zeros((BLOCK_N,), tl.float32)
            for j in tl.static_range(TOP):
                total += tl.load(out_ptr + j * H + n, mask=n < H, other=0.0)
            if BASE:
                total += tl.load(base_ptr + n, mask=n < H, other=0.0).to(tl.float32)
            tl.store(sum_ptr + n, total.to(sum_ptr.dtype.element_ty), mask=n < H)


@triton.jit
def combine_kernel(
    part_ptr, base_ptr, out_ptr, TOP: tl.constexpr, H: tl.constexpr, BASE: tl.constexpr, BASE_STRIDE: tl.constexpr,
    BLOCK: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """BLOCK columns of a token: the sum of its TOP rows of part [P, H] in order, and of base [T, H] where there is one."""
    token = tl.program_id(0).to(tl.int64)
    n = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    total = tl.zeros((BLOCK,), tl.float32)
    for j in tl.static_range(TOP):
        total += tl.load(part_ptr + (token * TOP + j) * H + n, mask=n < H, other=0.0).to(tl.float32)
    if BASE:
        total += tl.load(base_ptr + token * BASE_STRIDE + n, mask=n < H, other=0.0).to(tl.float32)
    tl.store(out_ptr + token * H + n, total.to(out_ptr.dtype.element_ty), mask=n < H)


@triton.jit(do_not_specialize=["P"])
def count_kernel(ids_ptr, rank_ptr, counts_ptr, P, BLOCK: tl.constexpr, PDL: tl.constexpr):
    """counts [E], which begins at zero: pairs of each expert; rank [P]: how many of them came before this one, in no given order."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    begin(PDL)
    expert = tl.load(ids_ptr + p, mask=p < P, other=0)
    rank = tl.atomic_add(counts_ptr + expert, 1, mask=p < P)
    tl.store(rank_ptr + p, rank, mask=p < P)


@triton.jit(do_not_specialize=["P"])
def order_kernel(
    ids_ptr, rank_ptr, counts_ptr, order_ptr, P, E: tl.constexpr, E_BLOCK: tl.constexpr, BLOCK: tl.constexpr, PDL: tl.constexpr
):
    """order [P]: the pairs, by expert."""
    p = tl.program_id(0) * BLOCK + tl.arange(0, BLOCK)
    e = tl.arange(0, E_BLOCK)
    begin(PDL)
    expert = tl.load(ids_ptr + p, mask=p < P, other=0)
    counts = tl.load(counts_ptr + e, mask=e < E, other=0)
    start = tl.sum(tl.where(e[None, :] < expert[:, None], counts[None, :], 0), axis=1)
    rank = tl.load(rank_ptr + p, mask=p < P, other=0)
    tl.store(order_ptr + start + rank, p, mask=p < P)
