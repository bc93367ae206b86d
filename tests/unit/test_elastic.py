"""Memory whose tail comes and goes: on the CPU by its resident size, on a GPU by the calls to CUDA's driver.

The driver here is a double that keeps the rules of the real one: nothing is mapped twice, nothing is unmapped in
parts, a handle lives while a mapping or its maker holds it. The real one is in tests/gpu/test_swap.py.
"""

from __future__ import annotations

import itertools
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from octavo.cache import elastic
from octavo.cache.elastic import CudaMemory, HostMemory
from octavo.cache.pool import Pool
from octavo.errors import ConfigError
from octavo.interfaces import CacheLayout, KVGroup, KVSpec

GRAIN = 2 << 20
OK, NO_MEMORY = 0, 2


def resident() -> int:
    """Bytes of this process that are backed by memory."""
    fields = Path("/proc/self/smaps_rollup").read_text()
    return 1024 * int(next(line.split()[1] for line in fields.splitlines() if line.startswith("Rss:")))


def test_the_process_grows_and_shrinks_with_the_pool() -> None:
    page = 256 << 10
    memory = HostMemory(2, 400, page)
    before = resident()
    memory.resize(400)
    for tensor in memory.tensors:
        tensor.view(401, page)[:400] = 1
    full = resident()
    assert full - before > 0.95 * 2 * 400 * page
    memory.resize(100)
    assert full - resident() > 0.95 * 2 * 300 * page
    for tensor in memory.tensors:
        assert bool((tensor.view(401, page)[:100] == 1).all()), "what stays keeps its content"
    memory.resize(400)
    assert int(memory.tensors[0].view(401, page)[399].max()) == 0, "new pages are zeros"


def test_the_scratch_page_survives_every_size() -> None:
    page = 3000  # not a multiple of the system's pages
    memory = HostMemory(1, 50, page)
    pages = memory.tensors[0].view(51, page)
    pages[50], pages[9] = 7, 3
    memory.resize(10)
    assert bool((pages[50] == 7).all()) and bool((pages[9] == 3).all())


def pool(blocks: int, most: int | None) -> Pool:
    spec = KVSpec("full", 1, 8, 8, "float32")
    return Pool((KVGroup(0, spec, (0,), 4, 256),), (CacheLayout("float32", (64,), 256, "flat"),), blocks, "cpu", max_blocks=most)


def test_a_pool_changes_its_size_within_its_range_and_keeps_its_addresses() -> None:
    moving = pool(10, 40)
    (cache,) = moving.caches(moving.groups[0])
    assert cache.shape == (41, 64) and moving.scratch == 40
    moving.resize(40)
    moving.resize(5)
    assert moving.num_blocks == 5 and moving.caches(moving.groups[0])[0].data_ptr() == cache.data_ptr()
    for wrong in (0, 41):
        with pytest.raises(ConfigError, match="cannot be made"):
            moving.resize(wrong)


def test_a_pool_that_was_built_to_stay_says_so() -> None:
    with pytest.raises(ConfigError, match="cannot be made 9"):
        pool(10, None).resize(9)


# ---------------------------------------------------------------- CUDA's calls


class Driver:
    """cuda.bindings.driver, as far as CudaMemory calls it. limit: bytes of the device."""

    CUmemAllocationType = SimpleNamespace(CU_MEM_ALLOCATION_TYPE_PINNED=1)
    CUmemLocationType = SimpleNamespace(CU_MEM_LOCATION_TYPE_DEVICE=1)
    CUmemAccess_flags = SimpleNamespace(CU_MEM_ACCESS_FLAGS_PROT_READWRITE=3)
    CUmemAllocationGranularity_flags = SimpleNamespace(CU_MEM_ALLOC_GRANULARITY_MINIMUM=0)
    CUresult = SimpleNamespace(CUDA_ERROR_OUT_OF_MEMORY=NO_MEMORY)

    def __init__(self, limit: int) -> None:
        self.limit = limit
        self.names = itertools.count(1)
        self.ranges: dict[int, int] = {}
        self.sizes: dict[int, int] = {}  # of handles that are alive
        self.released: set[int] = set()
        self.mapped: dict[int, tuple[int, int]] = {}  # address -> size, handle
        self.accessible: set[int] = set()
        self.touched: set[int] = set()  # addresses that work in flight may touch

    def launch(self) -> None:
        self.touched = set(self.mapped)

    def synchronize(self, device: torch.device) -> None:
        """torch.cuda.synchronize: the device has done all that was submitted."""
        assert device == torch.device("cuda", 0)
        self.touched = set()

    @staticmethod
    def CUmemAllocationProp() -> Any:
        return SimpleNamespace(type=0, location=SimpleNamespace(type=0, id=0))

    CUmemAccessDesc = CUmemAllocationProp

    @property
    def used(self) -> int:
        return sum(self.sizes.values())

    def cuMemGetAllocationGranularity(self, _: Any, __: Any) -> tuple[int, int]:
        return OK, GRAIN

    def cuMemAddressReserve(self, size: int, *_: int) -> tuple[int, int]:
        assert size % GRAIN == 0
        base = next(self.names) << 40
        self.ranges[base] = size
        return OK, base

    def cuMemCreate(self, size: int, _: Any, __: int) -> tuple[int, int]:
        assert size % GRAIN == 0 and size > 0
        if self.used + size > self.limit:
            return NO_MEMORY, 0
        handle = next(self.names)
        self.sizes[handle] = size
        return OK, handle

    def cuMemMap(self, address: int, size: int, offset: int, handle: int, _: int) -> tuple[int]:
        assert any(base <= address and address + size <= base + length for base, length in self.ranges.items())
        assert not any(a < address + size and address < a + s for a, (s, _) in self.mapped.items()), "mapped twice"
        assert size == self.sizes[handle] and offset == 0
        self.mapped[address] = (size, handle)
        return (OK,)

    def cuMemSetAccess(self, address: int, size: int, access: list[Any], count: int) -> tuple[int]:
        assert self.mapped[address][0] == size and len(access) == count == 1
        self.accessible.add(address)
        return (OK,)

    def cuMemsetD8(self, address: int, value: int, size: int) -> tuple[int]:
        assert address in self.accessible and self.mapped[address][0] == size and value == 0
        return (OK,)

    def cuMemUnmap(self, address: int, size: int) -> tuple[int]:
        assert address not in self.touched, "unmapped under work in flight"
        assert self.mapped[address][0] == size
        _, handle = self.mapped.pop(address)
        self.accessible.discard(address)
        self._reap(handle)
        return (OK,)

    def cuMemRelease(self, handle: int) -> tuple[int]:
        assert handle in self.sizes and handle not in self.released
        self.released.add(handle)
        self._reap(handle)
        return (OK,)

    def cuMemAddressFree(self, base: int, size: int) -> tuple[int]:
        assert self.ranges.pop(base) == size
        return (OK,)

    def _reap(self, handle: int) -> None:
        if handle in self.released and all(h != handle for _, h in self.mapped.values()):
            del self.sizes[handle]

    def reachable(self, base: int, upto: int) -> bool:
        """Whether [base, base + upto) is mapped without a hole."""
        at = base
        while at < base + upto:
            if at not in self.mapped:
                return False
            at += self.mapped[at][0]
        return True


def cuda_memory(monkeypatch: pytest.MonkeyPatch, driver: Driver, tensors: int, capacity: int, page: int) -> CudaMemory:
    monkeypatch.setattr(elastic.torch, "as_tensor", lambda array, device: array)
    monkeypatch.setattr(elastic.torch.cuda, "synchronize", driver.synchronize)
    return CudaMemory(tensors, capacity, page, torch.device("cuda", 0), driver)


@pytest.mark.parametrize("page", [GRAIN, 64 << 10, 12288, 3 * GRAIN // 2])
def test_what_is_mapped_is_what_is_in_use_and_one_scratch_page(monkeypatch: pytest.MonkeyPatch, page: int) -> None:
    driver = Driver(1 << 40)
    memory = cuda_memory(monkeypatch, driver, 3, 3000, page)
    assert memory.capacity >= 3000
    scratch = -(-page // GRAIN) * GRAIN
    for pages in (100, 3000, 1, 1500, 1499, 2999):
        memory.resize(pages)
        for base in driver.ranges:
            assert driver.reachable(base, pages * page)
            assert driver.reachable(base + memory.capacity * page, page), "the scratch page"
        slack = driver.used - 3 * pages * page - scratch
        assert 0 <= slack <= 3 * memory._piece
    assert memory._piece <= max(GRAIN, 2 * memory.capacity * page // elastic.PIECES)
    del memory
    assert (driver.sizes, driver.mapped, driver.ranges) == ({}, {}, {}), "nothing is left behind"


def test_a_growth_that_finds_no_memory_half_way_is_undone(monkeypatch: pytest.MonkeyPatch) -> None:
    page = 64 << 10
    driver = Driver(limit=200 << 20)
    memory = cuda_memory(monkeypatch, driver, 4, 4000, page)
    memory.resize(500)
    before = dict(driver.mapped)
    with pytest.raises(MemoryError, match="no memory left"):
        memory.resize(4000)
    assert driver.mapped == before
    memory.resize(600)


def test_nothing_is_unmapped_under_work_in_flight(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a shrink, nor by a growth that is undone, nor when the pool goes."""
    driver = Driver(limit=64 << 20)
    memory = cuda_memory(monkeypatch, driver, 2, 4000, 64 << 10)
    memory.resize(200)
    driver.launch()
    memory.resize(200)
    assert driver.touched, "a size that stays waits for nothing"
    memory.resize(300)
    assert driver.touched, "nor does a growth"
    memory.resize(50)
    driver.launch()
    with pytest.raises(MemoryError):
        memory.resize(4000)
    driver.launch()
    del memory
    assert (driver.sizes, driver.mapped, driver.ranges) == ({}, {}, {})
