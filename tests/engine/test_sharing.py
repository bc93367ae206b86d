"""Rows that begin with the same blocks are found by block ids alone, and only as far as all of them have tokens."""

from __future__ import annotations

import numpy as np
from octavo.engine.sharing import PrefixSharing
from octavo.interfaces import KVGroup, KVSpec
from octavo.request import TableUpdate


def sharing(*kinds: str, rows: int = 16, columns: int = 40) -> PrefixSharing:
    groups = [
        KVGroup(i, KVSpec(kind, 2, 8, 8, "float32", window=32 if kind == "window" else None), (i,), 16, 1024)  # type: ignore[arg-type]
        for i, kind in enumerate(kinds)
    ]
    return PrefixSharing(groups, rows, columns * 16)


def give(found: PrefixSharing, row: int, blocks: list[int], group: int = 0) -> None:
    size = len(blocks)
    found.update([TableUpdate(group, np.full(size, row), np.arange(size), np.array(blocks))])


def test_the_longest_run_of_equal_blocks_that_lies_before_every_new_token() -> None:
    found = sharing("full")
    for row in range(5):
        give(found, row, [7, 8, 9, 100 + row])
    (prefix,) = found.find(np.arange(5), np.array([60, 63, 50, 49, 48]))
    assert prefix.tokens == 48 and prefix.rows.tolist() == [0, 1, 2, 3, 4]
    (prefix,) = found.find(np.arange(5), np.array([60, 63, 50, 49, 47]))
    assert prefix.tokens == 32, "the third block of the last row is not full"


def test_what_a_table_holds_past_a_rows_tokens_is_not_a_prefix() -> None:
    found = sharing("full")
    for row in range(4):
        give(found, row, [5, 6, 7])
    assert (
        found.find(np.arange(4), np.array([15, 40, 40, 40])) == ()
        or found.find(np.arange(4), np.array([15, 40, 40, 40]))[0].tokens == 0
    )


def test_sets_come_largest_first_and_few_rows_are_none() -> None:
    found = sharing("full")
    for row in range(12):
        give(found, row, [1 if row < 4 else 2 if row < 9 else 3, 50])
    sets = found.find(np.arange(12), np.full(12, 32))
    assert [(s.rows.tolist(), s.tokens) for s in sets] == [([4, 5, 6, 7, 8], 32), ([0, 1, 2, 3], 32)]


def test_prefixes_longer_than_a_glance() -> None:
    found = sharing("full")
    for row in range(4):
        give(found, row, [*range(33), 200 + row])
    assert found.find(np.arange(4), np.full(4, 34 * 16))[0].tokens == 33 * 16


def test_models_without_one_full_group_share_nothing() -> None:
    for kinds in (("window",), ("full", "full")):
        found = sharing(*kinds)
        for row in range(4):
            give(found, row, [1, 2])
        assert found.find(np.arange(4), np.full(4, 32)) == ()
