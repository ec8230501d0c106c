"""The costs of pairs: start values, and what reports show."""

import pytest

from policies.cost.hops import FIRST_EXCHANGE, FIRST_HOP, HALF_LIFE_S, NO_HOPS, HopTotals, PairCosts
from policies.cost.steps import HopCosts


def test_before_a_measurement_the_costs_are_the_start_values() -> None:
    costs = PairCosts()
    costs.observe_hops(NO_HOPS, 0.0)
    assert costs.hop(0.0) == HopCosts(FIRST_HOP.latency_s, FIRST_HOP.per_unit_s)
    assert costs.exchange(0.0) == FIRST_EXCHANGE


def test_hops_are_a_line_over_the_tokens_of_a_step() -> None:
    costs = PairCosts()
    for number, tokens in enumerate((10, 400, 20, 300)):
        costs.observe_hops(HopTotals(50, 50 * tokens, 50 * (0.004 + 2e-5 * tokens)), float(number))
    assert costs.hop(4.0).seconds(100) == pytest.approx(0.003, rel=0.02), "one way"


def test_an_exchange_is_a_line_over_the_tokens_given_and_is_forgotten() -> None:
    costs = PairCosts()
    for number in range(4):
        costs.observe_exchange(1000.0 + 500 * number, 5.0 + 1e-3 * (1000 + 500 * number), float(number))
    assert costs.exchange(4.0).seconds(2000) == pytest.approx(7.0, rel=0.02)
    assert costs.exchange(40 * HALF_LIFE_S).seconds(2000) == pytest.approx(FIRST_EXCHANGE.seconds(2000))


def test_the_totals_of_another_pair_begin_anew() -> None:
    assert HopTotals(10, 100, 1.0).since(HopTotals(4, 30, 0.25)) == HopTotals(6, 70, 0.75)
    assert HopTotals(3, 30, 0.5).since(HopTotals(4, 30, 0.25)) == HopTotals(3, 30, 0.5)
