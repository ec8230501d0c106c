"""When another replica is opened: not while one that is starting has room that nothing else waits for."""

import pytest

from policies.cluster.search import tightest
from policies.cluster.sizes import Size
from policies.model import ReplicaState, RequestId, Tokens
from policies.rules.arrivals import Openings, admit
from policies.rules.best_fit import BestFit
from policies.rules.load_balance import LoadBalance
from policies.rules.policy import Policy
from policies.rules.worst_fit import WorstFit
from tests.policies.cluster.named import turn
from tests.policies.rules.drawn import after, drawn, shown

baselines = pytest.mark.parametrize("policy", [BestFit(), WorstFit(), LoadBalance()], ids=lambda p: type(p).__name__)


@baselines
@pytest.mark.parametrize(
    ("sizes", "expected"),
    [
        pytest.param([40, 50], "80 |  ; 40 50", id="two that fit together wait for one replica"),
        pytest.param([40, 60, 50], "80 |  |  ; 40 60 50", id="a third that does not for a second"),
        pytest.param([60, 70, 40, 30], "80 |  |  ; 60 70 40 30", id="each is tried on all of them"),
        pytest.param([90, 20], "80 20 |  ; 90", id="what fits now does not wait"),
    ],
)
def test_requests_share_a_replica_that_starts(policy: Policy, sizes: list[int], expected: str) -> None:
    cluster = drawn("80")
    cluster.starts_as = ReplicaState.STARTING
    assert after(policy, cluster, *sizes) == expected
    assert after(policy, cluster) == expected, "another replica is opened for those that wait"


@baselines
def test_growth_is_reserved_on_a_replica_that_starts(policy: Policy) -> None:
    cluster = drawn("80", headroom=10)
    cluster.starts_as = ReplicaState.STARTING
    assert after(policy, cluster, 40, 41) == "80 |  |  ; 40 41"


@baselines
def test_the_number_of_requests_is_reserved_on_a_replica_that_starts(policy: Policy) -> None:
    cluster = drawn("99")
    cluster.starts_as = ReplicaState.STARTING
    starting = cluster.decisions.open()
    assert starting is not None
    starting.max_requests = 2
    assert after(policy, cluster, 30, 30) == "99 |  ; 30 30"
    assert after(policy, cluster, 30) == "99 |  |  ; 30 30 30"


@baselines
def test_a_request_runs_on_the_replica_it_waited_for(policy: Policy) -> None:
    cluster = drawn("80")
    cluster.starts_as = ReplicaState.STARTING
    after(policy, cluster, 40)
    turn(cluster, list(cluster.replicas.values())[1], ReplicaState.RUNNING)
    assert after(policy, cluster) == "80 | 40"


@baselines
def test_a_request_waits_if_no_replica_is_left(policy: Policy) -> None:
    assert after(policy, drawn("80 | 70", limit=1), 100, 50, 30) == "80 | 70 30 | 100 ; 50"


@pytest.mark.parametrize("policy", [BestFit(), WorstFit()], ids=lambda p: type(p).__name__)
def test_an_evicted_request_waits_for_a_replica_that_starts(policy: Policy) -> None:
    cluster = drawn("80 25 | 90")
    cluster.starts_as = ReplicaState.STARTING
    assert after(policy, cluster, 30) == "80 | 90 |  ; 25 30"


def test_the_oldest_comes_first_in_whatever_order_they_are_given() -> None:
    cluster = drawn("60", limit=0)
    for size in (30, 20):
        cluster.add_request(RequestId(f"new{size}"), Tokens(size))
    admit(cluster, reversed(cluster.in_order()), lambda q: tightest(cluster, Size(q.tokens)), Openings(cluster))
    assert shown(cluster) == "60 30 ; 20"
