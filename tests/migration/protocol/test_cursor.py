"""The cursor gives exactly the request's tokens, whatever the order in which the hops' streams arrive."""

from collections.abc import Sequence
from itertools import pairwise
from random import Random

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from migration.protocol.cursor import Cursor, GapError
from migration.protocol.request import Delta, Moved
from policies.model import RequestId

unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])
"""A busy machine is no failure."""

REQUEST = RequestId("r")


def delta(index: int, *tokens: int, hop: int = 0, finish: str | None = None) -> Delta:
    return Delta(REQUEST, hop, index, tokens, finish)


def moved(index: int, hop: int = 0, next_hop: int = 1) -> Moved:
    return Moved(REQUEST, hop, next_hop, index, "b")


def test_new_tokens_are_returned_once() -> None:
    cursor = Cursor()
    assert cursor.feed(delta(0, 10, 11)) == (10, 11)
    assert cursor.feed(delta(0, 10, 11)) == ()
    assert cursor.feed(delta(1, 11, 12)) == (12,)
    assert cursor.tokens == [10, 11, 12]


def test_gap_raises_and_changes_nothing() -> None:
    cursor = Cursor(tokens=[10])
    with pytest.raises(GapError, match="token 1 is missing before 2"):
        cursor.feed(delta(2, 12, finish="stop"))
    assert cursor == Cursor(tokens=[10])


def test_gap_before_the_hand_over_raises_and_changes_nothing() -> None:
    cursor = Cursor(tokens=[10])
    cursor.feed(delta(2, 12, hop=1))
    with pytest.raises(GapError, match="token 1 is missing before hop 1"):
        cursor.moved(moved(2))
    assert cursor.hop == 0 and cursor.tokens == [10]
    cursor.feed(delta(1, 11))
    assert cursor.moved(moved(2)) == (12,)


def test_tokens_of_the_next_hop_wait_for_the_hand_over() -> None:
    cursor = Cursor(tokens=[10])
    assert cursor.feed(delta(1, 11, hop=1)) == ()
    assert cursor.moved(moved(1)) == (11,)
    assert (cursor.hop, cursor.tokens) == (1, [10, 11])


def test_tokens_of_the_old_hop_are_dropped_after_the_hand_over() -> None:
    cursor = Cursor(hop=1, tokens=[10])
    assert cursor.feed(delta(1, 99, hop=0, finish="stop")) == ()
    assert cursor == Cursor(hop=1, tokens=[10])


def test_hand_over_that_was_already_followed_changes_nothing() -> None:
    cursor = Cursor(hop=2, tokens=[10])
    assert cursor.moved(moved(1)) == ()
    assert cursor == Cursor(hop=2, tokens=[10])


def test_early_tokens_of_an_attempt_that_failed_are_dropped() -> None:
    cursor = Cursor(tokens=[10])
    cursor.feed(delta(1, 66, hop=1))
    cursor.feed(delta(1, 11, hop=2))
    assert cursor.moved(moved(1, next_hop=2)) == (11,)


def test_early_tokens_after_a_gap_are_left_to_be_asked_for() -> None:
    cursor = Cursor()
    for early in (delta(0, 10, hop=1), delta(2, 12, hop=1)):
        cursor.feed(early)
    assert cursor.moved(moved(0)) == (10,)
    assert cursor.feed(delta(1, 11, 12, hop=1)) == (11, 12)


def test_early_end_comes_into_force_with_the_hand_over() -> None:
    cursor = Cursor()
    cursor.feed(delta(0, 10, hop=1, finish="length"))
    assert cursor.finish is None
    cursor.moved(moved(0))
    assert cursor.finish == "length"


def test_nothing_follows_the_end() -> None:
    cursor = Cursor()
    cursor.feed(delta(0, 10, finish="stop"))
    assert cursor.feed(delta(1, 11)) == () and cursor.moved(moved(1)) == ()
    assert cursor == Cursor(tokens=[10], finish="stop")


def test_end_without_tokens_is_an_end() -> None:
    cursor = Cursor(tokens=[10])
    assert cursor.feed(delta(1, finish="stop")) == ()
    assert cursor.finish == "stop"


@pytest.mark.parametrize("hop", [0, 1])
def test_hops_only_rise(hop: int) -> None:
    with pytest.raises(ValueError, match="hop must rise"):
        Cursor(hop=1).advance(hop)


@st.composite
def streams(draw: st.DrawFn) -> tuple[int, list[list[Delta | Moved]]]:
    """The output's length, and one stream per hop: deltas in order, some repeated from further back, then `Moved`."""
    bounds = [0, *sorted(draw(st.lists(st.integers(0, 20), max_size=4))), draw(st.integers(20, 25))]
    last = len(bounds) - 2
    told: list[list[Delta | Moved]] = []
    for hop, (start, end) in enumerate(pairwise(bounds)):
        cuts = sorted({start, end, *draw(st.lists(st.integers(start, end), max_size=5))})
        events: list[Delta | Moved] = []
        for low, high in pairwise(cuts):
            again = draw(st.integers(start, low))
            finish = "length" if hop == last and high == end else None
            events.append(delta(again, *range(again, high), hop=hop, finish=finish))
            events += draw(st.sampled_from([[], [events[-1]]]))
        if hop < last:
            events.append(moved(end, hop, hop + 1))
        elif start == end:
            events.append(delta(end, hop=hop, finish="length"))
        told.append(events)
    return bounds[-1], told


@unhurried
@given(streams(), st.randoms(use_true_random=False))
def test_any_interleaving_of_the_hops_gives_exactly_the_tokens(
    output: tuple[int, list[list[Delta | Moved]]], order: Random
) -> None:
    length, told = output
    cursor, returned = Cursor(), list[int]()
    queues = [list(events) for events in told]
    while any(queues):
        # A reader follows hand-overs in their order: it attaches to a host only once it knows of it.
        ready = [q for hop, q in enumerate(queues) if q and (isinstance(q[0], Delta) or hop == cursor.hop)]
        event = order.choice(ready).pop(0)
        returned += cursor.feed(event) if isinstance(event, Delta) else cursor.moved(event)
    assert returned == cursor.tokens == list(range(length)) and cursor.finish == "length"


@unhurried
@given(st.lists(st.tuples(st.integers(0, 3), st.integers(0, 8), st.integers(0, 4)), max_size=20))
def test_any_deltas_at_all_give_a_prefix_of_the_tokens(draws: Sequence[tuple[int, int, int]]) -> None:
    cursor = Cursor()
    for hop, index, count in draws:
        before = list(cursor.tokens)
        try:
            fresh = cursor.feed(delta(index, *range(index, index + count), hop=hop))
        except GapError:
            assert cursor.tokens == before
        else:
            assert cursor.tokens == [*before, *fresh]
    assert cursor.tokens == list(range(len(cursor.tokens)))
