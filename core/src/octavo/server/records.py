"""The life of one HTTP request, for the log and the metrics.

Owns ids, clocks and counts of a request from arrival to its end, and the one line that says so.
Must never hold or log text of a client: no prompt, no output, no header, no key.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
from dataclasses import dataclass, field

from octavo.server.metrics import Metrics

log = logging.getLogger("octavo.server.requests")

_prefix = secrets.token_hex(8)
_serial = itertools.count(1)


def new_id() -> str:
    """An id of our own, unique over processes; the client's X-Request-Id is only echoed."""
    return f"{_prefix}{next(_serial):08x}"


@dataclass(slots=True, eq=False)
class Record:
    """One generating request. Times are from `time.perf_counter`, in seconds.

    outcome: "ok", "disconnected", or the code of the error that ended it.
    """

    metrics: Metrics
    route: str
    tenant: str
    log_line: bool
    id: str = field(default_factory=new_id)
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    submitted: float | None = None  # when the engine got it
    queued: float = 0.0  # seconds in the engine's queue
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finishes: list[str] = field(default_factory=list)
    outcome: str = "ok"
    _closed: bool = False

    def on_submit(self) -> None:
        self.submitted = time.perf_counter()

    def on_first_token(self) -> None:
        self.first_token = time.perf_counter()
        self.metrics.ttft.observe(self.first_token - self.arrived)

    def on_finish(self, reason: str) -> None:
        self.finishes.append(reason)
        self.metrics.finished[reason] += 1

    def close(self) -> None:
        """Count and log the end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        now = time.perf_counter()
        if self.outcome == "disconnected":
            self.metrics.disconnects += 1
        if self.outcome == "ok" and self.first_token is not None and self.submitted is not None:
            scheduled = self.submitted + self.queued
            self.metrics.e2e.observe(now - self.arrived)
            self.metrics.queue.observe(self.queued)
            self.metrics.prefill.observe(max(self.first_token - scheduled, 0.0))
            self.metrics.decode.observe(now - self.first_token)
            self.metrics.inference.observe(max(now - scheduled, 0.0))
        if self.log_line:
            ttft = "-" if self.first_token is None else f"{self.first_token - self.arrived:.3f}s"
            log.info(
                "%s %s %s finish=%s prompt=%d cached=%d completion=%d ttft=%s total=%.3fs key=%s",
                self.id,
                self.route,
                self.outcome,
                ",".join(dict.fromkeys(self.finishes)) or "-",
                self.prompt_tokens,
                self.cached_tokens,
                self.completion_tokens,
                ttft,
                now - self.arrived,
                self.tenant or "-",
            )
