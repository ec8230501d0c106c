"""The stays of a request on its replicas, as events tell them."""

import pytest

from app.ingress.journey import By, End, Journey, Stay
from policies.model import ReplicaId

A, B = ReplicaId("a"), ReplicaId("b")
S = 1_000_000_000


@pytest.fixture
def told() -> list[Stay]:
    return []


@pytest.fixture
def journey(told: list[Stay]) -> Journey:
    return Journey(told.append)


def test_a_stay_ends_with_the_newest_token_of_a_whole_answer(journey: Journey, told: list[Stay]) -> None:
    journey.hosted(A, 0, By.FIRST, 0, now=1 * S)
    journey.took(1, now=3 * S)
    journey.took(3, now=4 * S)
    assert told == []
    journey.closed("length", now=9 * S)
    assert told == [Stay(A, 0, By.FIRST, 0, 1 * S, None, 3, 3 * S, None, 4 * S, "length")]


def test_a_move_ends_one_stay_and_begins_another(journey: Journey, told: list[Stay]) -> None:
    journey.hosted(A, 0, By.FIRST, 0, now=1 * S)
    journey.took(2, now=2 * S)
    journey.hosted(B, 1, By.MIGRATION, 2, now=3 * S)
    journey.took(2, now=4 * S)
    journey.took(5, now=6 * S)
    journey.closed(None, now=7 * S)
    assert told == [
        Stay(A, 0, By.FIRST, 0, 1 * S, None, 2, 2 * S, None, 3 * S, End.MOVED),
        Stay(B, 1, By.MIGRATION, 2, 3 * S, A, 3, 6 * S, 4.0, 7 * S, End.CLOSED),
    ]


def test_a_replica_that_refuses_was_not_lived_on(journey: Journey, told: list[Stay]) -> None:
    journey.hosted(A, 0, By.FIRST, 0, now=1 * S)
    journey.lost("full", submitted=False, now=2 * S)
    journey.hosted(B, 0, By.FIRST, 0, now=3 * S)
    journey.closed(None, now=4 * S)
    assert [(stay.replica, stay.end, stay.reason, stay.before) for stay in told] == [
        (A, End.REFUSED, "full", None),
        (B, End.CLOSED, None, None),
    ]


@pytest.mark.parametrize(("submitted", "tokens"), [(True, 0), (False, 1)])
def test_a_replica_that_had_the_request_loses_it(
    journey: Journey, told: list[Stay], submitted: bool, tokens: int
) -> None:
    """Whoever sends tokens has it, also before it could say so."""
    journey.hosted(A, 0, By.FIRST, 0, now=1 * S)
    journey.took(tokens, now=2 * S)
    journey.lost("it died", submitted, now=3 * S)
    journey.hosted(B, 1, By.RESUBMISSION, tokens, now=4 * S)
    journey.closed(None, now=5 * S)
    assert (told[0].end, told[0].reason, told[0].ended, told[1].before) == (End.LOST, "it died", 3 * S, A)


def test_what_comes_between_two_stays_is_nobodys(journey: Journey, told: list[Stay]) -> None:
    journey.took(1, now=1 * S)
    journey.lost("nobody had it", submitted=True, now=2 * S)
    journey.closed(None, now=3 * S)
    assert told == []


def test_a_clock_that_is_put_back_makes_no_time_negative(journey: Journey, told: list[Stay]) -> None:
    journey.hosted(A, 0, By.FIRST, 0, now=5 * S)
    journey.took(1, now=4 * S)
    journey.hosted(B, 1, By.MIGRATION, 1, now=3 * S)
    journey.took(2, now=2 * S)
    journey.closed("stop", now=1 * S)
    assert all(stay.began <= stay.ended for stay in told)
    assert told[1].pause_s == 0
