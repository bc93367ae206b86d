"""The buffers of shared prefixes hold what this step's prefixes are, whatever the steps before it had."""

from __future__ import annotations

import sys
from pathlib import Path

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from octavo.interfaces import SharedPrefix, StepHost

pytest.importorskip("triton", reason="the backend's modules import it")
sys.path[:0] = [str(Path(__file__).parents[2] / "plugins" / name / "src") for name in ("attention_triton", "ops_triton")]

from octavo_attention_triton.cascade import Cascade  # noqa: E402

ROWS, GROUP = 24, 4
CPU = torch.device("cpu")


@st.composite
def steps(draw: st.DrawFn) -> tuple[tuple[SharedPrefix, ...], StepHost]:
    count = draw(st.sampled_from([8, 16, ROWS]))
    slots = np.array(draw(st.permutations(range(40)))[:count])
    order = draw(st.permutations(range(count)))
    cut = draw(st.integers(2, count))
    sets = [np.array(order[:cut])] + ([np.array(order[cut:])] if count - cut > 1 and draw(st.booleans()) else [])
    shared = tuple(SharedPrefix(rows, draw(st.sampled_from([64, 512, 2048])), 0) for rows in sets)
    ones = np.ones(count, np.int64)
    return shared, StepHost(ones, 4096 * ones, slots, count, 1, 4096)


def buffers(cascade: Cascade) -> list[list[int]]:
    return [part.tolist() for part in (cascade.skip, cascade.parts, cascade.tiles, cascade.members)]


@given(st.lists(steps(), min_size=1, max_size=4), st.lists(st.integers(0, 3), min_size=1, max_size=8))
def test_a_step_finds_its_own_prefixes_whatever_came_before(
    known: list[tuple[tuple[SharedPrefix, ...], StepHost]], turns: list[int]
) -> None:
    lasting = Cascade.make(GROUP, ROWS, CPU)
    for turn in turns:
        shared, host = known[turn % len(known)]
        lasting.update(shared, host, 2, 132)
        fresh = Cascade.make(GROUP, ROWS, CPU)
        fresh.update(shared, host, 2, 132)
        assert buffers(lasting) == buffers(fresh)
        assert sorted(m for m in fresh.members.tolist() if m >= 0) == sorted(int(r) for s in shared for r in s.rows)
