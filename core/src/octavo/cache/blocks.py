"""The physical blocks of the pool: who holds each one, and in which order idle ones are taken.

Owns the reference counts, the stack of free blocks and the least-recently-used lists of cached
ones. Knows nothing of rows, tokens or keys; never a tensor.

A block is in exactly one of four states:

    free    references 0, not published: on the stack
    cached  references 0, published:     on an LRU list, oldest first; `take` evicts from there
    used    references > 0:              on neither
    absent  id at or past `total`:       the pool has no memory for it now (see `resize`)

Cached blocks of three ranks (NORMAL, COLD, WARM) lie on three lists. A block is evicted as if it had
been released later (WARM) or earlier (COLD) by one turnover of the whole pool: prefixes of more
urgent requests stay longer, and yet none stays for ever.

The lists are intrusive (two arrays of ids), so that a hit unlinks its blocks and a release appends
them in a few numpy calls. Ids are np.intp throughout: numpy converts any other index type first,
which costs more than the indexing. memoryviews of the arrays serve scalar access, and constants
are 0-d arrays: both are several times as fast as the plain way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

NORMAL, WARM, COLD = 0, 1, 2
"""Ranks of a cached block: evicted in its turn, a turnover of the pool later, a turnover earlier."""

RANKS = (NORMAL, WARM, COLD)

_NONE, _ONE = np.array(0), np.array(1)
_NEVER = np.iinfo(np.int64).max


class Blocks:
    """Reference counts, free stack and LRU lists over block ids [0, total) of at most `capacity`.

    references: int64 [capacity]. published: bool [capacity], the block can be found by its
    content; whoever clears it for a cached block must call `discard`. rank: int8 [capacity], of
    published blocks. evicted is called with the ids (a list of int) of cached blocks that are taken,
    before they are handed out.
    """

    def __init__(self, num_blocks: int, evicted: Callable[[list[int]], None], capacity: int = 0) -> None:
        capacity = max(capacity, num_blocks)
        self.total, self.capacity = num_blocks, capacity
        self.references = np.zeros(capacity, np.int64)
        self.published = np.zeros(capacity, np.bool_)
        self.rank = np.zeros(capacity, np.int8)
        self.free = num_blocks
        self.cached = 0
        self.evictions = 0
        self._evicted = evicted
        self._stack = np.empty(capacity, np.intp)  # [:free] are free; the top is the end
        self._stack[:num_blocks] = np.arange(num_blocks - 1, -1, -1)
        # One sentinel a rank: next[end] is the oldest cached block of the rank, previous[end] the newest.
        self._end = capacity
        self._next = np.empty(capacity + len(RANKS), np.intp)
        self._previous = np.empty(capacity + len(RANKS), np.intp)
        self._next[capacity:] = self._previous[capacity:] = np.arange(capacity, capacity + len(RANKS))
        self._fast_next = self._next.data
        self._fast_previous = self._previous.data
        self._fast_published = self.published.data
        self._fast_rank = self.rank.data
        self._age = np.zeros(capacity, np.int64)  # of cached blocks: the clock when they were appended
        self._clock = 0  # blocks appended so far
        self._ranked = False  # whether any block was ever of a rank other than NORMAL
        self._stamp = np.empty(capacity, np.int64)  # scratch of `drop`

    @property
    def available(self) -> int:
        """Blocks that `take` can give."""
        return self.free + self.cached

    def take(self, count: int) -> np.ndarray:
        """`count` blocks, each with one reference: free ones first, then the oldest cached ones.
        count must not exceed `available`."""
        popped = min(count, self.free)
        self.free -= popped
        blocks = self._stack[self.free : self.free + popped][::-1].copy()
        if popped < count:
            blocks = np.concatenate((blocks, self._evict(count - popped)))
        self.references[blocks] = _ONE
        return blocks

    def hold(self, blocks: np.ndarray) -> None:
        """One more reference to each of these (distinct) published or used blocks."""
        references = self.references[blocks]
        idle = blocks[references == _NONE]
        if idle.size:
            self._unlink(idle)
        self.references[blocks] = references + _ONE

    def drop(self, blocks: np.ndarray, *, distinct: bool = False) -> None:
        """One reference less for each occurrence. Published blocks that nobody holds any more join the
        LRU list in this order, so callers pass the deepest block of a chain first: it goes first.
        distinct: the caller knows that no block occurs twice."""
        if distinct:
            left = self.references[blocks] - _ONE
            self.references[blocks] = left
            idle = blocks[left == _NONE]
        else:
            np.subtract.at(self.references, blocks, _ONE)
            idle = blocks[self.references[blocks] == _NONE]
            order = np.arange(idle.size)  # a block that several rows dropped counts once, at its last occurrence
            self._stamp[idle] = order
            idle = idle[self._stamp[idle] == order]
        kept = self.published[idle]
        count = np.count_nonzero(kept)
        if count == idle.size:
            if count:
                self._append(idle)
            return
        if count:
            self._append(idle[kept])
            idle = idle[~kept]
        self._push(idle)

    def publish(self, blocks: list[int], rank: int = NORMAL) -> None:
        """These used blocks can be found by their content from now on, and are worth that much."""
        published, ranks = self._fast_published, self._fast_rank
        for block in blocks:
            published[block] = True
            ranks[block] = rank
        self._ranked |= rank != NORMAL

    def raise_rank(self, blocks: np.ndarray, rank: int) -> None:
        """Someone of this rank uses these published blocks: they are worth the better of both."""
        if self._ranked or rank != NORMAL:
            worth = np.array([1, 2, 0], np.int8)  # by rank: COLD < NORMAL < WARM
            self.rank[blocks[worth[self.rank[blocks]] < worth[rank]]] = rank
            self._ranked = True

    def discard(self, blocks: np.ndarray) -> None:
        """Make these cached blocks, no longer published, free."""
        if blocks.size:
            self._unlink(blocks)
            self._push(blocks)

    def oldest(self) -> list[int]:
        """The cached blocks, each rank in the order of eviction, the first to go first."""
        found: list[int] = []
        for rank in (COLD, NORMAL, WARM):
            end = self._end + rank
            block = self._fast_next[end]
            while block != end and len(found) <= self.capacity:
                found.append(block)
                block = self._fast_next[block]
        return found

    def evict(self, count: int) -> None:
        """Make this many cached blocks free, in the order of eviction; count must not exceed `cached`."""
        if count:
            self._push(self._evict(count))

    # ------------------------------------------------------------ the size of the pool

    def grow(self, total: int) -> None:
        """Blocks [self.total, total) have memory from now on: they are free, and the last to be taken."""
        new = total - self.total
        self._stack[new : new + self.free] = self._stack[: self.free].copy()
        self._stack[:new] = np.arange(total - 1, self.total - 1, -1)
        self.free += new
        self.total = total

    def shrink(self, total: int) -> tuple[np.ndarray, np.ndarray]:
        """Blocks [total, self.total) lose their memory. Cached ones are evicted, used ones move: returns
        (blocks, the blocks that take their place). References, published and rank have moved when it
        returns; tables, index and content are the caller's. total must leave room for all used blocks."""
        cached = np.array(self.oldest(), np.intp)
        self._drop_cached(cached[cached >= total])
        free = self._stack[: self.free]
        free = free[free < total]
        self.free = free.size
        self._stack[: free.size] = free
        moving = np.flatnonzero(self.references[total : self.total]) + total
        self.total = total
        targets = self.take(moving.size)
        for column in (self.references, self.published, self.rank):
            column[targets] = column[moving]
        self.references[moving] = 0
        self.published[moving] = False
        return moving, targets

    def _drop_cached(self, blocks: np.ndarray) -> None:
        """Evict exactly these; they do not become free."""
        if blocks.size:
            self._unlink(blocks)
            self._evicted(blocks.tolist())
            self.evictions += blocks.size
            self.published[blocks] = False

    def check(self) -> None:
        """Raise AssertionError unless free, cached and used partition the pool and the list is sound."""
        cached = self.oldest()
        _require(len(cached) == self.cached, f"the LRU lists have {len(cached)} blocks, the counter says {self.cached}")
        for rank in RANKS:
            end = self._end + rank
            forward: list[int] = []
            backward: list[int] = []
            block = self._fast_next[end]
            while block != end and len(forward) <= self.capacity:
                forward.append(block)
                block = self._fast_next[block]
            block = self._fast_previous[end]
            while block != end and len(backward) <= self.capacity:
                backward.append(block)
                block = self._fast_previous[block]
            _require(backward[::-1] == forward, f"the LRU list of rank {rank} reads differently backwards")
            _require(bool((self.rank[forward] == rank).all()), f"a block on the list of rank {rank} is of another")
        free = self._stack[: self.free].tolist()
        idle = free + cached
        _require(len(set(idle)) == len(idle), "a block is free or cached twice")
        _require(0 <= self.free <= self.total, f"{self.free} free blocks in a pool of {self.total}")
        _require(not self.published[free].any(), "a free block is published")
        _require(bool(self.published[cached].all()), "a cached block is not published")
        _require(bool((self.references >= 0).all()), "a reference count is negative")
        unused = np.flatnonzero(self.references[: self.total] == 0).tolist()
        absent = slice(self.total, None)
        _require(not self.references[absent].any() and not self.published[absent].any(), "an absent block is in use")
        _require(sorted(idle) == unused, "free and cached blocks are not exactly those without references")

    def _push(self, blocks: np.ndarray) -> None:
        self._stack[self.free : self.free + blocks.size] = blocks
        self.free += blocks.size

    def _unlink(self, blocks: np.ndarray) -> None:
        """Take blocks off the list. What was released as one chain mostly still lies there as one run, in
        reverse, and a run is unlinked at once."""
        following, previous = self._fast_next, self._fast_previous
        breaks = (self._previous[blocks[:-1]] != blocks[1:]).nonzero()[0]
        starts, ends = [int(blocks[0])], [int(blocks[-1])]
        if breaks.size:
            starts += blocks[breaks + 1].tolist()
            ends = blocks[breaks].tolist() + ends
        for newest, oldest in zip(starts, ends, strict=True):
            before, after = previous[oldest], following[newest]
            following[before] = after
            previous[after] = before
        self.cached -= blocks.size

    def _append(self, blocks: np.ndarray) -> None:
        """Put blocks at the new ends of their lists."""
        self._age[blocks] = self._clock
        self._clock += blocks.size
        self.cached += blocks.size
        if self._ranked:
            ranks = self.rank[blocks]
            for rank in np.unique(ranks).tolist():
                self._link(blocks[ranks == rank], self._end + rank)
        else:
            self._link(blocks, self._end)

    def _link(self, blocks: np.ndarray, end: int) -> None:
        newest = self._fast_previous[end]
        self._next[blocks[:-1]] = blocks[1:]
        self._previous[blocks[1:]] = blocks[:-1]
        first, last = int(blocks[0]), int(blocks[-1])
        self._fast_next[newest] = first
        self._fast_previous[first] = newest
        self._fast_next[last] = end
        self._fast_previous[end] = last

    def _evict(self, count: int) -> np.ndarray:
        """Take the `count` cached blocks whose turn it is."""
        following = self._fast_next
        taken: list[int] = []
        heads = [following[self._end + rank] for rank in RANKS]
        if self._ranked:
            turnover = self.capacity
            due = [
                int(self._age[h]) + d if h < turnover else _NEVER for h, d in zip(heads, (0, turnover, -turnover), strict=True)
            ]
            while len(taken) < count:
                rank = min(RANKS, key=due.__getitem__)
                taken.append(heads[rank])
                heads[rank] = head = following[heads[rank]]
                due[rank] = int(self._age[head]) + (0, turnover, -turnover)[rank] if head < turnover else _NEVER
        else:
            block = heads[NORMAL]
            for _ in range(count):
                taken.append(block)
                block = following[block]
            heads[NORMAL] = block
        for rank, head in zip(RANKS, heads, strict=True):
            following[self._end + rank] = head
            self._fast_previous[head] = self._end + rank
        self.cached -= count
        self.evictions += count
        self._evicted(taken)
        blocks = np.array(taken, np.intp)
        self.published[blocks] = False
        return blocks


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
