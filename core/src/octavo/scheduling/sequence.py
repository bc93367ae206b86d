"""Sequence: one sample of one request, as the scheduler sees it while it lives.

Owned and mutated by the scheduler alone. Knows which token ends it. Holds token ids and counters, never tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from octavo.request import Admission, Event, Request, TokenLogprobs

if TYPE_CHECKING:
    from octavo.cache.tier import Parcel


class State(Enum):
    HELD = 0  # a sibling (n > 1) that waits to be forked from the sequence that computes the prompt
    WAITING = 1  # in the queue: new, preempted, or a sibling that found no slot to fork into
    RUNNING = 2  # holds a slot
    FINISHED = 3


@dataclass(slots=True, eq=False)
class Sequence:
    """key orders the queue and the running set: smaller runs first and is preempted last.

    `output` holds tokens whose results are back. `in_flight` counts sampled tokens whose results
    are not: they exist on the device only. `limit` is prompt + max_tokens.
    """

    request: Request
    sample: int
    seed: int
    key: tuple[float, int, int]
    tenant: int  # index of its share
    prompt: np.ndarray  # int32, shared by siblings
    limit: int
    deadline: float | None = None
    arrived: float = 0.0  # by the scheduler's clock
    queued: float = 0.0  # seconds from arrival to the first admission
    output: list[int] = field(default_factory=list)
    state: State = State.HELD
    slot: int = -1
    in_flight: int = 0
    charged: int = 0  # tokens that its tenant has been charged for, as of the last preemption
    extended: int = 0  # tokens that the allocator has been told of
    cached: int = -1  # prompt tokens taken from the prefix cache at first admission; -1 before it
    announced: bool = False  # whether an event has carried `cached`
    siblings: list[Sequence] = field(default_factory=list)  # samples that wait to be forked from this one
    prompt_logprobs: list[TokenLogprobs | None] | None = None
    parcel: Parcel | None = None  # what it had computed when it was swapped out; only while it waits
    ends: dict[int, int | None] = field(init=False)  # tokens that end it, with the stop_reason that they give
    least: int = field(init=False)  # tokens before which none of them does

    def __post_init__(self) -> None:
        params = self.request.params
        self.ends = {token: token for token in params.stop_token_ids or ()}
        if not params.ignore_eos or params.grammar is not None:  # a grammar's own end is one, and the sampler sees to the rest
            self.ends |= dict.fromkeys(self.request.eos_token_ids)
        self.least = 0 if params.grammar is not None else params.min_tokens

    @property
    def tokens(self) -> np.ndarray:
        """int32: every token known to the host."""
        return np.concatenate([self.prompt, np.asarray(self.output, np.int32)]) if self.output else self.prompt

    @property
    def known(self) -> int:
        return len(self.prompt) + len(self.output)

    def keep_prompt_logprobs(self, position: int, values: list[TokenLogprobs]) -> None:
        """Take the values of prompt positions from `position` on (a recomputed chunk overwrites itself)."""
        if self.prompt_logprobs is None:
            self.prompt_logprobs = [None]
        self.prompt_logprobs[position : position + len(values)] = values

    def append(self, tokens: list[int], logprobs: list[TokenLogprobs] | None) -> Event:
        """Take sampled tokens up to the one that ends the sequence, drop what comes after it, and tell of them.
        Runs for every row of every step."""
        output, room = self.output, self.limit - len(self.prompt)
        finish, reason, taken = None, None, 0
        for token in tokens:
            output.append(token)
            taken += 1
            if token in self.ends and len(output) >= self.least:
                finish, reason = "stop", self.ends[token]
                break
            if len(output) >= room:
                finish = "length"
                break
        event = self.event(tokens if taken == len(tokens) else tokens[:taken])
        if finish is not None:
            event.finish, event.stop_reason = finish, reason
        if logprobs:
            event.logprobs = logprobs[:taken]
        return event

    def event(self, tokens: list[int] | None = None) -> Event:
        """News of this sequence; the first one says how it began."""
        event = Event(self.request.id, self.sample, [] if tokens is None else tokens)
        if not self.announced:
            self.announced = True
            event.cached_tokens = max(self.cached, 0)
            event.queue_seconds = self.queued
            event.prompt_logprobs = self.prompt_logprobs
            if len(self.prompt) == 1 and self.request.params.prompt_logprobs is not None:
                event.prompt_logprobs = [None]  # nothing comes before the only token
        return event

    def admission(self, computed: int) -> Admission:
        """What the runner has to know of it. computed: tokens whose K and V are there before the step that admits it."""
        return Admission(
            slot=self.slot,
            tokens=self.tokens,
            num_prompt=len(self.prompt),
            params=self.request.params,
            seed=self.seed,
            eos_token_ids=self.request.eos_token_ids,
            rope_tokens=self.limit,
            computed=computed,
        )
