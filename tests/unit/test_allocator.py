"""Core's allocator passes the conformance suite of allocators, and refuses calls that make no sense.

The life of a prefix-cache entry, domains, allocations that fail half-way and block boundaries are in the suite:
`octavo.testing.allocator`.
"""

from __future__ import annotations

import numpy as np
import pytest
from octavo.cache.allocator import BlockAllocator
from octavo.catalog import Options
from octavo.errors import ConfigError
from octavo.interfaces import Allocator, AllocatorParts, KVGroup, KVSpec
from octavo.testing.allocator import AllocatorSuite
from octavo.testing.allocator_model import Paging, array, groups_of


def make(parts: AllocatorParts) -> Allocator:
    return BlockAllocator(Options(), parts)


class TestBlockAllocator(AllocatorSuite):
    def make(self, parts: AllocatorParts) -> Allocator:
        return make(parts)


def test_prefix_counters_count_tokens_looked_up_and_found() -> None:
    paging = Paging(make, groups_of((4, None)), 8)
    paging.admit(0, range(10))
    paging.run(0)
    paging.admit(1, range(10))
    paging.admit(2, range(10), reuse=False)
    assert isinstance(paging.allocator, BlockAllocator)
    assert (paging.allocator.prefix_queries, paging.allocator.prefix_hits) == (20, 8)


def test_a_decode_step_that_needs_nothing_changes_nothing() -> None:
    paging = Paging(make, groups_of((4, None)), 8)
    paging.admit(0, range(5))
    paging.run(0)
    assert paging.allocator.reserve(array(0), array(5), array(8)) is True
    assert paging.allocator.drain() == ((), ())


def test_an_empty_range_needs_no_block_even_in_a_shared_one() -> None:
    # A forked row computes nothing in the step that forks it.
    paging = Paging(make, groups_of((4, None)), 2)
    paging.admit(0, range(6))
    paging.run(0)
    paging.fork(0, 1)
    assert paging.allocator.reserve(array(0, 1), array(6, 6), array(6, 6))
    assert paging.allocator.usage().used == 2
    assert paging.allocator.drain() == ((), ())


def test_only_the_used_part_of_a_shared_block_is_copied() -> None:
    # Blocks that were reserved past the parent's tokens hold nothing: the child gets new ones, not copies.
    allocator = make(AllocatorParts(groups_of((4, None)), 8, 2, 64))
    allocator.admit(0, np.arange(6), "a")
    assert allocator.reserve(array(0), array(0), array(12))
    allocator.fork(0, 1)
    allocator.drain()
    assert allocator.reserve(array(1), array(6), array(12))
    _, copies = allocator.drain()
    assert [(group, len(sources)) for group, sources, _ in copies] == [(0, 1)]
    allocator.check()


def test_the_tables_that_are_handed_out_cannot_be_written() -> None:
    allocator = make(AllocatorParts(groups_of((4, None)), 4, 2, 16))
    with pytest.raises(ValueError, match="read-only"):
        allocator.table(0)[0, 0] = 1


def test_a_row_in_use_cannot_be_admitted_or_forked_into() -> None:
    allocator = make(AllocatorParts(groups_of((4, None)), 4, 3, 16))
    allocator.admit(0, np.arange(3), "a")
    with pytest.raises(ValueError, match=r"row 0 holds a sequence of 3 tokens"):
        allocator.admit(0, np.arange(3), "a")
    with pytest.raises(ValueError, match=r"fork 1 -> 2"):
        allocator.fork(1, 2)
    with pytest.raises(ValueError, match=r"fork 0 -> 0"):
        allocator.fork(0, 0)
    with pytest.raises(ValueError, match=r"row 1 is empty"):
        allocator.extend(1, np.arange(1))
    allocator.check()


def test_positions_past_the_context_and_empty_rows_are_refused_by_name() -> None:
    allocator = make(AllocatorParts(groups_of((4, None)), 64, 2, 15))
    allocator.admit(0, np.arange(3), "a")
    with pytest.raises(ValueError, match=r"rows \[0\] up to \[16\].*max_model_len 15"):
        allocator.reserve(array(0), array(0), array(16))
    with pytest.raises(ValueError, match=r"rows \[1\]"):
        allocator.reserve(array(0, 1), array(0, 0), array(3, 3))
    with pytest.raises(ValueError, match=r"16 tokens are more than max_model_len 15"):
        allocator.admit(1, np.arange(16), "a")
    assert allocator.usage().used == 0
    allocator.check()


def test_writing_below_a_trimmed_window_is_refused() -> None:
    paging = Paging(make, groups_of((2, 4)), 16)
    paging.admit(0, range(20))
    paging.run(0)
    paging.allocator.trim(array(0), array(19))
    with pytest.raises(ValueError, match=r"row 0 writes column 0 of group 0, which has been trimmed"):
        paging.allocator.reserve(array(0), array(0), array(2))


@pytest.mark.parametrize(
    ("groups", "message"),
    [
        ((), "at least one KV group"),
        (groups_of((4, None), (4, 8))[1:], "has index 1"),
        ((KVGroup(0, KVSpec("state", 1, 8, 8, "float32"), (0,), 4, 64),), "per-sequence state"),
        ((KVGroup(0, KVSpec("window", 1, 8, 8, "float32", 0), (0,), 4, 64),), "a window of 0"),
        ((KVGroup(0, KVSpec("window", 1, 8, 8, "float32"), (0,), 4, 64),), "window None"),
        ((KVGroup(0, KVSpec("full", 1, 8, 8, "float32"), (0,), 0, 64),), "block size 0"),
    ],
)
def test_groups_that_cannot_be_served_are_refused(groups: tuple[KVGroup, ...], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        make(AllocatorParts(groups, 4, 2, 16))


def test_the_check_notices_a_table_that_names_a_free_block() -> None:
    paging = Paging(make, groups_of((4, None)), 4)
    paging.admit(0, range(6))
    paging.run(0)
    allocator = paging.allocator
    assert isinstance(allocator, BlockAllocator)
    allocator._tables[0].array[0, 1] = 3
    with pytest.raises(AssertionError, match=r"references of blocks \[1, 3\]"):
        allocator.check()
