"""Slices, warps and ring depths by shape. Owns the choice; the measurements behind it are in benchmarks/RESULTS.md."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import numpy as np
from octavo.interfaces import StepHost

SHARED_RESERVE = 1024
"""Bytes of shared memory of a multiprocessor that every block costs besides what it asks for."""
MAX_STAGES = 8
ACCUMULATORS = 160
"""Registers of a lane that queries and sums may take."""


@dataclass(frozen=True, slots=True)
class DecodeChoice:
    """A decode kernel. slice: tokens of a warp's step; warps of a block; stages of a warp's ring; blocks a multiprocessor;
    n_tiles: products of 8 query heads that share K and V; shared: bytes of shared memory of a block."""

    slice: int
    warps: int
    stages: int
    blocks: int
    n_tiles: int
    shared: int

    def macros(self) -> dict[str, int]:
        """What decode.cu is compiled for."""
        return {
            "N_TILES": self.n_tiles,
            "SLICE": self.slice,
            "WARPS": self.warps,
            "STAGES": self.stages,
            "BLOCKS_PER_SM": self.blocks,
        }

    @property
    def unit(self) -> int:
        """Tokens of a unit of the work map."""
        return self.slice * self.warps

    @property
    def heads(self) -> int:
        """Query heads of a segment, at most."""
        return 8 * self.n_tiles


def n_tiles(*, group: int, k_dim: int, v_dim: int) -> int:
    """Products of 8 query heads side by side: as many as the group needs and registers hold."""
    room = ACCUMULATORS // (k_dim // 8 + v_dim // 4)
    return max(1, min(-(-group // 8), room))


WIDE_ROW = 512
"""Bytes of K and V of a token and head from which on four warps with large slices keep enough in flight."""


def crowd(*, k_dim: int, v_dim: int, element: int) -> int:
    """From how many segments a multiprocessor on rows are a crowd: segments end so often that two small blocks are better, of which
    one reads while the other adds up."""
    return 8 if (k_dim + v_dim) * element >= WIDE_ROW else 1


def decode_choice(
    *, group: int, k_dim: int, v_dim: int, element: int, shared_block: int, shared_sm: int, crowded: bool
) -> DecodeChoice:
    """element: bytes of a cache element; shared_block and shared_sm: bytes of shared memory that a block may have, and all of them.
    crowded: see `crowd`.

    Raises ValueError if no ring of two slices fits in shared memory.
    """
    row, large = (k_dim + v_dim) * element, max(k_dim, v_dim) > 128
    crowded = crowded and not large
    size, wanted = 16, 16384 if row >= WIDE_ROW and not crowded else 8192
    while size < 64 and size * row < wanted:
        size *= 2
    tiles = n_tiles(group=group, k_dim=k_dim, v_dim=v_dim)
    warps, blocks = 4 if crowded or large or row >= WIDE_ROW else 8, 2 if crowded else 1
    while True:
        room = min(shared_block, shared_sm // blocks - SHARED_RESERVE)
        fixed = warps * 8 * (v_dim + 4) * 4 + fixed_bytes(warps, tiles)
        stages = min(MAX_STAGES, (room - fixed) // (warps * size * row))
        if stages >= 2:
            return DecodeChoice(size, warps, stages, blocks, tiles, fixed + stages * warps * size * row)
        if warps == 1:
            raise ValueError(
                f"a block may have {shared_block} bytes of shared memory: too little for dims {k_dim} and {v_dim} of {element} bytes"
            )
        warps //= 2


def fixed_bytes(warps: int, tiles: int) -> int:
    """Of `Shared` in cuda/decode.cu: maxima, denominators, and MAX_STAGES barriers a warp."""
    return (2 * warps + 1) * 8 * tiles * 4 + 16 + warps * MAX_STAGES * 8


@dataclass(frozen=True, slots=True)
class PrefillChoice:
    """A prefill kernel by file name; rows: matrix rows of a block; threads; shared: bytes of shared memory; macros of its own."""

    kernel: Literal["prefill", "prefill_hopper"]
    rows: int
    threads: int
    shared: int
    macros: dict[str, int]


def hopper_choice(*, group: int, k_dim: int, v_dim: int) -> PrefillChoice | None:
    """The kernel for capability 9.0, which reads 16-bit pages; None for dims that it is not made for."""
    if k_dim != v_dim or k_dim not in (64, 128):
        return None
    # Two tiles each of queries, K and V; a word a thread that multiplies, items, and barriers.
    shared = 2 * 128 * (2 * k_dim + v_dim) * 2 + 1024 + 88 + 96
    return PrefillChoice("prefill_hopper", 128, 384, shared, {"GROUP": group, "SHARED_BYTES": shared})


def portable_choice(*, k_dim: int, v_dim: int, element: int, shared_block: int) -> PrefillChoice:
    """The kernel for every chip. Raises ValueError if no tile of 64 tokens fits in shared memory."""
    most = 2 if max(k_dim, v_dim) <= 128 else 1
    for m_tiles, stages in ((most, 2), (1, 2), (1, 1)):
        rows = 4 * 16 * m_tiles
        shared = stages * 64 * (k_dim + v_dim) * element + rows * k_dim * 2 + stages * 8 + rows * 4
        if shared <= shared_block:
            return PrefillChoice("prefill", rows, 128, shared, {"WARPS": 4, "M_TILES": m_tiles, "STAGES": stages})
    raise ValueError(
        f"prefill of dims {k_dim} and {v_dim} needs {shared} bytes of shared memory, a block may have {shared_block}"
    )


MOST_WIDE_BYTES = 512 << 20
"""Of the workspace for widened FP8 pages. A row that needs more is read by the portable kernel."""
PAIRS_WORTH_WIDENING = 1 << 19
"""Pairs of a new token and one that it may see from which on two kernels are quicker than the portable one."""


def widened_pages(*, page_values: int, page: int, tokens: int) -> int:
    """Pages of the workspace: enough for `tokens`, or what MOST_WIDE_BYTES hold. page_values: of K and V of a page, 2 bytes each."""
    return min(-(-tokens // page), MOST_WIDE_BYTES // (2 * page_values))


def widening_pays(host: StepHost) -> bool:
    """Whether a step's chunks are long enough: widening takes as long for one new token of a row as for many."""
    many = host.query_lens > 1
    return int((host.query_lens[many].astype(np.int64) * host.seq_lens[many]).sum()) >= PAIRS_WORTH_WIDENING
