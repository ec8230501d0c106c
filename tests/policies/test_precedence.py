"""Service classes: turns, the bound on overtaking that follows from them, and ranks of unknown classes."""

from collections.abc import Iterator
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.precedence import DEFAULT_CLASS, NO_CLASSES, Precedence, ServiceClass, ServiceClasses

OVERTAKE_S = 4.0
RANKS = {"batch": -2, "default": 0, "chat": 1, "voice": 3}
CLASSES = ServiceClasses({name: ServiceClass(rank) for name, rank in RANKS.items()}, OVERTAKE_S)

precedences = st.builds(Precedence, st.sampled_from(list(RANKS)), st.integers(0, 40).map(float))


def test_a_later_request_of_a_higher_rank_comes_first_within_the_bound() -> None:
    waiting = Precedence("batch", 10.0)
    assert CLASSES.turn(Precedence("chat", 21.9)) < CLASSES.turn(waiting) < CLASSES.turn(Precedence("chat", 22.1))


def test_of_one_class_the_earlier_request_comes_first() -> None:
    assert CLASSES.turn(Precedence("chat", 1.0)) < CLASSES.turn(Precedence("chat", 1.5))


def test_without_classes_there_are_no_turns() -> None:
    assert NO_CLASSES.turn(Precedence("chat", 5.0)) == 0.0
    assert NO_CLASSES.priority(Precedence("chat", 5.0)) is None
    assert (NO_CLASSES.names, NO_CLASSES.ranks) == ((DEFAULT_CLASS,), (0,))


def test_the_default_class_always_exists() -> None:
    classes = ServiceClasses({"batch": ServiceClass(-1), "voice": ServiceClass(2)})
    assert (classes.names, classes.ranks) == ((DEFAULT_CLASS, "batch", "voice"), (-1, 0, 2))


def test_a_class_that_is_gone_has_the_rank_of_the_default_class() -> None:
    assert ServiceClasses({"batch": ServiceClass(-1)}).rank("voice") == 0
    assert ServiceClasses({"default": ServiceClass(5)}).rank("voice") == 5


def test_priorities_are_turns_in_milliseconds() -> None:
    assert CLASSES.priority(Precedence("voice", 1_700_000_000.1234)) == 1_699_999_988_123


@given(st.lists(precedences, min_size=2, max_size=2))
def test_no_request_overtakes_another_beyond_the_bound(both: list[Precedence]) -> None:
    first, second = sorted(both, key=CLASSES.turn)
    later_by = first.arrived_s - second.arrived_s
    assert later_by <= OVERTAKE_S * (RANKS[first.service_class] - RANKS[second.service_class])


@dataclass(frozen=True, slots=True)
class Served:
    """A request of the queue below, and the number of requests that arrived after it and were served before it."""

    precedence: Precedence
    overtakers: int


def served(arrivals: list[Precedence]) -> Iterator[Served]:
    """One request is served per second, always that of the earliest turn, until none is left."""
    coming = sorted(arrivals, key=lambda each: each.arrived_s)
    waiting: list[tuple[float, int]] = []
    overtakers = [0] * len(coming)
    now, arrived = 0.0, 0
    while arrived < len(coming) or waiting:
        while arrived < len(coming) and coming[arrived].arrived_s <= now:
            waiting.append((CLASSES.turn(coming[arrived]), arrived))
            arrived += 1
        if waiting:
            waiting.remove(first := min(waiting))
            for _, index in waiting:
                overtakers[index] += index < first[1]
            yield Served(coming[first[1]], overtakers[first[1]])
        now += 1.0


@pytest.mark.parametrize("rank", ["batch", "default"])
def test_a_low_rank_does_not_starve_under_a_flood_of_higher_ones(rank: str) -> None:
    """Twice as many requests of the highest rank arrive as can be served."""
    flood = [Precedence("voice", at / 2) for at in range(200)]
    waits = list(served([Precedence(rank, 5.0), *flood]))
    (low,) = [each for each in waits if each.precedence.service_class == rank]
    assert 0 < low.overtakers <= 2 * OVERTAKE_S * (RANKS["voice"] - RANKS[rank])


@given(st.lists(precedences, max_size=60))
def test_only_requests_within_the_bound_overtake_in_a_queue(arrivals: list[Precedence]) -> None:
    for each in served(arrivals):
        rank = RANKS[each.precedence.service_class]
        within = (
            other
            for other in arrivals
            if 0 <= other.arrived_s - each.precedence.arrived_s <= OVERTAKE_S * (RANKS[other.service_class] - rank)
        )
        assert each.overtakers <= sum(1 for _ in within)
