"""Tiles of the products, by shape. From sweeps on an H200; benchmarks/RESULTS.md has what they reach."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Tile:
    """m rows of x, n of the weight and k of their length at a time; split: parts of K; warps and stages: Triton's."""

    m: int
    n: int
    k: int
    split: int
    warps: int
    stages: int


def product_tile(m: int, n: int, k: int) -> Tile:
    """For weights with a scale a row and quantised inputs."""
    rows = 16 if m <= 16 else 32 if m <= 32 else 64
    if n >= 16384:
        return Tile(rows, 64, 256, 1, 4, 4) if rows < 64 else Tile(rows, 64, 128, 1, 4, 6)
    if k >= 8192:  # few tiles, each of them long
        return Tile(rows, 64, 512, 2, 4, 3)
    return Tile(rows, 64, 512, 1, 4, 3) if rows < 64 else Tile(rows, 64, 256, 1, 4, 4)


def mixed_tile(m: int, *, blocks: bool) -> Tile:
    """For inputs in 16 bits. blocks: a scale a 128 x 128 block, whose k is 128."""
    return Tile(16, 32, 128 if blocks else 256, 1, 4, 4)


def block_tile(m: int, n: int) -> Tile:
    """For weights with a scale a 128 x 128 block, whose k is 128."""
    if m <= 64:
        return Tile(16 if m <= 16 else 32 if m <= 32 else 64, 64, 128, 1, 4, 5)
    return Tile(128, 128, 128, 1, 8, 4)


@dataclass(frozen=True, slots=True)
class RowTile:
    """n rows of the weight for one row of x. held: of their length, loaded before the wait for the kernel in front: a power of two that is all of
    it, or a first part of it, and then k at a time."""

    n: int
    held: int
    k: int
    warps: int
    stages: int = 4


def row_tile(n: int, k: int) -> RowTile:
    """For one row of x times weights [n, k]. A program of four warps holds 16384 weights; longer rows than 8192 would have x read too often.
    Where outputs are few, but enough for two programs a multiprocessor, it holds twice as many: all weights are on their way then while
    attention, in front, leaves memory idle."""
    if k <= 8192:
        block = max(128, 1 << (k - 1).bit_length())
        twice = n <= 4096 and n * block >= 1 << 23
        return RowTile(max(1, (32768 if twice else 16384) // block), block, block, 4)
    return RowTile(8, 2048, 1024, 4)
