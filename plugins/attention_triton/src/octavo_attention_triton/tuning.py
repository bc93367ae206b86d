"""Tile sizes, warps and pipeline depths by shape. Owns the choice; measured figures are in benchmarks/RESULTS.md."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """block_m: matrix rows of a program; block_n: tokens a tile; warps; stages of the load pipeline."""

    block_m: int
    block_n: int
    warps: int
    stages: int


def _pow2(n: int) -> int:
    return 1 << max(0, n - 1).bit_length()


def decode_tile(*, group: int, dim: int, kv_bytes: int, page: int) -> Tile:
    """group: query heads a KV head; dim: the larger of k_dim and v_dim; kv_bytes: of a cache element."""
    m, d = max(16, _pow2(group)), _pow2(dim)
    if kv_bytes == 4:
        return Tile(m, 32 if d <= 128 else 16, 4, 2)
    if kv_bytes == 1:
        return Tile(m, 128 if page % 128 == 0 and d <= 128 else 64, 4, 3)
    return Tile(m, 64 if d <= 128 else 32, 4, 3)


def prefill_tile(*, group: int, dim: int, kv_bytes: int, query_bytes: int, tokens: int) -> Tile:
    """tokens: the longest chunk of the step."""
    d = _pow2(dim)
    if query_bytes == 4:
        return Tile(max(16, _pow2(group)), 16, 4, 2)
    if tokens * group <= 64 or d > 128:
        return Tile(64, 32 if d > 128 else 64, 4, 2)
    return Tile(128, 64 if kv_bytes == 1 else 128, 8, 3)
