"""Rates and concurrency of one key: admissions, waiting times, and refusals without effect."""

import copy
import math

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from app.ingress.access.limits import MINUTE_S, Bucket, Exceeded, KeyLimits, Meter

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
RATES = st.integers(1, 1_000_000)
STEPS = st.lists(st.tuples(st.floats(0, 100), st.floats(0, 1)), max_size=30)
"""Per step: seconds since the last one, and the amount as a share of a minute's worth."""
START = st.floats(0, 1e9)


def metered(now: float = 0.0, **limits: int) -> Meter:
    meter = Meter()
    meter.limit(KeyLimits(**limits), now)
    return meter


@unhurried
@given(RATES, STEPS, START)
def test_any_period_allows_its_rate_and_a_minutes_worth_at_once(
    rate: int, steps: list[tuple[float, float]], now: float
) -> None:
    bucket, taken = Bucket.full(rate, now), list[tuple[float, float]]()
    for pause_s, share in steps:
        now += pause_s
        if not bucket.wait_s(share * rate, now):
            bucket.add(-share * rate, now)
            taken.append((now, share * rate))
    for first, (begin, _) in enumerate(taken):
        for last in range(first, len(taken)):
            most = rate + (taken[last][0] - begin) * rate / MINUTE_S
            assert sum(amount for _, amount in taken[first : last + 1]) <= most * (1 + 1e-6) + 1e-3


@unhurried
@given(RATES, STEPS, START, st.floats(0, 3))
def test_the_waiting_time_suffices_and_is_needed(
    rate: int, steps: list[tuple[float, float]], now: float, share: float
) -> None:
    bucket, amount = Bucket.full(rate, now), share * rate
    for pause_s, taken in steps:
        now += pause_s
        bucket.add(-taken * rate, now)
    if not (wait_s := bucket.wait_s(amount, now)):
        assert bucket.level >= min(amount, rate) - 1e-3
        return
    assert copy.copy(bucket).wait_s(amount, now + math.ceil(wait_s)) == 0
    if wait_s > 0.1:
        assert bucket.wait_s(amount, now + wait_s - 0.1) == pytest.approx(0.1, rel=1e-2, abs=1e-3)


@unhurried
@given(RATES, st.lists(st.tuples(st.floats(0, 100), st.floats(-3, 3)), max_size=30))
def test_a_bucket_never_holds_more_than_a_minutes_worth(rate: int, steps: list[tuple[float, float]]) -> None:
    bucket, now = Bucket.full(rate, 0.0), 0.0
    for pause_s, share in steps:
        now += pause_s
        bucket.add(share * rate, now)
        assert bucket.level <= rate


@unhurried
@given(RATES, RATES, st.floats(0, 2), st.floats(0, 30))
def test_a_new_rate_keeps_the_amount_used(rate: int, other: int, share: float, age_s: float) -> None:
    bucket = Bucket.full(rate, 0.0)
    bucket.add(-share * rate, 0.0)
    now = min(age_s, share * MINUTE_S)
    used = rate * (share - now / MINUTE_S)
    assert bucket.resized(other, now).level == pytest.approx(other - used, rel=1e-6, abs=1e-3)


def test_a_clock_that_stops_or_goes_back_adds_nothing() -> None:
    bucket = Bucket.full(60, 100.0)
    bucket.add(-60, 100.0)
    assert bucket.wait_s(1, 100.0) == bucket.wait_s(1, 90.0) == 1.0
    assert bucket.wait_s(1, 101.0) == 0.0


def test_more_than_a_minutes_worth_needs_a_full_bucket_and_is_charged_whole() -> None:
    meter = metered(tokens_per_minute=600)
    assert meter.charge(10, 0.0) is None
    assert meter.charge(5000, 0.0) == Exceeded("600 tokens per minute", 1.0)
    assert meter.charge(5000, 1.0) is None
    assert meter.charge(1, 1.0) == Exceeded("600 tokens per minute", 440.1)


@pytest.mark.parametrize(
    ("charged", "used", "wait_s"), [(100, 40, 4.0), (100, 100, 10.0), (100, 700, 70.0)], ids=["less", "as much", "more"]
)
def test_a_charge_is_settled_to_the_usage(charged: int, used: int, wait_s: float) -> None:
    meter = metered(tokens_per_minute=600)
    assert meter.charge(charged, 0.0) is None
    meter.settle(charged, used, 0.0)
    assert meter.charge(600, 0.0) == Exceeded("600 tokens per minute", wait_s)


@unhurried
@given(st.integers(1, 5), st.lists(st.booleans(), max_size=40))
def test_concurrency_never_exceeds_its_limit(most: int, begins: list[bool]) -> None:
    meter, running = metered(concurrent_requests=most), 0
    for begin in begins:
        if begin:
            refused = meter.begin(0.0)
            assert (refused is None) == (running < most)
            running += refused is None
        elif running:
            meter.end()
            running -= 1
        assert meter.running == running <= most


@pytest.mark.parametrize(
    ("limits", "refusal"),
    [
        ({"concurrent_requests": 1, "requests_per_minute": 9}, Exceeded("1 concurrent requests")),
        ({"concurrent_requests": 9, "requests_per_minute": 1}, Exceeded("1 requests per minute", 60.0)),
    ],
    ids=["at a time", "per minute"],
)
def test_a_refusal_counts_nothing(limits: dict[str, int], refusal: Exceeded) -> None:
    meter = metered(**limits)
    assert meter.begin(0.0) is None
    before = copy.deepcopy(meter)
    assert meter.begin(0.0) == refusal
    assert meter == before


def test_without_limits_every_request_is_allowed() -> None:
    meter = metered()
    assert all(meter.begin(0.0) is None and meter.charge(10**9, 0.0) is None for _ in range(1000))


def test_new_limits_keep_usage_and_running_requests() -> None:
    meter = metered(requests_per_minute=10, concurrent_requests=9)
    for _ in range(4):
        assert meter.begin(0.0) is None
    meter.limit(KeyLimits(requests_per_minute=4, concurrent_requests=9), 0.0)
    assert meter.begin(0.0) == Exceeded("4 requests per minute", 15.0)
    meter.limit(KeyLimits(concurrent_requests=4), 0.0)
    assert meter.begin(0.0) == Exceeded("4 concurrent requests")
