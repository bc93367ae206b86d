"""Which launches attention_cupy's prefill makes of a step, with kernels that only note what they are given."""

from __future__ import annotations

import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

pytest.importorskip("torch")
sys.path.insert(0, str(Path(__file__).parents[2] / "plugins" / "attention_cupy" / "src"))

import torch
from octavo.interfaces import AttentionLayer, KVSpec, StepHost
from octavo_attention_cupy.bound import Bound, Prefill, Widened
from octavo_attention_cupy.geometry import PageGeometry
from octavo_attention_cupy.launch import PrefillArgs, PrologueArgs, WidenArgs, WriteArgs
from octavo_attention_cupy.prefilling import Prefilling

CPU = torch.device("cpu")
PAGE = 64


class Recorder:
    """Takes the place of a Kernel."""

    def __init__(self, name: str, seen: list[tuple[str, tuple[int, int], Any]]) -> None:
        self.name, self.seen = name, seen

    def __call__(self, grid: tuple[int, int], args: Any, device: torch.device) -> None:
        self.seen.append((self.name, grid, {name: getattr(args, name) for name, *_ in args._fields_}))


def bound(seen: list[Any], pages: int | None, index: int = 0, window: int | None = None) -> Bound:
    """A layer of 32 query and 8 KV heads; pages: of the workspace, None for a 16-bit cache."""
    layer = AttentionLayer(index, 32, 8, 128, 128, 1.0, window=window)
    geometry = PageGeometry.of(KVSpec("full", 8, 128, 128, "bfloat16" if pages is None else "float8_e4m3fn"), PAGE)
    size = geometry.elements * geometry.element
    hopper = Prefill(Recorder("hopper", seen), PrefillArgs(page_bytes=size if pages is None else 2 * size), 32, True)  # type: ignore[arg-type]
    portable = Prefill(Recorder("portable", seen), PrefillArgs(page_bytes=size), 32, False)  # type: ignore[arg-type]
    widened = None if pages is None else Widened(Recorder("widen", seen), WidenArgs(), hopper, pages)  # type: ignore[arg-type]
    return Bound(
        layer, 0, geometry, torch.empty(0), None, {}, hopper if pages is None else portable, widened,
        Recorder("write", seen), WriteArgs(), None, PrologueArgs(),  # type: ignore[arg-type]
    )  # fmt: skip


def launches(layers: list[Bound], seen: list[Any], lengths: list[int], new: list[int], *, always: bool = False) -> list[Any]:
    prefilling = Prefilling(CPU, 132, layers, always_widen=always)
    ends, lens = np.array(lengths), np.array(new)
    host = StepHost(lens, ends, np.arange(len(ends)), int(lens.sum()), int(lens.max()), int(ends.max()))
    step: Any = SimpleNamespace(host=host, scratch={}, tables=(torch.zeros(len(ends), 400, dtype=torch.int32),))
    prefilling.prepare(step)
    for layer in layers:
        prefilling.run(layer, step, lambda args: setattr(args, "table_row", 400))
    return seen


def test_a_16_bit_cache_is_read_by_blocks_that_stay() -> None:
    seen: list[Any] = []
    ((name, grid, args),) = launches([bound(seen, None)], seen, [2048, 50], [2048, 1])
    assert (name, grid, args["table_row"]) == ("hopper", (132, 1), 400)
    assert args["starts"] != 0


def test_short_chunks_over_an_fp8_cache_are_the_portable_kernel_s() -> None:
    seen: list[Any] = []
    ((name, grid, _),) = launches([bound(seen, 400)], seen, [500, 50], [100, 1])
    assert (name, grid) == ("portable", (4, 8)), "four tiles of 32 new tokens, eight heads"


def test_they_are_widened_all_the_same_where_that_is_asked_for() -> None:
    seen: list[Any] = []
    found = launches([bound(seen, 400)], seen, [500, 50], [100, 1], always=True)
    assert [(name, grid) for name, grid, _ in found] == [("widen", (8, 8)), ("hopper", (32, 1))]


def test_long_ones_are_widened_into_what_the_hopper_kernel_reads() -> None:
    seen: list[Any] = []
    layer = bound(seen, 400)
    (widen, hopper) = launches([layer], seen, [2048, 50, 100], [2048, 1, 100])
    assert widen[:2] == ("widen", (32 + 2, 8))
    assert hopper[0] == "hopper"
    assert widen[2]["wide"] == hopper[2]["cache"] != 0
    assert (widen[2]["table_row"], hopper[2]["table_row"]) == (400, 32), "the block table, and the workspace's"


def test_rows_that_do_not_fit_together_are_widened_and_read_in_turn() -> None:
    seen: list[Any] = []
    found = launches([bound(seen, 33)], seen, [2048, 2000, 100], [2048, 2000, 100])
    assert [(name, grid[0]) for name, grid, _ in found] == [("widen", 32), ("hopper", 132), ("widen", 32), ("hopper", 132), ("widen", 2), ("hopper", 32)]  # fmt: skip


def test_a_row_that_does_not_fit_alone_is_the_portable_kernel_s_with_all_others() -> None:
    seen: list[Any] = []
    assert [name for name, *_ in launches([bound(seen, 31)], seen, [2048, 1000], [2048, 1000])] == ["portable"]


def test_layers_of_one_kind_share_lists_and_the_workspace() -> None:
    seen: list[Any] = []
    found = launches([bound(seen, 400), bound(seen, 400, 1), bound(seen, 400, 2, window=512)], seen, [2048], [2048])
    assert [name for name, *_ in found] == ["widen", "hopper"] * 3
    lists = [args["tiles"] for name, _, args in found if name == "hopper"]
    assert lists[0] == lists[1] != lists[2]
    assert len({args["cache"] for name, _, args in found if name == "hopper"}) == 1
