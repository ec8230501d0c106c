"""One epoch: events in, plan out, the same for the same."""

import copy
import os
import subprocess
import sys
from pathlib import Path

import pytest

from policies.cluster.changes import Arrival, Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.search import tightest
from policies.cluster.sizes import Size
from policies.decision.deciding import one_by_one
from policies.decision.limits import Limits
from policies.model import ReplicaId, RequestId, Tokens
from policies.plan import Placement, Plan
from policies.rules.policy import NONE, Barred
from policies.rules.registry import policy
from tests.policies.cluster.named import named, picture, replica, request
from tests.policies.history import COSTLY, IDEAL, SPECS, Setting, World, random_history
from tests.policies.rehearsal import before, violations
from tests.policies.stepping import Events, begin, step, step_each

A, P, Q, S, T = ReplicaId("A"), RequestId("p"), RequestId("q"), RequestId("s"), RequestId("t")


class Seen:
    """Places what waits where it fits, and keeps what it was told of."""

    headroom_s = 0.0
    knows_sharing = False

    def __init__(self, greedy: bool = False) -> None:
        self.greedy = greedy
        self.told: list[Changes] = []

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """See `Policy.place`."""
        return tightest(cluster, Size(request.tokens))

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """See `Policy.rebalance`. A greedy one looks at all that waits, whatever it is told of."""
        self.told.append(changes)
        for waiting in cluster.in_order() if self.greedy else changes.waiting:
            if target := self.place(cluster, waiting) or cluster.decisions.open():
                cluster.decisions.place(waiting, target)


def summary(changes: Changes) -> str:
    departed = [f"-{d.request}" for d in changes.departed]
    crossed = [f"^{c.request.id}" for c in changes.crossed]
    return " ".join([*departed, *crossed, *(f"+{q.id}" for q in changes.waiting)])


def busy() -> tuple[Cluster, Events]:
    """A departure, a request in another class, one that waits and an arrival."""
    events = Events({P: Tokens(60)}, departed=[Q], arrived=[Arrival(T, Tokens(90))])
    return named("A: p20 q20", "s30"), events


def test_a_step_reacts_to_everything_at_once() -> None:
    (cluster, events), seen = busy(), Seen()
    plan = step(cluster, events, seen)
    assert [summary(changes) for changes in seen.told] == ["-q ^p +s +t"]
    assert plan.placements == (Placement(S, A), Placement(T, ReplicaId("gpu-0")))
    assert picture(cluster) == "A: p60 s30 | gpu-0: t90"


def test_a_step_closes_what_it_empties() -> None:
    cluster = named("A: p20 | B: q20")
    assert step(cluster, Events(departed=[P]), Seen()) == Plan.of(closed=(A,))
    assert picture(cluster) == "B: q20"


def test_step_each_reacts_to_one_change_at_a_time() -> None:
    (cluster, events), seen = busy(), Seen()
    plans = step_each(cluster, events, seen)
    assert [summary(changes) for changes in seen.told] == ["-q", "^p", "", "+s", "+t"]
    assert [p.request for plan in plans for p in plan.placements] == [S, T]
    assert [len(plan.queued) for plan in plans] == [2, 2, 2, 1, 0, 0], "what has not had its turn is queued"


def test_step_each_does_not_offer_what_an_earlier_turn_placed() -> None:
    (cluster, events), seen = busy(), Seen(greedy=True)
    step_each(cluster, events, seen)
    assert [summary(changes) for changes in seen.told] == ["-q", "^p", ""]


def test_a_crossing_whose_request_was_evicted_has_no_turn() -> None:
    cluster, events = busy()
    turns = one_by_one(begin(cluster, events, Limits(), now=0.0))
    assert summary(next(turns)) == "-q"
    cluster.decisions.evict(request(cluster, "p"))
    assert summary(next(turns)) == ""


def test_step_each_closes_what_is_idle_after_the_last_turn() -> None:
    cluster = named("A: p20", "")
    plans = step_each(cluster, Events(departed=[P], arrived=[Arrival(S, Tokens(5))]), Seen())
    assert [plan.closed for plan in plans] == [(), (), (), ()] and picture(cluster) == "A: s5"
    plans = step_each(cluster, Events(departed=[S]), Seen())
    assert plans[-1] == Plan.of(closed=(A,)) and picture(cluster) == ""


def test_a_plan_is_made_for_what_begin_leaves() -> None:
    cluster, events = busy()
    cluster.rest(P, until=5.0)
    limits = Limits(moves_per_epoch=3)
    begin(cluster, events, limits, now=5.0)
    assert request(cluster, "p").movable and cluster.decisions.moves_left == 3
    assert replica(cluster, "A").load == 60 and list(before(cluster).waiting) == [S, T]


# --- the same input, the same plan --------------------------------------------------------------------


every_policy = pytest.mark.parametrize("spec", SPECS)


@every_policy
@pytest.mark.parametrize("setting", [IDEAL, COSTLY], ids=["ideal", "costly"])
def test_a_copy_of_the_cluster_gives_the_same_plan(spec: str, setting: Setting) -> None:
    world = World(policy(spec), setting)
    for tick in random_history(seed=1):
        twin = copy.deepcopy(world)
        plan = twin.advance(tick)[1]
        assert world.advance(tick)[1] == plan


@every_policy
def test_step_each_plans_can_be_carried_out_one_after_another(spec: str) -> None:
    world = World(policy(spec), IDEAL)
    for tick in random_history(seed=2):
        cluster, events = world.cluster, world.happen(tick)
        for changes in one_by_one(begin(cluster, events, Limits(), world.now)):
            was = before(cluster)
            world.policy.rebalance(cluster, changes)
            assert violations(cluster.decisions.settle(), was) == []
            cluster.check_integrity()


@pytest.mark.slow
def test_the_seed_of_hashes_changes_nothing() -> None:
    plans = [
        subprocess.run(
            [sys.executable, "-m", "tests.policies.history"],
            env=os.environ | {"PYTHONHASHSEED": seed},
            cwd=Path(__file__).parents[3],
            check=True,
            capture_output=True,
        ).stdout
        for seed in ("1", "2")
    ]
    assert plans[0] == plans[1] and plans[0].count(b"Move(") > 100
