"""e4m3 to wider floats. Where a device has no such type (CUDA below 8.9), weights come as bytes and are put together bit by bit."""

from __future__ import annotations

import triton
import triton.language as tl


@triton.jit
def widened(w, kind: tl.constexpr):
    """w, e4m3 or its bytes (uint8), as kind: bfloat16, float16 or float32. Exact; the two NaN bytes must not occur as bytes.

    Sign, exponent and mantissa keep their places relative to each other; the exponent's bias is made up for by a
    multiplication with a power of two, which also makes subnormals right."""
    if w.dtype == tl.uint8:
        if kind == tl.bfloat16:
            bits = ((w & 0x80).to(tl.uint16) << 8) | ((w & 0x7F).to(tl.uint16) << 4)
            value = (bits.to(tl.bfloat16, bitcast=True).to(tl.float32) * 1.329227995784916e36).to(tl.bfloat16)  # 2^(127 - 7)
        elif kind == tl.float16:
            bits = ((w & 0x80).to(tl.uint16) << 8) | ((w & 0x7F).to(tl.uint16) << 7)
            value = bits.to(tl.float16, bitcast=True) * 256.0  # 2^(15 - 7)
        else:
            bits = ((w & 0x80).to(tl.uint32) << 24) | ((w & 0x7F).to(tl.uint32) << 20)
            value = bits.to(tl.float32, bitcast=True) * 1.329227995784916e36
    else:
        value = w.to(kind)
    return value
