"""Rates over successive states."""

from app.cli.top import RATE_WINDOW_S, RateWindow
from app.client.documents import StateDocument, parse_state
from tests.app.client.sample import replica, request, state


def seen(*requests: tuple[str, int, int]) -> StateDocument:
    return parse_state(state(replica("a", *(request(id, tokens, hop=hop) for id, tokens, hop in requests))))


def test_one_state_has_no_rates() -> None:
    assert RateWindow().add(5.0, seen(("r", 10, 0))) is None


def test_rates_per_second() -> None:
    window = RateWindow()
    window.add(0.0, seen(("stays", 100, 0), ("goes", 50, 0)))
    window.add(1.0, seen(("stays", 120, 1), ("new", 70, 0), ("newer", 30, 0)))
    rates = window.add(2.0, seen(("stays", 130, 1), ("new", 80, 2), ("newer", 30, 0)))
    assert rates is not None
    assert (rates.over_s, rates.came, rates.left, rates.tokens, rates.moved) == (2.0, 1.0, 0.5, 20.0, 1.5)


def test_a_preempted_request_does_not_count_negatively() -> None:
    window = RateWindow()
    window.add(0.0, seen(("r", 100, 0)))
    assert (rates := window.add(1.0, seen(("r", 20, 0)))) is not None and rates.tokens == 0


def test_states_older_than_the_window_are_dropped() -> None:
    window = RateWindow()
    window.add(0.0, seen())
    window.add(1.0, seen(("r", 1, 0)))
    rates = window.add(1.0 + RATE_WINDOW_S, seen(("r", 1, 0)))
    assert rates is not None and (rates.over_s, rates.came) == (RATE_WINDOW_S, 0.0)
