"""Which cached prefix goes first: by age, with a turnover of the pool more or less for what is urgent or not; pins never."""

from __future__ import annotations

import numpy as np
from octavo.cache.allocator import BlockAllocator
from octavo.cache.blocks import COLD, NORMAL, WARM
from octavo.interfaces import AllocatorParts
from octavo.testing.allocator_model import groups_of


def pool(blocks: int, **options: int) -> BlockAllocator:
    """Blocks of one token."""
    return BlockAllocator(None, AllocatorParts(groups_of((1, None)), blocks, 4, 1000, **options))


def use(allocator: BlockAllocator, first: int, count: int, rank: int = NORMAL) -> int:
    """Run a prompt of `count` tokens that begins with token `first`, and release it; the tokens that were cached."""
    tokens = np.arange(first, first + count, dtype=np.int32)
    hit = allocator.admit(0, tokens, "a", rank=rank)
    rows, start, end = np.array([0]), np.array([hit]), np.array([count])
    assert allocator.reserve(rows, start, end)
    allocator.commit(rows, end)
    allocator.release(rows)
    allocator.check()
    return hit


def cached(allocator: BlockAllocator, first: int, count: int) -> bool:
    """Whether a prompt would hit, looked up without touching it."""
    from octavo.cache.prefix import Lineage

    lineage = Lineage(np.arange(first, first + count, dtype=np.int32), "a", "", (1,))
    return len(allocator._index.match(lineage, 0, 1, count)) == count


def test_the_least_recently_used_goes_first() -> None:
    allocator = pool(30)
    for prompt in (100, 200, 300):
        use(allocator, prompt, 10)
    use(allocator, 100, 10)
    use(allocator, 400, 10)
    assert [cached(allocator, p, 10) for p in (100, 200, 300, 400)] == [True, False, True, True]


def test_an_urgent_prefix_outlives_younger_ones_and_a_cold_one_goes_before_older_ones() -> None:
    allocator = pool(30)
    use(allocator, 100, 10, WARM)
    use(allocator, 200, 10)
    use(allocator, 300, 10, COLD)
    use(allocator, 400, 10)
    assert [cached(allocator, p, 10) for p in (100, 200, 300)] == [True, True, False]
    use(allocator, 500, 10)
    assert [cached(allocator, p, 10) for p in (100, 200)] == [True, False]


def test_an_urgent_prefix_that_nobody_asks_for_is_gone_after_a_turnover_more() -> None:
    allocator = pool(30)
    use(allocator, 100, 10, WARM)
    lived = 0
    for turn in range(10):
        use(allocator, 1000 + 20 * turn, 10)
        lived += cached(allocator, 100, 10)
    # two prompts fill the pool, and three more (thirty blocks) are released before its turn comes
    assert 3 <= lived <= 6


def test_whoever_uses_a_prefix_makes_it_worth_at_least_as_much() -> None:
    allocator = pool(30)
    use(allocator, 100, 10, COLD)
    use(allocator, 100, 11, WARM)
    use(allocator, 200, 9)
    use(allocator, 300, 15)
    assert cached(allocator, 100, 10) and not cached(allocator, 200, 9)


def test_a_pinned_prefix_stays_whatever_needs_room() -> None:
    allocator = pool(30)
    use(allocator, 100, 10)
    assert allocator.pin(np.arange(100, 110, dtype=np.int32), "a") == 10
    for turn in range(8):
        use(allocator, 1000 + 50 * turn, 20)
    assert cached(allocator, 100, 10)
    usage = allocator.usage()
    assert (usage.pinned, usage.used) == (10, 0)
    assert allocator.fits(20) and not allocator.fits(21)
    assert allocator.unpin(np.arange(100, 110, dtype=np.int32), "a") == 10
    use(allocator, 2000, 30)
    assert not cached(allocator, 100, 10)


def test_pinning_twice_is_pinning_once_and_a_pin_leaves_what_it_must() -> None:
    allocator = pool(30)
    use(allocator, 100, 10)
    use(allocator, 200, 10)
    tokens = np.arange(100, 110, dtype=np.int32)
    assert allocator.pin(tokens, "a", leave=20) == allocator.pin(tokens, "a", leave=20) == 10
    assert allocator.pin(np.arange(200, 210, dtype=np.int32), "a", leave=20) == 0
    assert allocator.unpin(tokens, "a") == 10 and allocator.unpin(tokens, "a") == 0
    assert allocator.usage().pinned == 0


def test_pins_of_one_prefix_in_two_domains_are_two() -> None:
    allocator = pool(30)
    use(allocator, 100, 10)
    tokens = np.arange(100, 110, dtype=np.int32)
    assert allocator.pin(tokens, "b") == 0, "nothing of it is cached there"
    assert allocator.pin(tokens, "a") == 10
