"""Means, quantiles and intervals against numbers worked out by hand or from tables."""

import pytest

from simulator.outcome.statistics import Interval, interval, mean, quantile, student_95


def test_nothing_has_no_mean() -> None:
    with pytest.raises(ValueError, match="no values"):
        mean([])


@pytest.mark.parametrize(("share", "value"), [(0, 1), (0.5, 2.5), (0.99, 3.97), (1, 4)])
def test_quantiles_lie_on_lines_between_neighbours(share: float, value: float) -> None:
    assert quantile([1, 2, 3, 4], share) == pytest.approx(value)


def test_an_interval_is_that_of_students_t() -> None:
    # Mean 6, standard deviation sqrt(10), five values: 2.776 * sqrt(10 / 5).
    assert interval([2, 4, 6, 8, 10]).mean == 6
    assert interval([2, 4, 6, 8, 10]).ci95 == pytest.approx(3.9259, abs=1e-4)


def test_two_values_are_enough_for_an_interval_and_one_is_not() -> None:
    assert interval([1, 3]).ci95 == pytest.approx(12.706)
    assert interval([5]) == Interval(5, None)


@pytest.mark.parametrize(
    ("freedom", "value"), [(1, 12.706), (2, 4.303), (30, 2.042), (31, 2.040), (60, 2.000), (120, 1.980)]
)
def test_students_t_is_that_of_the_tables(freedom: int, value: float) -> None:
    assert student_95(freedom) == pytest.approx(value, abs=6e-4)
