"""Gate: which requests may queue at all.

Owns the bound of the queue and, under a hard limit of blocks, what live sequences were promised of them.
Every refusal says whether trying again can help. Changes nothing when it refuses.
"""

from __future__ import annotations

from octavo.errors import AdmissionRefused
from octavo.interfaces import SchedulerParts
from octavo.request import Request
from octavo.scheduling.policies import Queue


class Gate:
    """check, then admit; release when a sequence ends."""

    def __init__(self, parts: SchedulerParts, queue: Queue) -> None:
        self._parts, self._queue = parts, queue
        self._promised = 0  # blocks that live sequences may come to hold (kept under a hard limit only)

    def check(self, request: Request, tenant: int, limit: int, samples: int) -> None:
        """limit: tokens of one sample, prompt included. Raises AdmissionRefused."""
        self._refuse_impossible(request, limit)
        self._refuse_over_queue(request, tenant, samples)
        self._refuse_over_hard_limit(self._promise(limit) * samples)

    def admit(self, limit: int, samples: int) -> None:
        self._promised += self._promise(limit) * samples

    def release(self, limit: int) -> None:
        """One sequence has ended."""
        self._promised -= self._promise(limit)

    def _refuse_impossible(self, request: Request, limit: int) -> None:
        if not self._parts.allocator.fits(limit):
            usage = self._parts.allocator.usage()
            raise AdmissionRefused(
                f"prompt ({len(request.prompt)}) plus max_tokens ({limit - len(request.prompt)}) is {limit} tokens, more than the "
                f"KV cache of {usage.total} blocks can ever hold: lower max_tokens, or start with more KV cache",
                code="too_large",
            )
        if not self._parts.chunked_prefill and limit > self._parts.limits.max_num_batched_tokens:
            raise AdmissionRefused(
                f"prompt plus max_tokens is {limit} tokens; without chunked prefill a step must take all of them at once after a "
                f"preemption, and takes at most {self._parts.limits.max_num_batched_tokens}: raise max_num_batched_tokens or enable "
                "chunked prefill",
                code="too_large",
            )

    def _refuse_over_queue(self, request: Request, tenant: int, samples: int) -> None:
        """The queue is bounded. Past the bound only a tenant that holds less than its share of it may still
        queue, so that nobody can fill the queue for everybody else; all shares together are the bound again."""
        most = self._parts.max_queued
        if not most or len(self._queue) + samples <= most:
            return
        mine = self._queue.waiting(tenant)
        if mine + samples > self._queue.share(tenant, request.weight, most):
            raise AdmissionRefused(
                f"{len(self._queue)} requests are waiting ({mine} of them this tenant's), the limit is {most}: try again later",
                code="queue_full",
                retry_after=1.0,
            )

    def _promise(self, limit: int) -> int:
        return self._parts.allocator.blocks(limit) if self._parts.hard_blocks else 0

    def _refuse_over_hard_limit(self, blocks: int) -> None:
        usage = self._parts.allocator.usage()
        total = usage.total - usage.pinned
        if self._parts.hard_blocks and self._promised + blocks > total:
            raise AdmissionRefused(
                f"of the hard limit of {total} KV blocks, {self._promised} are promised to running requests and this one may "
                f"need {blocks}: try again later, or lower max_tokens or n",
                code="no_capacity",
                retry_after=1.0,
            )
