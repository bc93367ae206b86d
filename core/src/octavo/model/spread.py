"""The rotation that spreads a head over its channels before a float8 cache rounds it.

Owns one fixed orthogonal matrix M for each head width. q M . k M = q . k, so attention over exact keys is unchanged, whatever
its scale, soft-cap, window or sinks. Over rounded ones it is not: a float's error is a share of the value, so that of a score
q . k has the variance e^2 * sum(q_i^2 k_i^2). Trained models put much of q and of k into the same few channels, which then
are most of that sum. After M every channel has about the same share of both, and the sum is about |q|^2 |k|^2 / D.

D = n m with n a power of two and m odd; a channel is (p, r), p < n and r < m. M = diag(s) H x (1 - 2 J / m): H is
Hadamard's matrix over p (Sylvester), the other factor Householder's reflection over r, J full of ones. The signs s are those
of Rudin and Shapiro, so that what H would gather in one channel, a vector that is the same everywhere or has the signs of one of H's
rows, is spread as flat as a single channel is.
"""

from __future__ import annotations

import math
from functools import cache

import torch
from torch import Tensor


def whole_matrix(dim: int) -> tuple[Tensor, float]:
    """(int64 [dim, dim] of small whole numbers, exact in any float, and what they are to be multiplied by): M."""
    n = dim & -dim
    m = dim // n
    signs = torch.tensor([_sign(p & (p >> 1)) for p in range(n)])
    hadamard = torch.tensor([[_sign(p & c) for c in range(n)] for p in range(n)])
    reflection = m * torch.eye(m, dtype=torch.int64) - 2 if m > 1 else torch.ones(1, 1, dtype=torch.int64)
    return torch.kron(signs.unsqueeze(1) * hadamard, reflection), 1 / (m * math.sqrt(n))


def _sign(bits: int) -> int:
    """-1 for an odd number of ones."""
    return 1 - 2 * (bits.bit_count() & 1)


@cache
def spread_matrix(dim: int, device: torch.device) -> Tensor:
    """M float32 [dim, dim]: a head x [dim] becomes x M. Made once for a device; not to be written."""
    whole, factor = whole_matrix(dim)
    return (whole.double() * factor).float().to(device)


def gathered(x: Tensor) -> Tensor:
    """What `octavo.model.operators.spread` did to x [..., D], undone: a new tensor of x's dtype."""
    return (x.float() @ spread_matrix(x.shape[-1], x.device).t()).to(x.dtype)
