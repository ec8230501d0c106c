"""Latencies in buckets: quantiles, windows, and the sums over ingresses."""

import random
from math import ceil

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.latencies import (
    ERROR,
    SLOT_S,
    WINDOW_S,
    Latencies,
    LatencyWindow,
    ReachedTimes,
    ServiceCounts,
    ServiceTimes,
)
from policies.precedence import DEFAULT_CLASS

seconds = st.floats(1e-5, 1e3)


def latencies(*values: float) -> Latencies:
    made = Latencies()
    for value in values:
        made.add(value)
    return made


@given(st.lists(seconds, min_size=1, max_size=60), st.floats(0.01, 1.0))
def test_a_quantile_is_within_its_error(values: list[float], share: float) -> None:
    exact = sorted(values)[max(0, ceil(share * len(values) - 1e-9) - 1)]
    found = latencies(*values).quantile(share)
    assert found == pytest.approx(exact, rel=ERROR * 1.001)


@given(st.lists(seconds, max_size=40), st.lists(seconds, max_size=40))
def test_counts_of_two_processes_add_up_and_come_apart_again(one: list[float], other: list[float]) -> None:
    both = latencies(*one)
    both.merge(latencies(*other).counts)
    assert both.counts == latencies(*one, *other).counts
    both.subtract(latencies(*other).counts)
    assert both.counts == latencies(*one).counts


def test_the_share_within_a_time() -> None:
    found = latencies(*[0.010] * 98, 1.0, 2.0)
    assert [found.share_within(limit) for limit in (0.001, 0.02, 1.5, 3.0)] == pytest.approx([0.0, 0.98, 0.99, 1.0])
    assert Latencies().share_within(1.0) is None and Latencies().quantile(0.99) is None


def test_times_below_the_shortest_count_as_that() -> None:
    assert latencies(0.0, -1.0, 1e-9).counts == {-318: 3}


def test_a_window_forgets() -> None:
    window = LatencyWindow()
    window.add(1.0, 0.0)
    window.add(0.1, WINDOW_S)
    assert window.latencies(WINDOW_S).total == 2
    assert window.latencies(WINDOW_S + SLOT_S).total == 1
    assert window.latencies(2 * WINDOW_S + 2 * SLOT_S).counts == {}


def test_rounding_errors_of_fractions_do_no_harm() -> None:
    window = LatencyWindow()
    for now, count in ((0.0, 1e17), (2 * SLOT_S, 0.3), (4 * SLOT_S, 0.1)):
        window.add(1.0, now, count)
    assert window.latencies(2 * WINDOW_S).counts == {}


def test_a_window_holds_what_was_added_lately() -> None:
    window, draw, added = LatencyWindow(), random.Random(0), []
    for step in range(3000):
        now = step * 0.7
        value = draw.lognormvariate(-3, 1)
        window.add(value, now)
        added.append((now, value))
        if step % 100 == 0:
            newest = latencies(*(each for at, each in added if at > now - WINDOW_S))
            longest = latencies(*(each for at, each in added if at > now - WINDOW_S - SLOT_S - 0.7))
            assert newest.total <= window.latencies(now).total <= longest.total


def counts(ttft: tuple[float, ...] = (), itl: tuple[float, ...] = ()) -> ServiceCounts:
    return ServiceTimes(latencies(*ttft), latencies(*itl)).counts


def test_ingresses_add_up_and_first_counts_are_of_unknown_times() -> None:
    reached = ReachedTimes()
    reached.take("a", {DEFAULT_CLASS: counts((9.0,) * 5, (9.0,) * 5)}, 0.0)
    reached.take("b", {}, 0.0)
    assert reached.quantiles(0.0) == {}
    reached.take("a", {DEFAULT_CLASS: counts((9.0,) * 5 + (0.5,), (9.0,) * 5)}, 1.0)
    reached.take("b", {DEFAULT_CLASS: counts((0.5,), (0.02, 0.02))}, 1.0)
    found = reached.quantiles(1.0)[DEFAULT_CLASS]
    assert (found.first_tokens, found.gaps) == (2, 2)
    assert found.ttft_p99_s == pytest.approx(0.5, rel=ERROR) and found.itl_p99_s == pytest.approx(0.02, rel=ERROR)


def test_lost_and_repeated_messages_change_nothing() -> None:
    messages = [{DEFAULT_CLASS: counts(itl=(0.02,) * n)} for n in range(6)]
    whole, lossy = ReachedTimes(), ReachedTimes()
    for now, message in enumerate(messages):
        whole.take("a", message, float(now))
    for now in (0, 2, 2, 5):
        lossy.take("a", messages[now], float(now))
    assert whole.quantiles(5.0) == lossy.quantiles(5.0) and whole.quantiles(5.0)[DEFAULT_CLASS].gaps == 5


def test_an_ingress_that_was_silent_for_long_begins_anew() -> None:
    reached = ReachedTimes()
    reached.take("a", {}, 0.0)
    reached.take("a", {DEFAULT_CLASS: counts((1.0,))}, WINDOW_S + 1)
    assert reached.quantiles(WINDOW_S + 1) == {}


def test_classes_are_apart() -> None:
    reached = ReachedTimes()
    reached.take("a", {}, 0.0)
    reached.take("a", {DEFAULT_CLASS: counts((1.0,)), "fast": counts((0.1,))}, 1.0)
    found = {name: times.ttft_p99_s for name, times in reached.quantiles(1.0).items()}
    assert found == {DEFAULT_CLASS: pytest.approx(1.0, rel=ERROR), "fast": pytest.approx(0.1, rel=ERROR)}
