"""The probability with which demand may exceed its forecast follows the share of late first tokens."""

import pytest

from policies.cluster.changes import Arrival
from policies.cost.service import TAIL, ReplicaSpeed, ServiceLevel
from policies.cost.steps import StepCosts, proportional
from policies.decision.deciding import place
from policies.decision.level.risk import DOUBLING_S, LATE, LEAST, MOST, YOUNG_STARTS, AdaptedRisk
from policies.decision.limits import Terms
from policies.decision.memory import PoolMemory
from policies.model import RequestId, Tokens
from tests.policies.decision.observed import Watcher, observed

RATE = 4.0
TTFT_S = 3.0
START_S = 30.0
GROWN_UP_S = YOUNG_STARTS * START_S
FIRST_TOKENS = ServiceLevel(ttft_p99_s=TTFT_S)


def follow(
    risk: AdaptedRisk,
    seconds: float,
    late: int = 0,
    ttft_s: float | None = TTFT_S,
    rate: float = RATE,
    at: float = GROWN_UP_S,
) -> float:
    """The probability after that time, if requests that arrive at a time in it turn out to be late."""
    unlucky = {RequestId(f"{index}") for index in range(late)}
    risk.arrived(RequestId("first"), 0.0)
    risk.observe(lambda request: False, ttft_s, START_S, rate, 0.0)
    for request in unlucky:
        risk.arrived(request, at)
    risk.observe(lambda request: request in unlucky, ttft_s, START_S, rate, seconds)
    return risk.value


def test_it_doubles_in_the_doubling_time() -> None:
    assert follow(AdaptedRisk(), DOUBLING_S) == pytest.approx(2 * TAIL)


def test_the_balance_is_at_the_share_of_late_ones() -> None:
    balanced = round(LATE * RATE * DOUBLING_S)
    assert follow(AdaptedRisk(), balanced / LATE / RATE, balanced) == pytest.approx(TAIL)
    assert follow(AdaptedRisk(), DOUBLING_S, balanced + 1) < TAIL < follow(AdaptedRisk(), DOUBLING_S, balanced - 1)


def test_without_arrivals_nothing_is_learned() -> None:
    assert follow(AdaptedRisk(), DOUBLING_S, rate=0.0) == TAIL


def test_the_time_before_the_first_epoch_teaches_nothing() -> None:
    risk = AdaptedRisk()
    risk.arrived(RequestId("p"), 1e6)
    risk.observe(lambda request: False, TTFT_S, START_S, RATE, 1e6)
    assert risk.value == TAIL


def test_it_stays_in_its_range() -> None:
    assert follow(AdaptedRisk(), 50 * DOUBLING_S) == MOST
    assert follow(AdaptedRisk(), DOUBLING_S, 100_000) == LEAST


def test_without_a_level_of_first_tokens_it_stays() -> None:
    assert follow(AdaptedRisk(), DOUBLING_S, 5, ttft_s=None) == TAIL


@pytest.mark.parametrize(("at", "counts"), [(0.0, False), (GROWN_UP_S - 1.0, False), (GROWN_UP_S, True)])
def test_late_ones_count_once_a_forecast_could_have_served_them(at: float, counts: bool) -> None:
    risk, untouched = AdaptedRisk(), AdaptedRisk()
    assert (follow(risk, 100.0, 50, at=at) < follow(untouched, 100.0)) == counts
    assert len(risk.late) == 50, "they open replicas in any case"


def test_a_late_request_counts_once() -> None:
    risk, name = AdaptedRisk(), RequestId("p")

    def after(seconds: float, waits: bool = True) -> float:
        risk.observe(lambda request: waits, TTFT_S, START_S, RATE, GROWN_UP_S + seconds)
        return risk.value

    follow(risk, 1.0)
    risk.arrived(name, GROWN_UP_S)
    after(0.0)
    in_time = after(TTFT_S)
    assert in_time > TAIL, "late only after more than the level"
    risk.arrived(name, GROWN_UP_S + 2.0)
    late = after(TTFT_S + 1.0)
    assert late < in_time, "another try keeps the time of the first"
    risk.arrived(name, GROWN_UP_S + 3.0)
    assert after(3 * TTFT_S) > late
    assert risk.late == {name}
    after(3 * TTFT_S, waits=False)
    assert not risk.late


def level_watcher(service: ServiceLevel | None) -> Watcher:
    speed = ReplicaSpeed(StepCosts(proportional(0.001), overhead_s=0.020))
    return Watcher(PoolMemory(Terms(service=service, speed=speed)))


def test_the_decision_learns_from_requests_that_wait_for_their_first_token() -> None:
    made = level_watcher(FIRST_TOKENS)
    made.observe(observed("a: q90"))
    place(made.memory, Arrival(RequestId("q"), Tokens(90)), 1.0)
    began = 2 * GROWN_UP_S
    place(made.memory, Arrival(RequestId("p"), Tokens(50)), began)
    made.decide(observed("a: q90 p50?", now=began + 1.0))
    risk = made.memory.learned.risk.value
    made.decide(observed("a: q90 p50?", now=began + 2.0))
    assert made.memory.learned.risk.value > risk
    made.decide(observed("a: q90 p50?", now=began + 4.0))
    assert made.memory.learned.risk.value < risk


def test_a_preempted_request_is_not_late() -> None:
    made = level_watcher(FIRST_TOKENS)
    made.observe(observed("a: q40"))
    place(made.memory, Arrival(RequestId("p"), Tokens(50)), 1.0)
    made.decide(observed("a: q40 p50", now=2.0))
    made.decide(observed("a: q90 p50?", now=2.0 + GROWN_UP_S))
    assert made.memory.learned.risk.value > TAIL
    assert not made.memory.learned.risk.late


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
