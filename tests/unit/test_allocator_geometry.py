"""Block boundaries, as arithmetic and on the tables that core's allocator makes."""

from __future__ import annotations

import numpy as np
import pytest
from octavo.cache.allocator import BlockAllocator
from octavo.cache.geometry import (
    blocks_for,
    first_visible,
    sequence_blocks,
    slots,
    window_blocks,
)
from octavo.interfaces import AllocatorParts
from octavo.testing.allocator_model import array, groups_of

SIZES = (1, 4, 5, 16, 32)
LENGTHS = (0, 1, 3, 4, 5, 7, 8, 9)


def test_the_eighth_token_of_the_example_goes_to_slot_47() -> None:
    table = np.array([[10, 11]], np.int32)
    assert slots(table, np.zeros(8, np.int64), np.arange(8), 4).tolist() == [40, 41, 42, 43, 44, 45, 46, 47]


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_a_length_has_a_block_for_every_column_that_its_positions_lie_in(size: int, length: int) -> None:
    assert blocks_for(length, size) == len(set(np.arange(length) // size))


@pytest.mark.parametrize("window", [None, 1, 2, 4, 5, 100])
@pytest.mark.parametrize("length", LENGTHS[1:])
def test_a_query_sees_its_own_key_and_as_many_before_it_as_the_window_holds(length: int, window: int | None) -> None:
    seen = range(first_visible(length - 1, window), length)
    assert len(seen) == (length if window is None else min(window, length))


@pytest.mark.parametrize("size", SIZES)
@pytest.mark.parametrize("length", LENGTHS)
def test_every_position_has_its_own_slot_in_a_block_of_its_row(size: int, length: int) -> None:
    allocator = BlockAllocator(None, AllocatorParts(groups_of((size, None)), 32, 3, 64))
    for row in range(2):
        allocator.admit(row, np.arange(length), "a")
    rows = array(0, 1)
    assert allocator.reserve(rows, array(0, 0), array(length, length))
    table = allocator.table(0)
    held = blocks_for(length, size)
    assert (table[:2, :held] >= 0).all() and (table[:2, held:] == -1).all() and (table[2] == -1).all()
    found = slots(table, np.repeat(rows, length), np.tile(np.arange(length), 2), size)
    assert len(set(found.tolist())) == 2 * length
    assert (found >= 0).all() and (found < 32 * size).all()
    for row in range(2):
        mine = found[row * length : (row + 1) * length]
        assert (mine // size).tolist() == np.repeat(table[row], size)[:length].tolist()
        assert (mine % size).tolist() == (np.arange(length) % size).tolist()
    allocator.check()


@pytest.mark.parametrize("size", SIZES)
def test_the_bound_of_a_window_is_the_worst_alignment(size: int) -> None:
    for window in (1, 4, 7, 33):
        for chunk in (1, 3, 8, 20):
            touched = {
                (start + chunk - 1) // size - first_visible(start, window) // size + 1
                for start in range(window, window + 4 * size)
            }
            assert max(touched) == window_blocks(window, size, chunk)


def test_a_sequence_needs_the_sum_of_its_groups_and_windows_stop_growing() -> None:
    groups = groups_of((4, None), (8, 8))
    assert sequence_blocks(groups, 4000) == 1000 + 500, "without a bound on steps one step may be everything"
    assert sequence_blocks(groups, 4000, 8) == 1000 + window_blocks(8, 8, 8)
    assert sequence_blocks(groups, 3, 8) == 2
    assert sequence_blocks(groups, 0, 8) == 0
