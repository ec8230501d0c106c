"""Rates over the last looks."""

from app.cli.rates import WINDOW_S, Looks
from app.client.documents import StateDocument, parse_state
from tests.app.client.sample import replica, request, state


def seen(*requests: tuple[str, int, int]) -> StateDocument:
    return parse_state(state(replica("a", *(request(id, tokens, hop=hop) for id, tokens, hop in requests))))


def test_one_look_says_nothing() -> None:
    assert Looks().add(5.0, seen(("r", 10, 0))) is None


def test_what_came_left_grew_and_moved_is_counted_per_second() -> None:
    looks = Looks()
    looks.add(0.0, seen(("stays", 100, 0), ("goes", 50, 0)))
    looks.add(1.0, seen(("stays", 120, 1), ("new", 70, 0), ("newer", 30, 0)))
    rates = looks.add(2.0, seen(("stays", 130, 1), ("new", 80, 2), ("newer", 30, 0)))
    assert rates is not None
    assert (rates.over_s, rates.came, rates.left, rates.tokens, rates.moved) == (2.0, 1.0, 0.5, 20.0, 1.5)


def test_a_preempted_request_that_starts_anew_takes_nothing_back() -> None:
    looks = Looks()
    looks.add(0.0, seen(("r", 100, 0)))
    assert (rates := looks.add(1.0, seen(("r", 20, 0)))) is not None and rates.tokens == 0


def test_what_is_older_than_the_window_is_forgotten() -> None:
    looks = Looks()
    looks.add(0.0, seen())
    looks.add(1.0, seen(("r", 1, 0)))
    rates = looks.add(1.0 + WINDOW_S, seen(("r", 1, 0)))
    assert rates is not None and (rates.over_s, rates.came) == (WINDOW_S, 0.0)
