"""The conformance suite of allocators, second half: host memory, pins and a pool that changes its size.

Used as the first half (`octavo.testing.allocator`): subclass, define `make`, name the class Test.... The oracle is the
same paged memory, which carries out every copy in its order, so that a wrong block, slot or order shows as a
wrong cell.
"""

from __future__ import annotations

import numpy as np

from octavo.interfaces import Allocator, AllocatorParts
from octavo.request import FROM_HOST, TO_HOST
from octavo.testing.allocator import GEOMETRIES
from octavo.testing.allocator_model import Paging, groups_of


class AllocatorTierSuite:
    """Subclass, define `make`, and name the class Test..."""

    def make(self, parts: AllocatorParts) -> Allocator:
        raise NotImplementedError("return the allocator under test")

    def paging(self, blocks: int, slots: int, geometry: str = "blocks of 4", **parts: int | bool) -> Paging:
        return Paging(self.make, GEOMETRIES[geometry], blocks, host_slots=slots, **parts)  # type: ignore[arg-type]

    # ------------------------------------------------------------ parcels

    def test_a_parcel_restores_every_cell_that_a_query_reads(self) -> None:
        for geometry in GEOMETRIES:
            for prefix_caching in (False, True):
                memory = self.paging(60, 60, geometry, prefix_caching=prefix_caching)
                fill(memory, 0, list(range(23)))
                for token in range(5):
                    memory.sample(0, token)
                    assert memory.run(0)
                assert memory.swap_out(0), geometry
                assert memory.allocator.usage().used == 0, geometry
                memory.allocator.evict()
                assert memory.resume(1) == 28, "`verify` has compared every cell"
                assert memory.run(1), geometry

    def test_a_parcel_that_finds_no_slots_changes_nothing(self) -> None:
        memory = self.paging(20, 3, prefix_caching=False)
        fill(memory, 0, list(range(16)))
        assert not memory.swap_out(0)
        assert memory.resident(0, 0) == 4

    def test_without_host_memory_nothing_is_swapped(self) -> None:
        memory = self.paging(20, 0)
        fill(memory, 0, list(range(16)))
        assert not memory.swap_out(0)

    def test_a_parcel_can_be_given_up(self) -> None:
        memory = self.paging(20, 4, prefix_caching=False)
        for _ in range(3):
            fill(memory, 0, list(range(16)))
            assert memory.swap_out(0)
            memory.discard()

    def test_a_parcel_survives_an_admission_that_comes_to_nothing(self) -> None:
        """The scheduler admits, finds no budget, releases, and tries again later with the same parcel."""
        memory = self.paging(20, 8, prefix_caching=False)
        fill(memory, 0, list(range(14)))
        assert memory.swap_out(0)
        parcel, row = memory.parcels[0]
        tokens = np.array([*row.tokens, 1], np.int32)
        assert memory.allocator.admit(1, tokens, row.domain, row.salt, parcel=parcel) == 14
        memory.allocator.release(np.array([1]))
        memory._apply_drained()
        assert memory.resume(2) == 14

    # ------------------------------------------------------------ the second tier of the prefix cache

    def test_an_evicted_prefix_is_found_in_host_memory(self) -> None:
        memory = self.paging(6, 20)
        fill(memory, 0, list(range(17)))
        memory.release(0)
        fill(memory, 1, [50 + n for n in range(21)])  # takes every block
        memory.release(1)
        assert memory.admit(0, list(range(17))) == 16
        assert memory.admit(2, [1, 1, 1, 1, 1]) == 0

    def test_tenants_stay_apart_in_host_memory(self) -> None:
        """Domains in the second tier: 0 across tenants, more within one."""
        memory = self.paging(6, 20)
        memory.admit(0, range(17), "tenant a")
        memory.run(0)
        memory.release(0)
        memory.evict()
        assert memory.admit(1, range(17), "tenant b") == 0
        assert memory.admit(2, range(17), "tenant a") == 16

    def test_a_hit_that_the_pool_has_no_room_for_is_passed_over(self) -> None:
        memory = self.paging(6, 20)
        fill(memory, 0, list(range(17)))
        memory.release(0)
        memory.evict()
        fill(memory, 1, [99] * 20)  # five of six blocks
        memory.lossless = False  # the prefix is there, but cannot be had
        assert memory.admit(0, list(range(17))) == 0
        memory.release(1)
        memory.release(0)
        assert memory.admit(0, list(range(17))) == 16

    def test_a_block_is_emptied_before_something_comes_back_into_it(self) -> None:
        """Both copies are in one drain, in the order in which they must be done."""
        memory = self.paging(4, 20)
        fill(memory, 0, list(range(13)))
        memory.release(0)
        fill(memory, 1, [99] * 13)
        memory.release(1)
        memory.allocator.admit(2, np.arange(13, dtype=np.int32), "a")
        kinds = [kind for kind, _, _ in memory.allocator.drain()[1]]
        assert kinds == [TO_HOST, FROM_HOST]

    def test_a_reset_forgets_host_memory_and_parcels(self) -> None:
        memory = self.paging(20, 20)
        fill(memory, 0, list(range(17)))
        memory.release(0)
        memory.evict()
        fill(memory, 1, [7] * 9)
        assert memory.swap_out(1)
        memory.reset()
        assert memory.admit(0, list(range(17))) == 0
        assert memory.resume(1) == 0, "a lost parcel counts as none"

    # ------------------------------------------------------------ pins and sizes

    def test_a_pinned_prefix_stays_until_it_is_let_go(self) -> None:
        for geometry in GEOMETRIES:
            memory = self.paging(40, 0, geometry)
            fill(memory, 0, list(range(19)))
            memory.release(0)
            pinned = memory.pin(list(range(19)))
            assert 0 < pinned <= 19, geometry
            memory.evict()
            assert memory.allocator.usage().pinned > 0
            memory.lossless = False
            assert memory.admit(0, list(range(19))) == (pinned if pinned < 19 else pinned - 1), geometry
            memory.release(0)
            assert memory.allocator.unpin(np.arange(19, dtype=np.int32), "a") == pinned
            assert memory.allocator.usage().pinned == 0, geometry

    def test_a_pin_that_would_leave_too_little_pins_nothing(self) -> None:
        memory = self.paging(10, 0)
        fill(memory, 0, list(range(16)))
        memory.release(0)
        assert memory.pin(list(range(16)), leave=7) == 0
        assert memory.pin(list(range(16)), leave=6) == 16
        assert memory.allocator.fits(24) and not memory.allocator.fits(25)

    def test_what_lives_in_the_tail_is_moved_when_the_pool_shrinks(self) -> None:
        for geometry in GEOMETRIES:
            memory = self.paging(60, 0, geometry, max_blocks=80)
            for row in range(3):
                fill(memory, row, [row, *range(12)])
            memory.release(0)
            used = memory.allocator.usage().used
            assert memory.resize(used + 2) == used + 2, geometry
            assert memory.resize(1) == used, "what lives bounds it"
            assert memory.resize(80) == 80, geometry
            for row in (1, 2):
                memory.sample(row, 5)
                assert memory.run(row), geometry

    def test_any_order_of_pressure_keeps_every_cell_right(self) -> None:
        """A small pool, few different prompts, and mostly the calls that a scheduler makes under pressure."""
        for seed in range(4):
            rng = np.random.default_rng(seed)
            geometry = groups_of(*[((4, None),), ((4, None), (4, 7)), ((2, None), (3, 5))][seed % 3])
            memory = Paging(self.make, geometry, 30, host_slots=24, max_blocks=40, prefix_caching=seed != 3)
            resumed = 0
            for _ in range(320):
                resumed += _pressure(memory, rng)
            assert resumed >= 3, f"seed {seed}: hardly anything was swapped in"


def fill(memory: Paging, row: int, tokens: list[int]) -> None:
    """Admit a prompt and compute all of it."""
    memory.admit(row, tokens)
    assert memory.run(row)


def _pressure(memory: Paging, rng: np.random.Generator) -> bool:
    """One call; whether it brought a whole parcel back."""
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
        return memory.resume(free[0]) == want > 0
    elif act < 0.95 and memory.rows:
        memory.release(int(rng.choice(list(memory.rows))))
    else:
        memory.resize(int(rng.integers(12, 41)))
    return False
