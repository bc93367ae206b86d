"""Admissions: requests on their way into the engine. One with a grammar waits at the door until that is compiled.

Owns those that wait, and what a request that is not taken is told. The loop's steps go on meanwhile.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from concurrent.futures import Future
from typing import Any

from octavo.engine.engine import Engine
from octavo.engine.messages import Refused
from octavo.errors import AdmissionRefused
from octavo.request import Request


class Admissions:
    """refuse: sends a refusal back."""

    def __init__(self, engine: Engine, refuse: Callable[[Refused], None]) -> None:
        self._engine, self._refuse = engine, refuse
        self._waiting: dict[str, tuple[Request, Future[Any], float]] = {}

    @property
    def waiting(self) -> bool:
        return bool(self._waiting)

    def add(self, request: Request) -> None:
        """Into the engine, or to wait for its grammar."""
        grammar, grammars = request.params.grammar, self._engine.grammars
        if grammar is not None and grammars is not None:
            ready = grammars.prepare(grammar)
            if not ready.done():
                self._waiting[request.id] = request, ready, time.monotonic() + grammars.patience
                return
        self._enter(request)

    def abort(self, request_id: str) -> None:
        """A request that waits is forgotten."""
        self._waiting.pop(request_id, None)

    def turn(self) -> None:
        """Let in whose grammar is ready, and turn away whose took too long. Once a step."""
        if not self._waiting:
            return
        now = time.monotonic()
        for request, ready, until in list(self._waiting.values()):
            if ready.done():
                del self._waiting[request.id]
                self._enter(request)
            elif now > until:
                assert self._engine.grammars is not None
                del self._waiting[request.id]
                self._tell(request, self._engine.grammars.late())

    def _enter(self, request: Request) -> None:
        try:
            self._engine.add(request)
        except AdmissionRefused as refusal:
            self._tell(request, refusal)

    def _tell(self, request: Request, refusal: AdmissionRefused) -> None:
        self._refuse(Refused(request.id, refusal.message, refusal.code, refusal.retry_after))
