"""The conformance suite of allocators.

Whoever writes an allocator subclasses `AllocatorSuite`, returns theirs from `make`, and lets pytest
collect it; every test states one promise of `octavo.interfaces.Allocator`. Needs numpy only.

    class TestMyAllocator(AllocatorSuite):
        def make(self, parts):
            return MyAllocator(MyOptions(), parts)

The oracle is `octavo.testing.allocator_model.Paging`: it replays what the device would do and checks,
after every call, each cell that a query could read.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from octavo.cache.geometry import blocks_for, window_blocks
from octavo.interfaces import Allocator, AllocatorParts, KVGroup
from octavo.testing.allocator_model import Paging, array, groups_of

BLOCK_SIZES = (1, 4, 5, 16, 32)
LENGTHS = (1, 3, 4, 5, 7, 8, 9)

GEOMETRIES: dict[str, tuple[KVGroup, ...]] = {
    "one token a block": groups_of((1, None)),
    "blocks of 4": groups_of((4, None)),
    "blocks of 5": groups_of((5, None)),
    "a window alone": groups_of((4, 6)),
    "full and window": groups_of((4, None), (4, 7)),
    "a window of one token": groups_of((2, None), (2, 1)),
    "different block sizes": groups_of((2, None), (4, 9), (2, 3)),
    "sizes that do not divide": groups_of((2, None), (3, 5)),
}


class AllocatorSuite:
    """Subclass, define `make`, and name the class Test..."""

    def make(self, parts: AllocatorParts) -> Allocator:
        raise NotImplementedError("return the allocator under test")

    def paging(self, groups: Sequence[KVGroup], num_blocks: int, **parts: int | bool) -> Paging:
        return Paging(self.make, groups, num_blocks, **parts)  # type: ignore[arg-type]

    # ------------------------------------------------------------ taking and giving back

    def test_a_row_holds_as_many_blocks_as_its_tokens_begin_to_fill(self) -> None:
        for size in BLOCK_SIZES:
            for length in LENGTHS:
                paging = self.paging(groups_of((size, None)), 16)
                paging.admit(0, range(length))
                assert paging.resident(0, 0) == 0, "an admission without a hit takes nothing"
                assert paging.run(0)
                assert paging.resident(0, 0) == blocks_for(length, size), (size, length)
                assert paging.allocator.usage().used == blocks_for(length, size)

    def test_release_gives_everything_back(self) -> None:
        for name, groups in GEOMETRIES.items():
            for prefix_caching in (False, True):
                paging = self.paging(groups, 40, prefix_caching=prefix_caching)
                for row in range(3):
                    paging.admit(row, range(9))
                    assert paging.run(row), name
                paging.release(2, 0, 1)
                usage = paging.allocator.usage()
                assert usage.used == 0, name
                assert (usage.cached > 0) == prefix_caching, name

    def test_releasing_an_empty_row_does_nothing(self) -> None:
        paging = self.paging(groups_of((4, None)), 4)
        paging.release(5)
        paging.admit(1, range(6))
        paging.run(1)
        paging.release(1, 5)
        paging.release(1)
        assert paging.allocator.usage().used == 0

    def test_reserve_is_all_or_nothing(self) -> None:
        # The pool ends at the third of five blocks, in one row and across rows.
        for name, groups in GEOMETRIES.items():
            each = groups[0].block_size
            paging = self.paging(groups, 2 * len(groups), max_model_len=64)
            paging.admit(0, range(5 * each))
            assert not paging.run(0), name
            assert paging.allocator.usage().used == 0, name
        paging = self.paging(groups_of((4, None)), 3)
        for row in range(5):
            paging.admit(row, [row] * 4)
        assert not paging.step(range(5), [4] * 5)
        assert paging.step(range(3), [4] * 3)

    def test_a_refused_reserve_leaves_cached_prefixes_alone(self) -> None:
        paging = self.paging(groups_of((4, None)), 4)
        paging.admit(0, range(9))
        paging.run(0)
        paging.release(0)
        paging.admit(1, [7] * 20)
        assert not paging.run(1)
        paging.release(1)
        assert paging.admit(0, range(9)) == 8

    def test_commit_takes_back_what_was_reserved_beyond_it(self) -> None:
        for name, groups in GEOMETRIES.items():
            paging = self.paging(groups, 60)
            paging.admit(0, range(30))
            assert paging.reserve([0], [30]), name
            paging.submit([0], [3])
            for group in groups:
                assert paging.resident(0, group.index) == blocks_for(3, group.block_size), name
            assert paging.run(0)

    def test_rows_of_different_lengths_move_in_one_call(self) -> None:
        for name, groups in GEOMETRIES.items():
            paging = self.paging(groups, 200)
            for row in range(8):
                paging.admit(row, [row, *range(row + 2)])
            assert paging.step(range(8), [row + 3 for row in range(8)]), name
            for step in range(12):
                for row in range(8):
                    paging.sample(row, step)
                assert paging.step(range(8), [1] * 8), name

    def test_the_pool_says_which_sequences_it_can_ever_hold(self) -> None:
        for size in BLOCK_SIZES:
            paging = self.paging(groups_of((size, None)), 3, max_model_len=1000)
            assert paging.allocator.fits(3 * size) and not paging.allocator.fits(3 * size + 1)
            assert [paging.allocator.blocks(n) for n in LENGTHS] == [blocks_for(n, size) for n in LENGTHS]

    # ------------------------------------------------------------ prefix cache

    def test_a_hit_covers_full_blocks_and_never_the_last_token(self) -> None:
        for size in BLOCK_SIZES:
            for length in LENGTHS:
                paging = self.paging(groups_of((size, None)), 32)
                paging.admit(0, range(length))
                paging.run(0)
                paging.release(0)
                assert paging.admit(0, range(length)) == (length - 1) // size * size, (size, length)
                paging.release(0)
                assert paging.admit(0, range(length + 1)) == length // size * size, (size, length)
                assert paging.run(0)

    def test_two_identical_prompts_of_one_step_do_not_share(self) -> None:
        # No submitted step has written the first one's blocks.
        for name, groups in GEOMETRIES.items():
            paging = self.paging(groups, 60)
            assert paging.admit(0, range(13)) == paging.admit(1, range(13)) == 0, name
            assert paging.reserve([0], [13])
            assert paging.admit(2, range(13)) == 0, f"{name}: reserved blocks are not computed ones"
            assert paging.step([0, 1, 2], [13] * 3), name
            paging.release(0, 1, 2)

    def test_the_next_step_shares_a_submitted_prompt(self) -> None:
        for name, groups in GEOMETRIES.items():
            paging = self.paging(groups, 60)
            paging.admit(0, range(13))
            assert paging.run(0)
            paging.admit(1, range(13))  # the model predicts the hit
            assert paging.rows[1].hit > 0, name
            assert paging.run(1)

    def test_the_first_of_two_equal_blocks_stays_published_and_the_second_private(self) -> None:
        paging = self.paging(groups_of((4, None)), 8)
        paging.admit(0, range(8))
        paging.admit(1, range(8))
        assert paging.step([0, 1], [8, 8])
        paging.release(1)
        assert paging.allocator.usage().cached == 0, "the duplicate is free, the original in use"
        paging.release(0)
        assert paging.allocator.usage().cached == 2

    def test_a_shared_start_is_shared_as_far_as_it_fills_blocks(self) -> None:
        # Five of six tokens in common, blocks of four.
        paging = self.paging(groups_of((4, None)), 8)
        paging.admit(0, [1, 2, 3, 4, 5, 6])
        paging.run(0)
        assert paging.admit(1, [1, 2, 3, 4, 5, 9]) == 4
        assert paging.run(1)

    def test_a_recycled_block_is_no_longer_found(self) -> None:
        paging = self.paging(groups_of((4, None)), 4)
        paging.admit(0, [1] * 9)
        paging.run(0)
        paging.release(0)
        paging.admit(0, [2] * 16)
        assert paging.run(0)
        paging.release(0)
        assert paging.admit(0, [1] * 9) == 0

    def test_the_least_recently_released_prefix_goes_first_and_its_head_last(self) -> None:
        for taken, hits in ((3, (12, 12)), (4, (8, 12)), (5, (4, 12)), (6, (0, 12)), (7, (0, 8)), (8, (0, 4))):
            paging = self.paging(groups_of((4, None)), 9)
            for token in (1, 2):
                paging.admit(token, [token] * 13)
                assert paging.run(token)
            paging.release(1)
            paging.release(2)  # cached: three blocks of each; free: three
            paging.admit(0, [0] * 4 * taken)
            assert paging.run(0)
            assert (paging.admit(1, [1] * 13), paging.admit(2, [2] * 13)) == hits, f"{taken} blocks taken"

    def test_a_hit_makes_a_prefix_recent(self) -> None:
        paging = self.paging(groups_of((4, None)), 6)
        for token in (1, 2):
            paging.admit(0, [token] * 9)
            assert paging.run(0)
            paging.release(0)
        assert paging.admit(0, [1] * 9) == 8
        paging.release(0)
        paging.admit(1, [3] * 16)  # 2 free blocks and the 2 of prefix 2
        assert paging.run(1)
        assert paging.admit(0, [1] * 9) == 8

    def test_domains_share_nothing_but_what_is_public(self) -> None:
        # 0 across tenants, more than 0 within one.
        for name, groups in GEOMETRIES.items():
            paging = self.paging(groups, 300)
            prompt = range(33)
            for row, (domain, salt, found) in enumerate(
                [("a", "", False), ("b", "", False), ("a", "", True), ("b", "", True), ("a", "b", False), ("public", "", False)]
            ):
                assert (paging.admit(row, prompt, domain, salt) > 0) == found, (name, domain, salt)
                assert paging.run(row)
            assert paging.admit(6, prompt, "c") > 0, name

    def test_a_request_without_reuse_looks_nothing_up_and_can_still_be_found(self) -> None:
        paging = self.paging(groups_of((4, None)), 16)
        paging.admit(0, range(9), reuse=False)
        paging.run(0)
        assert paging.admit(1, range(9), reuse=False) == 0
        assert paging.admit(2, range(9)) == 8

    def test_sampled_tokens_are_found_once_they_are_known(self) -> None:
        paging = self.paging(groups_of((4, None)), 16)
        paging.admit(0, [1, 2, 3])
        paging.run(0)
        for token in (4, 5):
            paging.sample(0, token, tell=False)
            paging.run(0)
        assert paging.admit(1, [1, 2, 3, 4, 5]) == 0
        paging.tell(0)
        paging.release(0, 1)
        assert paging.admit(1, [1, 2, 3, 4, 5]) == 4

    def test_a_withdrawn_block_is_not_found(self) -> None:
        for name, groups in GEOMETRIES.items():
            paging = self.paging(groups, 60)
            paging.admit(0, range(24))
            assert paging.step([0], [12]) and paging.step([0], [12]), name
            paging.withdraw(0, 12)
            hit = paging.admit(1, range(24))
            assert hit <= 12, name
            paging.release(0)
            assert paging.run(1), name

    def test_reset_forgets_every_prefix_and_running_rows_publish_no_more(self) -> None:
        for name, groups in GEOMETRIES.items():
            paging = self.paging(groups, 60)
            for row in range(2):
                paging.admit(row, [row] * 13)
                assert paging.step([row], [6])
            paging.release(1)
            paging.reset()
            assert paging.admit(1, [0] * 13) == 0, name
            assert paging.run(0)
            paging.release(0)
            assert paging.admit(0, [0] * 13) == 0, f"{name}: a row that ran during the reset was published"
            assert paging.run(0) and paging.run(1)
            assert paging.admit(2, [0] * 13) > 0, name

    def test_without_prefix_caching_nothing_is_cached(self) -> None:
        paging = self.paging(groups_of((4, None)), 8, prefix_caching=False)
        paging.admit(0, range(9))
        paging.run(0)
        assert paging.admit(1, range(9)) == 0
        paging.release(0)
        assert paging.allocator.usage().cached == 0

    # ------------------------------------------------------------ forks

    def test_four_samples_fork_from_one_partial_block_and_copy_it_on_write(self) -> None:
        for name, groups in GEOMETRIES.items():
            for length in (5, 6, 8, 9):
                paging = self.paging(groups, 80)
                paging.admit(0, range(length))
                assert paging.run(0)
                used = paging.allocator.usage().used
                for child in (1, 2, 3):
                    paging.fork(0, child)
                assert paging.allocator.usage().used == used, f"{name}: a fork takes no block"
                for step in range(7):
                    for row in range(4):
                        paging.sample(row, 100 * row + step)
                    assert paging.step(range(4), [1] * 4), name
                paging.release(0, 1, 2, 3)

    def test_of_all_holders_of_a_partial_block_the_last_to_write_keeps_it(self) -> None:
        paging = self.paging(groups_of((4, None)), 5)
        paging.admit(0, range(6))
        paging.run(0)
        for child in (1, 2, 3):
            paging.fork(0, child)
        for row in range(4):
            paging.sample(row, row)
        assert paging.step(range(4), [1] * 4), "2 blocks and 3 copies are all that is needed"
        assert paging.allocator.usage().used == 5

    def test_a_copy_that_does_not_fit_is_refused_as_a_whole(self) -> None:
        paging = self.paging(groups_of((4, None)), 3)
        paging.admit(0, range(6))
        paging.run(0)
        for child in (1, 2):
            paging.fork(0, child)
        for row in range(3):
            paging.sample(row, row)
        assert not paging.step(range(3), [1] * 3)
        assert paging.step([1], [1])
        paging.release(2)
        assert paging.step([0], [1]), "alone with its block now"

    def test_forks_of_forks_and_releases_in_any_order(self) -> None:
        for groups in GEOMETRIES.values():
            paging = self.paging(groups, 80)
            paging.admit(0, range(7))
            assert paging.run(0)
            paging.fork(0, 1)
            paging.fork(1, 2)
            paging.sample(1, 50)
            assert paging.run(1)
            paging.fork(1, 3)
            paging.release(0)
            for row in (1, 2, 3):
                for token in range(6):
                    paging.sample(row, 10 * row + token)
            assert paging.step([3, 1, 2], [6, 6, 6])
            paging.release(1)
            paging.release(3, 2)
            assert paging.allocator.usage().used == 0

    # ------------------------------------------------------------ windows

    def test_a_window_group_holds_no_more_than_window_and_chunk(self) -> None:
        for size, window, chunk in ((4, 8, 4), (1, 3, 2), (5, 12, 7), (16, 16, 1), (4, 1, 3)):
            groups = groups_of((size, window))
            bound = window_blocks(window, size, chunk)
            paging = self.paging(groups, bound, max_rows=1, max_model_len=400, max_step_tokens=chunk)
            assert paging.allocator.fits(400)
            paging.admit(0, range(200))
            for _ in range(0, 200, chunk):
                count = min(chunk, 200 - paging.rows[0].computed)
                assert paging.step([0], [count]), f"{size}, {window}, {chunk}: {bound} blocks are enough at any context"

    def test_a_window_hit_needs_only_the_blocks_that_the_next_query_sees(self) -> None:
        paging = self.paging(groups_of((4, 8)), 6, max_rows=2)
        paging.admit(0, range(33))
        for _ in range(8):
            assert paging.step([0], [4])
        paging.release(0)
        hit = paging.admit(0, range(33))
        assert hit == 32
        assert paging.resident(0, 0) == 2, "7 tokens before the hit's end: two blocks"
        assert paging.run(0)

    def test_random_schedules_read_only_what_they_wrote(self) -> None:
        for name, groups in GEOMETRIES.items():
            for seed in range(3):
                walk(self.paging(groups, 14 * len(groups), max_rows=5), np.random.default_rng(seed), 60, name)

    def test_calls_take_int32_and_int64_columns(self) -> None:
        for dtype in (np.int32, np.int64):
            paging = self.paging(groups_of((4, None)), 8)
            paging.admit(0, range(6))
            rows, start, upto = array(0), np.zeros(1, dtype), np.full(1, 6, dtype)
            assert paging.allocator.reserve(rows, start, upto)
            paging.allocator.commit(rows, upto)
            paging.allocator.check()


def walk(paging: Paging, random: np.random.Generator, steps: int, name: str) -> None:
    """A random but sensible schedule under pressure: admissions that share starts, chunks, forks, late
    tokens, preemptions by release, failed steps and resets. The oracle checks every call."""
    top = paging.parts.max_rows
    for _ in range(steps):
        empty = [r for r in range(top) if r not in paging.rows]
        action = random.integers(0, 20)
        if empty and action < 7:
            tokens = random.integers(0, 2, random.integers(1, 22)).tolist()
            paging.admit(int(random.choice(empty)), tokens, str(random.choice(["a", "b", "public"])), "")
        elif empty and paging.rows and action == 7:
            paging.fork(int(random.choice(list(paging.rows))), int(random.choice(empty)))
        elif paging.rows and action == 8:
            row = int(random.choice(list(paging.rows)))
            state = paging.rows[row]
            paging.withdraw(row, int(random.integers(max(state.hit, state.computed - 3), state.computed + 1)))
            paging.release(row)
        elif action == 9:
            paging.reset()
        elif paging.rows and action < 12:
            paging.release(*random.choice(list(paging.rows), random.integers(1, len(paging.rows) + 1), replace=False).tolist())
        elif paging.rows:
            for r, state in paging.rows.items():
                if state.computed == len(state.tokens) < paging.parts.max_model_len - 1:
                    paging.sample(r, int(random.integers(0, 2)), tell=bool(random.integers(0, 2)))
            work = {r: left for r, state in paging.rows.items() if (left := len(state.tokens) - state.computed)}
            rows, counts = list(work), [int(random.integers(1, left + 1)) for left in work.values()]
            while rows and not paging.step(rows, counts):
                paging.release(rows.pop())
                counts.pop()
    paging.release(*range(top))
    assert paging.allocator.usage().used == 0, name
