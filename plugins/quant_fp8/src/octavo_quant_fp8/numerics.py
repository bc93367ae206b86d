"""FP8 arithmetic in plain torch: scales, rounding and back. The reference of the kernels, and what a CPU runs.

Every cast is clamped to +-448 first: what e4m3 cannot hold saturates instead of turning into NaN, whatever the library does. A NaN
or an infinity in an activation stays visible: it makes its whole row NaN.
"""

from __future__ import annotations

import torch
from torch import Tensor

from octavo_quant_fp8.scheme import BLOCK

E4M3 = torch.float8_e4m3fn
E4M3_MAX = 448.0
TINY = 1e-12
"""Least amplitude that a scale is made for: an all-zero row gets a positive scale."""


def to_e4m3(x: Tensor) -> Tensor:
    """x rounded to the nearest e4m3, saturated at +-448; NaN stays NaN."""
    return x.clamp(-E4M3_MAX, E4M3_MAX).to(E4M3)


def scale_of(peak: Tensor) -> Tensor:
    """float32: the scale under which `peak` (the largest absolute value) becomes 448."""
    return peak.float().clamp_min(TINY) / E4M3_MAX


def quantise_rows(x: Tensor, bound: float | None = None) -> tuple[Tensor, Tensor]:
    """x [..., K] -> (e4m3 [..., K], float32 scale [..., 1]): one scale a row. bound: larger values saturate."""
    x = x.float()
    peak = x.abs().amax(-1, keepdim=True)
    if bound is not None:
        peak = peak.clamp_max(bound)
    scale = scale_of(peak)
    return to_e4m3(x / scale), scale


def quantise_groups(x: Tensor) -> tuple[Tensor, Tensor]:
    """x [T, K] -> (e4m3 [T, K], float32 scale [T, ceil(K / 128)]): one scale for every 128 channels of a row."""
    rows, width = x.shape
    count = -(-width // BLOCK)
    padded = torch.nn.functional.pad(x.float(), (0, count * BLOCK - width)).view(rows, count, BLOCK)
    data, scale = quantise_rows(padded)
    return data.view(rows, count * BLOCK)[:, :width].contiguous(), scale.view(rows, count)


def quantise_static(x: Tensor, scale: Tensor) -> Tensor:
    """x in e4m3 under a scale that is known (float32, one value)."""
    return to_e4m3(x.float() / scale)


def quantise_blocks(weight: Tensor) -> tuple[Tensor, Tensor]:
    """weight [N, K] -> (e4m3 [N, K], float32 scale [ceil(N / 128), ceil(K / 128)]): one scale a 128 x 128 block."""
    n, k = weight.shape
    rows, columns = -(-n // BLOCK), -(-k // BLOCK)
    padded = torch.nn.functional.pad(weight.float(), (0, columns * BLOCK - k, 0, rows * BLOCK - n))
    blocks = padded.view(rows, BLOCK, columns, BLOCK)
    scale = scale_of(blocks.abs().amax((1, 3)))
    data = to_e4m3(blocks / scale[:, None, :, None]).view(rows * BLOCK, columns * BLOCK)
    return data[:n, :k].contiguous(), scale


def spread_blocks(scale: Tensor, rows: int, columns: int) -> Tensor:
    """Block scales [ceil(rows / 128), ceil(columns / 128)] as one value a weight, float32 [rows, columns]."""
    wide = scale.float().repeat_interleave(BLOCK, 0).repeat_interleave(BLOCK, 1)
    return wide[:rows, :columns]


def spread_groups(scale: Tensor, columns: int) -> Tensor:
    """Group scales [T, ceil(columns / 128)] as one value a channel, float32 [T, columns]."""
    return scale.float().repeat_interleave(BLOCK, -1)[..., :columns]


def as_scale(stored: Tensor) -> Tensor:
    """A scale tensor of a checkpoint in float32. uint8 and e8m0 hold b for 2^(b - 127)."""
    if stored.dtype == torch.uint8:
        return torch.exp2(stored.float() - 127.0)
    return stored.float()
