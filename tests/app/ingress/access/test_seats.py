"""Seats by rank: lower ranks are refused first, and none for ever."""

from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from app.ingress.access.seats import Seats

RANKS = (-1, 0, 2)


def flooded(seats: Seats, rank: int, most: int = 1000) -> int:
    """The number of requests of a rank that find seats, one after the other."""
    found = 0
    while found < most and seats.take():
        if not seats.assign(rank):
            seats.leave(None)
            break
        found += 1
    return found


def test_with_one_rank_all_seats_are_its() -> None:
    seats = Seats(20, (0,))
    assert flooded(seats, 0) == 20 == seats.taken
    assert not seats.take()
    seats.leave(0)
    assert flooded(seats, 0) == 1


def test_without_a_limit_nobody_is_refused() -> None:
    assert flooded(Seats(None, RANKS), -1, most=500) == 500


def test_lower_ranks_are_refused_while_higher_ones_find_seats() -> None:
    seats = Seats(100, RANKS)
    # One seat is the own one of each of the two other ranks.
    assert (flooded(seats, -1), flooded(seats, 0), flooded(seats, 2)) == (78, 11, 11)
    assert seats.taken == 100
    seats.leave(-1)
    assert (flooded(seats, -1), flooded(seats, 0), flooded(seats, 2)) == (0, 0, 1)


def test_every_rank_keeps_a_seat_of_its_own() -> None:
    seats = Seats(100, RANKS)
    assert (flooded(seats, 2), flooded(seats, 0), flooded(seats, -1)) == (98, 1, 1)


@pytest.mark.parametrize("most", [3, 4, 7])
def test_few_seats_are_shared_in_the_same_way(most: int) -> None:
    seats = Seats(most, RANKS)
    assert flooded(seats, 2) == most - 2
    assert (flooded(seats, 0), flooded(seats, -1)) == (1, 1)


def test_a_request_without_a_rank_yet_takes_a_seat() -> None:
    seats = Seats(2, (0,))
    assert (seats.take(), seats.take(), seats.take(), seats.taken) == (True, True, False, 2)
    seats.leave(None)
    assert seats.taken == 1


calls = st.lists(st.tuples(st.sampled_from(RANKS), st.booleans()), max_size=120)


@given(st.integers(3, 40), calls)
def test_in_any_history_own_seats_are_free_and_lower_ranks_are_refused_first(
    most: int, history: list[tuple[int, bool]]
) -> None:
    seats, taken = Seats(most, RANKS), Counter[int]()
    for rank, arrives in history:
        if not arrives:
            if taken[rank]:
                seats.leave(rank)
                taken[rank] -= 1
            continue
        free = {each: _would_seat(seats, each) for each in RANKS}
        assert all(free[each] for each in RANKS if not taken[each]), "a rank without requests has a seat"
        for lower, higher in ((-1, 0), (0, 2)):
            assert free[higher] or not free[lower] or not taken[lower], "a lower rank finds a seat, a higher one none"
        if free[rank]:
            assert seats.take() and seats.assign(rank)
            taken[rank] += 1
        assert seats.taken == taken.total() <= most


def _would_seat(seats: Seats, rank: int) -> bool:
    if not seats.take():
        return False
    if not seats.assign(rank):
        seats.leave(None)
        return False
    seats.leave(rank)
    return True


def of_model(seats: Seats, model: str) -> int:
    """The number of requests of a model that find seats, one after the other."""
    found = 0
    while seats.take():
        if not seats.assign(0, model):
            seats.leave(None)
            break
        found += 1
    return found


@pytest.mark.parametrize(("models", "found"), [(1, (20,)), (2, (18, 2)), (3, (16, 2, 2)), (9, (12, *[1] * 8))])
def test_models_that_take_all_they_can_leave_seats_for_each_other_one(models: int, found: tuple[int, ...]) -> None:
    seats = Seats(20, (0,), models)
    assert tuple(of_model(seats, str(number)) for number in range(models)) == found


def test_a_model_uses_seats_beyond_those_that_others_have_to_find() -> None:
    seats = Seats(20, (0,), 3)
    assert of_model(seats, "a") == 16
    for _ in range(10):
        seats.leave(0, "a")
    assert of_model(seats, "b") == 12 and seats.taken == 18
    assert of_model(seats, "a") == 0 and of_model(seats, "c") == 2


def test_without_a_limit_models_have_all_seats() -> None:
    seats = Seats(None, (0,), models=3)
    assert all(seats.take() and seats.assign(0, "a") for _ in range(100))
