"""The life of one HTTP request, for the log, the metrics and the traces.

Owns ids, clocks and counts of a request from arrival to its end, and the one line that says so.
Text of a client is kept only where --log-requests-on-error asks for it, and logged only if the request
fails. Must never log a header or a key.
"""

from __future__ import annotations

import itertools
import logging
import secrets
import time
import traceback
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from octavo.server.counts import Counts

log = logging.getLogger("octavo.server.requests")

_prefix = secrets.token_hex(8)
_serial = itertools.count(1)


def new_id() -> str:
    """An id of our own, unique over processes; the client's X-Request-Id is only echoed."""
    return f"{_prefix}{next(_serial):08x}"


@dataclass(slots=True, eq=False)
class Record:
    """One generating request. Times are from `time.perf_counter`, in seconds.

    outcome: "ok", "disconnected", or the code of the error that ended it. prompt: makes the text to log
    if the request fails; None where it must not be logged. at_end: called once with the record, whatever
    the outcome, for those who hold something for the request's time.
    """

    counts: Counts
    route: str
    tenant: str
    log_line: bool
    id: str = field(default_factory=new_id)
    model: str = ""
    arrived: float = field(default_factory=time.perf_counter)
    first_token: float | None = None
    submitted: float | None = None  # when the engine got it
    ended: float | None = None
    queued: float = 0.0  # seconds in the engine's queue
    prompt_tokens: int = 0
    cached_tokens: int = 0
    completion_tokens: int = 0
    finishes: list[str] = field(default_factory=list)
    outcome: str = "ok"
    prompt: Callable[[], str] | None = None
    at_end: list[Callable[[Record], None]] = field(default_factory=list)
    _error: BaseException | None = None
    _closed: bool = False

    def on_submit(self) -> None:
        self.submitted = time.perf_counter()
        self.counts.admission.observe(self.submitted - self.arrived)

    def on_first_token(self) -> None:
        self.first_token = time.perf_counter()
        self.counts.ttft.observe(self.first_token - self.arrived)

    def on_finish(self, reason: str) -> None:
        self.finishes.append(reason)
        self.counts.finished[reason] += 1

    def fail(self, code: str | None, error: BaseException) -> None:
        """The request has ended with `error`, which the client knows by `code`."""
        self.outcome, self._error = code or "error", error

    @property
    def scheduled(self) -> float | None:
        """When the engine gave it its first place in a step."""
        return None if self.submitted is None else self.submitted + self.queued

    def close(self) -> None:
        """Count and log the end. Idempotent."""
        if self._closed:
            return
        self._closed = True
        self.ended = time.perf_counter()
        self._count(self.ended)
        if self.log_line:
            log.info(self._line(self.ended), extra={"request": self.facts()})
        if self._error is not None and self.prompt is not None:
            self._log_failure(self._error, self.prompt)
        for callback in self.at_end:
            try:
                callback(self)
            except Exception:
                log.exception("request %s: what follows its end failed", self.id)

    def _count(self, now: float) -> None:
        if self.outcome == "disconnected":
            self.counts.disconnects += 1
        if self.outcome == "ok" and self.first_token is not None and self.scheduled is not None:
            self.counts.e2e.observe(now - self.arrived)
            self.counts.queue.observe(self.queued)
            self.counts.prefill.observe(max(self.first_token - self.scheduled, 0.0))
            self.counts.decode.observe(now - self.first_token)
            self.counts.inference.observe(max(now - self.scheduled, 0.0))
        share = self.counts.tenant(self.tenant)
        share.requests += 1
        share.failed += self.outcome not in ("ok", "disconnected")
        share.prompt_tokens += self.prompt_tokens
        share.generation_tokens += self.completion_tokens

    def facts(self) -> dict[str, Any]:
        """What a log line and a trace may say: no text of the client."""
        return {
            "id": self.id,
            "route": self.route,
            "model": self.model,
            "outcome": self.outcome,
            "finish": list(dict.fromkeys(self.finishes)),
            "prompt_tokens": self.prompt_tokens,
            "cached_tokens": self.cached_tokens,
            "completion_tokens": self.completion_tokens,
            "admission_seconds": _between(self.arrived, self.submitted),
            "queue_seconds": round(self.queued, 6),
            "prefill_seconds": _between(self.scheduled, self.first_token),
            "ttft_seconds": _between(self.arrived, self.first_token),
            "total_seconds": _between(self.arrived, self.ended),
            "tenant": self.tenant,
        }

    def _line(self, now: float) -> str:
        ttft = "-" if self.first_token is None else f"{self.first_token - self.arrived:.3f}s"
        return (
            f"{self.id} {self.route} {self.outcome} finish={','.join(dict.fromkeys(self.finishes)) or '-'} "
            f"prompt={self.prompt_tokens} cached={self.cached_tokens} completion={self.completion_tokens} "
            f"ttft={ttft} total={now - self.arrived:.3f}s key={self.tenant or '-'} model={self.model or '-'}"
        )

    def _log_failure(self, error: BaseException, prompt: Callable[[], str]) -> None:
        try:
            text = prompt()
        except Exception as wrong:
            text = f"(cannot be shown: {wrong})"
        stack = "".join(traceback.format_exception(error)).rstrip()
        log.error(
            "request %s failed with %s\nprompt: %s\n%s", self.id, self.outcome, text, stack, extra={"request": self.facts()}
        )


def _between(begin: float | None, end: float | None) -> float | None:
    """Seconds, None where one of the two never came."""
    return None if begin is None or end is None else round(end - begin, 6)
