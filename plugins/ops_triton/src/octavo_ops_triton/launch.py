"""Launcher: a Triton kernel launched with little work on the host, programmatically dependent where asked.

Owns the compiled kernels. Triton's own launch inspects every argument each time, which takes longer on the
host than most of these kernels take on the device; a step that is not captured would wait for it. So a kernel
is looked up by what it was compiled for (dtypes, constants, alignment) and launched through its compiled form.

Programmatic dependent launch (PDL): a kernel may start before its predecessor has ended. Every kernel of this
plugin therefore begins with `begin`, which waits, before it reads or writes what another kernel may touch;
only weights, which no step writes, may be read earlier. That holds for chains of them too: a kernel that ended had
waited for the one before it.
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl
from torch import Tensor

ALIGNMENT = 16
"""Bytes: what Triton specialises pointers for."""


@triton.jit
def begin(PDL: tl.constexpr):
    """Let the next kernel be set up, then wait until the one before has written everything."""
    if PDL:
        tl.extra.cuda.gdc_launch_dependents()
        tl.extra.cuda.gdc_wait()


class Launcher:
    """Calls kernels whose parameters are run-time arguments first, then constants, the last of them PDL."""

    def __init__(self, *, pdl: bool) -> None:
        self.pdl = pdl
        self._extra: dict[str, Any] = {"launch_pdl": True} if pdl else {}
        self._compiled: dict[tuple[Any, ...], Any] = {}

    def __call__(
        self, kernel: Any, grid: tuple[int, int], args: tuple[Any, ...], constants: tuple[Any, ...], *, warps: int
    ) -> None:
        """args: tensors, integers below 2^31 (declared do_not_specialize) and floats; constants in declared order."""
        if grid[0] == 0:
            return
        tensors = [a for a in args if isinstance(a, Tensor)]
        aligned = tuple(t.data_ptr() % ALIGNMENT == 0 for t in tensors)
        key = (id(kernel), tensors[0].get_device(), constants, warps, aligned, *(t.dtype for t in tensors))
        compiled = self._compiled.get(key)
        if compiled is not None:
            compiled[(*grid, 1)](*args, *constants, self.pdl)
            return
        compiled = kernel[grid](*args, *constants, self.pdl, num_warps=warps, **self._extra)
        if compiled is not None:  # Triton's interpreter compiles nothing
            self._compiled[key] = compiled


def rows(x: Tensor, what: str) -> int:
    """The row stride of x, whose last dimension must be dense."""
    if x.stride(-1) != 1:
        raise ValueError(
            f"{what}: the last dimension of a tensor with shape {tuple(x.shape)} and strides {x.stride()} is not dense"
        )
    return x.stride(0)
