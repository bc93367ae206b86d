"""The physical blocks of the pool: who holds each one, and in which order idle ones are taken.

Owns the reference counts, the stack of free blocks and the least-recently-used list of cached
ones. Knows nothing of rows, tokens or keys; never a tensor.

A block is in exactly one of three states:

    free    references 0, not published: on the stack
    cached  references 0, published:     on the LRU list, oldest first; `take` evicts from there
    used    references > 0:              on neither

The list is intrusive (two arrays of ids), so that a hit unlinks its blocks and a release appends
them in a few numpy calls. Ids are np.intp throughout: numpy converts any other index type first,
which costs more than the indexing. memoryviews of the arrays serve scalar access, and constants
are 0-d arrays: both are several times as fast as the plain way.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_NONE, _ONE = np.array(0), np.array(1)


class Blocks:
    """Reference counts, free stack and LRU list over block ids [0, num_blocks).

    references: int64 [num_blocks]. published: bool [num_blocks], the block can be found by its
    content; whoever clears it for a cached block must call `discard`. evicted is called with the
    ids (a list of int) of cached blocks that are taken, before they are handed out.
    """

    def __init__(self, num_blocks: int, evicted: Callable[[list[int]], None]) -> None:
        self.total = num_blocks
        self.references = np.zeros(num_blocks, np.int64)
        self.published = np.zeros(num_blocks, np.bool_)
        self.free = num_blocks
        self.cached = 0
        self._evicted = evicted
        self._stack = np.arange(num_blocks - 1, -1, -1)  # [:free] are free; the top is the end
        self._end = num_blocks  # sentinel: next[end] is the oldest cached block, previous[end] the newest
        self._next = np.empty(num_blocks + 1, np.intp)
        self._previous = np.empty(num_blocks + 1, np.intp)
        self._next[self._end] = self._previous[self._end] = self._end
        self._fast_next = self._next.data
        self._fast_previous = self._previous.data
        self._fast_published = self.published.data
        self._stamp = np.empty(num_blocks, np.int64)  # scratch of `drop`

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

    def publish(self, blocks: list[int]) -> None:
        """These used blocks can be found by their content from now on."""
        published = self._fast_published
        for block in blocks:
            published[block] = True

    def discard(self, blocks: np.ndarray) -> None:
        """Make these cached blocks, no longer published, free."""
        if blocks.size:
            self._unlink(blocks)
            self._push(blocks)

    def oldest(self) -> list[int]:
        """The cached blocks in the order of eviction."""
        found: list[int] = []
        block = self._fast_next[self._end]
        while block != self._end and len(found) <= self.total:
            found.append(block)
            block = self._fast_next[block]
        return found

    def check(self) -> None:
        """Raise AssertionError unless free, cached and used partition the pool and the list is sound."""
        cached = self.oldest()
        _require(len(cached) == self.cached, f"the LRU list has {len(cached)} blocks, its counter says {self.cached}")
        backward: list[int] = []
        block = self._fast_previous[self._end]
        while block != self._end and len(backward) <= self.total:
            backward.append(block)
            block = self._fast_previous[block]
        _require(backward[::-1] == cached, "the LRU list reads differently backwards")
        free = self._stack[: self.free].tolist()
        idle = free + cached
        _require(len(set(idle)) == len(idle), "a block is free or cached twice")
        _require(0 <= self.free <= self.total, f"{self.free} free blocks in a pool of {self.total}")
        _require(not self.published[free].any(), "a free block is published")
        _require(bool(self.published[cached].all()), "a cached block is not published")
        _require(bool((self.references >= 0).all()), "a reference count is negative")
        unused = np.flatnonzero(self.references == 0).tolist()
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
        newest, end = self._fast_previous[self._end], self._end
        self._next[blocks[:-1]] = blocks[1:]
        self._previous[blocks[1:]] = blocks[:-1]
        first, last = int(blocks[0]), int(blocks[-1])
        self._fast_next[newest] = first
        self._fast_previous[first] = newest
        self._fast_next[last] = end
        self._fast_previous[end] = last
        self.cached += blocks.size

    def _evict(self, count: int) -> np.ndarray:
        following, end = self._fast_next, self._end
        taken = []
        block = following[end]
        for _ in range(count):
            taken.append(block)
            block = following[block]
        following[end] = block
        self._fast_previous[block] = end
        self.cached -= count
        self._evicted(taken)
        blocks = np.array(taken, np.intp)
        self.published[blocks] = False
        return blocks


def _require(holds: bool, message: str) -> None:
    if not holds:
        raise AssertionError(message)
