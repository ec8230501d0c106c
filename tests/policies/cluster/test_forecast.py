"""The forecast of demand at the end of a start."""

import random
from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.cluster.forecast import WINDOW_S, Forecast
from policies.cluster.period import find_period

START_S = 30.0


def observed(demand: Callable[[int], int], until: int, wait_s: float = 0.0) -> Forecast:
    """The forecast after the demand of every second before `until`."""
    forecast = Forecast()
    for now in range(until):
        forecast.observe(float(now), demand(now), START_S, wait_s)
    return forecast


def shortages(demand: Callable[[int], int], until: int, share: float) -> float:
    """The share of seconds whose demand exceeds what was forecast for them one start earlier."""
    forecast, capacity = Forecast(), []
    for now in range(until):
        forecast.observe(float(now), demand(now), START_S)
        capacity.append(demand(now) + forecast.change(share))
    late = range(int(WINDOW_S), until - int(START_S))
    return sum(demand(now + int(START_S)) > capacity[now] for now in late) / len(late)


def noise(now: int) -> int:
    return round(random.Random(now).gauss(1000, 100))


def test_steady_demand_keeps_nothing_in_reserve() -> None:
    assert observed(lambda now: 1000, 300).change(0.99) == 0


@pytest.mark.slow
@pytest.mark.parametrize("share", [0.9, 0.99])
def test_the_forecast_is_exceeded_as_often_as_allowed(share: float) -> None:
    found = shortages(noise, 3000, share)
    assert (1 - share) / 2 < found < (1 - share) * 2


IRREGULAR = (130, 330, 640, 790, 1060, 1420, 1590, 1900, 2080, 2410, 2560, 2900)
"""The beginnings of bursts without a period."""


def bursts(seconds: int) -> Callable[[int], int]:
    """The demand of irregular bursts that last `seconds` each."""
    return lambda now: 3000 if any(begin <= now < begin + seconds for begin in IRREGULAR) else 1000


@pytest.mark.slow
def test_bursts_that_return_are_kept_in_reserve() -> None:
    assert observed(bursts(20), 1150).change(0.99) == 2000
    assert shortages(bursts(20), 3000, 0.99) == 0


def test_high_demand_is_expected_to_fall() -> None:
    def after(last: int) -> int:
        return observed(lambda now: last if now == 900 else noise(now), 901).change(0.99)

    assert after(1300) < after(900) - 250


def test_a_burst_shorter_than_requests_may_wait_needs_no_reserve() -> None:
    assert observed(bursts(4), 1150).change(0.99) == 2000
    assert observed(bursts(4), 1150, wait_s=5.0).change(0.99) == 0


@pytest.mark.parametrize("first", [0, 300], ids=["the rise of a new service", "a burst"])
def test_a_rise_that_has_come_once_is_not_kept_in_reserve(first: int) -> None:
    def once(now: int) -> int:
        return 5000 if first <= now < first + 50 else 1000 if now else 0

    assert max(observed(once, until).change(0.99) for until in range(first + 120, 900, 60)) < 100


def test_a_rise_that_comes_again_soon_is_kept_in_reserve() -> None:
    def twice(now: int) -> int:
        return 5000 if 400 <= now < 410 or 500 <= now < 510 else 1000

    assert observed(twice, 600).change(0.999) > 3000


@pytest.mark.parametrize("until", [120, 180, 240, 300])
def test_a_young_service_has_a_reserve_for_what_returns(until: int) -> None:
    def bursts(now: int) -> int:
        return 3000 if now % 40 < 8 else 1000

    assert observed(bursts, until + 20).change(0.99) > 1500


@pytest.mark.parametrize(("period", "rise"), [(40, 2000), (200, 0)], ids=["within a start", "seldom"])
def test_the_highest_demand_of_the_next_start(period: int, rise: int) -> None:
    forecast = Forecast(max)
    for now in range(5 * period + period // 2):
        forecast.observe(float(now), 3000 if now % period < 8 else 1000, 0.0, START_S)
    assert forecast.change(0.5) == pytest.approx(rise, abs=50)


def test_bursts_are_forgotten_after_the_window() -> None:
    def twice(now: int) -> int:
        return 5000 if 100 <= now < 150 or 400 <= now < 450 else 1000

    end = 150 + int(WINDOW_S + START_S)
    assert [observed(twice, until).change(0.99) > 1000 for until in (300, 500, end - 60, end + 5)] == [
        False,
        True,
        True,
        False,
    ]


def test_before_a_start_has_passed_the_largest_rise_counts() -> None:
    assert observed(lambda now: 100 * now, 20).change(0.99) == 1900
    assert Forecast().change(0.99) == 0


def test_a_rising_demand_is_expected_to_rise_on() -> None:
    assert observed(lambda now: 100 * now, 400).change(0.99) == pytest.approx(100 * START_S, rel=0.1)


def regular(now: int) -> int:
    """Two minutes of much demand in every four, with noise."""
    return round(random.Random(now).gauss(5000 if now % 240 < 120 else 1000, 200))


def test_bursts_that_repeat_are_expected_at_their_time_and_not_between() -> None:
    forecast, found = Forecast(), {}
    for now in range(1801):
        forecast.observe(float(now), regular(now), START_S)
        if now > 1560:
            found[now % 240] = regular(now) + forecast.change(0.99)
    assert forecast.period_s == pytest.approx(240.0, abs=2)
    before, after = 240 - int(START_S), 120 - int(START_S)
    assert min(found[now % 240] for now in range(before + 2, before + 118)) > 4800
    assert max(found[now % 240] for now in range(after + 2, after + 118)) < 2500


def test_what_no_longer_repeats_is_no_period() -> None:
    forecast = Forecast()
    for now in range(4000):
        forecast.observe(float(now), regular(now) if now < 1500 else noise(now), START_S)
        if now == 1499:
            assert forecast.period_s is not None
    assert forecast.period_s is None


def test_the_period_is_the_shortest_of_its_multiples() -> None:
    assert observed(regular, 3000).period_s == pytest.approx(240.0, abs=2)


@pytest.mark.parametrize("demand", [noise, bursts(20), lambda now: 100 * now], ids=["noise", "irregular", "a rise"])
def test_there_is_no_period_where_nothing_repeats(demand: Callable[[int], int]) -> None:
    assert {observed(demand, until).period_s for until in range(300, 3000, 300)} == {None}


def test_of_a_period_of_few_starts_a_multiple_counts() -> None:
    found = observed(lambda now: 5000 if now % 80 < 40 else 1000, 2000).period_s
    assert found == pytest.approx(160.0, abs=2)


def test_two_bursts_are_no_period() -> None:
    forecast, found = Forecast(), set()
    for now in range(900):
        forecast.observe(float(now), 5000 if 400 <= now < 410 or 500 <= now < 510 else 1000, 10.0)
        found.add(forecast.period_s)
    assert found == {None}


def test_what_repeats_within_the_noise_is_no_period() -> None:
    def weak(now: int) -> int:
        return round(random.Random(now).gauss(2270 if now % 240 < 120 else 1730, 200))

    assert {observed(weak, until).period_s for until in (1500, 2500, 3500)} == {None}


@given(st.integers(0, 130), st.integers(1, 50), st.integers(4, 200))
@example(21, 5, 60)
def test_a_past_of_any_length_is_searched(length: int, least: int, most: int) -> None:
    """The coarse steps of a period may all be outside of its bounds."""
    demand = np.arange(length) % 7.0
    found = find_period(demand, demand, least, most)
    assert found == 0 or least <= found <= length // 3
