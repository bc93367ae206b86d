"""Angles of rotary position embeddings: from a RopeConfig and a Step to cos and sin.

Owns the frequency tables. They are plain float32 tensors, not module buffers: nothing that casts a
model can reach them. They are the frequencies that models were trained with; their product with a position
is float64, because in float32 it is off by up to 0.06 radians at position 2^20, and only cos and sin are cast to the
model's dtype (bfloat16 cannot tell position 256 from 257). There is no table over positions, so there is no length past
which it would have to wrap or fail.
"""

from __future__ import annotations

import math
from collections.abc import Callable

import torch
from torch import Tensor

from octavo.interfaces import Step
from octavo.model.operators import rope_angles
from octavo.model.rope import RopeConfig


def inverse_frequencies(rope: RopeConfig, length: int | None = None) -> Tensor:
    """float32 [dim / 2]: radians per position of each pair, for sequences of `length` tokens where
    the type depends on it (None: the original length). Formulas: RoPE (Su et al. 2021), position
    interpolation (Chen et al. 2023), NTK-aware scaling, YaRN (Peng et al. 2023), LongRoPE (Ding et al.
    2024), Llama 3.1; float32 throughout, in the order of transformers' operations."""
    length = rope.original if length is None else length
    theta = rope.theta * rope.ntk_multiplier(length) if rope.type == "dynamic" else rope.theta
    exponents = torch.arange(0, rope.dim, 2, dtype=torch.int64).float() / rope.dim
    wavelengths = theta**exponents
    if rope.type == "longrope":
        chosen = rope.long_factor if length > rope.original else rope.short_factor
        return 1.0 / (torch.tensor(chosen, dtype=torch.float32) * wavelengths)
    plain = 1.0 / wavelengths
    if rope.type == "linear":
        return plain / rope.factor
    if rope.type == "yarn":
        return _yarn(rope, wavelengths)
    if rope.type == "llama3":
        return _llama3(rope, plain)
    return plain


def _yarn(rope: RopeConfig, wavelengths: Tensor) -> Tensor:
    """High frequencies stay, low ones are divided by the factor, a linear ramp over dimensions between."""

    def dimension(rotations: float) -> float:
        """The (fractional) pair that turns `rotations` times over the original context."""
        return rope.dim * math.log(rope.original / (rotations * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dimension(rope.beta_fast), dimension(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.dim - 1)
    if low == high:
        high += 0.001
    ramp = ((torch.arange(rope.dim // 2, dtype=torch.float32) - low) / (high - low)).clamp(0, 1)
    keep = 1 - ramp
    return (1.0 / (rope.factor * wavelengths)) * (1 - keep) + (1.0 / wavelengths) * keep


def _llama3(rope: RopeConfig, plain: Tensor) -> Tensor:
    """Wavelengths shorter than original/high stay, longer than original/low are stretched by the factor,
    and those between are blended."""
    wavelengths = 2 * math.pi / plain
    blend = (rope.original / wavelengths - rope.low_freq_factor) / (rope.high_freq_factor - rope.low_freq_factor)
    blended = (1 - blend) * plain / rope.factor + blend * plain
    result = torch.where(wavelengths > rope.original / rope.low_freq_factor, plain / rope.factor, blended)
    return torch.where(wavelengths < rope.original / rope.high_freq_factor, plain, result)


class Rotary:
    """cos and sin of a step, for one RopeConfig.

    max_len bounds the sequences, and so the number of variants of a type that varies with length. angles is the
    operator "rope_angles".
    """

    def __init__(
        self,
        rope: RopeConfig,
        *,
        max_len: int,
        dtype: torch.dtype,
        device: torch.device,
        angles: Callable[..., tuple[Tensor, Tensor]] = rope_angles,
    ) -> None:
        self.rope, self._dtype, self._angles = rope, dtype, angles
        lengths = [rope.original]
        while rope.varies and lengths[-1] < rope.length(max_len):
            lengths.append(rope.length(lengths[-1] + 1))
        self._frequencies = torch.stack([inverse_frequencies(rope, length) for length in lengths]).to(device)
        # Variant i serves bounds in (lengths[i - 1], lengths[i]].
        self._lengths = torch.tensor(lengths[:-1], dtype=torch.int64, device=device)

    def __call__(self, step: Step) -> tuple[Tensor, Tensor]:
        """(cos, sin) of the step's tokens, each [T, 1, dim] in the model's dtype, both halves filled and
        the sign in sin's first half: rotate(x) = x * cos + roll(x, dim / 2) * sin."""
        return self.angles(step.positions, step.rope_tokens)

    def angles(self, positions: Tensor, bounds: Tensor | None) -> tuple[Tensor, Tensor]:
        """As __call__, for positions int64 [T] of sequences with length bounds int64 [T]."""
        frequencies = self._frequencies
        if len(frequencies) > 1:
            if bounds is None:
                raise ValueError(
                    f"rope type {self.rope.type!r} depends on the sequence's length, but the step carries no rope_tokens"
                )
            frequencies = frequencies[torch.bucketize(bounds, self._lengths)]
        return self._angles(positions, frequencies, self.rope.attention_factor, self._dtype)
