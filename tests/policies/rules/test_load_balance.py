"""Load balancing: what is moved, where to, and what is not."""

import pytest

from policies.decision.limits import Limits
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Reason
from policies.rules.load_balance import LoadBalance
from tests.policies.cluster.named import impose, turn
from tests.policies.rules.drawn import after, drawn, shown
from tests.policies.stepping import Events, step


@pytest.mark.parametrize(
    ("before", "sizes", "expected"),
    [
        pytest.param("60 | 50", [15], "60 | 50 15", id="an arrival goes to the emptiest"),
        pytest.param("60 | 50", [51], "60 | 50 | 51", id="a new one if that has no room"),
        pytest.param("80", [15, 30], "80 15 | 30", id="the older arrival first"),
    ],
)
def test_placement(before: str, sizes: list[int], expected: str) -> None:
    assert after(LoadBalance(threshold=1), drawn(before), *sizes) == expected


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param("60 10 31 | 55 | 60", "60 31 | 55 10 | 60", id="the smallest request that cures it"),
        pytest.param("80 20 10 10 | 60 | 60", "80 10 10 | 60 | 60 20", id="the first that is enough, not the youngest"),
        pytest.param("40 40 40 | 80", "40 40 | 80 | 40", id="to a new replica if it fits nowhere"),
        pytest.param(
            "14 13 15 15 15 15 15 15 | 85 | 84", "14 15 15 15 15 15 | 85 13 | 84 15", id="two if none is enough"
        ),
    ],
)
def test_an_overload_is_cured_by_moves(before: str, expected: str) -> None:
    cluster = drawn(before)
    plan = step(cluster, Events(), LoadBalance(threshold=1), Limits())
    assert shown(cluster) == expected
    assert {m.reason for m in plan.moves} == {Reason.OVERLOAD}


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param("30 30 30 | 30", "30 30 | 30 30", id="one of equals"),
        pytest.param("70 20 | 10", "70 | 10 20", id="the one that makes them most alike"),
        pytest.param("40 10 | 30", "40 | 30 10", id="by no less than the threshold"),
        pytest.param("50 9 | 30", "50 9 | 30", id="not by less than the threshold"),
        pytest.param("95 | 5", "95 | 5", id="not if they only change places"),
        pytest.param("30 30 30 | 30 30 30 | 20 | 30", "30 30 | 30 30 | 20 30 | 30 30", id="each in one pair"),
        pytest.param("20 20 20 20 | 40 10 | ", "20 20 20 | 40 10 | 20", id="one request per epoch"),
        pytest.param("60 5 5 5 5 | 10", "5 5 5 5 | 10 60", id="none back, though the full one is now the empty one"),
    ],
)
def test_the_fullest_relieve_themselves_to_the_emptiest(before: str, expected: str) -> None:
    cluster = drawn(before)
    impose(cluster, min_replicas=9)
    plan = step(cluster, Events(), LoadBalance())
    assert shown(cluster) == expected
    assert all(m.reason is Reason.BALANCE for m in plan.moves)


def test_of_equal_requests_the_older_moves() -> None:
    plan = step(drawn("30 30 30 | 30"), Events(), LoadBalance())
    assert [(m.request, m.target) for m in plan.moves] == [("a0", "b")]


def test_equal_loads_are_left_alone_without_a_threshold() -> None:
    assert after(LoadBalance(threshold=0), drawn("30 20 | 50")) == "30 20 | 50"
    assert after(LoadBalance(threshold=0), drawn("40 20 | 20 20")) == "40 20 | 20 20"


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param("50 | 20 10 | 40", "50 | 10 | 40 20", id="the largest request of the emptiest"),
        pytest.param("45 | 60 20 | 75 ", "45 | 60 20 | 75", id="none if it fits nowhere"),
        pytest.param("90 | 95 | 80 5", "90 | 95 | 80 5", id="none without more to spare than is to be kept"),
        pytest.param("60 20", "60 20", id="not the last replica"),
    ],
)
def test_draining_moves_one_request_off_the_least_loaded(before: str, expected: str) -> None:
    cluster = drawn(before)
    plan = step(cluster, Events(), LoadBalance(drain=True, threshold=1), Limits())
    assert shown(cluster) == expected
    assert all(m.reason is Reason.DRAIN for m in plan.moves)


def test_draining_goes_on_until_the_replica_is_closed() -> None:
    cluster = drawn("30 | 15 10 | 40")
    closed = [step(cluster, Events(), LoadBalance(drain=True, spare=0.6), Limits()).closed for _ in range(4)]
    assert closed == [(), ("b",), (), ()]
    assert shown(cluster) == "30 15 | 40 10"


def test_an_arrival_avoids_the_replica_that_is_emptied() -> None:
    assert after(LoadBalance(drain=True), drawn("50 | 10 | 40"), 30) == "50 10 |  | 40 30"
    assert after(LoadBalance(drain=True), drawn("50 | 25 | 40"), 75) == "50 | 75 | 40 25", "there is room nowhere else"


@pytest.mark.parametrize(("drain", "expected"), [(False, "b"), (True, "c")], ids=["emptiest", "not what is emptied"])
def test_a_single_arrival_is_placed_like_those_of_an_epoch(drain: bool, expected: str) -> None:
    cluster = drawn("50 | 10 | 40")
    replica = LoadBalance(drain=drain).place(cluster, cluster.add_request(RequestId("new"), Tokens(30)))
    assert replica is cluster.replicas[ReplicaId(expected)]


def test_a_replica_with_a_pinned_request_is_not_drained() -> None:
    cluster = drawn("50 | 10 | 20")
    for request in cluster.replicas[ReplicaId("b")].requests.values():
        request.pinned = True
    assert after(LoadBalance(drain=True, threshold=1), cluster) == "50 | 10 20 | "


@pytest.mark.parametrize("before", ["60 41 | 20", "30 30 30 | 30"], ids=["overload", "imbalance"])
def test_requests_that_must_stay_stay(before: str) -> None:
    cluster = drawn(before)
    for request in cluster.requests.values():
        request.pinned = True
    assert after(LoadBalance(), cluster) == before


def test_no_more_moves_than_allowed() -> None:
    cluster = drawn("30 30 30 | 30 30 30 | 30 | 30")
    plan = step(cluster, Events(), LoadBalance(), Limits(moves_per_epoch=1))
    assert len(plan.moves) == 1


def test_an_overload_waits_for_a_replica_that_starts() -> None:
    cluster = drawn("60 50 | 60")
    cluster.starts_as = ReplicaState.STARTING
    assert after(LoadBalance(), cluster) == "60 50 | 60 | "
    assert after(LoadBalance(), cluster) == "60 50 | 60 | "
    turn(cluster, list(cluster.replicas.values())[2], ReplicaState.RUNNING)
    assert after(LoadBalance(), cluster) == "60 | 60 | 50"
