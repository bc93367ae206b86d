"""The second tier: slots of host memory, for the content of blocks that the pool has no room for.

Owns the slots' bookkeeping (ids only, no tensors): which content each holds, who needs it, which goes
first. Never copies: `BlockAllocator` writes down which copies the runner has to do, in order, and
`octavo.cache.swap.SwapSpace` does them.

A slot takes one block id's pages in every tensor of the pool. Like a block it is free, cached (the
content of an evicted prefix block, found by its key, the oldest goes first) or held by parcels. A
parcel is what a preempted row leaves behind: its sequence comes back to where it was without
computing anything again, if its slots could be had when it left.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import numpy as np

from octavo.cache.blocks import Blocks
from octavo.cache.prefix import PrefixIndex

Content = tuple[bytes, bytes]
"""Key and message of a published block (see `prefix`)."""


@dataclass(eq=False, slots=True)
class Parcel:
    """What a row had computed, in host memory. Opaque to the scheduler, which keeps it while the sequence
    waits and gives it back with `Allocator.discard`.

    computed: tokens. parts: per KV group, its first column and the slots (int64) from that column on.
    Empty once the parcel has been discarded or lost (after a reset): it then means nothing.
    """

    computed: int
    parts: list[tuple[int, np.ndarray]] = field(default_factory=list)

    @property
    def lost(self) -> bool:
        return not self.parts


class HostTier:
    """Slots [0, slots) of host memory. hits, stores: blocks found here, and blocks copied here."""

    def __init__(self, slots: int) -> None:
        self.index = PrefixIndex(slots)
        self._slots = Blocks(slots, self.index.remove)
        self._parcels: set[Parcel] = set()
        self.hits = 0
        self.stores = 0

    @property
    def total(self) -> int:
        return self._slots.total

    @property
    def cached(self) -> int:
        return self._slots.cached

    @property
    def used(self) -> int:
        """Slots that parcels hold."""
        return self._slots.total - self._slots.free - self._slots.cached

    # ------------------------------------------------------------ evicted prefixes

    def keep(self, contents: list[Content]) -> tuple[list[int], np.ndarray]:
        """Make room for the content of evicted blocks, oldest first. Returns the positions in `contents`
        that have to be copied and the slots they go to; what is here already, or finds no slot, is passed
        over (of too many, the youngest are kept)."""
        wanted = []
        for at, (key, message) in enumerate(contents):
            slot = self.index.slot((key,), message)
            if slot is None:
                wanted.append(at)
            elif not self._slots.references[slot]:  # it was used a moment ago: the youngest again
                self._touch(np.array([slot]))
        room = self._slots.available
        wanted = wanted[-room:] if room else []
        slots = self._slots.take(len(wanted))
        self._write(slots, [contents[at] for at in wanted])
        self._slots.drop(slots, distinct=True)
        return wanted, slots

    def hold(self, slots: np.ndarray) -> list[Content]:
        """Keep these found slots from being taken while blocks are found for them; their contents."""
        self._slots.hold(slots)
        self.hits += slots.size
        found = [self.index.content(slot) for slot in slots.tolist()]
        return [content for content in found if content is not None]

    def drop(self, slots: np.ndarray) -> None:
        """The opposite of `hold`: the copies that read them have been written down."""
        self._slots.drop(slots)

    def forget(self) -> None:
        """Every prefix and every parcel: their content may be wrong."""
        for parcel in list(self._parcels):
            self.discard(parcel)
        cached = np.array(self._slots.oldest(), np.intp)
        self._slots.published[self.index.clear()] = False
        self._slots.discard(cached)

    # ------------------------------------------------------------ parcels

    def claim(self, contents: list[Content | None]) -> tuple[np.ndarray, np.ndarray] | None:
        """One held slot for each content (None: of no one but the row). Returns the slots and which of
        them (bool) have to be copied to, because the content was not here; None, with nothing changed, if
        there are not enough."""
        slots = np.full(len(contents), -1, np.intp)
        for at, content in enumerate(contents):
            found = None if content is None else self.index.slot((content[0],), content[1])
            slots[at] = -1 if found is None else found
        new = slots < 0
        count = int(np.count_nonzero(new))
        self._slots.hold(slots[~new])
        if count > self._slots.available:
            self._slots.drop(slots[~new])
            return None
        slots[new] = self._slots.take(count)
        self._write(slots[new], [content for content, fresh in zip(contents, new.tolist(), strict=True) if fresh])
        return slots, new

    def wrap(self, computed: int, parts: list[tuple[int, np.ndarray]]) -> Parcel:
        """A parcel of claimed slots."""
        parcel = Parcel(computed, parts)
        self._parcels.add(parcel)
        return parcel

    def discard(self, parcel: Parcel) -> None:
        """Give a parcel's slots back, the deepest first; a lost one has none."""
        if parcel in self._parcels:
            self._parcels.remove(parcel)
            for _, slots in parcel.parts:
                self._slots.drop(slots[::-1])
            parcel.parts = []

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken."""
        self._slots.check()
        self.index.check(self._slots.published)
        held = np.zeros(self.total, np.int64)
        for parcel in self._parcels:
            for _, slots in parcel.parts:
                np.add.at(held, slots, 1)
        if not np.array_equal(held, self._slots.references):
            wrong = np.flatnonzero(held != self._slots.references).tolist()
            raise AssertionError(f"host slots {wrong} are not held exactly by the parcels that name them")

    def _write(self, slots: np.ndarray, contents: list[Content] | list[Content | None]) -> None:
        """These just taken slots will hold these contents: findable where they have a key."""
        self.stores += slots.size
        published = [
            slot for slot, content in zip(slots.tolist(), contents, strict=True) if content and self.index.adopt(slot, content)
        ]
        self._slots.publish(published)

    def _touch(self, slots: np.ndarray) -> None:
        self._slots.hold(slots)
        self._slots.drop(slots, distinct=True)
