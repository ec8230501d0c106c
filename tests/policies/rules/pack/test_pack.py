"""Pack, rule by rule, on drawn clusters of replicas of 100 tokens."""

from dataclasses import replace

import pytest

from policies.cluster.changes import Arrival, Changes
from policies.decision.limits import Limits
from policies.model import ReplicaState, RequestId, Tokens
from policies.plan import Plan, Reason
from policies.rules.pack import Pack
from tests.policies.cluster.named import impose, move, named, picture, request
from tests.policies.rules.drawn import drawn, shown
from tests.policies.stepping import Events, step

PACK = Pack(comfort=0.0)
"""Without comfort, room is tight room: what is drawn is easier to follow."""


def decided(
    text: str, policy: Pack = PACK, limits: Limits | None = None, headroom: int = 0, least: int = 0
) -> tuple[Plan, str]:
    """The cluster after an epoch without events."""
    cluster = drawn(text, headroom=headroom)
    impose(cluster, min_replicas=least)
    plan = step(cluster, Events(), policy, limits or Limits())
    cluster.check_integrity()
    return plan, shown(cluster)


def admitted(text: str, sizes: list[int], policy: Pack, limits: Limits | None = None) -> str:
    """The cluster after arrivals of those sizes."""
    cluster = drawn(text)
    arrived = [Arrival(RequestId(f"new{i}"), Tokens(size)) for i, size in enumerate(sizes)]
    step(cluster, Events(arrived=arrived), policy, limits or Limits())
    cluster.check_integrity()
    return shown(cluster)


# --- arrivals -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "sizes", "expected"),
    [
        pytest.param("60 | 75", [20], "60 | 75 20", id="the tightest that fits"),
        pytest.param("60 | 75", [30], "60 30 | 75", id="another if that has no room"),
        pytest.param("60 | ", [20], "60 20", id="an empty one is left to be closed"),
        pytest.param("90 | ", [20], "90 | 20", id="unless no other has room"),
        pytest.param("50 | 50", [30, 50], "50 30 | 50 50", id="the oldest first"),
        pytest.param("90 | 90", [50], "90 | 90 | 50", id="a new one if no exchange makes room"),
    ],
)
def test_placement(before: str, sizes: list[int], expected: str) -> None:
    assert admitted(before, sizes, Pack(comfort=0.0, drain_moves=0)) == expected


def test_room_is_made_by_one_move() -> None:
    assert admitted("50 30 | 65", [40], PACK) == "50 40 | 65 30"


def test_room_is_made_by_a_swap() -> None:
    assert admitted("60 30 | 70 20", [20], PACK) == "60 20 20 | 70 30"


def test_an_arrival_prefers_comfortable_room() -> None:
    assert admitted("70 | 60", [25], Pack(comfort=0.0, drain_moves=0)) == "70 25 | 60"
    assert admitted("70 | 60", [25], Pack(comfort=0.3, drain_moves=0)) == "70 | 60 25"


# --- overloads ----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "expected"),
    [
        pytest.param("60 20 30 | 50", "60 30 | 50 20", id="the smallest that cures it"),
        pytest.param("96 2 3 4 | 88", "96 3 | 88 4 2", id="several smaller ones if it fits nowhere"),
        pytest.param("60 50 | 30 60", "60 | 30 60 | 50", id="to a new one if it fits nowhere"),
        pytest.param("120 | 50", "120 | 50", id="not if it is alone"),
    ],
)
def test_an_overload_is_cured(before: str, expected: str) -> None:
    plan, outcome = decided(before, Pack(comfort=0.0, drain_moves=0))
    assert outcome == expected
    assert {m.reason for m in plan.moves} <= {Reason.OVERLOAD}


def test_an_overload_is_cured_before_it_is_there() -> None:
    cluster = drawn("60 30 | 50")
    impose(cluster, headroom=6, lead=6)
    step(cluster, Events(), Pack(comfort=0.0, drain_moves=0, rest=0.0), Limits())
    assert shown(cluster) == "60 | 50 30"


# --- drains -------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("before", "expected", "moves"),
    [
        pytest.param("60 | 30", "60 30", 1, id="the least loaded"),
        pytest.param("60 20 | 30 20 | 45", "60 20 | 30 20 45", 1, id="the one that costs the fewest moves"),
        pytest.param("70 | 80", "70 | 80", 0, id="not if there is no room"),
        pytest.param("60 20 | 50 30 | 38", "60 38 | 50 30 20", 2, id="with an exchange"),
    ],
)
def test_a_replica_is_emptied(before: str, expected: str, moves: int) -> None:
    plan, outcome = decided(before)
    assert (outcome, len(plan.moves)) == (expected, moves)


def test_emptying_may_not_cost_more_moves_than_allowed() -> None:
    assert decided("30 30 20 10 | 2 2 6", Pack(comfort=0.0, drain_moves=2))[1] == "30 30 20 10 | 2 2 6"
    assert decided("30 30 20 10 | 2 2 6", Pack(comfort=0.0, drain_moves=3))[1] == "30 30 20 10 6 2 2"


def test_headroom_is_left_when_a_replica_is_emptied() -> None:
    assert decided("60 | 30", headroom=5)[1] == "60 30"
    assert decided("60 | 30", headroom=6)[1] == "60 | 30"


def test_replicas_that_must_stay_open_are_not_emptied_but_evened_out() -> None:
    plan, outcome = decided("20 20 20 20 | 20", least=2)
    assert outcome == "20 20 20 | 20 20"
    assert [m.reason for m in plan.moves] == [Reason.BALANCE]


def test_slack_keeps_replicas_from_being_emptied() -> None:
    assert decided("50 | 30")[1] == "50 30"
    assert decided("50 | 30", limits=Limits(slack=0.5))[1] == "50 | 30"


@pytest.mark.parametrize(
    ("slack", "expected"),
    [
        pytest.param(0.0, "60 | 75 20", id="nothing is kept free: the tightest"),
        pytest.param(0.2, "60 20 | 75", id="the one in use with the most room"),
        pytest.param(0.6, "60 | 75 | 20", id="also an empty one, if it stays open"),
    ],
)
def test_room_that_is_kept_is_shared(slack: float, expected: str) -> None:
    assert admitted("60 | 75 | ", [20], PACK, Limits(slack=slack)) == expected


def test_replicas_are_emptied_while_there_is_plenty() -> None:
    assert decided("60 | 15 | 5", limits=Limits(slack=0.5))[1] == "60 | 15 5"
    # Without one of the two 60 are free: enough for the slack, but no plenty.
    assert decided("30 | 10", limits=Limits(slack=0.5))[1] == "30 | 10"
    assert decided("30 | 10", replace(PACK, plenty=1.0), Limits(slack=0.5))[1] == "30 10"


def test_loads_are_evened_out_where_there_is_no_plenty() -> None:
    plan, outcome = decided("20 20 | 5", limits=Limits(slack=0.5))
    assert outcome == "20 | 5 20"
    assert [m.reason for m in plan.moves] == [Reason.BALANCE]


@pytest.mark.parametrize(("forecast", "expected"), [(None, "20 | 5 20"), (100, "20 20 | 5")])
def test_by_a_forecast_no_loads_are_evened_out(forecast: int | None, expected: str) -> None:
    cluster = drawn("20 20 | 5")
    impose(cluster, slack=100, forecast=forecast, peak=100)
    PACK.rebalance(cluster, Changes())
    assert shown(cluster) == expected


def test_a_budget_of_moves_is_kept() -> None:
    assert decided("60 50 | 30 15 | 20", limits=Limits(moves_per_epoch=1))[0].moves[1:] == ()


def test_an_immovable_request_keeps_its_replica_from_being_emptied() -> None:
    cluster = drawn("60 | 30")
    cluster.requests[RequestId("b0")].pinned = True
    step(cluster, Events(), PACK)
    assert shown(cluster) == "30 60"


# --- where moves and starts take time -------------------------------------------------------------------


@pytest.mark.parametrize(
    ("size", "expected"), [pytest.param(30, "B", id="another"), pytest.param(40, "A", id="if no other has room")]
)
def test_an_arrival_avoids_a_replica_that_requests_are_leaving(size: int, expected: str) -> None:
    cluster = named("A: p10 q5 | B: r60", f"s{size}", holds=True)
    impose(cluster, slack=10)
    move(cluster, "q", "B", Reason.DRAIN)
    found = PACK.place(cluster, request(cluster, "s"))
    assert found is not None
    assert found.id == expected


def test_room_that_a_move_makes_is_waited_for_instead_of_opening() -> None:
    cluster = named("A: p50 q30 | B: r60", "s45", holds=True, starts_as=ReplicaState.STARTING)
    plan = step(cluster, Events(), PACK, Limits())
    assert picture(cluster) == "A: p50 | B: q30 r60"
    assert (plan.queued, plan.opened) == (("s",), ())


def test_room_that_an_arrival_leaves_to_another_is_there_at_once() -> None:
    """Else the next in line, who need not be smaller, would take it."""
    cluster = named("A: | B: r20", "q5 s96 t97", holds=True, starts_as=ReplicaState.STARTING)
    plan = step(cluster, Events(), PACK, Limits(slack=1.0))
    assert picture(cluster).startswith("A: s96 | B: r20 q5")
    assert plan.queued == ("t",)


def test_room_is_promised_once() -> None:
    cluster = named("A: p50 q30 | B: r60", "s45 t44", holds=True, starts_as=ReplicaState.STARTING)
    plan = step(cluster, Events(), PACK, Limits())
    assert len(plan.opened) == 1


def test_a_request_moves_within_its_node_first() -> None:
    cluster = named("A: p70 q25 r20 | B: s60 | C: t70", holds=True)
    cluster.replicas[next(iter(cluster.replicas))].node = "far"
    cluster.replicas["B"].node = "far"  # type: ignore[index]
    step(cluster, Events(), Pack(comfort=0.0, drain_moves=0), Limits())
    assert picture(cluster) == "A: p70 q25 | B: r20 s60 | C: t70"
