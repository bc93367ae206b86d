"""What kernels of one matrix are compiled for, and how much of shared memory a block of its inputs takes."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Variant:
    """Activations bfloat16 or float16, scales bfloat16 or float16, zero points or none, groups in a block of 128 inputs;
    tail: inputs are no multiple of 128."""

    bf16: bool
    scale_bf16: bool
    zeros: bool
    sub: int
    tail: bool

    @property
    def defines(self) -> dict[str, int]:
        """The macros of common.cuh."""
        return {"BF16": int(self.bf16), "SCALE_BF16": int(self.scale_bf16), "ZEROS": int(self.zeros), "SUB": self.sub}


def stage_bytes(rows: int, tokens: int, variant: Variant, *, align: int) -> int:
    """Shared memory of one block of 128 inputs: words, scales and zero points of `rows` rows, and `tokens` rows of x."""
    taken = rows * 64 + tokens * 256 + variant.sub * rows * (2 + variant.zeros)
    return -(-taken // align) * align
