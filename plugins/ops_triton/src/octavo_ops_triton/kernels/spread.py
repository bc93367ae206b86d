"""Heads spread over their channels (`octavo.model.spread`), alone or behind QK-norm and RoPE, in one kernel.

A head is a row of CHUNKS chunks. The matrix is a small one, as wide as a chunk, and Hadamard's over the chunks, so a program multiplies
each chunk by the small one on the matrix units, and adds and subtracts whole chunks, which lie in the threads in the same way: nothing but those
products moves a value from thread to thread. They are exact: the small matrix holds whole numbers, heads are rounded to the model's dtype first,
as RoPE leaves them, and sums are float32 (a float32 head is three parts in TF32).
"""

from __future__ import annotations

import math
from dataclasses import dataclass

import torch
import triton
import triton.language as tl
from torch import Tensor

from octavo_ops_triton.launch import Launcher, begin


@dataclass(frozen=True, slots=True)
class Tile:
    """What a program takes, and with how many warps: `rows` heads of `chunks` chunks, each filled up to `block` channels."""

    chunks: int
    block: int
    warps: int
    rows: int = 16


@triton.jit
def small_matrices(DIM: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, dtype: tl.constexpr):
    """What chunks are multiplied by, those at even places and those at odd ones: [BLOCK, BLOCK] of whole numbers, the corner of the
    whole matrix (`octavo.model.spread.whole_matrix`) that they meet, but for signs of whole chunks. Computed: reading it would be waiting
    for memory, since what lies between two layers leaves nothing of it in a cache."""
    WIDTH: tl.constexpr = DIM // CHUNKS
    POWER: tl.constexpr = WIDTH & -WIDTH
    ODD: tl.constexpr = WIDTH // POWER
    i = tl.arange(0, BLOCK)[:, None]
    j = tl.arange(0, BLOCK)[None, :]
    p = i // ODD
    bits = (p & (j // ODD)) ^ (p & (p >> 1))
    bits ^= bits >> 4
    bits ^= bits >> 2
    bits = (bits ^ (bits >> 1)) & 1
    size = tl.full([BLOCK, BLOCK], 1, tl.int32)
    if ODD > 1:
        size = tl.where(i % ODD == j % ODD, ODD - 2, -2)
    if WIDTH < BLOCK:
        size = tl.where((i < WIDTH) & (j < WIDTH), size, 0)
    even = tl.where(bits == 0, size, -size)
    # The sign of a channel has a part in the last bit of its chunk's place: it turns the lower half of an odd chunk.
    odd = tl.where(p >= POWER // 2, -even, even) if POWER > 1 else even
    return even.to(dtype), odd.to(dtype)


@triton.jit
def turned_chunks(
    head_ptr, weight_ptr, cos_ptr, sin_ptr, here, eps,
    DIM: tl.constexpr, ROTARY: tl.constexpr, NORM: tl.constexpr, ROPE: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """CHUNKS tiles [R, BLOCK] in the model's dtype, zero past a chunk and where not `here` [R, 1]: heads, normalised (NORM) and turned (ROPE).
    The pointers [R, 1] are to a head, its weights and its angles. What RoPE pairs lies in two tiles at one place, or else is read twice."""
    WIDTH: tl.constexpr = DIM // CHUNKS
    HALF: tl.constexpr = ROTARY // 2
    j = tl.arange(0, BLOCK)[None, :]
    mask = here & (j < WIDTH)
    heads = head_ptr + j  # so that chunks are at offsets that instructions hold
    xs = ()
    for i in tl.static_range(CHUNKS):
        xs += (tl.load(heads + i * WIDTH, mask=mask, other=0.0),)
    if not ROPE:
        return xs
    dtype: tl.constexpr = head_ptr.dtype.element_ty
    weights = weight_ptr + j
    if NORM:
        squares = tl.zeros_like(xs[0].to(tl.float32))
        for i in tl.static_range(CHUNKS):
            squares += xs[i].to(tl.float32) * xs[i].to(tl.float32)
        scale = (1.0 / tl.sqrt_rn(tl.sum(squares, axis=1) / DIM + eps))[:, None]
    else:
        # One. Behind a sum the compiler turns heads first, and then hands them to the matrix units, not heads, cos and sin each.
        scale = tl.sum(here.to(tl.float32), axis=1)[:, None]
    ys = ()
    for i in tl.static_range(CHUNKS):
        x = xs[i].to(tl.float32)
        x = x * scale
        if NORM:
            x = x * tl.load(weights + i * WIDTH, mask=mask, other=0.0).to(tl.float32)
        ys += (x,)
    cosines = cos_ptr + j
    sines = sin_ptr + j
    zs = ()
    for i in tl.static_range(CHUNKS):
        if i * WIDTH < ROTARY:
            d = i * WIDTH + j
            turns = mask
            if i * WIDTH + WIDTH > ROTARY:
                turns = mask & (d < ROTARY)
            if HALF % WIDTH == 0:
                other = ys[i + HALF // WIDTH if i < HALF // WIDTH else i - HALF // WIDTH]
            else:
                partner = tl.where(d < HALF, d + HALF, d - HALF)
                other = tl.load(head_ptr + partner, mask=turns, other=0.0).to(tl.float32)
                if NORM:
                    other = other * scale * tl.load(weight_ptr + partner, mask=turns, other=0.0).to(tl.float32)
            cos = tl.load(cosines + i * WIDTH, mask=turns, other=1.0).to(tl.float32)
            sin = tl.load(sines + i * WIDTH, mask=turns, other=0.0).to(tl.float32)
            zs += ((ys[i] * cos + other * sin).to(dtype),)
        else:
            zs += (ys[i].to(dtype),)
    return zs


@triton.jit
def spread_chunks(xs, even, odd, factor, CHUNKS: tl.constexpr):
    """Tiles of `turned_chunks` times the whole matrix, in their dtype."""
    ys = ()
    for i in tl.static_range(CHUNKS):
        y = tl.dot(xs[i], odd if i % 2 == 1 else even, input_precision="tf32x3")
        if ((i & (i >> 1)) + ((i >> 1) & (i >> 2)) + ((i >> 2) & (i >> 3))) % 2 == 1:  # Rudin's and Shapiro's sign
            y = -y
        ys += (y,)
    for s in tl.static_range(4):
        if (1 << s) < CHUNKS:
            zs = ()
            for i in tl.static_range(CHUNKS):
                zs += (ys[i - (1 << s)] - ys[i] if (i >> s) % 2 == 1 else ys[i] + ys[i + (1 << s)],)
            ys = zs
    zs = ()
    for i in tl.static_range(CHUNKS):
        zs += ((ys[i] * factor).to(xs[0].dtype),)
    return zs


@triton.jit(do_not_specialize=["rows"])
def spread_kernel(
    x_ptr, out_ptr, weight_ptr, cos_ptr, sin_ptr, eps, factor, rows,
    TOKEN_STRIDE: tl.constexpr, HEAD_STRIDE: tl.constexpr, HEADS: tl.constexpr, DIM: tl.constexpr, ROTARY: tl.constexpr,
    ROPE: tl.constexpr, NORM: tl.constexpr, CHUNKS: tl.constexpr, BLOCK: tl.constexpr, BLOCK_R: tl.constexpr, PDL: tl.constexpr,
):  # fmt: skip
    """out [rows, DIM] dense; a program takes BLOCK_R heads, of one token or several."""
    even, odd = small_matrices(DIM, CHUNKS, BLOCK, x_ptr.dtype.element_ty)
    row = tl.program_id(0) * BLOCK_R + tl.arange(0, BLOCK_R)[:, None]
    here = row < rows
    token = (row // HEADS).to(tl.int64)
    head = row % HEADS
    begin(PDL)
    xs = turned_chunks(
        x_ptr + token * TOKEN_STRIDE + head * HEAD_STRIDE, weight_ptr + head * DIM, cos_ptr + token * ROTARY, sin_ptr + token * ROTARY,
        here, eps, DIM, ROTARY, NORM, ROPE, CHUNKS, BLOCK,
    )  # fmt: skip
    xs = spread_chunks(xs, even, odd, factor, CHUNKS)
    j = tl.arange(0, BLOCK)[None, :]
    out = out_ptr + row.to(tl.int64) * DIM + j
    for i in tl.static_range(CHUNKS):
        tl.store(out + i * (DIM // CHUNKS), xs[i], mask=here & (j < DIM // CHUNKS))


FEW = 1 << 15
"""Heads of a step up to which all that counts is how long one program takes. In a model, that is fetching its instructions: nothing of them is in
a cache since the layer before. So there are many warps with few instructions each."""


def tile_of(dim: int, dtype: torch.dtype, heads: int) -> Tile:
    """The tile for so many heads of all tokens of a step together. More warps to a head take less time, and more instructions in all."""
    if dtype == torch.float32:
        return _tile(dim, 32, 4)
    if heads <= FEW:
        return _tile(dim, 32, 8)
    return _tile(dim, 16, 1) if dim <= 128 else _tile(dim, 32, 2)


def _tile(dim: int, widest: int, warps: int) -> Tile:
    chunks = 1
    while dim // chunks > widest and dim % (2 * chunks) == 0 and chunks < 16:
        chunks *= 2
    return Tile(chunks, max(16, triton.next_power_of_2(dim // chunks)), warps)


def heads_of(turns: int, tokens: int, tile: Tile) -> int:
    """Of `turns` heads of each token, how many a program takes: with the fewest programs."""

    def programs(heads: int) -> int:
        return triton.cdiv(turns, heads) * triton.cdiv(tokens, tile.rows // heads)

    return min((tile.rows >> i for i in range(tile.rows.bit_length())), key=programs)


def factor_of(dim: int) -> float:
    """What the product with a matrix of whole numbers is to be multiplied by."""
    power = dim & -dim
    return 1 / (dim // power * math.sqrt(power))


def spread(launch: Launcher, x: Tensor) -> Tensor:
    """`octavo.model.operators.spread`: x [T, heads, D] may be a part of a wider tensor."""
    return _spread(launch, x, None, 0.0, None, None, 0)


def qk_norm_rope_spread(launch: Launcher, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor, sin: Tensor) -> Tensor:
    """`octavo.model.operators.qk_norm_rope_spread`, a new tensor: x [T, heads, D] may be a part of a wider one."""
    if not (cos.is_contiguous() and sin.is_contiguous()):
        raise ValueError("qk_norm_rope_spread: cos or sin is not contiguous")
    return _spread(launch, x, weight, eps, cos, sin, cos.shape[-1])


def _spread(
    launch: Launcher, x: Tensor, weight: Tensor | None, eps: float, cos: Tensor | None, sin: Tensor | None, rotary: int
) -> Tensor:
    tokens, heads, dim = x.shape
    if x.stride(2) != 1:
        raise ValueError(f"spread: heads with strides {x.stride()} are not dense")
    rows = tokens * heads
    tile = tile_of(dim, x.dtype, rows)
    out = x.new_empty(tokens, heads, dim)
    kind = (heads, dim, rotary, cos is not None, weight is not None)
    constants = (x.stride(0), x.stride(1), *kind, tile.chunks, tile.block, tile.rows)
    tensors = (x, out, x if weight is None else weight, x if cos is None else cos, x if sin is None else sin)
    launch(spread_kernel, (triton.cdiv(rows, tile.rows), 1), tensors, (eps, factor_of(dim), rows), constants, warps=tile.warps)
    return out
