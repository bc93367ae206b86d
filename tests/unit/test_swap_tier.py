"""The second tier on the allocator alone: what goes to host memory, what comes back, who waits for whom.

The paged memory of the conformance suite replays every copy in its order, so that a wrong block, slot or order shows
as a wrong cell.
"""

from __future__ import annotations

import numpy as np
import pytest
from octavo.cache.allocator import BlockAllocator
from octavo.request import FROM_HOST, TO_HOST
from octavo.testing.allocator import GEOMETRIES
from octavo.testing.allocator_model import Paging, groups_of


def paging(blocks: int, slots: int, geometry: str = "blocks of 4", **options: int | bool) -> Paging:
    return Paging(lambda parts: BlockAllocator(None, parts), GEOMETRIES[geometry], blocks, host_slots=slots, **options)  # type: ignore[arg-type]


def fill(memory: Paging, row: int, tokens: list[int]) -> None:
    memory.admit(row, tokens)
    assert memory.run(row)


@pytest.mark.parametrize("prefix_caching", [False, True])
@pytest.mark.parametrize("geometry", sorted(GEOMETRIES))
def test_a_parcel_restores_every_cell_that_a_query_reads(geometry: str, prefix_caching: bool) -> None:
    memory = paging(60, 60, geometry, prefix_caching=prefix_caching)
    fill(memory, 0, list(range(23)))
    for token in range(5):
        memory.sample(0, token)
        assert memory.run(0)
    assert memory.swap_out(0)
    assert memory.allocator.usage().used == 0
    memory.allocator.evict()
    assert memory.resume(1) == 28, "`verify` has compared every cell"
    assert memory.run(1)


def test_a_parcel_that_finds_no_slots_changes_nothing() -> None:
    memory = paging(20, 3, prefix_caching=False)
    fill(memory, 0, list(range(16)))
    assert not memory.swap_out(0)
    assert memory.allocator.memory()["host_parcel_slots"] == 0
    assert 0 in memory.rows and memory.resident(0, 0) == 4


def test_parcels_displace_cached_prefixes_from_host_memory() -> None:
    memory = paging(8, 4)
    fill(memory, 0, list(range(17)))
    memory.release(0)
    memory.allocator.evict()
    memory._apply_drained()
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


def test_an_evicted_prefix_is_found_in_host_memory_and_verified() -> None:
    memory = paging(6, 20)
    fill(memory, 0, list(range(17)))
    memory.release(0)
    fill(memory, 1, [50 + n for n in range(21)])  # takes every block
    memory.release(1)
    assert memory.admit(0, list(range(17))) == 16
    assert memory.allocator.memory()["host_hits"] == 4
    assert memory.admit(2, [1, 1, 1, 1, 1]) == 0


def test_tenants_stay_apart_in_host_memory() -> None:
    """S5 for the second tier: 0 across tenants, more within one."""
    memory = paging(6, 20)
    memory.admit(0, range(17), "tenant a")
    memory.run(0)
    memory.release(0)
    memory.allocator.evict()
    memory._apply_drained()
    assert memory.admit(1, range(17), "tenant b") == 0
    assert memory.admit(2, range(17), "tenant a") == 16


def test_a_hit_that_the_pool_has_no_room_for_is_passed_over() -> None:
    memory = paging(6, 20)
    fill(memory, 0, list(range(17)))
    memory.release(0)
    memory.allocator.evict()
    memory._apply_drained()
    fill(memory, 1, [99] * 20)  # five of six blocks
    memory.lossless = False  # the prefix is there, but cannot be had
    assert memory.admit(0, list(range(17))) == 0
    memory.release(1)
    memory.release(0)
    assert memory.admit(0, list(range(17))) == 16


def test_copies_are_written_down_in_the_order_in_which_they_must_be_done() -> None:
    """The block that a hit comes back to is first emptied to host memory, in one drain."""
    memory = paging(4, 20)
    allocator = memory.allocator
    fill(memory, 0, list(range(13)))
    memory.release(0)
    fill(memory, 1, [99] * 13)
    memory.release(1)
    allocator.admit(2, np.arange(13, dtype=np.int32), "a")
    kinds = [kind for kind, _, _ in allocator.drain()[1]]
    assert kinds == [TO_HOST, FROM_HOST]


def test_a_reset_forgets_host_memory_and_parcels() -> None:
    memory = paging(20, 20)
    fill(memory, 0, list(range(17)))
    memory.release(0)
    memory.allocator.evict()
    memory._apply_drained()
    fill(memory, 1, [7] * 9)
    assert memory.swap_out(1)
    memory.reset()
    assert memory.admit(0, list(range(17))) == 0
    assert memory.resume(1) == 0, "a lost parcel counts as none"


def test_any_order_of_pressure_keeps_every_cell_right() -> None:
    """A small pool, few different prompts, and mostly the calls that a scheduler makes under pressure."""
    for seed in range(4):
        rng = np.random.default_rng(seed)
        geometry = groups_of(*[((4, None),), ((4, None), (4, 7)), ((2, None), (3, 5))][seed % 3])
        memory = Paging(
            lambda parts: BlockAllocator(None, parts), geometry, 30, host_slots=24, max_blocks=40, prefix_caching=seed != 3
        )
        resumed = 0
        for _ in range(320):
            free = [row for row in range(5) if row not in memory.rows]
            act = rng.random()
            if act < 0.3 and free:
                memory.admit(free[0], [int(rng.integers(10, 16))] * int(rng.integers(1, 25)) + [int(rng.integers(1, 3))])
            elif act < 0.6 and memory.rows:
                row = int(rng.choice(list(memory.rows)))
                state = memory.rows[row]
                if state.computed == len(state.tokens) and len(state.tokens) < 60:
                    memory.sample(row, int(rng.integers(0, 2)))
                if state.computed < len(state.tokens) and not memory.run(row):
                    memory.swap_out(row)
            elif act < 0.7 and memory.rows:
                memory.swap_out(int(rng.choice(list(memory.rows))))
            elif act < 0.85 and memory.parcels and free:
                want = memory.parcels[0][0].computed
                resumed += memory.resume(free[0]) == want > 0
            elif act < 0.95 and memory.rows:
                memory.release(int(rng.choice(list(memory.rows))))
            else:
                memory.resize(int(rng.integers(12, 41)))
        promoted = memory.allocator.memory()["host_hits"]
        assert resumed >= 3, f"seed {seed}: hardly anything was swapped in"
        assert promoted > 3 or seed == 3, f"seed {seed}: hardly anything was promoted"
