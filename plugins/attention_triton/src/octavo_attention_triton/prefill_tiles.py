"""The tile list of an eager step's prefill: which query tokens each program of a prefill kernel takes.

Owns the cutting of rows into tiles and their order; made on the host, since an eager step knows its lengths there.
"""

from __future__ import annotations

import numpy as np
from octavo.interfaces import StepHost

from octavo_attention_triton.kernels.prefill import TILE


def tile_list(host: StepHost, size: int, window: int | None, only: np.ndarray | None = None) -> np.ndarray:
    """int32 [tiles, TILE] of the rows with several new tokens, `size` query tokens each, longest first, so that the
    last programs to run are short ones. `window` bounds what a tile has to read. only: of these rows of the step (indices), numbered in
    that order instead of by their place in the state table."""
    lens, ends = host.query_lens.astype(np.int64), host.seq_lens.astype(np.int64)
    starts = np.cumsum(lens) - lens
    many = np.flatnonzero(lens > 1) if only is None else only
    names = host.rows[many] if only is None else np.arange(len(only))
    counts = -(-lens[many] // size)
    of = np.repeat(many, counts)
    nth = np.arange(of.size) - np.repeat(np.cumsum(counts) - counts, counts)
    tiles = np.zeros((of.size, TILE), dtype=np.int32)
    tiles[:, 0] = starts[of] + nth * size
    tiles[:, 1] = np.minimum(lens[of] - nth * size, size)
    tiles[:, 2] = ends[of] - lens[of] + nth * size
    tiles[:, 3] = np.repeat(names, counts)
    tiles[:, 4] = ends[of]
    work = tiles[:, 2] + tiles[:, 1]
    if window is not None:
        work = np.minimum(work, window + size)
    return tiles[np.argsort(-work, kind="stable")]
