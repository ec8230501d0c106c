"""Properties of the division of a device's memory."""

from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.memory.division import BETWEEN_SHRINKS_S, SeatNeed, divide, moves_requests
from policies.model import Bytes, ReplicaId

ROUNDING = 1


def need(name: str, **given: float) -> SeatNeed:
    facts = {"floor": 10, "used": 0, "want": 10, "declared": 1000, "size": 10, **given}
    sizes = {key: Bytes(int(value)) for key, value in facts.items() if key not in ("weight", "shrunk_at")}
    return SeatNeed(ReplicaId(name), facts.get("weight", 1.0), shrunk_at=facts.get("shrunk_at"), **sizes)


@st.composite
def devices(draw: st.DrawFn) -> tuple[Bytes, list[SeatNeed]]:
    """A budget for the floors or more, and seats whose present sizes are within their bounds."""
    seats = []
    for number in range(draw(st.integers(1, 5))):
        floor = draw(st.integers(1, 50))
        declared = floor + draw(st.integers(0, 500))
        used = draw(st.integers(0, declared))
        want, size = draw(st.integers(used, 600)), draw(st.integers(floor, declared))
        weight = draw(st.sampled_from((0.5, 1.0, 2.0)))
        seats.append(need(f"r{number}", weight=weight, floor=floor, used=used, want=want, declared=declared, size=size))
    return Bytes(sum(seat.floor for seat in seats) + draw(st.integers(0, 800))), seats


def anew(seats: list[SeatNeed]) -> list[SeatNeed]:
    """The seats at a size that every division changes."""
    return [replace(seat, size=Bytes(10**6)) for seat in seats]


@settings(max_examples=200, deadline=None)
@given(devices())
def test_sizes_fit_and_each_seat_has_what_it_wants_or_its_share(device: tuple[Bytes, list[SeatNeed]]) -> None:
    budget, seats = device
    sizes = divide(budget, anew(seats), 0.0)
    assert sum(sizes.values()) <= budget
    room, weights = budget - sum(seat.floor for seat in seats), sum(seat.weight for seat in seats)
    for seat in seats:
        assert seat.floor <= sizes[seat.replica] <= seat.declared
        fair = seat.floor + room * seat.weight / weights
        assert sizes[seat.replica] >= min(seat.want, seat.declared, fair) - ROUNDING
    wanted = sum(max(seat.floor, min(seat.want, seat.declared)) for seat in seats)
    if wanted <= budget:
        assert all(sizes[seat.replica] >= min(seat.want, seat.declared) - ROUNDING for seat in seats)
    most = sum(seat.declared for seat in seats)
    assert sum(sizes.values()) >= min(budget, most) - ROUNDING * len(seats), "nothing is left over"


@settings(max_examples=100, deadline=None)
@given(devices(), st.integers(0, 300))
def test_more_memory_and_more_demand_take_nothing_from_a_seat(device: tuple[Bytes, list[SeatNeed]], more: int) -> None:
    budget, seats = device
    before = divide(budget, anew(seats), 0.0)
    larger = divide(Bytes(budget + more), anew(seats), 0.0)
    assert all(larger[seat.replica] >= before[seat.replica] - ROUNDING for seat in seats)
    first = replace(seats[0], want=Bytes(seats[0].want + more))
    assert divide(budget, anew([first, *seats[1:]]), 0.0)[first.replica] >= before[first.replica] - ROUNDING


@settings(max_examples=100, deadline=None)
@given(devices())
def test_constant_demand_changes_nothing(device: tuple[Bytes, list[SeatNeed]]) -> None:
    budget, seats = device
    sizes = divide(budget, seats, 0.0)
    if sum(sizes.values()) <= budget:
        again = divide(budget, [replace(seat, size=sizes[seat.replica]) for seat in seats], 0.0)
        assert all(abs(again[name] - sizes[name]) <= ROUNDING for name in sizes)


def test_small_changes_wait_unless_a_seat_lacks_memory() -> None:
    even = [need("a", size=515), need("b", size=485)]
    assert divide(Bytes(1000), even, 0.0) == {"a": 515, "b": 485}
    assert divide(Bytes(1000), [need("a", size=600), need("b", size=400)], 0.0) == {"a": 500, "b": 500}
    lacking = [need("a", size=515), need("b", size=485, want=490)]
    assert divide(Bytes(1000), lacking, 0.0)[ReplicaId("b")] > 485


def test_a_seat_that_has_just_shrunk_below_its_use_keeps_what_it_uses() -> None:
    seats = [need("a", used=800, want=800, size=800, shrunk_at=10.0), need("b", want=900, size=200)]
    assert divide(Bytes(1000), seats, 10.0 + BETWEEN_SHRINKS_S / 2) == {"a": 800, "b": 200}
    later = divide(Bytes(1000), seats, 10.0 + BETWEEN_SHRINKS_S)
    assert later == {"a": 500, "b": 500} and moves_requests(seats[0], later[ReplicaId("a")])
    newcomer = need("c", floor=150, want=150, size=150)
    assert sum(divide(Bytes(1000), [*seats, newcomer], 11.0).values()) <= 1000, "floors come first"


def test_a_seat_that_keeps_what_it_uses_gets_no_more_before_the_others_have_as_much() -> None:
    resting = need("a", used=400, want=900, size=400, shrunk_at=10.0)
    sizes = divide(Bytes(1000), [resting, need("b", want=900, size=100)], 10.0)
    assert sizes == {"a": 500, "b": 500}
    sizes = divide(Bytes(600), [resting, need("b", want=900, size=100)], 10.0)
    assert sizes == {"a": 400, "b": 200}


def test_floors_above_the_budget_are_an_error() -> None:
    with pytest.raises(ValueError, match="by 5 bytes"):
        divide(Bytes(15), [need("a"), need("b")], 0.0)
