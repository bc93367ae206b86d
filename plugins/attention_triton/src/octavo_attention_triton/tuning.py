"""Tile sizes, warps and pipeline depths by shape. Owns the choice; the measurements behind it are in benchmarks/RESULTS.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

PACKED = 8
"""(row, KV head) pairs a multiprocessor from which on a decode step is packed."""


@dataclass(frozen=True, slots=True)
class Tile:
    """block_m: matrix rows of a program; block_n: tokens a tile; warps; stages of the load pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """How a decode step runs: its tile, programs a multiprocessor that the work is cut for, and who adds up the parts
    of a split row: the last program of the row to arrive (fused), or a second kernel. mask_all: a row's last tile goes through the
    same pipeline as the others, which are then masked too."""

    tile: Tile
    ctas_per_sm: int
    fused: bool
    mask_all: bool = False


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def decode_block_n(*, dim: int, kv_bytes: int, roomy: bool) -> int:
    """Tokens of a tile, which the work map is cut by.

    dim: the larger of k_dim and v_dim; kv_bytes: of a cache element; roomy: a program may take 160 KiB of shared memory.
    """
    d = _pow2(dim)
    if kv_bytes == 4:
        return 32 if d <= 128 else 16
    return 64 if d <= 128 or kv_bytes == 1 or roomy else 32


Crowd = Literal["one", "few", "crowded", "packed"]
"""One row; a few; a (row, KV head) pair or more for every multiprocessor; PACKED of them."""


def decode_choice(*, group: int, dim: int, kv_bytes: int, roomy: bool, crowd: Crowd, finite: bool = False) -> DecodeChoice:
    """group: query heads a KV head; finite: masked tiles of an FP8 cache cost little more than others (`tile.finite16`).

    One row, or a few, are latency: deep pipelines of few programs, and a second kernel that all multiprocessors merge in; one
    in fewer parts still, since their sum is a good part of its time. In a crowd few rows are split, and it is bandwidth: small programs,
    and no second launch. Packed, programs are so many that begin and end of each count: small tiles, and no tile apart from the others.
    """
    n, m, d = decode_block_n(dim=dim, kv_bytes=kv_bytes, roomy=roomy), max(16, _pow2(group)), _pow2(dim)
    crowded = crowd in ("crowded", "packed")
    if kv_bytes == 4:
        return DecodeChoice(Tile(m, n, 4, 2), 2, crowded)
    if d > 128:
        if kv_bytes == 1:
            return DecodeChoice(Tile(m, n, 2, 3), 4, crowded)
        return DecodeChoice(Tile(m, n, 4, 5 if roomy else 3), 2, crowded)
    if m > 16:
        return DecodeChoice(Tile(m, n, 4, 3), 3, crowded)
    if crowd == "packed" and d > 64 and kv_bytes == 2:
        return DecodeChoice(Tile(m, n // 2, 2, 5), 6, True, mask_all=True)
    if crowd == "packed" and d > 64 and finite and group > 1:
        return DecodeChoice(Tile(m, n, 2, 5), 4, True, mask_all=True)
    if crowded and d > 64 and not (kv_bytes == 1 and group == 1):
        return DecodeChoice(Tile(m, n, 2, 5 if kv_bytes == 1 else 3), 4, True)
    return DecodeChoice(Tile(m, n, 4, 5), 4 if kv_bytes == 1 else 2 if crowd == "one" and d > 64 else 3, crowded)


def prefill_tile(*, group: int, dim: int, kv_bytes: int, query_bytes: int, tokens: int, roomy: bool) -> Tile:
    """Of the portable kernel. tokens: the longest chunk of the step."""
    d = _pow2(dim)
    if query_bytes == 4:
        return Tile(max(16, _pow2(group)), 16, 4, 2)
    if tokens * group <= 64 or d > 128 or kv_bytes == 1 or not roomy:
        return Tile(64, 32 if d > 128 else 64, 4, 2)
    return Tile(128, 128, 8, 2)


HOPPER_TOKENS = 128
"""Tokens of a KV tile of the Hopper prefill kernel, and matrix rows of its programs."""


def hopper_prefill_fits(*, k_dim: int, v_dim: int, page: int, group: int, dtype: str, kv_dtype: str, row_align: int) -> bool:
    """Whether the warp-specialised kernel can read such a cache: 16-bit, of dim 64 or 128, rows without padding, pages that
    tile 128 tokens or are tiled by them."""
    whole = page % HOPPER_TOKENS == 0 or HOPPER_TOKENS % page == 0
    plain = k_dim == v_dim and k_dim in (64, 128) and k_dim * 2 % row_align == 0
    return plain and whole and group <= 64 and dtype == kv_dtype and dtype in ("bfloat16", "float16")
