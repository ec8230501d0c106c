"""Bounds around any policy: here one that moves all that it may."""

from dataclasses import dataclass

import pytest

from policies.cluster.changes import Changes
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.cluster.search import tightest
from policies.cluster.sizes import Size
from policies.decision.conditions import headroom, lead, net_lead
from policies.decision.experience import Experience
from policies.decision.limits import Limits, LiveLimits
from policies.model import Tokens
from policies.plan import Reason
from policies.rules.pack import Pack
from policies.rules.policy import NONE, Barred, Policy
from policies.rules.registry import policy
from tests.policies.cluster.named import impose, named, request
from tests.policies.stepping import Events, step


@dataclass(frozen=True)
class Wander:
    """Moves every request that it may to the next replica; with `back`, then home again."""

    back: bool = False
    headroom_s: float = 0.0
    knows_sharing: bool = False

    def place(self, cluster: Cluster, request: Request, barred: Barred = NONE) -> Replica | None:
        """See `Policy.place`."""
        return tightest(cluster, Size(request.tokens))

    def rebalance(self, cluster: Cluster, changes: Changes) -> None:
        """See `Policy.rebalance`."""
        running = cluster.running()
        for wanderer in cluster.requests.values():
            home = wanderer.replica
            if home is not None and cluster.decisions.may_move(wanderer):
                cluster.decisions.move(wanderer, running[(running.index(home) + 1) % len(running)], Reason.FILL)
                if self.back:
                    cluster.decisions.move(wanderer, home, Reason.FILL)


KEEP = 9
"""More replicas than any cluster here has: none is closed."""


def moved(cluster: Cluster, limits: Limits, policy: Policy = Wander(), now: float = 0.0) -> str:
    """The requests that an epoch moves."""
    impose(cluster, min_replicas=KEEP)
    plan = step(cluster, Events(), policy, limits, now)
    cluster.check_integrity()
    return "".join(m.request for m in plan.moves)


@pytest.mark.parametrize(("budget", "expected"), [(0, ""), (1, "p"), (2, "pq"), (None, "pqr")])
def test_budget_bounds_an_epochs_moves(budget: int | None, expected: str) -> None:
    assert moved(named("A: p10 q10 r10 | B:"), Limits(budget)) == expected


def test_each_epoch_has_a_budget_of_its_own() -> None:
    cluster = named("A: p10 q10 r10 | B:")
    limits = Limits(moves_per_epoch=2)
    assert [moved(cluster, limits) for _ in range(3)] == ["pq", "pq", "pq"]


def test_moves_there_and_back_leave_the_budget_to_others() -> None:
    cluster = named("A: p10 q10 | B:")
    assert moved(cluster, Limits(1), Wander(back=True)) == ""
    assert cluster.decisions.moves_left == 1


def test_what_was_moved_stays_until_its_time() -> None:
    cluster = named("A: p10 | B:")
    limits = Limits(cooldown_s=5.0)
    times = [10.0, 14.9, 15.0, 19.9, 20.0]
    assert [moved(cluster, limits, now=now) for now in times] == ["p", "", "p", "", "p"]
    cluster.decisions.begin_epoch(cluster.conditions, 25.0)
    assert not cluster.resting


def test_without_a_cooldown_nothing_rests() -> None:
    cluster = named("A: p10 | B:")
    moved(cluster, Limits())
    assert not cluster.resting and request(cluster, "p").movable


def test_only_what_was_moved_rests() -> None:
    cluster = named("A: p10 q10 | B:", "s10")
    moved(cluster, Limits(1, cooldown_s=5.0))
    assert sorted(cluster.resting) == ["p"]


# --- headroom -----------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("policy_s", "limits_s", "rate", "tokens"),
    [
        pytest.param(4.0, 0.0, 25.0, 100, id="the policy's"),
        pytest.param(4.0, 8.0, 25.0, 200, id="the limits', if that is more"),
        pytest.param(8.0, 4.0, 25.0, 200, id="not if it is less"),
        pytest.param(0.5, 0.0, 25.0, 13, id="rounded up"),
        pytest.param(0.0, 0.0, 25.0, 0, id="none"),
    ],
)
def test_headroom(policy_s: float, limits_s: float, rate: float, tokens: int) -> None:
    assert headroom(Pack(headroom_s=policy_s), Limits(headroom_s=limits_s), rate, Tokens(0)) == tokens


@pytest.mark.parametrize(
    ("policy_s", "limits_s", "lead_s", "tokens"),
    [
        pytest.param(4.0, 2.0, 1.0, 125, id="comes on top of the policy's"),
        pytest.param(2.0, 4.0, 1.0, 125, id="or the limits'"),
        pytest.param(0.0, 0.0, 0.5, 13, id="or none, rounded up"),
    ],
)
def test_the_time_that_a_decision_takes(policy_s: float, limits_s: float, lead_s: float, tokens: int) -> None:
    limits = Limits(headroom_s=limits_s, lead_s=lead_s)
    growth = lead(limits, decode_rate=25.0)
    assert growth == (25 if lead_s == 1.0 else 13)
    assert headroom(Pack(headroom_s=policy_s), limits, 25.0, growth) == tokens


@pytest.mark.parametrize(
    ("rule", "by_hand_s", "follows", "tokens"),
    [
        ("pack", 0.0, False, 30),
        ("pack", 0.0, True, 10),
        ("pack:headroom_s=4", 0.0, True, 50),
        ("pack", 3.0, True, 40),
        ("mell_repaired", 0.0, True, 10),
    ],
)
def test_with_a_level_headroom_is_the_growth_until_a_decision_unless_it_is_set(
    rule: str, by_hand_s: float, follows: bool, tokens: int
) -> None:
    assert headroom(policy(rule), Limits(headroom_s=by_hand_s), 10.0, Tokens(10), follows) == tokens


@pytest.mark.parametrize(
    ("stay_s", "requests", "size", "tokens"),
    [
        pytest.param(0.0, 10, 500, 60, id="stays are unknown"),
        pytest.param(1e6, 10, 500, 60, id="none ends"),
        pytest.param(0.5, 1, 500, 0, id="all end, and leave more than they grow by"),
        pytest.param(0.5, 1, 0, 15, id="none grows beyond its end"),
        pytest.param(10.0, 10, 500, 55, id="perhaps none of few ends"),
        pytest.param(10.0, 1000, 200, 24, id="of many nearly the mean: 18 %, of which 15 % are sure"),
    ],
)
def test_with_a_level_the_ends_of_requests_make_room(stay_s: float, requests: int, size: int, tokens: int) -> None:
    assert net_lead(Limits(lead_s=2.0), 30.0, stay_s, requests, size) == tokens


def test_what_follows_from_a_level_and_what_is_set_by_hand() -> None:
    experience = Experience(1.0)
    follows, none = LiveLimits().resolve(experience, 0.99), LiveLimits().resolve(experience)
    assert (follows.foreseen, follows.linger_s, follows.slack) == (0.99, 0.0, 0.0)
    assert (none.foreseen, none.linger_s, none.foresight_s) == (None, experience.startup_s, experience.startup_s)
    by_hand = LiveLimits(linger_s=7.0, slack=0.5).resolve(experience, 0.99)
    assert (by_hand.foreseen, by_hand.linger_s, by_hand.slack, by_hand.foresight_s) == (None, 7.0, 0.5, 0.0)
    assert LiveLimits(slack=0.5).resolve(experience, 0.99).linger_s == experience.startup_s
