"""The work map of a decode step, under Triton's interpreter: every visible token once, in items about as long as each other, longest rows first."""

from __future__ import annotations

import itertools
import json
from importlib.util import find_spec

import pytest

from tests.plugins.interpreter import PRELUDE, interpreted

if find_spec("triton") is None:
    pytest.skip("triton is not installed: the kernel cannot be interpreted", allow_module_level=True)

SCRIPT = (
    PRELUDE
    + """
import json, sys
from octavo_attention_triton.kernels.plan import INFO, ITEM, plan

found = []
for lengths, new, budget, window in json.loads(sys.argv[1]):
    count, tile = len(lengths), 16
    starts = torch.tensor([0, *new]).cumsum(0).int()
    capacity = budget + count
    items = torch.full((capacity + 3, ITEM), -7, dtype=torch.int32)
    cuts = torch.full((count + 2, INFO), -7, dtype=torch.int32)
    plan(starts, torch.tensor(lengths).int(), torch.arange(count) + 40, None, items, cuts, budget=budget, capacity=capacity,
         max_items=capacity + 3, max_rows=32, tile=tile, min_tiles=1, window=window, max_splits=64)
    found.append([items.tolist(), cuts.tolist()])
print(json.dumps(found))
"""
)

CASES: list[tuple[list[int], list[int], int, int | None]] = [
    ([100, 900, 33, 500], [1, 1, 1, 1], 12, None),
    ([40, 700, 20, 700, 5], [1, 1, 20, 1, 1], 4, None),  # a prompt, which gets no item, and rows that are not split
    ([900, 64, 300], [1, 1, 1], 6, 50),  # a window that begins inside a tile
    ([0, 17], [1, 1], 3, None),  # a row without a token still has its output written
    ([7 * i % 31 + 1 for i in range(20)], [1] * 20, 8, None),  # more rows than the variant for few takes
]


@pytest.fixture(scope="module")
def maps() -> list[tuple[list[list[int]], list[list[int]]]]:
    return json.loads(interpreted(SCRIPT, json.dumps(CASES), plugins=("attention_triton",)))  # type: ignore[no-any-return]


@pytest.mark.parametrize("case", range(len(CASES)))
def test_items_cut_what_each_decoding_row_sees(case: int, maps: list[tuple[list[list[int]], list[list[int]]]]) -> None:
    (lengths, new, budget, window), (items, cuts) = CASES[case], maps[case]
    capacity, tile = budget + len(lengths), 16
    starts = [sum(new[:r]) for r in range(len(new))]
    used = [item for item in items[:capacity] if item[0] >= 0]

    assert items[: len(used)] == used, "an idle item lies among the others"
    assert all(item[0] == -7 for item in items[capacity:]) and all(cut[0] == -7 for cut in cuts[len(lengths) :]), (
        "written past the end"
    )
    for r, length in enumerate(lengths):
        mine = [(i, item) for i, item in enumerate(used) if item[6] == r]
        if new[r] != 1:
            assert not mine and cuts[r][0] == -1
            continue
        first = max(0, length - window) if window else 0
        assert [i for i, _ in mine] == list(range(cuts[r][1], cuts[r][1] + cuts[r][2])), "a row's items are not neighbours"
        assert cuts[r][0] == starts[r]
        assert all(item[:2] == [starts[r], r + 40] and item[4:6] == [cuts[r][1], len(mine)] for _, item in mine)
        edges = [item[2] for _, item in mine] + [length]
        assert edges[0] == first and [item[3] for _, item in mine] == edges[1:], "tokens are left out or read twice"
        assert all(edge % tile == 0 for edge in edges[1:-1]), "cut inside a tile"
    longest = {r: max(item[3] - item[2] for item in used if item[6] == r) for r in {item[6] for item in used}}
    order = [longest[item[6]] for item in used]
    assert all(a + tile > b for a, b in itertools.pairwise(order)), "a long row begins after a short one"
