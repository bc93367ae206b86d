"""SwapSpace: the second tier's memory, and the copies between it and the pool.

Owns host memory (pinned where the device is a GPU), the copy stream and the staging buffers. Does the
copies that an allocator has written down, in their order; decides none of them. `submit` never waits
for the device, and neither does this.

On a GPU every copy goes through a staging buffer on the device, so that the two streams need one
event each way and a block is free as soon as its content lies in the buffer, at the speed of the
device's own memory:

    out   compute stream: gather blocks -> buffer      copy stream: buffer -> host slots
    in    copy stream: host slots -> buffer            compute stream: scatter buffer -> blocks

The copy stream waits for the gather, and the compute stream for the arrival. All accesses to
host slots lie on the copy stream, in the order of the log, so a slot is never overwritten before it was
read. A buffer is used again only after an event says that both streams are done with it.
"""

from __future__ import annotations

import weakref
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import numpy as np
import torch
from torch import Tensor

from octavo.cache.pool import Pool
from octavo.errors import ConfigError
from octavo.request import FROM_HOST, MOVE, TO_HOST

STAGING_BUFFERS = 4
"""Buffers on a GPU. As long as one is free, the compute stream does not wait for the bus."""

MOVE_BYTES = 16 << 20
"""Blocks are moved within the pool about this many bytes at a time."""


def make_swap_space(pool: Pool, slots: int, staging_bytes: int = 64 << 20) -> SwapSpace:
    """The copies of this pool. slots: blocks that host memory holds; 0 still moves blocks within the pool.
    staging_bytes: of all staging buffers on a GPU together, as far as each holds at least one block."""
    return CudaSwapSpace(pool, slots, staging_bytes) if pool.device.type == "cuda" else SwapSpace(pool, slots)


class SwapSpace:
    """Copies of a pool in host memory: the memory is [slots, tensors, words], touched only when written."""

    def __init__(self, pool: Pool, slots: int) -> None:
        self.pool, self.slots = pool, slots
        self._pages = pool.words()
        self._host = self._allocate(slots)

    @property
    def nbytes(self) -> int:
        return self._host.nbytes

    def copy(self, kind: int, sources: np.ndarray, targets: np.ndarray) -> None:
        """One entry of Batch.copies whose kind is TO_HOST, FROM_HOST or MOVE."""
        if kind == TO_HOST:
            self._store(sources, targets)
        elif kind == FROM_HOST:
            self._load(sources, targets)
        elif kind == MOVE:
            self._move(sources, targets)
        else:
            raise ValueError(f"copies of KV group {kind} are the attention backend's, not the swap space's")

    def _allocate(self, slots: int) -> Tensor:
        first = self._pages[0]
        shape = (slots, len(self._pages), first.shape[1])
        # numpy's large arrays are pages of the system that nobody has touched
        return torch.from_numpy(np.empty(shape, np.dtype(str(first.dtype).removeprefix("torch."))))

    def _store(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        to, ids = torch.from_numpy(slots.astype(np.int64)), torch.from_numpy(blocks.astype(np.int64))
        for i, pages in enumerate(self._pages):
            self._host[to, i] = pages[ids]

    def _load(self, slots: np.ndarray, blocks: np.ndarray) -> None:
        at, ids = torch.from_numpy(slots.astype(np.int64)), torch.from_numpy(blocks.astype(np.int64))
        for i, pages in enumerate(self._pages):
            pages[ids] = self._host[at, i]

    def _move(self, blocks: np.ndarray, targets: np.ndarray) -> None:
        sources, ids = self._ids(blocks), self._ids(targets)
        for pages in self._pages:
            pages[ids] = pages[sources]

    def _ids(self, ids: np.ndarray) -> Tensor:
        return torch.from_numpy(ids.astype(np.int64))


class CudaSwapSpace(SwapSpace):
    """The same in pinned memory, without waiting for the device."""

    def __init__(self, pool: Pool, slots: int, staging_bytes: int) -> None:
        self._device = pool.device
        super().__init__(pool, slots)
        first = self._pages[0]
        block_bytes = len(self._pages) * first.shape[1] * first.itemsize
        self._chunk = max(1, staging_bytes // STAGING_BUFFERS // block_bytes)  # blocks of a buffer
        self._move_chunk = max(1, MOVE_BYTES // block_bytes)
        self._stream = torch.cuda.Stream(self._device)  # type: ignore[no-untyped-call]
        shape = (self._chunk, len(self._pages), first.shape[1])
        count = STAGING_BUFFERS if slots else 0
        self._buffers = [(torch.empty(shape, dtype=first.dtype, device=self._device), torch.cuda.Event()) for _ in range(count)]  # type: ignore[no-untyped-call]
        self._turn = 0

    def _allocate(self, slots: int) -> Tensor:
        host = super()._allocate(slots)
        if slots:
            _pin(self, host)
        return host

    def _store(self, blocks: np.ndarray, slots: np.ndarray) -> None:
        compute = torch.cuda.current_stream(self._device)
        for part in _parts(len(blocks), self._chunk):
            buffer, free = self._next_buffer()
            ids = self._ids(blocks[part])
            compute.wait_event(free)
            for i, pages in enumerate(self._pages):
                torch.index_select(pages, 0, ids, out=buffer[: len(ids), i])
            gathered = torch.cuda.Event()  # type: ignore[no-untyped-call]
            gathered.record(compute)
            self._stream.wait_event(gathered)
            with torch.cuda.stream(self._stream):
                for at, slot, count in runs(slots[part]):
                    self._host[slot : slot + count].copy_(buffer[at : at + count], non_blocking=True)
                free.record(self._stream)

    def _load(self, slots: np.ndarray, blocks: np.ndarray) -> None:
        compute = torch.cuda.current_stream(self._device)
        for part in _parts(len(blocks), self._chunk):
            buffer, free = self._next_buffer()
            self._stream.wait_event(free)
            with torch.cuda.stream(self._stream):
                for at, slot, count in runs(slots[part]):
                    buffer[at : at + count].copy_(self._host[slot : slot + count], non_blocking=True)
                arrived = torch.cuda.Event()  # type: ignore[no-untyped-call]
                arrived.record(self._stream)
            ids = self._ids(blocks[part])
            compute.wait_event(arrived)
            for i, pages in enumerate(self._pages):
                pages.index_copy_(0, ids, buffer[: len(ids), i])
            free.record(compute)

    def _move(self, blocks: np.ndarray, targets: np.ndarray) -> None:
        for part in _parts(len(blocks), self._move_chunk):
            super()._move(blocks[part], targets[part])

    def _next_buffer(self) -> tuple[Tensor, torch.cuda.Event]:
        self._turn = (self._turn + 1) % len(self._buffers)
        return self._buffers[self._turn]

    def _ids(self, ids: np.ndarray) -> Tensor:
        return super()._ids(ids).pin_memory().to(self._device, non_blocking=True)


def _parts(count: int, size: int) -> Iterator[slice]:
    return (slice(at, at + size) for at in range(0, count, size))


def runs(slots: np.ndarray) -> Iterator[tuple[int, int, int]]:
    """Stretches of consecutive slots: (position in `slots`, first slot, count), so that one copy serves each."""
    starts = np.concatenate(([0], np.flatnonzero(np.diff(slots) != 1) + 1, [len(slots)])).tolist()
    for at, end in pairwise(starts):
        yield at, int(slots[at]), end - at


def _pin(owner: object, host: Tensor) -> None:
    """Lock the pages of a host tensor for the device, until `owner` goes. ConfigError where the system refuses."""
    runtime: Any = torch.cuda.cudart()  # type: ignore[no-untyped-call]
    status = runtime.cudaHostRegister(host.data_ptr(), host.nbytes, 0)
    if int(status) != 0:
        raise ConfigError(
            f"--swap-space: the system does not lock {host.nbytes / 2**30:.1f} GiB of host memory for the GPU (CUDA error "
            f"{int(status)}): lower it, or raise the limit of locked memory (ulimit -l)"
        )
    weakref.finalize(owner, runtime.cudaHostUnregister, host.data_ptr())
