"""Pins that outlive the cache: what an operator pinned stays wanted until it is unpinned.

A reset, or a step that failed, forgets every prefix, because what lies in the pool is then not to be trusted. Owns
which prefixes are wanted and brings each back: a request of the engine's own computes it once more, and then it is pinned
again. One at a time, behind the requests of clients, whose events never show it.
"""

from __future__ import annotations

import logging
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass

import numpy as np

from octavo.cache.pins import pin_id
from octavo.cache.prefix import PUBLIC
from octavo.errors import AdmissionRefused
from octavo.request import Event, Request, SamplingParams

log = logging.getLogger(__name__)

ATTEMPTS = 2
"""How often a pin is computed again before it is left out until the next time that the cache is forgotten: fewer than the
failed steps in a row after which an engine gives itself up."""


@dataclass(slots=True)
class _Lost:
    name: str
    attempts: int = 0


class WantedPins:
    """pin: pins what is cached of a prefix (token ids), and returns how many tokens that were. Called from the
    engine's loop only."""

    def __init__(self, pin: Callable[[np.ndarray], int]) -> None:
        self._pin = pin
        self._wanted: dict[str, np.ndarray] = {}
        self._lost: deque[_Lost] = deque()
        self._running: _Lost | None = None
        self._serial = 0

    def want(self, tokens: np.ndarray) -> None:
        self._wanted[pin_id(tokens, PUBLIC, "")] = tokens

    def let_go(self, tokens: np.ndarray) -> None:
        self._wanted.pop(pin_id(tokens, PUBLIC, ""), None)

    def let_all_go(self) -> None:
        self._wanted.clear()

    def forgotten(self) -> None:
        """The cache has forgotten everything: all that is wanted is to come back."""
        waiting = {lost.name for lost in self._lost} | ({self._running.name} if self._running else set())
        self._lost.extend(_Lost(name) for name in self._wanted if name not in waiting)

    @property
    def returning(self) -> int:
        """Pins that are on their way back."""
        return len(self._lost) + (self._running is not None)

    def order(self, add: Callable[[Request], None], *, idle: bool) -> None:
        """Queue the request of the next lost pin, if none is under way. add: as Scheduler.add. idle: nothing else
        runs or waits, so that what is refused now would be refused for ever."""
        while self._running is None and self._lost:
            lost = self._lost[0]
            tokens = self._wanted.get(lost.name)
            if tokens is None:  # unpinned meanwhile
                self._lost.popleft()
                continue
            self._serial += 1
            params = SamplingParams(max_tokens=1, temperature=0.0, ignore_eos=True)
            try:
                add(Request(id=self._request_id, prompt=tokens.tolist(), params=params, domain=PUBLIC))
            except AdmissionRefused as refusal:
                if refusal.retry_after is not None and not idle:
                    return
                log.error("a pin of %d tokens does not come back: %s", len(tokens), refusal.message)
                self._lost.popleft()
                continue
            self._running = self._lost.popleft()

    @property
    def _request_id(self) -> str:
        return f"octavo.pin.{self._serial}"

    def take(self, events: list[Event]) -> list[Event]:
        """The events without those of a pin's own request, which are dealt with."""
        if self._running is None:
            return events
        mine = self._request_id
        for event in events:
            if event.request_id == mine and event.finish is not None:
                self._finished(event)
        return [event for event in events if event.request_id != mine]

    def _finished(self, event: Event) -> None:
        lost, self._running = self._running, None
        assert lost is not None
        tokens = self._wanted.get(lost.name)
        if tokens is None:
            return
        if event.finish != "error":
            pinned = self._pin(tokens)
            level = logging.INFO if pinned else logging.WARNING  # none: the pool has shrunk meanwhile
            log.log(level, "a pin of %d tokens was computed again: %d of them are pinned", len(tokens), pinned)
            return
        lost.attempts += 1
        if lost.attempts < ATTEMPTS:
            self._lost.append(lost)
        else:
            log.error("a pin of %d tokens does not come back after %d attempts: %s", len(tokens), ATTEMPTS, event.error)
