"""Who holds which blocks, and who runs next. Neither ever sees a tensor. Part of the contract, see `octavo.interfaces`."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal, Protocol

import numpy as np

from octavo.interfaces.geometry import KVGroup, Limits
from octavo.request import Batch, EngineStats, Event, Request, Result, TableUpdate

if TYPE_CHECKING:
    from octavo.cache.tier import Parcel


@dataclass(frozen=True, slots=True)
class Usage:
    """Blocks of the pool: total = free + cached + used + pinned. free holds nothing; cached holds a prefix
    that nobody references (evictable); used is referenced by at least one row; pinned by pins alone."""

    total: int
    free: int
    cached: int
    used: int
    pinned: int = 0


@dataclass(frozen=True, slots=True)
class AllocatorParts:
    """What an allocator is built from. num_blocks is the pool's size; max_rows the state table's.

    max_step_tokens: most tokens that one step adds to one row (max_num_batched_tokens); `fits` needs
    it to bound what a window group holds. 0: unknown, a step may be as long as the sequence. host_slots:
    places in host memory, each for one block (0: none, `swap_out` then gives None). max_blocks: the
    most that `resize` may be asked for (0: num_blocks)."""

    groups: tuple[KVGroup, ...]
    num_blocks: int
    max_rows: int
    max_model_len: int
    prefix_caching: bool = True
    max_step_tokens: int = 0
    host_slots: int = 0
    max_blocks: int = 0


class Allocator(Protocol):
    """Block bookkeeping: ids only, no tensors. Calls take rows (int32 arrays over slots).

    Invariant after every call: each block is in exactly one of free / cached / used, and the
    reference count of a block equals the number of table entries that name it.
    """

    def admit(
        self, row: int, tokens: np.ndarray, domain: str, salt: str = "", *, reuse: bool = True, parcel: Parcel | None = None,
        rank: int = 0,
    ) -> int:  # fmt: skip
        """Give `row` to a sequence whose host-known tokens are `tokens` (int32), attach the longest
        cached prefix (full, computed, verified blocks; never the last token) and return its length
        in tokens. `domain` is searched first, then "public". `salt` (RoPE variant, adapter) is part
        of every key. Without `reuse` nothing is looked up (a request that wants prompt logprobs must
        compute its whole prompt). The row must be empty.

        parcel: what `swap_out` gave for the same sequence. If it reaches further than the hit and there is
        room, its content comes back and the answer is its `computed`. It stays valid until `discard`.
        rank: what the row's prefixes are worth when blocks are evicted: 0 normal, 1 more, 2 less."""

    def extend(self, row: int, tokens: np.ndarray) -> None:
        """Append tokens that became known (sampled ones), so that blocks they fill can be published."""

    def reserve(self, rows: np.ndarray, start: np.ndarray, upto: np.ndarray) -> bool:
        """Make positions [start, upto) of every row writable: all or nothing. A shared block that
        would be written is replaced by a copy (see `drain`). False, with nothing changed, if the
        pool cannot give enough even after evicting cached blocks."""

    def commit(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """The step that computes each row up to `computed` tokens has been submitted: publish the
        blocks it fills (later steps may hit them) and take back reserved blocks beyond it."""

    def withdraw(self, rows: np.ndarray, computed: np.ndarray) -> None:
        """The step failed: unpublish blocks of these rows that hold tokens at or past `computed`."""

    def trim(self, rows: np.ndarray, position: np.ndarray) -> None:
        """In window groups, give back blocks that no query at or after `position` can see."""

    def fork(self, parent: int, child: int) -> None:
        """The empty row `child` shares all of `parent`'s blocks and tokens."""

    def release(self, rows: np.ndarray) -> None:
        """Empty these rows; blocks without references become cached or free, at once reusable by
        later work of the same stream. Releasing an empty row does nothing."""

    def swap_out(self, row: int) -> Parcel | None:
        """Release the row as `release` does, and keep what it computed in host memory. None, with nothing
        changed, where host memory has no room: the caller then releases the row and computes again."""

    def discard(self, parcel: Parcel) -> None:
        """Nobody will continue from this parcel (any more). Discarding twice does nothing."""

    def blocks(self, tokens: int) -> int:
        """Blocks that one sequence of that length holds at most, all groups together, nothing shared."""

    def fits(self, tokens: int) -> bool:
        """Whether the pool, if nothing but pins were in it, could hold one sequence of that length."""

    def drain(self) -> tuple[tuple[TableUpdate, ...], tuple[tuple[int, np.ndarray, np.ndarray], ...]]:
        """Table changes and copies since the last call: (KV group, sources, targets) for copy on write, and
        octavo.request's TO_HOST, FROM_HOST or MOVE in place of the group."""

    def table(self, group: int) -> np.ndarray:
        """int32 [max_rows, columns]: the block table; entries that hold no block are -1."""

    def usage(self) -> Usage: ...

    def reset(self) -> None:
        """Forget every cached prefix, every pin and every parcel, in host memory as well. Rows keep their
        blocks, which will not be hit any more; a parcel that is lost counts as none."""

    def evict(self) -> int:
        """Make every cached block free (host memory keeps what it can); how many there were."""

    def pin(self, tokens: np.ndarray, domain: str, salt: str = "", *, leave: int = 0) -> int:
        """Keep the longest cached prefix of these tokens in the pool until `unpin` or `reset`. Returns its
        length; 0, with nothing pinned, if there is none, or if fewer than `leave` blocks would stay unpinned."""

    def unpin(self, tokens: np.ndarray, domain: str, salt: str = "") -> int:
        """Undo `pin`. Returns the length that was pinned, 0 if it was not."""

    def resize(self, num_blocks: int) -> int:
        """Use blocks [0, num_blocks) from now on. Growing: their memory is there. Shrinking: held blocks are
        moved off the tail (see `drain`), whose memory may be taken once those copies are done. Returns
        the number in use then, which is larger than asked for where rows and pins hold more."""

    def memory(self) -> dict[str, Any]:
        """Plain numbers of cache, pins and host memory, for people."""

    def check(self) -> None:
        """Raise AssertionError if an invariant is broken. For tests and the idle loop."""


@dataclass(frozen=True, slots=True)
class SchedulerParts:
    """What a scheduler is built from. hard_blocks: refuse (429) what does not fit now, do not queue.
    clock returns seconds (monotonic); seeds returns a fresh 63-bit seed for an unseeded request; salt
    maps a sequence's length bound to the part of its prefix-cache key that depends on it (the
    variant of a dynamic RoPE). swap_pays(tokens, blocks): whether a preempted sequence that has computed so
    many tokens in so many blocks is better swapped to host memory than recomputed."""

    allocator: Allocator
    limits: Limits
    policy: Literal["fcfs", "priority"]
    max_queued: int  # 0: no bound
    chunked_prefill: bool
    hard_blocks: bool
    clock: Callable[[], float]
    seeds: Callable[[], int]
    salt: Callable[[int], str]
    swap_pays: Callable[[int, int], bool] = lambda tokens, blocks: False


class Scheduler(Protocol):
    """Who runs next. Never sees a tensor. Single-threaded: called by the engine's loop only."""

    def add(self, request: Request) -> None:
        """Queue a request. Raises AdmissionRefused, leaving nothing behind."""

    def abort(self, request_id: str, sample: int | None = None) -> None:
        """End a request, or one of its samples, in any state; unknown ids are ignored. Its events stop at once."""

    def schedule(self) -> Batch | None:
        """The next work order, or None if nothing can run now."""

    def commit(self, batch: Batch, result: Result) -> list[Event]:
        """Take the result of a batch, in the order of submission; results of finished, aborted or
        preempted-and-stale rows are dropped."""

    def fail(self, batch: Batch, message: str) -> list[Event]:
        """The batch will have no result: end its requests with an error, withdraw its blocks."""

    def events(self) -> list[Event]:
        """Drain events that no result produced (a deadline that passed, a queued request that failed)."""

    def stats(self) -> EngineStats: ...

    @property
    def unfinished(self) -> bool:
        """Whether any request is waiting or running."""
