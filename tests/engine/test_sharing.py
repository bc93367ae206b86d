"""Rows that begin with the same blocks are found by block ids alone, and only as far as all of them have tokens."""

from __future__ import annotations

import numpy as np
from hypothesis import given
from hypothesis import strategies as st
from octavo.engine.sharing import FEWEST_ROWS, PrefixSharing
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


def test_tokens_of_one_sequence_share_all_that_lies_before_the_first_of_them() -> None:
    found = sharing("full")
    give(found, 3, [9, 8, 7, 6, 5])
    (prefix,) = found.find(np.full(6, 3), np.array([70, 48, 49, 50, 51, 52]))
    assert prefix.tokens == 48 and sorted(prefix.rows.tolist()) == [0, 1, 2, 3, 4, 5]


@given(
    st.lists(st.tuples(st.lists(st.integers(0, 3), min_size=3, max_size=3), st.integers(0, 47)), min_size=1, max_size=24),
)
def test_whatever_the_tables_every_set_is_right_and_none_of_enough_rows_is_missed(rows: list[tuple[list[int], int]]) -> None:
    """Against the definition, row by row."""
    found = sharing("full", rows=24)
    for row, (blocks, _) in enumerate(rows):
        give(found, row, blocks)
    sets = found.find(np.arange(len(rows)), np.array([start for _, start in rows]))
    heads = [blocks[0] if start >= 16 else None for blocks, start in rows]
    right = {tuple(i for i, h in enumerate(heads) if h == head) for head in set(heads) - {None}}
    assert {tuple(sorted(s.rows.tolist())) for s in sets} == {members for members in right if len(members) >= FEWEST_ROWS}
    assert [len(s.rows) for s in sets] == sorted((len(s.rows) for s in sets), reverse=True)
    for shared in sets:
        whole = min(rows[i][1] // 16 for i in shared.rows)
        tables = [rows[i][0][:whole] for i in shared.rows]
        common = next((at for at, column in enumerate(zip(*tables, strict=True)) if len(set(column)) > 1), whole)
        assert shared.tokens == 16 * common
