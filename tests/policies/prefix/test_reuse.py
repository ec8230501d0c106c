"""How likely contexts are continued, as learned from arrivals, and when their return pays."""

import pytest

from policies.cost.lines import Line
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts, proportional
from policies.prefix.reuse import FORGOTTEN_S, HORIZON_S, MEMORY, WEIGHT, Reuse, worth_returning

SPEED = ReplicaSpeed(StepCosts(proportional(1 / 1000)))


def prompt(conversation: int, turn: int) -> tuple[int, ...]:
    """The names of a turn's prompt: each adds two blocks of output and one of the client to the last one."""
    return tuple(conversation * 1000 + block for block in range(1, 3 * turn + 2))


def turn(
    made: Reuse, conversation: int, number: int, now: float, session: str = "", reached: int | None = None
) -> float:
    """The probability after a turn; by default, replicas have all of it but its newest block."""
    names = prompt(conversation, number)
    return made.arrived(names, len(names) - 1 if reached is None else reached, session, now)


def singles(made: Reuse, count: int, now: float = 0.0) -> None:
    """Requests that nothing continues."""
    for number in range(count):
        turn(made, 10_000 + number, 0, now)


@pytest.mark.parametrize("session", ["", "s"])
def test_conversation_that_goes_on_is_likely_to_go_on(session: str) -> None:
    made = Reuse()
    singles(made, 50)
    found = [turn(made, 1, number, HORIZON_S + number, session) for number in range(6)]
    assert found[0] < 0.1 and found == sorted(found) and found[-1] > 0.7


def test_first_request_of_all_is_as_likely_as_not() -> None:
    assert turn(Reuse(), 1, 0, 0.0) == 0.5


def test_request_is_likely_to_end_where_most_do() -> None:
    made = Reuse()
    singles(made, 50)
    assert turn(made, 1, 0, HORIZON_S - 1) == 0.5, "they may be continued yet"
    assert turn(made, 2, 0, HORIZON_S) == pytest.approx(1 / 52)


def test_request_that_is_continued_late_has_not_ended() -> None:
    made = Reuse()
    turn(made, 1, 0, 0.0)
    turn(made, 2, 0, HORIZON_S)
    assert made.share == pytest.approx(1 / 3)
    turn(made, 1, 1, HORIZON_S + 1)
    assert made.share == pytest.approx(2 / 3)


def test_request_is_continued_once() -> None:
    made = Reuse()
    turn(made, 1, 0, 0.0)
    for now in (1.0, 2.0):
        turn(made, 1, 1, now)
    assert made.share == pytest.approx(2 / 3)


def test_prompt_whose_output_no_replica_has_continues_nothing() -> None:
    """Another question on the same document: what the first answer was is of no use to it."""
    made = Reuse()
    turn(made, 1, 0, 0.0)
    turn(made, 1, 1, 1.0, reached=1)
    assert made.share == 0.5


def test_session_that_begins_anew_each_time_is_unlikely_to_be_continued() -> None:
    made = Reuse()
    found = [turn(made, number, 0, float(number), "s", reached=0) for number in range(5)]
    assert found == [0.5, *(WEIGHT * 0.5 / (number + WEIGHT) for number in range(1, 5))]


def test_equal_prompt_is_no_continuation() -> None:
    made = Reuse()
    for now in (0.0, 1.0):
        turn(made, 1, 0, now, reached=1)
    assert made.share == 0.5


def test_request_is_forgotten() -> None:
    made = Reuse()
    turn(made, 1, 0, 0.0, "s")
    turn(made, 2, 0, FORGOTTEN_S)
    assert turn(made, 1, 1, FORGOTTEN_S, "s") == made.share
    assert len(made._turns) == len(made._by_end) == 2 and len(made._by_session) == 1


def test_later_requests_count_more() -> None:
    made = Reuse()
    singles(made, 2 * int(MEMORY))
    made.arrived((), 0, "", HORIZON_S)
    assert made._continued + made._ended <= MEMORY
    for conversation in range(1, 400):
        for number in range(2):
            turn(made, conversation, number, HORIZON_S + 1)
    assert made.share > 0.25


def test_requests_without_a_full_block_are_counted() -> None:
    made = Reuse()
    assert made.arrived((), 0, "", 0.0) == 0.5
    made.arrived((), 0, "", HORIZON_S)
    assert made.share == pytest.approx(1 / 3)


@pytest.mark.parametrize(
    ("reuse", "link", "pays"),
    [
        (1.0, Line.of(10_000.0), True),
        (0.5, Line.of(10_000.0), True),
        (0.05, Line.of(10_000.0), False),
        (0.5, Line.of(1500.0), False),
        (0.5, Line.of(10_000.0, 2.0), True),
        (1.0, None, False),
    ],
    ids=["certain", "likely", "unlikely", "slow link", "nobody waits for a latency", "no link"],
)
def test_return_pays_where_the_prefill_that_it_saves_is_longer(reuse: float, link: Line | None, pays: bool) -> None:
    assert worth_returning(reuse, 1000, SPEED, link) is pays
