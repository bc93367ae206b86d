"""A tenant's quotas, by a clock that the test moves."""

from __future__ import annotations

from typing import Any

import pytest
from octavo.server.errors import ApiError
from octavo.server.quota import Bucket, Quota
from octavo.server.tenant_file import Limits


class Clock:
    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


def refused(quota: Quota, call: Any, *args: Any) -> ApiError:
    with pytest.raises(ApiError) as caught:
        call(*args)
    error = caught.value
    assert (error.status, error.code) == (429, "rate_limit_exceeded")
    assert error.param and error.param in error.message and quota.refused[error.param]
    return error


def test_a_bucket_is_full_at_first_and_fills_at_its_rate() -> None:
    clock = Clock()
    bucket = Bucket(60, clock)
    assert bucket.level == 60
    bucket.use(60)
    assert (bucket.level, bucket.wait(1)) == (0, 1.0)
    clock.now += 30
    assert bucket.level == 30
    clock.now += 3600
    assert bucket.level == 60, "it never holds more than a minute's worth"


def test_requests_a_minute() -> None:
    clock = Clock()
    quota = Quota("a", Limits(requests_per_minute=6), clock)
    for _ in range(6):
        quota.enter().close()
    error = refused(quota, quota.enter)
    assert error.param == "requests_per_minute" and error.headers["Retry-After"] == "10"
    clock.now += 9.9
    assert refused(quota, quota.enter).headers["Retry-After"] == "1"
    clock.now += 0.2
    quota.enter()


def test_concurrent_requests_count_until_they_close_and_once() -> None:
    quota = Quota("a", Limits(max_concurrent_requests=2, requests_per_minute=3), Clock())
    first, _ = quota.enter(), quota.enter()
    assert refused(quota, quota.enter).param == "max_concurrent_requests"
    first.close()
    first.close()
    assert quota.running == 1
    quota.enter()  # the refused one above took nothing of the three a minute
    assert quota.running == 2


def test_tokens_are_charged_as_they_are_used_and_a_debt_is_paid_off_in_time() -> None:
    clock = Clock()
    quota = Quota("a", Limits(tokens_per_minute=600), clock)
    quota.admit_prompt(500)
    quota.use_tokens(700)  # a long answer: 600 below zero
    error = refused(quota, quota.admit_prompt, 100)
    assert error.param == "tokens_per_minute" and error.headers["Retry-After"] == "70"
    clock.now += 71
    quota.admit_prompt(100)


def test_a_prompt_larger_than_the_whole_budget_waits_for_a_full_one() -> None:
    clock = Clock()
    quota = Quota("a", Limits(tokens_per_minute=60), clock)
    quota.admit_prompt(150)
    assert refused(quota, quota.admit_prompt, 150).headers["Retry-After"] == "150"
    clock.now += 150
    quota.admit_prompt(150)


def test_over_any_long_time_a_tenant_gets_its_rate_and_no_more() -> None:
    clock = Clock()
    quota = Quota("a", Limits(tokens_per_minute=1000), clock)
    used = 0
    for _ in range(6000):
        clock.now += 0.1
        try:
            quota.admit_prompt(50)
        except ApiError:
            continue
        quota.use_tokens(70)
        used += 120
    assert used == pytest.approx(1000 * 10 + 1000, rel=0.02)  # ten minutes, and the full bucket of the start


def test_without_limits_nothing_is_refused() -> None:
    quota = Quota("a", Limits(), Clock())
    for _ in range(1000):
        quota.enter()
        quota.admit_prompt(10**6)
