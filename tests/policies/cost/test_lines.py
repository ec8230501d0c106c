"""Lines through what was observed: what they converge to, what they follow, and what leaves them unmoved."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cost.lines import FASTEST, WINDOW, Evidence, Line, Observed, weighted_median

PRIOR = Line.of(1e9, 0.05)
HALF_LIFE_S = 300.0

Lines = st.builds(Line.of, st.floats(1e5, 1e11), st.floats(0.0, 2.0))
"""None is faster than `FASTEST` allows with `PRIOR`."""


def evidence(*observed: tuple[float, float], at: float = 0.0) -> Evidence:
    """(size, seconds), oldest first, all at one time."""
    found = Evidence(HALF_LIFE_S)
    for size, seconds in observed:
        found.add(Observed(at, size, seconds))
    return found


def on(line: Line, count: int, small: float = 1e6) -> list[tuple[float, float]]:
    """Points of a line, of two sizes in turns."""
    sizes = [small * (1 if n % 2 else 4) for n in range(count)]
    return [(size, line.seconds(size)) for size in sizes]


def alike(one: Line, other: Line) -> bool:
    """True if two lines agree at the observed sizes and beyond."""
    return all(one.seconds(size) == pytest.approx(other.seconds(size), rel=1e-3) for size in (1e6, 4e6, 1e8))


def test_without_evidence_the_prior_holds() -> None:
    assert evidence().line(PRIOR, 0.0) == PRIOR


@given(Lines, st.integers(10, 40))
def test_a_constant_truth_is_found_whatever_was_believed_before(truth: Line, count: int) -> None:
    assert alike(evidence(*on(truth, count)).line(PRIOR, 0.0), truth)


@given(Lines)
def test_the_first_observation_outweighs_the_prior(truth: Line) -> None:
    size = 1e7
    found = evidence((size, max(truth.seconds(size), PRIOR.latency_s + 1e-3))).line(PRIOR, 0.0)
    assert found.seconds(size) == pytest.approx(max(truth.seconds(size), PRIOR.latency_s + 1e-3))


@given(Lines, st.integers(0, 9), st.floats(1e-6, 1e6))
def test_one_outlier_in_ten_does_no_harm(truth: Line, position: int, factor: float) -> None:
    points = on(truth, 10)
    size, seconds = points[position]
    points[position] = (size, seconds * factor)
    found = evidence(*points).line(PRIOR, 0.0)
    assert [found.seconds(s) for s in (1e6, 4e6)] == [pytest.approx(truth.seconds(s), rel=0.05) for s in (1e6, 4e6)]


@given(Lines, Lines)
def test_a_change_is_followed_within_eight_observations(before: Line, after: Line) -> None:
    points = on(before, 2 * WINDOW) + on(after, 8)
    assert alike(evidence(*points).line(PRIOR, 0.0), after)


def test_old_evidence_fades_until_the_prior_holds_again() -> None:
    truth = Line.of(1e6, 0.5)
    found = evidence(*on(truth, 16))
    assert alike(found.line(PRIOR, HALF_LIFE_S), truth)
    assert found.line(PRIOR, 12 * HALF_LIFE_S) == PRIOR


def test_newer_evidence_outweighs_older_that_was_more() -> None:
    slow, fast = Line.of(1e6, 0.05), Line.of(1e8, 0.05)
    found = evidence(*on(slow, 16))
    for size, seconds in on(fast, 3):
        found.add(Observed(5 * HALF_LIFE_S, size, seconds))
    assert alike(found.line(PRIOR, 5 * HALF_LIFE_S), fast)


def test_a_clock_that_is_ahead_makes_nothing_newer_than_new() -> None:
    truth, now = Line.of(1e6, 0.5), 1000.0
    found = evidence(*on(truth, 10), at=now)
    found.add(Observed(now + 100 * HALF_LIFE_S, 1e6, 50.0))
    assert alike(found.line(PRIOR, now), truth)


def test_added_evidence_counts_at_once() -> None:
    found = evidence((1e6, 5.0))
    before = found.line(PRIOR, 0.0)
    found.add(Observed(0.0, 4e6, 50.0))
    assert found.line(PRIOR, 0.0) != before


@given(st.lists(st.tuples(st.integers(0, 10**12), st.floats(0.0, 1e4)), max_size=WINDOW), st.floats(0.0, 1e5))
def test_whatever_was_observed_the_line_rises_and_begins_at_zero_or_above(
    points: list[tuple[int, float]], now: float
) -> None:
    line = evidence(*points).line(PRIOR, now)
    assert line.latency_s >= 0 and line.per_unit_s >= FASTEST * PRIOR.per_unit_s
    assert 0 < line.rate < float("inf")


@given(
    st.lists(st.tuples(st.integers(0, 10**12), st.floats(0.0, 1e4)), max_size=WINDOW),
    st.floats(0.0, 1e5),
    st.floats(1e3, 1e15),
)
def test_whatever_was_observed_no_rate_is_above_its_bound(
    points: list[tuple[int, float]], now: float, fastest: float
) -> None:
    assert evidence(*points).line(PRIOR, now, fastest).rate <= fastest * (1 + 1e-9)


@given(Lines, st.integers(5, 14), st.floats(-0.3, 0.3))
def test_small_sizes_do_not_change_the_rate_between_large_ones(truth: Line, count: int, disturbance_s: float) -> None:
    """Disturbances that rise or fall with the order of the small sizes look like a slope."""
    large = [(size, truth.seconds(size)) for size in (5e8, 1e9)]
    small = [(1e5 * n, truth.seconds(1e5 * n) + disturbance_s * n / count) for n in range(1, count + 1)]
    found = evidence(*large, *small).line(PRIOR, 0.0)
    assert found.per_unit_s == pytest.approx(truth.per_unit_s, rel=1e-6, abs=1e-9)


@given(st.lists(st.tuples(st.floats(-1e6, 1e6), st.floats(0.01, 10.0)), min_size=1))
def test_weighted_median_has_half_of_the_weight_on_either_side(weighted: list[tuple[float, float]]) -> None:
    found, total = weighted_median(weighted), sum(weight for _, weight in weighted)
    assert sum(weight for value, weight in weighted if value < found) <= total / 2 * (1 + 1e-9)
    assert sum(weight for value, weight in weighted if value > found) <= total / 2 * (1 + 1e-9)


def test_a_line_can_be_held_to_a_rate() -> None:
    assert PRIOR.no_faster(1e8) == Line.of(1e8, 0.05)
    assert PRIOR.no_faster(1e10) == PRIOR.no_faster(float("inf")) == PRIOR
