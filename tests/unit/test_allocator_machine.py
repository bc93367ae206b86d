"""Any order of calls: hypothesis drives core's allocator over the paged memory of the suite.

The oracle (`Paging`) checks after every call that each block is in one state, that references match
the tables, that the index and the LRU list are sound, and that every cell a query would read holds
exactly its token after exactly its history.
"""

from __future__ import annotations

from hypothesis import HealthCheck, Phase, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, precondition, rule
from octavo.cache.allocator import BlockAllocator
from octavo.testing.allocator import GEOMETRIES
from octavo.testing.allocator_model import Paging, array

ROWS = 5
LONGEST = 40

SEQUENCES = st.one_of(st.lists(st.integers(0, 1), min_size=1, max_size=20), st.integers(1, 20).map(lambda n: [0] * n))
"""Prompts: any, and (often enough to be found again) prefixes of one and the same."""


class Calls(RuleBasedStateMachine):
    paging: Paging

    @initialize(
        geometry=st.sampled_from(sorted(GEOMETRIES)),
        blocks=st.integers(3, 60),
        prefix_caching=st.sampled_from([True, True, False]),
        host_slots=st.sampled_from([0, 2, 7, 40]),
    )
    def build(self, geometry: str, blocks: int, prefix_caching: bool, host_slots: int) -> None:
        self.paging = Paging(
            lambda parts: BlockAllocator(None, parts),
            GEOMETRIES[geometry],
            blocks,
            max_rows=ROWS,
            max_model_len=LONGEST,
            prefix_caching=prefix_caching,
            host_slots=host_slots,
            max_blocks=blocks + 20,
        )

    def running(self) -> bool:
        return bool(self.paging.rows)

    def room(self) -> bool:
        return len(self.paging.rows) < ROWS

    def both(self) -> bool:
        return self.running() and self.room()

    @precondition(room)
    @rule(
        data=st.data(),
        tokens=SEQUENCES,
        domain=st.sampled_from(["a", "b", "public"]),
        salt=st.sampled_from(["", "", "x"]),
        reuse=st.sampled_from([True, True, True, False]),
        rank=st.sampled_from([0, 0, 1, 2]),
    )
    def admit(self, data: st.DataObject, tokens: list[int], domain: str, salt: str, reuse: bool, rank: int) -> None:
        self.paging.admit(self.pick(data, taken=False), tokens, domain, salt, reuse=reuse, rank=rank)

    @precondition(running)
    @rule(data=st.data())
    def swap_out(self, data: st.DataObject) -> None:
        self.paging.swap_out(self.pick(data))

    @precondition(lambda self: self.room() and self.paging.parcels)
    @rule(data=st.data(), keep=st.sampled_from([True, True, True, False]))
    def swap_in(self, data: st.DataObject, keep: bool) -> None:
        which = data.draw(st.integers(0, len(self.paging.parcels) - 1))
        if keep:
            self.paging.resume(self.pick(data, taken=False), which)
        else:
            self.paging.discard(which)

    @rule(change=st.integers(-8, 8))
    def resize(self, change: int) -> None:
        self.paging.resize(max(1, min(self.paging.num_blocks + change, self.paging.parts.max_blocks)))

    @rule(tokens=SEQUENCES, domain=st.sampled_from(["a", "public"]), leave=st.integers(0, 20), keep=st.booleans())
    def pin(self, tokens: list[int], domain: str, leave: int, keep: bool) -> None:
        pinned = self.paging.pin(tokens, domain, leave=leave)
        if not keep:
            assert self.paging.allocator.unpin(array(*tokens), domain) == pinned

    @rule()
    def evict(self) -> None:
        self.paging.evict()
        self.paging.lossless = False

    @precondition(running)
    @rule(data=st.data())
    def step(self, data: st.DataObject) -> None:
        work = {r: n for r, row in self.paging.rows.items() if (n := len(row.tokens) - row.computed)}
        rows = data.draw(st.permutations(sorted(work)))[: data.draw(st.integers(1, ROWS))]
        self.paging.step(rows, [data.draw(st.integers(1, work[r])) for r in rows]) if rows else None

    @precondition(running)
    @rule(data=st.data())
    def reserve_and_think_better_of_it(self, data: st.DataObject) -> None:
        row = self.pick(data)
        left = len(self.paging.rows[row].tokens) - self.paging.rows[row].computed
        if left and self.paging.reserve([row], [left]):
            self.paging.submit([row], [data.draw(st.integers(0, left))])

    @precondition(running)
    @rule(data=st.data(), token=st.integers(0, 1), tell=st.booleans())
    def sample(self, data: st.DataObject, token: int, tell: bool) -> None:
        row = self.pick(data)
        if len(self.paging.rows[row].tokens) < LONGEST:
            self.paging.sample(row, token, tell=tell)

    @precondition(both)
    @rule(data=st.data())
    def fork(self, data: st.DataObject) -> None:
        self.paging.fork(self.pick(data), self.pick(data, taken=False))

    @precondition(running)
    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        self.paging.release(*data.draw(st.lists(st.integers(0, ROWS - 1), min_size=1, unique=True)))

    @precondition(running)
    @rule(data=st.data(), back=st.integers(0, 6))
    def fail_a_step(self, data: st.DataObject, back: int) -> None:
        row = self.pick(data)
        state = self.paging.rows[row]
        self.paging.withdraw(row, max(state.hit, state.computed - back))
        self.paging.release(row)

    @rule()
    def reset(self) -> None:
        self.paging.reset()

    def pick(self, data: st.DataObject, *, taken: bool = True) -> int:
        return data.draw(st.sampled_from([r for r in range(ROWS) if (r in self.paging.rows) == taken]))

    def teardown(self) -> None:
        if hasattr(self, "paging"):
            self.paging.release(*range(ROWS))
            while self.paging.parcels:
                self.paging.discard()
            assert self.paging.allocator.usage().used == 0
            self.paging.reset()
            usage = self.paging.allocator.usage()
            assert usage.free == usage.total == self.paging.num_blocks
            assert self.paging.allocator.memory()["host_parcel_slots"] == 0


TestAnyOrderOfCalls = Calls.TestCase
TestAnyOrderOfCalls.settings = settings(
    max_examples=200,
    stateful_step_count=40,
    deadline=None,
    suppress_health_check=list(HealthCheck),
    derandomize=True,
    phases=[Phase.explicit, Phase.generate, Phase.shrink],
)
