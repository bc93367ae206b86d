"""Block bookkeeping: which blocks each row holds, in every KV group, and which prefixes can be shared.

`BlockAllocator` is core's `octavo.interfaces.Allocator`. It owns ids, never tensors, and never
waits for the device: a released block is at once reusable because whatever reuses it is submitted
later to the same stream. It is a `stock.Stock` (blocks, index of prefixes, pins, second tier) with rows,
each of which has a line in one `table.GroupTable` per KV group.

All groups draw from one pool. Per-row bounds keep the common step short: a decode step where
nothing is due compares them and returns.

    room       tokens that the row may have: max_model_len, and 0 for an empty row
    known      tokens that `admit` and `extend` told
    computed   tokens whose K/V a submitted step writes
    capacity   tokens that the held blocks of every group can take
    writable   from here on, every held block is the row's alone and unpublished
    surplus    a step that computes no more than this leaves blocks over
    due        computed and known up to here, there is a block to publish
    trimmable  a query at this position no longer sees the first held block of some window group

They and the groups' counts are columns of one array, so that a release resets a row at once.
"""

from __future__ import annotations

from typing import Any

import numpy as np

from octavo.cache.conflict import Conflict
from octavo.cache.prefix import Lineage
from octavo.cache.stock import Stock
from octavo.cache.table import GroupTable
from octavo.cache.tier import Parcel
from octavo.interfaces import AllocatorParts

NEVER = np.iinfo(np.int64).max

_ZERO = np.array(0)


class BlockAllocator(Stock):
    """The allocator of `octavo.interfaces`; its docstrings are the contract of every method here.

    Additions to the contract, kept here so that nobody has to guess:

    - Rows of one call are distinct. A row that was never admitted holds nothing.
    - A hit ends at a multiple of every group's block size. A window group needs only the blocks of
      the window - 1 tokens before that point; the columns before them stay -1.
    - Copies of one `drain` are applied in the order given, whole entry after whole entry: a block may
      be a source in one entry and a target in a later one. Within an entry sources and targets are disjoint.
    - `release` publishes what the row computed and knows before it lets go.
    - After `reset`, the rows that were running publish nothing any more.
    """

    def __init__(self, options: Any, parts: AllocatorParts) -> None:
        super().__init__(parts)
        # A row of state: the bounds, then first, held and published of each group.
        empty = [0, 0, 0, 0, 0, -1, NEVER, NEVER] + [0, 0, 0] * len(parts.groups)
        self._empty = np.array(empty)
        self._state = np.tile(self._empty, (parts.max_rows, 1))
        bounds = self._state.T[:8]
        self._room, self._known, self._computed, self._capacity, self._writable, self._surplus, self._due, self._trimmable = (
            bounds
        )
        counts = [self._state[:, at : at + 3] for at in range(8, len(empty), 3)]
        self._tables = tuple(
            GroupTable(group, count, parts.max_model_len) for group, count in zip(parts.groups, counts, strict=True)
        )
        self._views = tuple(_read_only(table.array) for table in self._tables)
        self._windowed = tuple(t for t in self._tables if t.window is not None)
        self._ranks = [0] * parts.max_rows  # what the row's prefixes are worth (blocks.RANKS)
        self._lineages: list[Lineage | None] = [None] * parts.max_rows
        # What `admit` makes of an empty row: it holds nothing, and these are the first things to come.
        self._fresh = self._empty.copy()
        self._fresh[0] = self._limit
        if parts.prefix_caching:
            self._fresh[6] = min(self._sizes)
        if self._windowed:
            self._fresh[7] = min(t.block_size + (t.window or 0) - 1 for t in self._windowed)
        # The same memory, for scalar access: a memoryview is several times as fast as an array there.
        self._fast_room, self._fast_known = self._room.data, self._known.data
        self._fast_computed, self._fast_writable, self._fast_due = (b.data for b in (self._computed, self._writable, self._due))

    # ------------------------------------------------------------ a row's life

    def admit(
        self, row: int, tokens: np.ndarray, domain: str, salt: str = "", *, reuse: bool = True, parcel: Parcel | None = None,
        rank: int = 0,
    ) -> int:  # fmt: skip
        if self._room[row]:
            raise ValueError(f"row {row} holds a sequence of {self._known[row]} tokens: release it before admitting another")
        known = len(tokens)
        if known > self._limit:
            raise ValueError(f"row {row}: {known} tokens are more than max_model_len {self._limit}")
        self._state[row] = self._fresh
        self._fast_known[row] = known
        hit = 0
        if self._prefix_caching:
            self._ranks[row] = rank
            lineage = self._lineages[row] = Lineage(tokens, domain, salt, self._sizes)
            if reuse:
                hit = self._attach(row, lineage, known)
                self.prefix_queries += known
                self.prefix_hits += hit
        if parcel is not None and not parcel.lost and parcel.computed > hit:
            return self._resume(row, hit, parcel)
        return hit

    def extend(self, row: int, tokens: np.ndarray) -> None:
        if not self._fast_room[row]:
            raise ValueError(f"row {row} is empty: only an admitted row can learn tokens")
        self._fast_known[row] += len(tokens)
        lineage = self._lineages[row]
        if lineage is not None:
            lineage.extend(tokens)

    def fork(self, parent: int, child: int) -> None:
        if not self._room[parent] or self._room[child]:
            raise ValueError(f"fork {parent} -> {child}: the parent must hold a sequence and the child must be empty")
        self._writable[parent] = max(int(t.held[parent]) * t.block_size for t in self._tables)
        self._state[child] = self._state[parent]
        lineage = self._lineages[parent]
        self._lineages[child] = None if lineage is None else lineage.copy()
        rows = np.array([parent])
        for table in self._tables:
            source = table.span(rows, table.first[rows], table.held[rows])
            blocks = table.blocks(source)
            table.assign(source + (child - parent) * table.columns, blocks)
            self._blocks.hold(blocks)

    def release(self, rows: np.ndarray) -> None:
        rows = np.asarray(rows, np.intp)
        rows = rows[self._room[rows] > _ZERO]
        if rows.size > 1:
            rows = np.unique(rows)
        elif not rows.size:
            return
        self._publish(rows)
        self._let_go([(table, rows, table.first[rows], table.held[rows]) for table in self._tables])
        self._state[rows] = self._empty
        if self._prefix_caching:
            for row in rows.tolist():
                self._lineages[row] = None

    def swap_out(self, row: int) -> Parcel | None:
        if self._spill is None or not self._room[row]:
            return None
        rows = np.array([row])
        self._publish(rows)
        parcel = self._spill.pack(row, int(self._computed[row]), self._tables)
        if parcel is not None:
            self.release(rows)
        return parcel

    def discard(self, parcel: Parcel) -> None:
        if self._spill is not None:
            self._spill.tier.discard(parcel)

    # ------------------------------------------------------------ a step

    def reserve(self, rows: np.ndarray, start: np.ndarray, upto: np.ndarray) -> bool:
        rows = np.asarray(rows, np.intp)
        todo = ((upto > self._capacity[rows]) | (start < self._writable[rows])).nonzero()[0]
        if not todo.size:
            return True
        rows, start, upto = rows[todo], np.asarray(start)[todo], np.asarray(upto)[todo]
        todo = (upto > start).nonzero()[0]
        if todo.size < rows.size:
            rows, start, upto = rows[todo], start[todo], upto[todo]
        return not todo.size or self._reserve(rows, start, upto)

    def commit(self, rows: np.ndarray, computed: np.ndarray) -> None:
        rows = np.asarray(rows, np.intp)
        self._computed[rows] = computed
        todo = (computed <= self._surplus[rows]).nonzero()[0]
        if todo.size:
            some, length = rows[todo], np.asarray(computed)[todo]
            spans = []
            for table in self._tables:
                held = table.held[some]
                keep = np.minimum(held, np.maximum(table.first[some], (length + table.round_up) // table.size))
                spans.append((table, some, keep, held))
                table.held[some] = keep
            self._let_go(spans)
            self._bound(some)
        self._publish(rows)

    def trim(self, rows: np.ndarray, position: np.ndarray) -> None:
        if not self._windowed:
            return
        rows = np.asarray(rows, np.intp)
        todo = (position >= self._trimmable[rows]).nonzero()[0]
        if not todo.size:
            return
        rows, position = rows[todo], np.asarray(position)[todo]
        spans = []
        for table in self._windowed:
            assert table.window is not None
            first = table.first[rows]
            visible = np.maximum(first, (position - table.window + 1) // table.size)
            visible = np.minimum(visible, table.held[rows])
            spans.append((table, rows, first, visible))
            table.first[rows] = visible
        self._let_go(spans)
        self._bound(rows)

    def withdraw(self, rows: np.ndarray, computed: np.ndarray) -> None:
        rows = np.asarray(rows, np.intp)
        alive = self._room[rows] > _ZERO
        rows, computed = rows[alive], np.asarray(computed)[alive]
        self._computed[rows] = np.minimum(self._computed[rows], computed)
        for table in self._tables:
            column = computed // table.size
            held = table.held[rows]
            blocks = table.blocks(table.span(rows, np.minimum(held, np.maximum(table.first[rows], column)), held))
            self._unpublish(blocks)
            table.published[rows] = np.minimum(table.published[rows], column)
        self._expect(rows)

    # ------------------------------------------------------------ all of it

    def table(self, group: int) -> np.ndarray:
        return self._views[group]

    def reset(self) -> None:
        self._pins.clear()
        if self._spill is not None:
            self._spill.tier.forget()
        cached = np.array(self._blocks.oldest(), np.intp)
        self._blocks.published[self._index.clear()] = False
        self._blocks.discard(cached)
        self._lineages = [None] * len(self._lineages)
        self._due[:] = NEVER

    def check(self) -> None:
        from octavo.cache.integrity import check

        check(self)

    # ------------------------------------------------------------ how

    def _attach(self, row: int, lineage: Lineage, known: int) -> int:
        """Give a fresh row the longest prefix that every group has; its length."""
        hit, found = self._look_up(lineage, known, self._ranks[row])
        if hit:
            self._computed[row] = self._writable[row] = hit
            for table, blocks in zip(self._tables, found, strict=True):
                end = hit // table.block_size
                held = np.array(blocks, np.intp)
                first = end - held.size
                table.first[row], table.held[row], table.published[row] = first, end, end
                table.assign(np.arange(first, end) + row * table.columns, held)
                self._blocks.hold(held)
                self._blocks.raise_rank(held, self._ranks[row])
            rows = np.array([row])
            self._bound(rows)
            self._expect(rows)
        return hit

    def _resume(self, row: int, hit: int, parcel: Parcel) -> int:
        """Continue from a parcel that reaches further than the hit, if there is room; the tokens computed then."""
        assert self._spill is not None
        if not self._spill.unpack(row, hit, parcel, self._tables, self._blocks):
            return hit
        self._computed[row], self._writable[row] = parcel.computed, hit
        rows = np.array([row])
        self._bound(rows)
        self._expect(rows)
        return parcel.computed

    def _reserve(self, rows: np.ndarray, start: np.ndarray, upto: np.ndarray) -> bool:
        """`reserve` of rows that need a look: blocks to add, shared blocks to replace, published ones to take over."""
        over = (upto > self._room[rows]).nonzero()[0]
        if over.size:
            raise ValueError(
                f"reserve: rows {rows[over].tolist()} up to {upto[over].tolist()}: an empty row, or past max_model_len {self._limit}"
            )
        unsafe = (start < self._writable[rows]).nonzero()[0]
        total, grown, conflicts = 0, [], []
        for table in self._tables:
            held = table.held[rows]
            need = (upto + table.round_up) // table.size
            end = np.maximum(held, need)
            flat = table.span(rows, held, end)
            grown.append((table, end, flat))
            total += flat.size
            if unsafe.size:
                conflict = Conflict(table, rows[unsafe], start[unsafe], np.minimum(need, held)[unsafe], self._blocks)
                conflicts.append(conflict)
                total += conflict.replaced.size
        if total > self._blocks.available:
            return False
        fresh = self._blocks.take(total)
        used = 0
        for table, end, flat in grown:
            table.assign(flat, fresh[used : used + flat.size])
            table.held[rows] = end
            used += flat.size
        for conflict in conflicts:
            self._unpublish(conflict.rewritten)
            targets = fresh[used : used + conflict.replaced.size]
            used += targets.size
            if targets.size:
                sources = conflict.table.blocks(conflict.replaced)
                conflict.table.assign(conflict.replaced, targets)
                self._blocks.drop(sources)  # each has a holder left, so none becomes idle
                if conflict.copied.any():
                    self._copies.append((conflict.table.group, sources[conflict.copied], targets[conflict.copied]))
        if unsafe.size:
            self._claim(rows[unsafe], start[unsafe], upto[unsafe])
        self._bound(rows)
        return True

    def _claim(self, rows: np.ndarray, start: np.ndarray, upto: np.ndarray) -> None:
        """These rows will write [start, upto): what they published past start must be published anew, and
        if that covers all that they hold, they are alone from start on."""
        self._computed[rows] = np.minimum(self._computed[rows], start)
        alone = np.ones(rows.size, np.bool_)
        for table in self._tables:
            table.published[rows] = np.minimum(table.published[rows], start // table.size)
            alone &= table.held[rows] <= (upto + table.round_up) // table.size
        self._writable[rows[alone]] = start[alone]
        self._expect(rows)

    def _publish(self, rows: np.ndarray) -> None:
        """Offer the blocks that are computed and whose tokens are known to the index."""
        if not self._prefix_caching:
            return
        if rows.size == 1:
            one = int(rows[0])
            ready = min(self._fast_computed[one], self._fast_known[one])
            work = [(one, ready)] if ready >= self._fast_due[one] else []
        else:
            least = np.minimum(self._computed[rows], self._known[rows])
            todo = (least >= self._due[rows]).nonzero()[0]
            work = list(zip(rows[todo].tolist(), least[todo].tolist(), strict=True)) if todo.size else []
        for row, upto in work:
            lineage = self._lineages[row]
            assert lineage is not None
            due, safe = NEVER, self._fast_writable[row]
            for table in self._tables:
                size = table.block_size
                first, end = table.fast_published[row], upto // size
                if end > first:
                    at = row * table.columns
                    blocks = table.fast_flat[at + first : at + end].tolist()
                    self._blocks.publish(self._index.publish(lineage, table.group, size, first, blocks), self._ranks[row])
                    table.fast_published[row] = first = end
                safe, due = max(safe, end * size), min(due, first * size + size)
            self._fast_writable[row], self._fast_due[row] = safe, due

    def _unpublish(self, blocks: np.ndarray) -> None:
        """Forget the content of those of these used blocks that are published."""
        blocks = np.unique(blocks[self._blocks.published[blocks]])
        if blocks.size:
            self._index.remove(blocks.tolist())
            self._blocks.published[blocks] = False

    def _let_go(self, spans: list[tuple[GroupTable, np.ndarray, np.ndarray, np.ndarray]]) -> None:
        """Empty columns [low, high) of rows, (table, rows, low, high) each, and drop the blocks, the
        deepest (by position in the sequence) first, so that they are evicted before the heads of their chains."""
        blocks, depths = [], []
        for table, rows, low, high in spans:
            flat = table.span(rows, low, high)[::-1]
            if flat.size:
                blocks.append(table.clear(flat))
                if len(spans) > 1:
                    depths.append(flat % table.columns * table.block_size)
        if len(blocks) == 1:
            self._blocks.drop(blocks[0], distinct=spans[0][1].size == 1)
        elif blocks:
            order = np.argsort(-np.concatenate(depths), kind="stable")
            self._blocks.drop(np.concatenate(blocks)[order], distinct=spans[0][1].size == 1)

    def _bound(self, rows: np.ndarray) -> None:
        """Recompute the bounds that follow from the columns held."""
        table = self._tables[0]
        capacity = table.held[rows] * table.size
        surplus = capacity - table.size
        for table in self._tables[1:]:
            taken = table.held[rows] * table.size
            capacity, surplus = np.minimum(capacity, taken), np.maximum(surplus, taken - table.size)
        self._capacity[rows], self._surplus[rows] = capacity, surplus
        if self._windowed:
            ends = [(t.first[rows] + 1) * t.size + (t.window or 0) - 1 for t in self._windowed]
            self._trimmable[rows] = np.min(ends, axis=0)

    def _expect(self, rows: np.ndarray) -> None:
        """Recompute `due` from the columns published; rows without a lineage publish nothing."""
        for row in rows.tolist():
            if self._lineages[row] is not None:
                self._due[row] = min((int(t.published[row]) + 1) * t.block_size for t in self._tables)


def _read_only(array: np.ndarray) -> np.ndarray:
    view = array.view()
    view.flags.writeable = False
    return view
