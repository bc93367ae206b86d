"""Generation: the prompts of one HTTP request, run side by side as one thing.

Owns the calls of `AsyncLLM.generate` that belong to a request: all are admitted or none runs, and
closing ends them all. Knows nothing of HTTP or of the shape of answers.
"""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Sequence
from dataclasses import dataclass
from typing import TypeVar, cast

from octavo.engine.async_llm import AsyncLLM
from octavo.request import SamplingParams
from octavo.server.errors import Cut, DeadlineExceeded, GenerationFailed
from octavo.server.records import Record
from octavo.server.tenants import Principal
from octavo.text.output import RequestOutput

T = TypeVar("T")

_QUEUE = 16


@dataclass(frozen=True, slots=True)
class Job:
    """One prompt: its token ids, the text it came from (None for ids or messages), and how to continue it."""

    ids: list[int]
    text: str | None
    params: SamplingParams


class Generation:
    """`await start()`, then either `async for job, output in generation.deltas()` (made with delta=True) or
    `await last()` (made without).

    start returns once every prompt is admitted and has its first output; it raises what the first
    failing prompt raised (RequestError, AdmissionRefused, EngineDead), with the others aborted by close.
    A consumer that is slow gets fewer, larger deltas. domain: the caller's, or narrower; deadline: seconds
    from now. Generated tokens are charged to the caller as they come, or all at the end without delta.
    """

    def __init__(
        self,
        llm: AsyncLLM,
        jobs: Sequence[Job],
        record: Record,
        *,
        caller: Principal,
        domain: str,
        priority: int = 0,
        deadline: float | None = None,
        delta: bool,
    ) -> None:
        self.jobs = list(jobs)
        self._record, self._quota, self._deadline = record, caller.quota, deadline
        self._streams = [
            cast(
                AsyncGenerator[RequestOutput, None],
                llm.generate(
                    {"prompt": job.text, "prompt_token_ids": job.ids},
                    job.params,
                    record.id,
                    priority=priority,
                    tenant=caller.tenant,
                    weight=caller.weight,
                    domain=domain,
                    deadline=deadline,
                    delta=delta,
                ),
            )
            for job in jobs
        ]
        self._firsts: list[RequestOutput] = []
        self._unpaid: list[RequestOutput] = []  # what `last` has seen and nobody has been charged for
        self._pumps: list[asyncio.Task[None]] = []
        record.counts.in_flight += 1
        self._open = True

    async def start(self) -> None:
        self._record.on_submit()
        if len(self._streams) == 1:
            self._firsts = [await anext(self._streams[0])]
        else:
            self._firsts = await _all([anext(stream) for stream in self._streams])
        self._record.on_first_token()
        for job, output in zip(self.jobs, self._firsts, strict=True):
            self._record.prompt_tokens += len(job.ids)
            self._record.cached_tokens += output.num_cached_tokens
            self._record.queued = max(self._record.queued, output.queue_seconds)

    async def deltas(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        """(index of the job, output) as they come, the first ones included."""
        async for i, output in self._outputs():
            yield i, self._account(output)
            self._record.counts.delivery.observe(time.perf_counter() - output.sent)  # the consumer has written it

    async def _outputs(self) -> AsyncIterator[tuple[int, RequestOutput]]:
        for i, output in enumerate(self._firsts):
            yield i, output
        if len(self._streams) == 1:
            async for output in self._streams[0]:
                yield 0, output
            return
        queue: asyncio.Queue[tuple[int, RequestOutput | Exception | None]] = asyncio.Queue(_QUEUE)

        async def pump(i: int) -> None:
            try:
                async for output in self._streams[i]:
                    await queue.put((i, output))
                await queue.put((i, None))
            except Exception as exc:
                await queue.put((i, exc))

        self._pumps = [asyncio.create_task(pump(i)) for i in range(len(self._streams))]
        left = len(self._pumps)
        while left:
            i, item = await queue.get()
            if isinstance(item, Exception):
                raise item
            if item is None:
                left -= 1
            else:
                yield i, item

    async def last(self) -> list[RequestOutput]:
        """The final output of every job, in order."""

        self._unpaid = list(self._firsts)

        async def end(i: int) -> RequestOutput:
            async for output in self._streams[i]:
                self._unpaid[i] = output
            return self._unpaid[i]

        outputs = await _all([end(i) for i in range(len(self._streams))])
        self._unpaid = []
        return [self._account(output) for output in outputs]

    def _account(self, output: RequestOutput) -> RequestOutput:
        """Count what is new. Raises GenerationFailed, DeadlineExceeded or Cut where a sample did not end by itself."""
        for sample in output.outputs:
            self._record.completion_tokens += len(sample.token_ids)
            self._quota.use_tokens(len(sample.token_ids))
            if sample.finish_reason is not None:
                self._record.on_finish(sample.finish_reason)
            if sample.finish_reason == "error":
                raise GenerationFailed(output.error or "The generation failed.")
            if sample.finish_reason == "abort" and self._deadline is not None:
                raise DeadlineExceeded  # nothing else makes the engine abort a request that has one
            if sample.finish_reason == "abort":
                raise Cut(output.error or "The request was ended before it was complete.")
        return output

    async def close(self) -> None:
        """Abort whatever still runs. Idempotent."""
        if not self._open:
            return
        self._open = False
        self._record.counts.in_flight -= 1
        unpaid = sum(len(sample.token_ids) for output in self._unpaid for sample in output.outputs)
        self._record.completion_tokens += unpaid
        self._quota.use_tokens(unpaid)
        for pump in self._pumps:
            pump.cancel()
        await asyncio.gather(*self._pumps, return_exceptions=True)
        for stream in self._streams:
            await stream.aclose()


async def _all(work: Sequence[Awaitable[T]]) -> list[T]:
    """The results in order. The first failure is raised, once the others have been cancelled."""
    tasks = [asyncio.ensure_future(item) for item in work]
    try:
        return await asyncio.gather(*tasks)
    finally:
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)
