"""Elastic memory: one address range for each of the pool's tensors, whose tail is mapped and unmapped.

Owns addresses and the memory behind them. The base address never changes, so captured graphs and
kernels' arguments stay right while the pool grows and shrinks. Never decides how large the pool
is, and never looks at what is in a page: whoever shrinks has moved what lives off the tail. On a GPU nothing is
unmapped before the device has done all that was submitted: what is in flight may still read it.

    [ pieces that are mapped ............ | pieces that are not ......... | scratch ]
     0                                     num_blocks                      capacity

On a GPU the pieces are physical handles of CUDA's virtual memory management, so `nvidia-smi` and other
processes see them come and go; one handle, mapped at the end of every range, holds all the scratch pages
(nobody reads what they hold). On a CPU the range is an anonymous mapping whose tail is given back with
madvise.
"""

from __future__ import annotations

import contextlib
import math
import mmap
import weakref
from importlib import import_module
from typing import Any, Protocol

import torch
from torch import Tensor

from octavo.errors import ConfigError

PIECES = 128
"""A range is mapped in about this many pieces: finer gives little, and each costs a call of the driver."""


class Memory(Protocol):
    """`tensors`: uint8 [(capacity + 1) * page_bytes] each; only the first `resize`d pages and the last may be touched."""

    tensors: tuple[Tensor, ...]
    capacity: int  # pages, without the scratch page; at least what was asked for

    def resize(self, pages: int) -> None:
        """Have memory behind the first `pages` pages and the scratch page, and behind nothing else (to the
        granularity of the system). New pages are zeros. MemoryError, with nothing changed, if there is none. Waits for
        the device before memory goes."""


def reserve(tensors: int, capacity: int, page_bytes: int, device: torch.device) -> Memory:
    """Address ranges for `capacity` pages in each of `tensors` tensors; nothing is mapped yet."""
    if device.type == "cuda":
        return CudaMemory(tensors, capacity, page_bytes, device)
    return HostMemory(tensors, capacity, page_bytes)


class HostMemory:
    """Anonymous private mappings: a page of the system is there once it is written, and goes with madvise."""

    def __init__(self, tensors: int, capacity: int, page_bytes: int) -> None:
        self.capacity, self._page_bytes = capacity, page_bytes
        flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS
        self._maps = [mmap.mmap(-1, (capacity + 1) * page_bytes, flags=flags) for _ in range(tensors)]
        self.tensors = tuple(torch.frombuffer(memory, dtype=torch.uint8) for memory in self._maps)

    def resize(self, pages: int) -> None:
        start = -(-pages * self._page_bytes // mmap.PAGESIZE) * mmap.PAGESIZE
        end = self.capacity * self._page_bytes // mmap.PAGESIZE * mmap.PAGESIZE
        for memory in self._maps:
            if end > start:
                memory.madvise(mmap.MADV_DONTNEED, start, end - start)


class CudaMemory:
    """CUDA virtual memory: cuMemAddressReserve once, then cuMemCreate and cuMemMap, cuMemUnmap and cuMemRelease a piece."""

    def __init__(self, tensors: int, capacity: int, page_bytes: int, device: torch.device, driver: Any = None) -> None:
        self._driver = driver or _driver()
        self._device, self._page_bytes = device, page_bytes
        d = self._driver
        self._property = d.CUmemAllocationProp()
        self._property.type = d.CUmemAllocationType.CU_MEM_ALLOCATION_TYPE_PINNED
        self._property.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._property.location.id = device.index or 0
        self._access = d.CUmemAccessDesc()
        self._access.location.type = d.CUmemLocationType.CU_MEM_LOCATION_TYPE_DEVICE
        self._access.location.id = device.index or 0
        self._access.flags = d.CUmemAccess_flags.CU_MEM_ACCESS_FLAGS_PROT_READWRITE
        minimum = d.CUmemAllocationGranularity_flags.CU_MEM_ALLOC_GRANULARITY_MINIMUM
        grain = int(self._call("cuMemGetAllocationGranularity", self._property, minimum))
        # The scratch page begins a piece of its own: the capacity is rounded up to where one begins.
        unit = grain // math.gcd(grain, page_bytes)
        self.capacity = -(-capacity // unit) * unit
        whole = self.capacity * page_bytes
        self._piece = max(grain, -(-whole // PIECES // grain) * grain)
        scratch = -(-page_bytes // grain) * grain
        size = whole + scratch
        self._bases = [int(self._call("cuMemAddressReserve", size, 0, 0, 0)) for _ in range(tensors)]
        self._pieces: list[list[Any]] = []  # mapped pieces from the start on: one handle per tensor
        self._whole = whole
        handle = self._call("cuMemCreate", scratch, self._property, 0)
        for base in self._bases:
            self._map(base + whole, scratch, handle)
        self._call("cuMemRelease", handle)  # the mappings keep it
        self.resize(1)  # torch asks the driver whose the first address is
        shape = ((self.capacity + 1) * page_bytes,)
        self.tensors = tuple(torch.as_tensor(_Array(base, shape), device=device) for base in self._bases)
        weakref.finalize(self, _free, self._driver, device, self._bases, self._pieces, self._piece, whole, scratch)

    def resize(self, pages: int) -> None:
        wanted = -(-pages * self._page_bytes // self._piece)
        self._shrink(wanted)
        before = len(self._pieces)
        while len(self._pieces) < wanted:
            try:
                self._grow()
            except MemoryError:
                self._shrink(before)
                raise

    def _shrink(self, pieces: int) -> None:
        if len(self._pieces) > pieces:
            torch.cuda.synchronize(self._device)  # unmapping does not wait
        while len(self._pieces) > pieces:
            offset, size = self._span(len(self._pieces) - 1)
            for base, handle in zip(self._bases, self._pieces.pop(), strict=True):
                self._call("cuMemUnmap", base + offset, size)
                self._call("cuMemRelease", handle)

    def _grow(self) -> None:
        """One more piece in every tensor, or none."""
        offset, size = self._span(len(self._pieces))
        handles: list[Any] = []
        try:
            for base in self._bases:
                handles.append(self._call("cuMemCreate", size, self._property, 0))
                self._map(base + offset, size, handles[-1])
        except MemoryError:
            # The driver says so when a handle is made: every handle there is was mapped too.
            for base, handle in zip(self._bases, handles, strict=False):
                self._call("cuMemUnmap", base + offset, size)
                self._call("cuMemRelease", handle)
            raise
        self._pieces.append(handles)
        for base in self._bases:
            self._call("cuMemsetD8", base + offset, 0, size)

    def _span(self, piece: int) -> tuple[int, int]:
        """Offset and bytes of a piece; the last may be shorter."""
        offset = piece * self._piece
        return offset, min(self._piece, self._whole - offset)

    def _map(self, address: int, size: int, handle: Any) -> None:
        self._call("cuMemMap", address, size, 0, handle, 0)
        self._call("cuMemSetAccess", address, size, [self._access], 1)

    def _call(self, name: str, *arguments: Any) -> Any:
        """Call the driver. MemoryError where the device has no memory left, RuntimeError for what else fails."""
        status, *values = getattr(self._driver, name)(*arguments)
        if int(status) == int(self._driver.CUresult.CUDA_ERROR_OUT_OF_MEMORY):
            raise MemoryError(f"{name}: the device has no memory left")
        if int(status) != 0:
            raise RuntimeError(f"{name} failed: {status}")
        return values[0] if values else None


class _Array:
    """Device memory as torch takes it (CUDA array interface, version 3)."""

    def __init__(self, address: int, shape: tuple[int, ...]) -> None:
        self.__cuda_array_interface__ = {"shape": shape, "typestr": "|u1", "data": (address, False), "version": 3}


def _free(
    driver: Any, device: torch.device, bases: list[int], pieces: list[list[Any]], piece: int, whole: int, scratch: int
) -> None:
    """Give everything back. Statuses are ignored: at the end of a process the driver may be gone already."""
    with contextlib.suppress(Exception):
        torch.cuda.synchronize(device)
    mapped = min(whole, len(pieces) * piece)
    for base in bases:
        for offset in range(0, mapped, piece):
            driver.cuMemUnmap(base + offset, min(piece, whole - offset))
        driver.cuMemUnmap(base + whole, scratch)
        driver.cuMemAddressFree(base, whole + scratch)
    for handles in pieces:
        for handle in handles:
            driver.cuMemRelease(handle)


def _driver() -> Any:
    try:
        return import_module("cuda.bindings.driver")
    except ImportError as error:
        raise ConfigError(
            f"--dynamic-memory needs the package cuda-bindings on a GPU ({error}): install it, or leave the flag out"
        ) from error
