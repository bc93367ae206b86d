"""A step's prompts as kernels take them: every new token in one tile, and pages that are widened are found again."""

from __future__ import annotations

import numpy as np
from octavo.attention.prompts import page_lists, query_tiles, widened_rows
from octavo.interfaces import StepHost


def host(lengths: list[int], new: list[int], rows: list[int] | None = None) -> StepHost:
    ends, lens = np.array(lengths), np.array(new)
    return StepHost(
        lens, ends, np.arange(len(ends)) if rows is None else np.array(rows), int(lens.sum()), int(lens.max()), int(ends.max())
    )


def test_a_row_is_cut_into_tiles_and_one_that_decodes_is_left_out() -> None:
    step = host([70, 9, 33], [70, 1, 3], rows=[4, 0, 2])
    assert query_tiles(step, 32, 6).tolist() == [
        [0, 32, 0, 4, 70, 0],
        [32, 32, 32, 4, 70, 0],
        [64, 6, 64, 4, 70, 0],
        [71, 3, 30, 2, 33, 0],
    ]


def test_no_row_with_several_new_tokens_is_no_tile() -> None:
    assert query_tiles(host([7, 9], [1, 1]), 32, 8).shape == (0, 8)


def test_rows_are_widened_together_as_long_as_the_workspace_holds_their_pages() -> None:
    step = host([640, 64, 1000, 5], [640, 1, 8, 5])
    assert widened_rows(step, None, 64, 16) == [[(0, 0, 10)], [(2, 0, 16)], [(3, 0, 1)]], "row 1 decodes"
    assert widened_rows(step, None, 64, 26) == [[(0, 0, 10), (2, 0, 16)], [(3, 0, 1)]]
    assert widened_rows(step, None, 64, 15) is None, "row 2 has 16 pages"


def test_pages_before_a_window_are_left_out() -> None:
    assert widened_rows(host([2000], [100]), 500, 64, 31) == [[(0, 21, 11)]]  # the first new token sees 1401, 21 * 64 is 1344


def test_the_workspace_s_table_says_where_each_page_of_a_row_is() -> None:
    step = host([640, 64, 1000, 200], [640, 1, 8, 100], rows=[7, 3, 0, 5])
    pages, table = page_lists(step, [(0, 0, 10), (3, 1, 3)])
    assert table.tolist() == [[0, 1, 2, 3, 4, 5, 6, 7, 8, 9], [-1, 10, 11, 12, -1, -1, -1, -1, -1, -1]]
    assert pages.tolist() == [[7, c] for c in range(10)] + [[5, c] for c in (1, 2, 3)]
    assert set(query_tiles(step, 32, 8, np.array([0, 3]))[:, 3].tolist()) == {0, 1}, "tiles name rows of that table"


def test_a_kernel_that_reads_whole_tiles_gets_the_pages_of_the_tile_where_its_window_begins() -> None:
    step = host([2000], [100])
    assert widened_rows(step, 500, 64, 32, tile=128) == [[(0, 20, 12)]]  # from 1401 on: 1280 = 10 * 128
    assert widened_rows(step, 500, 256, 32, tile=128) == [[(0, 5, 3)]], "a page longer than a tile"
