"""Counter-based random numbers: one uniform per (seed, position), whatever shares the batch.

Owns the hash. Keeps no state, so a preempted or replayed row draws the same numbers again. Runs on
the host (numpy): a step needs one number per row, and kernels take them as an input.
"""

from __future__ import annotations

import numpy as np

_GAMMA = np.uint64(0x9E3779B97F4A7C15)  # 2^64 / golden ratio, odd


def _mix(x: np.ndarray) -> np.ndarray:
    """The finaliser of SplitMix64 (Steele, Lea and Flood, 2014; constants of Stafford's variant 13)."""
    x = (x ^ (x >> np.uint64(30))) * np.uint64(0xBF58476D1CE4E5B9)
    x = (x ^ (x >> np.uint64(27))) * np.uint64(0x94D049BB133111EB)
    mixed: np.ndarray = x ^ (x >> np.uint64(31))
    return mixed


def uniforms(seeds: np.ndarray, positions: np.ndarray) -> np.ndarray:
    """float64 in [0, 1) for each row: mix(mix(seed + gamma) + (position + 1) * gamma), its top 53 bits.

    seeds: uint64 [S] (an int64 seed taken modulo 2^64). positions: integers [S], the index of the
    token being chosen. The seed goes through the mixer first: neighbouring seeds (samples of one
    request) must not be shifted copies of one stream.
    """
    with np.errstate(over="ignore"):
        key = _mix(seeds.astype(np.uint64) + _GAMMA)
        bits = _mix(key + (positions.astype(np.uint64) + np.uint64(1)) * _GAMMA)
    return (bits >> np.uint64(11)).astype(np.float64) * 2.0**-53
