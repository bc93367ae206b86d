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


def constants_of(kernel: Any, **values: Any) -> tuple[Any, ...]:
    """The values in the order in which the kernel declares parameters of these names: what `Launcher` takes as constants.

    PDL, which the launcher adds, is left out. TypeError where the names are not the kernel's last."""
    names = tuple(kernel.arg_names[-len(values) - 1 : -1])
    if kernel.arg_names[-1] != "PDL" or set(names) != set(values):
        raise TypeError(f"{kernel.__name__} ends in {', '.join(kernel.arg_names)}: constants are given for {', '.join(values)}")
    return tuple(values[name] for name in names)


class Launcher:
    """Calls kernels whose parameters are copy descriptors, if it has any, then pointers, then numbers, then constants, the last
    of them PDL. For one device.

    Triton's launch hooks (its profilers) see only the first launch of a kernel."""

    def __init__(self, *, pdl: bool) -> None:
        self.pdl = pdl
        self._extra: dict[str, Any] = {"launch_pdl": True} if pdl else {}
        self._compiled: dict[tuple[Any, ...], tuple[Any, ...]] = {}

    def __call__(
        self,
        kernel: Any,
        grid: tuple[int, int],
        tensors: tuple[Tensor, ...],
        numbers: tuple[int | float, ...],
        constants: tuple[Any, ...],
        *,
        warps: int,
        stages: int = 3,
        overlap: bool = True,
        descriptors: tuple[Any, ...] = (),
    ) -> None:
        """numbers: integers below 2^31, declared do_not_specialize, and floats; constants: in declared order, and among
        them strides and the like, which Triton specialises for if they are no constexpr; stages: how many turns of a loop
        with a dot have their loads in flight; overlap: with PDL, whether it may start before its predecessor ends;
        descriptors: those of Triton's host API, whose boxes are the same at every launch."""
        if grid[0] == 0:
            return
        pointers = [t.data_ptr() for t in tensors]
        low = 0
        for pointer in pointers:
            low |= pointer
        seen = (*[d.base for d in descriptors], *tensors)
        key = (id(kernel), constants, warps, stages, low % ALIGNMENT == 0, overlap, *[t.dtype for t in seen])
        found = self._compiled.get(key)
        if found is None:
            args = (*descriptors, *tensors, *numbers, *constants, self.pdl)
            self._compile(key, kernel, grid, args, seen[0].get_device(), num_warps=warps, num_stages=stages)
            return
        run, function, metadata, stream, device = found
        # None: no launch metadata and no hooks. Addresses instead of tensors: Triton need not ask the driver about them.
        args = (*descriptors, *pointers, *numbers, *constants, self.pdl)
        run(*grid, 1, stream(device), function, metadata, None, None, None, *args)

    def _compile(
        self, key: tuple[Any, ...], kernel: Any, grid: tuple[int, int], args: tuple[Any, ...], device: int, **options: int
    ) -> None:
        """The first launch goes Triton's way; what it compiled is kept."""
        aligned, overlap = key[4:6]
        compiled = kernel[grid](*args, **options, **(self._extra if overlap else {}))
        if compiled is None:  # Triton's interpreter compiles nothing
            return
        # Pointers that are not all aligned share a key although the kernel was compiled for some of them: go Triton's way each time.
        if aligned:
            stream = triton.runtime.driver.active.get_current_stream
            self._compiled[key] = (compiled.run, compiled.function, compiled.packed_metadata, stream, device)


def rows(x: Tensor, what: str) -> int:
    """The row stride of x, whose last dimension must be dense."""
    if x.stride(-1) != 1:
        raise ValueError(
            f"{what}: the last dimension of a tensor with shape {tuple(x.shape)} and strides {x.stride()} is not dense"
        )
    return x.stride(0)
