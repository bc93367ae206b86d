"""A paged memory made of Python lists, and a driver that runs any allocator over it.

The oracle of the allocator suite. It does not know how blocks should be chosen. It knows what a
query must find: the cell that a table leads to holds exactly that token after exactly that history,
written by a step that was submitted before. Sharing, copying, recycling or trimming wrongly, in
any order of calls, shows up as a wrong cell. Slow, exact, and without torch or pytest.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from octavo.cache.geometry import first_visible
from octavo.interfaces import Allocator, AllocatorParts, KVGroup, KVSpec
from octavo.request import FROM_HOST, MOVE, TO_HOST

if TYPE_CHECKING:
    from octavo.cache.tier import Parcel

Make = Callable[[AllocatorParts], Allocator]

POISON = -1
"""What a cell holds that nobody has written: no history has this number."""


def groups_of(*shapes: tuple[int, int | None]) -> tuple[KVGroup, ...]:
    """KV groups from (block size, window or None) pairs."""
    found = []
    for index, (block_size, window) in enumerate(shapes):
        spec = KVSpec("full" if window is None else "window", 1, 8, 8, "float32", window)
        found.append(KVGroup(index, spec, (index,), block_size, 1024))
    return tuple(found)


def array(*values: int) -> np.ndarray:
    """int32 rows, starts or ends of a call."""
    return np.array(values, np.int32)


@dataclass
class Row:
    """One sequence: all its tokens, how many the allocator was told of, how many were computed."""

    tokens: list[int]
    told: int
    domain: str
    salt: str
    computed: int
    hit: int
    publishes: bool = True


@dataclass
class Page:
    """One block's cells, of one group at a time."""

    group: int
    cells: list[int] = field(default_factory=list)


class Paging:
    """An allocator, the pages it hands out, and the rows that use them. `verify` runs after every call."""

    def __init__(
        self, make: Make, groups: Sequence[KVGroup], num_blocks: int, *, max_rows: int = 8, max_model_len: int = 64,
        prefix_caching: bool = True, max_step_tokens: int = 0, host_slots: int = 0, max_blocks: int = 0,
    ) -> None:  # fmt: skip
        self.groups = tuple(groups)
        parts = AllocatorParts(
            self.groups, num_blocks, max_rows, max_model_len, prefix_caching, max_step_tokens, host_slots, max_blocks
        )
        self.num_blocks = num_blocks
        self.parts = parts
        self.allocator = make(parts)
        self.rows: dict[int, Row] = {}
        self.pages: dict[int, Page] = {}
        self.host: dict[int, Page] = {}  # by host slot
        self.parcels: list[tuple[Parcel, Row]] = []
        self.device = [np.full_like(self.allocator.table(g.index), -1) for g in self.groups]  # tables, from drained updates alone
        self._histories: dict[tuple[object, int], int] = {}
        self.lossless = True  # no cached block can have been lost: then hits can be predicted exactly
        self._findable: set[tuple[str, int, int]] = set()  # (domain, group, history at the end of a full block)

    # ------------------------------------------------------------ calls

    def admit(
        self, row: int, tokens: Sequence[int], domain: str = "a", salt: str = "", *, reuse: bool = True, rank: int = 0
    ) -> int:
        expected = self.expected_hit(tokens, domain, salt)
        hit = self.allocator.admit(row, np.array(tokens, np.int32), domain, salt, reuse=reuse, rank=rank)
        assert 0 <= hit < len(tokens), f"a hit of {hit} covers the last of {len(tokens)} tokens"
        assert all(hit % g.block_size == 0 for g in self.groups), f"a hit of {hit} tokens ends inside a block"
        if not reuse or not self.parts.prefix_caching:
            assert hit == 0
        elif self.lossless:
            assert hit == expected, f"{hit} tokens were found where {expected} are cached"
        self.rows[row] = Row(list(tokens), len(tokens), domain, salt, hit, hit)
        self._apply_drained()
        self.verify()
        return hit

    def swap_out(self, row: int) -> bool:
        """Preempt a row into host memory; False, and nothing has changed, if that is full."""
        self.tell(row)
        self._note_published(row)
        usage = self.allocator.usage()
        parcel = self.allocator.swap_out(row)
        if parcel is None:
            assert self.allocator.usage() == usage, "a refused swap changed the pool"
        else:
            assert parcel.computed == self.rows[row].computed
            self.parcels.append((parcel, self.rows.pop(row)))
        self._apply_drained()
        self.verify()
        return parcel is not None

    def resume(self, row: int, which: int = 0) -> int:
        """Admit the sequence of a parcel again, and give the parcel back; the tokens that it need not compute.
        It has learnt one more token meanwhile, as a sequence does before it comes back."""
        parcel, state = self.parcels.pop(which)
        if len(state.tokens) == state.computed:
            state.tokens.append(1)
        lost = parcel.lost
        computed = self.allocator.admit(row, np.array(state.tokens, np.int32), state.domain, state.salt, parcel=parcel)
        assert computed < len(state.tokens)
        assert lost or computed <= parcel.computed or not computed % self.groups[0].block_size
        self._apply_drained()  # the slots are read before anything else may be written to them
        self.allocator.discard(parcel)
        self.rows[row] = Row(state.tokens, len(state.tokens), state.domain, state.salt, computed, 0)
        self.verify()
        return computed

    def discard(self, which: int = 0) -> None:
        parcel, _ = self.parcels.pop(which)
        self.allocator.discard(parcel)
        self.verify()

    def pin(self, tokens: Sequence[int], domain: str = "a", salt: str = "", *, leave: int = 0) -> int:
        pinned = self.allocator.pin(np.array(tokens, np.int32), domain, salt, leave=leave)
        self._apply_drained()
        self.verify()
        return pinned

    def evict(self) -> None:
        """Drop every cached prefix from the pool; host memory may keep it."""
        self.lossless &= not self.allocator.evict() or bool(self.parts.host_slots)
        self._apply_drained()
        self.verify()

    def resize(self, num_blocks: int) -> int:
        """Grow or shrink the pool; what lies past its end is gone once the copies have been done."""
        before = self.allocator.usage()
        self.num_blocks = self.allocator.resize(num_blocks)
        assert self.num_blocks >= min(num_blocks, before.total), "it shrank below what was asked for"
        if self.num_blocks < before.total:
            self.lossless = False
        self._apply_drained()
        self.pages = {block: page for block, page in self.pages.items() if block < self.num_blocks}
        self.verify()
        return self.num_blocks

    def reserve(self, rows: Sequence[int], counts: Sequence[int]) -> bool:
        """Reserve the next counts[i] tokens of rows[i], after trimming; all or nothing is checked here."""
        start = array(*(self.rows[r].computed for r in rows))
        upto = start + array(*counts)
        self.allocator.trim(array(*rows), start)
        self._apply_drained()
        before, usage = [table.copy() for table in self.device], self.allocator.usage()
        granted = self.allocator.reserve(array(*rows), start, upto)
        after = self.allocator.usage()
        if not granted:
            assert after == usage, f"a refused reserve changed {usage} to {after}"
        elif after.cached < usage.cached:
            self.lossless = False
        self._apply_drained()
        if not granted:
            assert all(np.array_equal(a, b) for a, b in zip(before, self.device, strict=True)), (
                "a refused reserve changed a table"
            )
        self.verify()
        return granted

    def submit(self, rows: Sequence[int], counts: Sequence[int]) -> None:
        """Write what was reserved, then commit: the order of a step."""
        for r, count in zip(rows, counts, strict=True):
            row = self.rows[r]
            for position in range(row.computed, row.computed + count):
                for group in self.groups:
                    self._write(r, group, position)
            row.computed += count
        self.allocator.commit(array(*rows), array(*(self.rows[r].computed for r in rows)))
        for r in rows:
            self._note_published(r)
        self._apply_drained()
        self.verify()

    def step(self, rows: Sequence[int], counts: Sequence[int]) -> bool:
        if not self.reserve(rows, counts):
            return False
        self.submit(rows, counts)
        return True

    def run(self, row: int) -> bool:
        """Compute all that the row has."""
        return self.step([row], [len(self.rows[row].tokens) - self.rows[row].computed])

    def sample(self, row: int, token: int, *, tell: bool = True) -> None:
        """A token was sampled; the host may come to know of it later (`tell`)."""
        self.rows[row].tokens.append(token)
        if tell:
            self.tell(row)

    def tell(self, row: int) -> None:
        state = self.rows[row]
        self.allocator.extend(row, np.array(state.tokens[state.told :], np.int32))
        state.told = len(state.tokens)
        self.verify()

    def fork(self, parent: int, child: int) -> None:
        self.tell(parent)
        self.allocator.fork(parent, child)
        row = self.rows[parent]
        self.rows[child] = Row(list(row.tokens), row.told, row.domain, row.salt, row.computed, row.hit, row.publishes)
        self._apply_drained()
        self.verify()

    def release(self, *rows: int) -> None:
        for row in rows:
            if row in self.rows:
                self._note_published(row)
        self.allocator.release(array(*rows))
        for row in rows:
            self.rows.pop(row, None)
        self._apply_drained()
        self.verify()

    def withdraw(self, row: int, computed: int) -> None:
        """The steps that computed `computed` and later tokens failed. The row can then only be released:
        its windows may have been trimmed for a step that is now undone."""
        self.allocator.withdraw(array(row), array(computed))
        self.rows[row].computed = 0
        self.lossless = False
        self.verify()

    def reset(self) -> None:
        self.allocator.reset()
        self._findable.clear()
        for row in self.rows.values():
            row.publishes = False
        assert self.allocator.usage().cached == 0, "blocks are cached after a reset"
        self.verify()

    # ------------------------------------------------------------ what must hold

    def verify(self) -> None:
        """The allocator's own invariants, the accounts, and every cell that a next query would read."""
        self.allocator.check()
        usage = self.allocator.usage()
        assert usage.total == self.num_blocks == usage.free + usage.cached + usage.used + usage.pinned, f"{usage} does not add up"
        tables = [self.allocator.table(g.index) for g in self.groups]
        named = np.unique(np.concatenate([table[table >= 0] for table in tables]))
        assert usage.used == named.size, f"{usage.used} blocks are used, tables name {named.size}"
        assert not named.size or named[-1] < self.num_blocks, "a table names a block that the pool does not have"
        for r, row in self.rows.items():
            history: object = row.salt
            for position, token in enumerate(row.tokens[: row.computed]):
                history = self._next(history, token)
                for group, table in zip(self.groups, tables, strict=True):
                    if position >= first_visible(row.computed, group.spec.window):
                        found = self._cell(table, r, group, position)
                        assert found == history, (
                            f"row {r}, group {group.index}, position {position}: the cell holds "
                            f"{'nothing' if found == POISON else f'history {found}'}, not {history}"
                        )

    def resident(self, row: int, group: int) -> int:
        """Blocks that a row holds in a group."""
        return int((self.allocator.table(group)[row] >= 0).sum())

    def expected_hit(self, tokens: Sequence[int], domain: str, salt: str) -> int:
        """The longest hit that the published blocks allow, from the definition alone."""
        ends: list[object] = [salt]
        for token in tokens:
            ends.append(self._next(ends[-1], token))

        def covered(length: int) -> bool:
            for group in self.groups:
                size = group.block_size
                if length % size:
                    return False
                for column in range(first_visible(length, group.spec.window) // size, length // size):
                    end = ends[(column + 1) * size]
                    if not any((d, group.index, end) in self._findable for d in (domain, "public")):
                        return False
            return True

        return next((n for n in range(len(tokens) - 1, 0, -1) if covered(n)), 0)

    # ------------------------------------------------------------ how

    def _next(self, history: object, token: int) -> int:
        return self._histories.setdefault((history, token), len(self._histories))

    def _cell(self, table: np.ndarray, row: int, group: KVGroup, position: int) -> int:
        block = int(table[row, position // group.block_size])
        assert block >= 0, f"row {row}, group {group.index}: position {position} is visible and has no block"
        page = self.pages.get(block)
        return POISON if page is None or page.group != group.index else page.cells[position % group.block_size]

    def _write(self, row: int, group: KVGroup, position: int) -> None:
        block = int(self.device[group.index][row, position // group.block_size])
        assert block >= 0, f"row {row}, group {group.index}: position {position} was reserved and has no block"
        page = self.pages.get(block)
        if page is None or page.group != group.index:
            page = self.pages[block] = Page(group.index, [POISON] * group.block_size)
        history: object = self.rows[row].salt
        for token in self.rows[row].tokens[: position + 1]:
            history = self._next(history, token)
        assert isinstance(history, int)
        page.cells[position % group.block_size] = history

    def _apply_drained(self) -> None:
        """What the device does with a drain: copies in order, each entry at once, then tables."""
        updates, copies = self.allocator.drain()
        for group, sources, targets in copies:
            origin = self.host if group == FROM_HOST else self.pages
            target = self.host if group == TO_HOST else self.pages
            # A block that nobody has written yet (reserved, then swapped or moved) has no page: nothing is copied.
            moved = {t: origin[s] for s, t in zip(sources.tolist(), targets.tolist(), strict=True) if s in origin}
            if group in (TO_HOST, FROM_HOST, MOVE):
                moved = {t: Page(page.group, list(page.cells)) for t, page in moved.items()}
            else:
                assert len(moved) == len(targets), "a copy on write of a block that nobody wrote"
                moved = {t: Page(group, list(page.cells)) for t, page in moved.items()}
            if origin is target:
                assert not set(sources.tolist()) & set(targets.tolist()), "a copy reads a block that it overwrites"
            for gone in set(targets.tolist()) - set(moved):
                target.pop(gone, None)
            target.update(moved)
        for update in updates:
            places = set(zip(update.rows.tolist(), update.cols.tolist(), strict=True))
            assert len(places) == len(update.rows), "a table entry is updated twice in one drain"
            self.device[update.group][update.rows, update.cols] = update.blocks
        for index, table in enumerate(self.device):
            assert np.array_equal(table, self.allocator.table(index)), "the drained updates do not lead to the table"

    def _note_published(self, r: int) -> None:
        """Full, computed and known blocks that the row still holds can be found from now on."""
        row = self.rows[r]
        if not row.publishes or not self.parts.prefix_caching:
            return
        history: object = row.salt
        for position, token in enumerate(row.tokens[: min(row.told, row.computed)]):
            history = self._next(history, token)
            assert isinstance(history, int)
            for group in self.groups:
                column, rest = divmod(position + 1, group.block_size)
                if not rest and self.allocator.table(group.index)[r, column - 1] >= 0:
                    self._findable.add((row.domain, group.index, history))
