"""Both policies where moves, replicas or time are short: nothing is evicted, and what must stay stays."""

import pytest

from policies.cluster.capacity import overloaded
from policies.decision.limits import Limits
from policies.model import ReplicaState, RequestId, Tokens
from policies.rules.mell import Mell, mell, mell_repaired
from tests.policies.cluster.named import impose
from tests.policies.rules.mell.clusters import C, cluster, named, plan_after, shown

both = pytest.mark.parametrize("policy", [mell(), mell_repaired()], ids=["mell", "mell_repaired"])


@both
@pytest.mark.parametrize(
    ("before", "departed", "grown", "arrived"),
    [
        pytest.param("A: x.6 M.4 | B: M.4", "", "x.62", "", id="an overload"),
        pytest.param("A: x.6 M.4 | B: L.9", "x", "", "", id="a departure"),
        pytest.param("A: L.6 T.2 | B: T.2", "", "", "x.4", id="an arrival"),
    ],
)
def test_without_a_budget_nothing_moves(policy: Mell, before: str, departed: str, grown: str, arrived: str) -> None:
    none = Limits(moves_per_epoch=0)
    plan = plan_after(policy, cluster(before), departed=departed, grown=grown, arrived=arrived, limits=none)
    assert (plan.moves, plan.evicted) == ((), ())


@both
def test_a_small_budget_is_kept(policy: Mell) -> None:
    made = cluster("A: x.55 T.14 T.14 G.06 G.06 | B: y.6 M.4 | C: M.4")
    plan = plan_after(policy, made, grown="x.62 y.62", limits=Limits(moves_per_epoch=2))
    assert 0 < len(plan.moves) <= 2


@both
@pytest.mark.parametrize(("departed", "grown", "arrived"), [("", "x.62", ""), ("x", "", ""), ("", "", "y.6")])
def test_a_pinned_request_stays(policy: Mell, departed: str, grown: str, arrived: str) -> None:
    made = cluster("A: x.6 z.4 | B: L.9")
    home = named(made, "z").replica
    named(made, "z").pinned = True
    plan_after(policy, made, departed=departed, grown=grown, arrived=arrived)
    assert named(made, "z").replica is home


@both
@pytest.mark.parametrize(
    ("before", "grown"),
    [
        pytest.param("A: x.6 M.4 | B: L.7", "x.65", id="one overload"),
        pytest.param("A: x.55 M.4 | B: y.55 M.38 | C: L.6 S.3", "x.7 y.7", id="two"),
    ],
)
def test_an_overload_that_nothing_can_take_is_left_to_the_engine(policy: Mell, before: str, grown: str) -> None:
    made = cluster(before, more=0)
    plan = plan_after(policy, made, grown=grown)
    assert (plan.moves, plan.evicted, plan.queued) == ((), (), ())
    assert overloaded(made)


@both
def test_one_overload_is_cured_even_if_another_cannot_be(policy: Mell) -> None:
    made = cluster("A: x.55 M.4 | B: y.55 S.3 | C: L.6", more=0)
    plan = plan_after(policy, made, grown="x.65 y.75")
    assert shown(made) == "A: x.65 S.3 | B: y.75 | C: L.6 M.4"
    assert plan.evicted == ()


def test_units_without_room_go_home_and_the_rest_goes_on() -> None:
    made = cluster("A: x.6 M.4 | B: L.7 | C: L.75 y.2 | D: T.25 T.25 T.15 | E: L.9", more=0)
    plan = plan_after(mell(), made, departed="y", grown="x.62")
    assert shown(made) == "A: x.62 M.4 | B: L.7 | C: L.75 T.25 | D: T.25 T.15 | E: L.9"
    assert (plan.evicted, plan.queued) == ((), ())


def test_where_a_home_is_lost_all_go_back_and_overloads_are_cured_one_by_one() -> None:
    before = "A: L.52 x.45 | B: z.505 y.49 | C: L.65 | D: u.6 s.3 | E: L.75 t.2 | F: T.2 T.2 T.2 T.2 | G: L.9"
    made = cluster(before, more=0)
    plan = plan_after(mell(), made, departed="z t", grown="x.75 u.75")
    # x would go to B, which y has left, and then y cannot go anywhere. Nor is the hole that t leaves refilled.
    then = "A: x.75 L.52 | B: y.49 | C: L.65 s.3 | D: u.75 | E: L.75 | F: T.2 T.2 T.2 T.2 | G: L.9"
    assert shown(made) == then
    assert (len(plan.moves), plan.evicted) == (1, ())


@pytest.mark.parametrize(
    ("arrived", "opened"), [pytest.param("", 1, id="alone"), pytest.param("w.6", 2, id="with an arrival")]
)
def test_a_unit_without_room_waits_for_a_replica_to_start(arrived: str, opened: int) -> None:
    made = cluster("A: L.52 x.45 | B: z.505 y.49 | E: L.9", starts_as=ReplicaState.STARTING)
    plan = plan_after(mell(), made, departed="z", grown="x.75", arrived=arrived)
    assert (len(plan.opened), plan.moves, plan.evicted) == (opened, (), ())


def test_a_tiny_unit_is_not_moved_for_a_request_if_nothing_takes_it() -> None:
    made = cluster("A: L.55 T.2 T.13 | B: L.85", more=0)
    plan = plan_after(mell(), made, arrived="x.4")
    assert (shown(made), plan.moves) == ("A: L.55 T.2 T.13 | B: L.85 ; x.4", ())


def test_where_moves_take_time_room_cannot_be_made() -> None:
    made = cluster("A: L.55 T.2 T.13 | B: T.2", holds=True)
    plan = plan_after(mell(), made, arrived="x.4")
    assert (shown(made), plan.moves) == ("A: L.55 T.2 T.13 | B: T.2 | gpu-0: x.4", ())


@both
def test_where_moves_take_time_the_rest_of_a_large_replica_stays(policy: Mell) -> None:
    made = cluster("A: x.6 M.4 | B: | C: L.9", holds=True, starts_as=ReplicaState.STARTING)
    impose(made, min_replicas=3)
    plan = plan_after(policy, made, departed="x")
    assert (shown(made), plan.moves) == ("A: M.4 | B: | C: L.9", ())


@both
def test_running_requests_wait_at_home_for_a_replica_that_starts(policy: Mell) -> None:
    made = cluster("A: x.6 M.4 | B: L.7", starts_as=ReplicaState.STARTING)
    assert plan_after(policy, made, grown="x.62").moves == ()
    assert shown(made) == "A: x.62 M.4 | B: L.7 | gpu-0*:"
    plan_after(policy, made, grown="x.63")
    assert shown(made) == "A: x.63 M.4 | B: L.7 | gpu-0*:", "one is enough"


@both
def test_moves_that_take_time_keep_their_room(policy: Mell) -> None:
    made = cluster("A: x.55 T.2 T.2 | B: T.2", holds=True)
    plan = plan_after(policy, made, grown="x.61")
    assert [move.tokens for move in plan.moves] == [0.2 * C]
    assert made.replicas[plan.moves[0].source].held == 0.2 * C


@both
@pytest.mark.parametrize("starts_as", [ReplicaState.RUNNING, ReplicaState.STARTING])
def test_a_request_that_no_replica_can_hold_opens_none(policy: Mell, starts_as: ReplicaState) -> None:
    made = cluster("A: L.6", starts_as=starts_as)
    made.add_request(RequestId("x"), Tokens(C + 1))
    plan = plan_after(policy, made)
    assert (plan.opened, plan.queued) == ((), ("x",))


@both
def test_a_batch_limit_is_kept(policy: Mell) -> None:
    made = cluster("A: G.05 | B: T.2 T.2")
    for replica in made.replicas.values():
        replica.max_requests = 2
    plan_after(policy, made, arrived="a.05 b.05 c.05")
    assert max(len(replica.requests) for name, replica in made.replicas.items() if name in "AB") == 2
