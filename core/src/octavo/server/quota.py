"""Quota: what one tenant may still use: requests and tokens a minute, and requests at a time.

Owns the counts and the 429 that names the limit and says when to come back. Counts what has been
used, never what might be: a request is charged for its prompt when it is admitted and for every
generated token as it comes, so a budget can fall below zero and then takes longer to recover; over
any stretch of time a tenant gets its rate. Must never wait, and never look at a key.
"""

from __future__ import annotations

import math
import time
from collections import Counter
from collections.abc import Callable

from octavo.server.errors import ApiError
from octavo.server.tenant_file import Limits

Clock = Callable[[], float]

_MINUTE = 60.0


class Bucket:
    """A budget that fills at `per_minute` / 60 a second up to `per_minute`, and starts full."""

    def __init__(self, per_minute: int, clock: Clock) -> None:
        self.per_minute = per_minute
        self._clock = clock
        self._level, self._at = float(per_minute), clock()

    @property
    def level(self) -> float:
        """What is left; below zero after more was used than there was."""
        now = self._clock()
        self._level = min(self.per_minute, self._level + (now - self._at) * self.per_minute / _MINUTE)
        self._at = now
        return self._level

    def wait(self, amount: float) -> float:
        """Seconds until `amount` is there, 0 if it is now. What is more than the whole budget needs a full one."""
        missing = min(amount, self.per_minute) - self.level
        return max(missing, 0.0) * _MINUTE / self.per_minute

    def use(self, amount: float) -> None:
        self._level = self.level - amount

    def resize(self, per_minute: int) -> Bucket:
        """A bucket of another rate that has used as much of its budget as this one."""
        other = Bucket(per_minute, self._clock)
        other._level = min(float(per_minute), per_minute - (self.per_minute - self.level))
        return other


class Quota:
    """The running account of one tenant. `refused` counts refusals by the limit's name."""

    def __init__(self, tenant: str, limits: Limits, clock: Clock = time.monotonic) -> None:
        self.tenant = tenant
        self.running = 0
        self.refused: Counter[str] = Counter()
        self._clock = clock
        self._limits = Limits()
        self._requests: Bucket | None = None
        self._tokens: Bucket | None = None
        self.limit(limits)

    def limit(self, limits: Limits) -> None:
        """Take new limits; what has been used stays used."""
        self._requests = self._resized(self._requests, limits.requests_per_minute)
        self._tokens = self._resized(self._tokens, limits.tokens_per_minute)
        self._limits = limits

    def _resized(self, bucket: Bucket | None, per_minute: int | None) -> Bucket | None:
        if per_minute is None:
            return None
        return Bucket(per_minute, self._clock) if bucket is None else bucket.resize(per_minute)

    def enter(self) -> Place:
        """Begin a request. Raises ApiError 429 where the tenant has too many running or sent too many lately."""
        most = self._limits.max_concurrent_requests
        if most is not None and self.running >= most:
            raise self._refuse(
                "max_concurrent_requests", f"{self.running} requests of this key are running, its limit is {most}", 1.0
            )
        if self._requests is not None:
            if wait := self._requests.wait(1):
                raise self._refuse(
                    "requests_per_minute", f"this key may send {self._requests.per_minute} requests a minute", wait
                )
            self._requests.use(1)
        self.running += 1
        return Place(self)

    def admit_prompt(self, tokens: int) -> None:
        """Charge a prompt. Raises ApiError 429, charging nothing, where the token budget has no room for it yet."""
        if self._tokens is None:
            return
        if wait := self._tokens.wait(tokens):
            raise self._refuse("tokens_per_minute", f"this key may use {self._tokens.per_minute} tokens a minute", wait)
        self._tokens.use(tokens)

    def use_tokens(self, tokens: int) -> None:
        """Charge generated tokens."""
        if self._tokens is not None:
            self._tokens.use(tokens)

    def _refuse(self, limit: str, why: str, wait: float) -> ApiError:
        self.refused[limit] += 1
        seconds = max(1, math.ceil(wait))
        return ApiError(
            429,
            f"Limit {limit} reached: {why}. Try again in {seconds} s.",
            param=limit,
            code="rate_limit_exceeded",
            headers={"Retry-After": str(seconds)},
        )


class Place:
    """One running request of a tenant, until `close` or the end of a `with` block."""

    def __init__(self, quota: Quota) -> None:
        self.quota = quota
        self._open = True

    def __enter__(self) -> Place:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def close(self) -> None:
        """Idempotent."""
        if self._open:
            self._open = False
            self.quota.running -= 1
