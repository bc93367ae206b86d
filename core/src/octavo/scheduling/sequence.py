"""Sequence: one sample of one request, as the scheduler sees it while it lives.

Owned and mutated by the scheduler alone. Holds token ids and counters, never tensors.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum
from typing import TYPE_CHECKING

import numpy as np

from octavo.request import Request, TokenLogprobs

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
