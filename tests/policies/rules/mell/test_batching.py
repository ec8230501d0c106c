"""Operation batching (section VI-C): what all operations of an epoch together need not move."""

import pytest

from policies.cluster.capacity import overloaded
from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.model import RequestId, Tokens
from policies.rules.mell import Mell, mell, mell_repaired
from tests.policies.rules.mell.clusters import C, after, cluster, named, plan_after, shown
from tests.policies.stepping import Events, step, step_each

unbatched = pytest.mark.parametrize("policy", [mell(), mell_repaired()], ids=["mell", "mell_repaired"])


def moves(made: Cluster, departed: str, arrived: float, *, batched: bool) -> tuple[str, int]:
    """The drawing after one request has left and another has arrived, and how many were moved for that."""
    size = Tokens(round(arrived * C))
    events = Events(departed=[named(made, departed).id], arrived=[Arrival(RequestId("new"), size)])
    plans = [step(made, events, mell())] if batched else step_each(made, events, mell())
    return shown(made), sum(len(plan.moves) for plan in plans)


@pytest.mark.parametrize(
    ("before", "arrived", "then"),
    [
        pytest.param("A: M.4 x.4 | B: M.4 M.4", 0.45, "A: new.45 M.4 | B: M.4 M.4", id="MEDIUM"),
        pytest.param("A: S.3 x.3 S.3 | B: S.3 S.3", 0.26, "A: S.3 S.3 new.26 | B: S.3 S.3", id="SMALL"),
        pytest.param("A: T.2 x.2 | B: T.2", 0.15, "A: T.2 new.15 | B: T.2", id="TINY"),
    ],
)
def test_a_hole_takes_an_arrival_before_it_is_refilled(before: str, arrived: float, then: str) -> None:
    assert moves(cluster(before), "x", arrived, batched=True) == (then, 0)
    assert moves(cluster(before), "x", arrived, batched=False)[1] == 1


def test_a_hole_takes_a_displaced_request_before_it_is_refilled() -> None:
    made = cluster("A: M.4 x.4 | B: z.6 M.4 | C: M.45 M.45")
    plan = plan_after(mell(), made, departed="x", grown="z.61")
    assert shown(made) == "A: M.4 M.4 | B: z.61 | C: M.45 M.45"
    assert len(plan.moves) == 1


def test_departures_of_one_epoch_see_the_category_that_was() -> None:
    before = "A: x.3 y.2 T.2 | B: T.2 T.15 | C: M.4 T.13 | D: S.3 S.28"
    then = "A: S.3 T.2 T.2 | B: T.15 | C: M.4 T.13 | D: S.28"
    assert after(mell(), cluster(before), departed="x y") == then, "y left a SMALL replica, not a TINY one"


def test_a_unit_that_is_lifted_and_comes_back_has_not_moved() -> None:
    made = cluster("A: x.55 T.2 T.2 | B: L.9")
    plan = plan_after(mell(), made, grown="x.605")
    assert shown(made) == "A: x.605 T.2 | B: L.9 | gpu-0: T.2"
    assert len(plan.moves) == 1


@unbatched
def test_each_operation_alone_ends_well_too(policy: Mell) -> None:
    made = cluster("A: L.6 x.3 | B: y.24 M.4 | C: M.4 z.2")
    events = Events(
        sizes={named(made, "y").id: Tokens(650)},
        departed=[named(made, "x").id],
        arrived=[Arrival(RequestId("new"), Tokens(1300))],
    )
    plans = step_each(made, events, policy)
    made.check_integrity()
    assert len(plans) == 5  # a departure, a change of class, growth, an arrival, and closing
    assert not made.waiting and not overloaded(made)
