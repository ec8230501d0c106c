"""The probability with which demand may exceed its forecast follows the share of late first tokens."""

import pytest

from policies.cluster.changes import Arrival
from policies.cost.service import TAIL, ReplicaSpeed, ServiceLevel
from policies.cost.steps import StepCosts, proportional
from policies.decision.deciding import place
from policies.decision.level.risk import DOUBLING_S, LATE, LEAST, MOST, AdaptedRisk
from policies.decision.limits import Terms
from policies.decision.memory import PoolMemory
from policies.model import RequestId, Tokens
from tests.policies.decision.observed import Watcher, observed

RATE = 4.0
TTFT_S = 3.0
FIRST_TOKENS = ServiceLevel(ttft_p99_s=TTFT_S)
EPOCHS = int(DOUBLING_S)
PER_DOUBLING = round(RATE * DOUBLING_S)
"""Arrivals in time that double the probability."""


def follow(risk: AdaptedRisk, arrivals: int, late: int = 0, ttft_s: float | None = TTFT_S) -> float:
    """The probability after one epoch's arrivals, of which some turn out to be late."""
    for index in range(arrivals):
        risk.arrived(RequestId(f"{index}"), 0.0)
    unlucky = {RequestId(f"{index}") for index in range(late)}
    risk.observe(lambda request: request in unlucky, ttft_s, RATE, TTFT_S + 1.0)
    return risk.value


def test_it_doubles_with_the_arrivals_of_the_doubling_time() -> None:
    assert follow(AdaptedRisk(), PER_DOUBLING) == pytest.approx(2 * TAIL)


def test_the_balance_is_at_the_share_of_late_ones() -> None:
    assert follow(AdaptedRisk(), 1000, round(1000 * LATE)) == pytest.approx(TAIL)
    assert follow(AdaptedRisk(), 1000, round(1000 * LATE) + 1) < TAIL < follow(AdaptedRisk(), 1000, 2)


def test_without_arrivals_nothing_is_learned() -> None:
    assert follow(AdaptedRisk(), 0) == TAIL


def test_it_stays_in_its_range() -> None:
    assert follow(AdaptedRisk(), 50 * PER_DOUBLING) == MOST
    assert follow(AdaptedRisk(), 100_000, 100_000) == LEAST


def test_without_a_level_of_first_tokens_it_stays() -> None:
    assert follow(AdaptedRisk(), PER_DOUBLING, 5, ttft_s=None) == TAIL


def test_a_late_request_counts_once() -> None:
    risk, name = AdaptedRisk(), RequestId("p")
    risk.arrived(name, 0.0)
    risk.observe(lambda request: True, TTFT_S, RATE, TTFT_S)
    in_time = risk.value
    assert in_time > TAIL, "late only after more than the level"
    risk.arrived(name, 2.0)
    risk.observe(lambda request: True, TTFT_S, RATE, TTFT_S + 1.0)
    late = risk.value
    assert late < in_time, "another try keeps the time of the first"
    risk.arrived(name, 3.0)
    risk.observe(lambda request: True, TTFT_S, RATE, 3 * TTFT_S)
    assert risk.value == late
    assert risk.late == {name}
    risk.observe(lambda request: False, TTFT_S, RATE, 3 * TTFT_S)
    assert not risk.late


def level_watcher(service: ServiceLevel | None) -> Watcher:
    speed = ReplicaSpeed(StepCosts(proportional(0.001), overhead_s=0.020))
    return Watcher(PoolMemory(Terms(service=service, speed=speed)))


def test_the_decision_learns_from_requests_that_wait_for_their_first_token() -> None:
    made = level_watcher(FIRST_TOKENS)
    made.observe(observed("a: q90"))
    place(made.memory, Arrival(RequestId("p"), Tokens(50)), 1.0)
    made.decide(observed("a: q90 p50?", now=2.0))
    risk = made.memory.learned.risk.value
    assert risk > TAIL
    made.decide(observed("a: q90 p50?", now=5.0))
    assert made.memory.learned.risk.value < risk


def test_a_preempted_request_is_not_late() -> None:
    made = level_watcher(FIRST_TOKENS)
    made.observe(observed("a: q40"))
    place(made.memory, Arrival(RequestId("p"), Tokens(50)), 1.0)
    made.decide(observed("a: q40 p50", now=2.0))
    risk = made.memory.learned.risk.value
    made.decide(observed("a: q90 p50?", now=9.0))
    assert made.memory.learned.risk.value == risk


@pytest.mark.parametrize(
    ("service", "waits_s", "opens"),
    [
        pytest.param(FIRST_TOKENS, 1.0, False, id="in time"),
        pytest.param(FIRST_TOKENS, TTFT_S + 1.0, True, id="late"),
        pytest.param(ServiceLevel(itl_p99_s=1.0), 1.0, True, id="without a level of first tokens"),
        pytest.param(None, 1.0, True, id="without a level"),
    ],
)
def test_a_request_opens_a_replica_once_it_is_late(service: ServiceLevel | None, waits_s: float, opens: bool) -> None:
    made = level_watcher(service)
    made.observe(observed("a: q90"))
    place(made.memory, Arrival(RequestId("p"), Tokens(50)), 1.0)
    made.decide(observed("a: q90 p50?", now=1.0 + waits_s))
    assert made.memory.cluster.conditions.opens_for_requests == opens
