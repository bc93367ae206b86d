"""What the device keeps of sequences is what the batches said, and what the host believes of it is true.

The table by itself, against the plainest model of it; then under an engine: preempted and resumed rows, forks, aborts, results that
come late and padded rows, with every step looked at as a backend that reads shared prefixes once would.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from octavo.engine import inputs
from octavo.engine.graphs import StepGraphs
from octavo.engine.inputs import StateTable
from octavo.interfaces import KVGroup, KVSpec, Limits, StepHost
from octavo.request import Admission, Batch, SamplingParams, TableUpdate
from octavo.transfer import staged

from tests.engine.harness import make_engine, request, run

ROWS, LENGTH, SCRATCH = 5, 37, 99
SIZES = (4, 5)


def table() -> StateTable:
    groups = [
        KVGroup(i, KVSpec("full", 1, 8, 8, "float32", window=16 if i else None), (i,), size, 1024) for i, size in enumerate(SIZES)
    ]
    limits = Limits(max_num_seqs=ROWS, max_num_batched_tokens=64, max_model_len=LENGTH)
    return StateTable(groups, limits, torch.device("cpu"), SCRATCH)


def agree(state: StateTable) -> bool:
    """Whether the host's copy of the first table is the device's, where anything was ever told (an untold entry is -1 here, 0 there)."""
    host, device = state.sharing._table[: state.scratch_row], state.tables[0].numpy()[: state.scratch_row]
    return bool(((host == device) | ((host == -1) & (device == 0))).all())


def admission(slot: int, tokens: list[int], bound: int, computed: int = 0, **params: float) -> Admission:
    return Admission(slot, np.array(tokens, np.int32), len(tokens), SamplingParams(**params), 0, (), bound, computed)  # type: ignore[arg-type]


def batch(admissions: list[Admission], tables: list[TableUpdate]) -> Batch:
    none = np.zeros(0, np.int32)
    return Batch(1, none, none, none, np.zeros(0, bool), none, tuple(admissions), tuple(tables))


@st.composite
def changes(draw: st.DrawFn) -> tuple[list[Admission], list[TableUpdate]]:
    slots = draw(st.lists(st.integers(0, ROWS - 1), unique=True, max_size=ROWS))
    admissions = []
    for slot in slots:
        tokens = draw(st.lists(st.integers(0, 2**31 - 1), min_size=1, max_size=LENGTH))
        bound = draw(st.sampled_from([1, 17, 2**31 - 1, 2**40 + 3]))
        params = draw(st.sampled_from([{}, {"presence_penalty": 0.5}, {"frequency_penalty": -1.0}, {"repetition_penalty": 1.1}]))
        admissions.append(admission(slot, tokens, bound, draw(st.integers(0, len(tokens))), **params))
    updates = []
    for group, size in enumerate(SIZES):
        places = st.tuples(st.integers(0, ROWS - 1), st.integers(0, -(-LENGTH // size) - 1))
        found = draw(st.dictionaries(places, st.integers(-1, 90), max_size=12))
        if found:
            rows, columns = (np.array(column, np.int32) for column in zip(*found, strict=True))
            updates.append(TableUpdate(group, rows, columns, np.array(list(found.values()), np.int32)))
    return admissions, updates


@settings(deadline=None)
@given(st.lists(st.tuples(changes(), st.booleans()), min_size=1, max_size=6))
def test_the_table_holds_what_it_was_told_last_and_nothing_else_changes(steps: list[Any]) -> None:
    state = table()
    tokens = np.zeros((ROWS + 1, LENGTH + 1), np.int64)
    bound = np.zeros(ROWS + 1, np.int64)
    blocks = [np.zeros((ROWS + 1, -(-LENGTH // size)), np.int64) for size in SIZES]
    for one in blocks:
        one[ROWS] = SCRATCH
    for (admissions, updates), alone in steps:
        if alone:
            admissions = []
            state.update(updates)
        else:
            state.apply(batch(admissions, updates))
        for one in admissions:
            read = 0 if one.params.counts_tokens else one.computed
            tokens[one.slot, read : len(one.tokens)] = one.tokens[read:]
            bound[one.slot] = one.rope_tokens
        for update in updates:
            blocks[update.group][update.rows, update.cols] = update.blocks
        assert state.tokens.tolist() == tokens.tolist() and state.bound.tolist() == bound.tolist()
        assert [found.tolist() for found in state.tables] == [one.tolist() for one in blocks]
        assert agree(state)


def test_whatever_a_step_changes_is_one_copy(monkeypatch: pytest.MonkeyPatch) -> None:
    state = table()
    sent: list[int] = []

    def spy(shape: int, dtype: Any, device: torch.device) -> Any:
        tensor, array = staged(shape, dtype, device)
        sent.append(array.nbytes)
        return tensor, array

    monkeypatch.setattr(inputs, "staged", spy)
    some = [admission(slot, [1, 2, 3], 9) for slot in range(4)]
    entries = [TableUpdate(g, np.arange(4, dtype=np.int32), np.zeros(4, np.int32), np.arange(4, dtype=np.int32)) for g in (0, 1)]
    state.apply(batch(some, entries))
    assert sent == [12 * (4 * (3 + 2) + 2 * 4)]
    state.apply(batch([], []))
    assert len(sent) == 1, "nothing is sent where nothing changed"


def test_each_part_begins_where_an_allocation_would() -> None:
    state = table()
    parts = (state.tokens, state.bound, *state.tables)
    assert all((part.data_ptr() - state.tokens.data_ptr()) % 256 == 0 and part.is_contiguous() for part in parts)


# ---------------------------------------------------------------- under an engine


class Reader:
    """What a backend that reads a shared prefix once would rely on, checked against the device's own tables."""

    def __init__(self, state: StateTable, size: int) -> None:
        self.state, self.size, self.sets = state, size, 0

    def __call__(self, host: StepHost) -> str:
        whole = self.state.tables[0].numpy()
        for shared in host.shared:
            slots, count = host.rows[shared.rows], shared.tokens // self.size
            assert (
                len(shared.rows) >= 4
                and len(set(shared.rows.tolist())) == len(shared.rows)
                and shared.tokens == count * self.size
            )
            assert (slots != self.state.scratch_row).all(), "a padded row shares nothing"
            blocks = whole[slots, :count]
            assert (blocks == blocks[0]).all() and (blocks >= 0).all(), "one prefix, and all of it is there"
            # Each row's new token is its last, and rows of one sequence write what others of them read.
            first = min((host.seq_lens[host.rows == slot] - 1).min() for slot in slots)
            assert shared.tokens <= first, "no token that this step writes is in it"
            self.sets += count > 0
        assert agree(self.state)
        return ""


PREFIX = [*range(40, 40 + 24)]


@pytest.mark.parametrize("late", [{"depth": depth, "padded": True} for depth in (0, 1, 3)], ids=["0", "1", "3"])
@settings(max_examples=15, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(
    block=st.sampled_from([1, 4, 8]),
    room=st.integers(0, 20),
    samples=st.lists(st.integers(1, 4), min_size=5, max_size=9),
    ends=st.lists(st.lists(st.integers(100, 200), max_size=9), min_size=9, max_size=9),
    aborts=st.dictionaries(st.integers(0, 8), st.integers(0, 25), max_size=3),
    budget=st.sampled_from([9, 32, 128]),
)
def test_shared_prefixes_are_those_of_the_devices_tables_whatever_happens_to_rows(
    tiny1: Path,
    monkeypatch: pytest.MonkeyPatch,
    late: dict[str, Any],
    block: int,
    room: int,
    samples: list[int],
    ends: list[list[int]],
    aborts: dict[int, int],
    budget: int,
) -> None:
    """A pool that is too small, rows that come back, forks of one prompt, and requests that are taken away."""
    readers: list[Reader] = []
    build = StepGraphs.__init__

    def spy(self: StepGraphs, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        readers.append(Reader(self._state, block))
        self._variant = readers[-1]  # type: ignore[assignment]

    with monkeypatch.context() as patch:
        patch.setattr(StepGraphs, "__init__", spy)
        engine = make_engine(
            tiny1,
            late=late,
            block_size=block,
            num_gpu_blocks_override=-(-(24 + 9 + 20) // block) + room,
            max_num_seqs=12,
            max_num_batched_tokens=budget,
        )

    def between(turn: int) -> None:
        for which, when in aborts.items():
            if when == turn:
                engine.abort(str(which))

    asked = [
        request(engine, str(i), [*PREFIX, *ends[i]], max_tokens=20, n=count, temperature=1.0, seed=i, ignore_eos=True)
        for i, count in enumerate(samples)
    ]
    run(engine, asked, between=between)
    assert len(readers) == 1


def test_rows_of_a_warm_prefix_are_seen_to_share_it(tiny1: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The test above looks at something: sets of rows are found when there are any."""
    readers: list[Reader] = []
    build = StepGraphs.__init__

    def spy(self: StepGraphs, *args: Any, **options: Any) -> None:
        build(self, *args, **options)
        readers.append(Reader(self._state, 8))
        self._variant = readers[-1]  # type: ignore[assignment]

    monkeypatch.setattr(StepGraphs, "__init__", spy)
    engine = make_engine(tiny1, late={"depth": 1, "padded": True}, block_size=8, num_gpu_blocks_override=64, max_num_seqs=12)
    run(engine, [request(engine, "warm", PREFIX, max_tokens=1)])
    run(engine, [request(engine, str(i), [*PREFIX, 300 + i], max_tokens=9, ignore_eos=True) for i in range(6)])
    assert readers[0].sets >= 8
