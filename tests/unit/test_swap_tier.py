"""Core's allocator under the second half of the conformance suite, and what only it promises: no copy too many."""

from __future__ import annotations

from octavo.cache.allocator import BlockAllocator
from octavo.interfaces import Allocator, AllocatorParts
from octavo.testing.allocator import GEOMETRIES
from octavo.testing.allocator_model import Paging
from octavo.testing.allocator_tiers import AllocatorTierSuite, fill


class TestBlockAllocator(AllocatorTierSuite):
    def make(self, parts: AllocatorParts) -> Allocator:
        return BlockAllocator(None, parts)


def paging(blocks: int, slots: int) -> Paging:
    return Paging(lambda parts: BlockAllocator(None, parts), GEOMETRIES["blocks of 4"], blocks, host_slots=slots)


def test_parcels_displace_cached_prefixes_from_host_memory() -> None:
    memory = paging(8, 4)
    fill(memory, 0, list(range(17)))
    memory.release(0)
    memory.evict()
    assert memory.allocator.memory()["host_cached_slots"] == 4
    fill(memory, 1, [99] * 13)
    assert memory.swap_out(1)
    assert memory.allocator.memory()["host_parcel_slots"] == 4


def test_what_is_in_host_memory_already_is_not_copied_again() -> None:
    memory = paging(20, 20)
    fill(memory, 0, list(range(18)))
    assert memory.swap_out(0)
    assert memory.allocator.memory()["host_stores"] == 5, "four full blocks and the one that is begun"
    memory.resume(0)
    assert memory.run(0)
    assert memory.swap_out(0)
    assert memory.allocator.memory()["host_stores"] == 6, "only the block that is nobody's but the row's"


def test_host_memory_counts_what_it_gave_back() -> None:
    memory = paging(6, 20)
    fill(memory, 0, list(range(17)))
    memory.release(0)
    memory.evict()
    assert memory.admit(0, list(range(17))) == 16
    assert memory.allocator.memory()["host_hits"] == 4
