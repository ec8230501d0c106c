"""The mode `observe`: in every epoch it proposes the plan of `act`, and decides what `off` decides."""

import copy
import random
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from policies.cluster.changes import Arrival
from policies.cluster.search import roomiest
from policies.cost.service import ReplicaSpeed, ServiceLevel
from policies.cost.steps import StepCosts
from policies.decision.deciding import decide_pool, place
from policies.decision.limits import Limits, LiveLimits, Mode, Terms
from policies.decision.memory import PoolMemory
from policies.model import ReplicaId, RequestId, Tokens
from policies.paths.prices import Profile
from policies.plan import Plan, Proposal, Reason
from policies.rules.registry import POLICIES
from tests.counts import scaled
from tests.policies.decision.observed import Drawn, Watcher, observed
from tests.policies.decision.test_deciding import CROWD, NO_GROWTH, orders
from tests.policies.settings import unhurried

PROFILE = Profile("n", "c", 1.0)
SPEED = ReplicaSpeed(StepCosts(((1, 0.02), (2, 0.021), (8, 0.03))))
LIMITS = LiveLimits(Limits(), 0.0, 0.0, 60.0, 0.0)

TERMS = {
    "plain": Terms(limits=LIMITS),
    "reserve": Terms(limits=replace(LIMITS, slack=0.5, linger_s=1.0)),
    "few moves": Terms(limits=replace(LIMITS, limits=Limits(2, 3.0)), moves_at_once=3, moves_per_replica=1),
    "level": Terms(limits=replace(LIMITS, foresight_s=None), service=ServiceLevel(itl_p99_s=0.05), speed=SPEED),
    "prefills": Terms(limits=LIMITS, prefill_replicas=1),
    "auto": Terms(limits=LIMITS, prefill_replicas=3, auto_prefills=True, speed=SPEED),
}


def watcher(terms: Terms = TERMS["plain"], spec: str = NO_GROWTH, least: int = 0) -> Watcher:
    """A watcher in the mode `observe`, of replicas that exchange KV."""
    memory = PoolMemory(replace(terms, policy=spec, mode=Mode.OBSERVE))
    for name in "abcde":
        memory.learned.estimates.profile(ReplicaId(name), PROFILE)
    return Watcher(memory, least)


def proposed(made: Watcher, *drawn: Drawn) -> Proposal:
    """The proposal of the last of these epochs."""
    plan = [made.decide(one) for one in drawn][-1]
    assert plan.proposed is not None
    return plan.proposed


def standing(memory: PoolMemory) -> dict[str, Any]:
    """Everything that decides on locations and paths, with the orders of all collections."""
    cluster = memory.cluster
    return {
        "replicas": [
            (r.id, r.state, r.room, r.load, r.held, r.shared, r.queued, r.backlog, r.role, r.apart, r.order)
            for r in cluster.replicas.values()
        ],
        "there": [(list(r.requests), list(r.adapters.items())) for r in cluster.replicas.values()],
        "requests": [
            (q.id, q.tokens, q.pinned, q.resting, q.replica and q.replica.id, q.source and q.source.id)
            for q in cluster.requests.values()
        ],
        "roomiest": [r.id for r in roomiest(cluster)],
        "waiting": list(cluster.waiting),
        "under way": memory.locations.under_way,
        "homes": (memory.locations.homes, memory.locations.leaving, memory.locations.placed),
        "resting": cluster.resting,
        "supply": (cluster.supply.left, sorted(cluster.supply._taken)),
        "unit": cluster.decisions._units,
        "roles": memory.learned.prefill_load,
        "paths": memory.learned.estimates._shared,
        "next": (memory.locations._stale, memory.locations._expected, memory.locations._closed),
    }


def drawing(dice: random.Random, names: list[str]) -> str:
    """Up to five replicas, some of which start or stop, and those requests, some with an adapter."""
    replicas = [f"{name}{dice.choice(['', '', '', '', '', '*', '^'])}:" for name in "abcde"[: dice.randrange(1, 6)]]
    for name in names:
        index = dice.randrange(len(replicas))
        if "*" not in replicas[index]:
            adapter, phase = dice.choice(["", "", "", "+1", "+2", "+3"]), dice.choice(["", "", "", "", *"?~>!"])
            replicas[index] += f" {name}{dice.randrange(1, 60)}{adapter}{phase}"
    return " | ".join(replicas)


@settings(unhurried, max_examples=scaled(300))
@given(
    st.sampled_from(sorted(POLICIES)),
    st.sampled_from(sorted(TERMS)),
    st.integers(0, 2),
    st.booleans(),
    st.randoms(use_true_random=False),
)
def test_a_proposal_is_the_plan_of_act_and_leaves_no_trace(
    spec: str, terms: str, least: int, share: bool, dice: random.Random
) -> None:
    made = watcher(TERMS[terms], spec, least)
    off = watcher(TERMS[terms], spec).memory
    off.set_mode(Mode.OFF)
    alphabet = [first + second for first in "pqrst" for second in "uvwxy"]
    for epoch in range(dice.randrange(1, 6)):
        now = float(epoch)
        seen = made.report(observed(drawing(dice, dice.sample(alphabet, dice.randrange(14))), now, most=6))
        act = copy.deepcopy(made.memory)
        act.set_mode(Mode.ACT)
        (plan,) = decide_pool(made.memory, seen, now)
        assert plan.proposed is not None
        assert (plan.proposed.plan,) == decide_pool(act, seen, now)
        assert (replace(plan, proposed=None),) == decide_pool(off, seen, now)
        made.memory.cluster.check_integrity()
        assert standing(made.memory) == standing(off)
        names = tuple(range(dice.randrange(9))) if share else ()
        arrival = Arrival(RequestId(f"z{epoch}"), Tokens(dice.randrange(10, 60)), names)
        assert place(made.memory, arrival, now + 0.5) == place(off, arrival, now + 0.5)
        assert standing(made.memory) == standing(off)


@pytest.mark.parametrize("spec", sorted(POLICIES))
def test_what_does_not_change_is_proposed_again(spec: str) -> None:
    """From the second epoch on: in the first one, all requests have changed."""
    cluster = "a: p40 q20 | b: r15 | c: s80 t15 v40? | d:"
    made = watcher(spec=spec)
    proposals = [proposed(made, observed(cluster, float(now), most=6)) for now in range(4)]
    assert proposals[1] == proposals[2] == proposals[3]


def test_nothing_of_a_proposal_is_under_way() -> None:
    made = watcher()
    for now in range(3):
        proposal = proposed(made, observed("a: p40 q20 | b: r15 | c:", float(now)))
        assert orders(proposal.plan.moves) == ["r:b>a drain"] and proposal.plan.closed == ("c",)
        assert not made.memory.locations.under_way and set(made.memory.cluster.replicas) == set("abc")


def test_evacuations_are_carried_out_and_proposed() -> None:
    plan = watcher().decide(observed("a^: p40 | b: q30 | c: r20"))
    assert [move.reason for move in plan.moves] == [Reason.EVACUATE]
    assert plan.proposed is not None
    assert {move.reason for move in plan.proposed.plan.moves} == {Reason.EVACUATE, Reason.DRAIN}


@pytest.mark.parametrize("mode", [Mode.ACT, Mode.OFF])
def test_only_observe_proposes(mode: Mode) -> None:
    made = watcher()
    made.memory.set_mode(mode)
    assert made.decide(observed("a: p40 | b: q30")).proposed is None


@pytest.mark.parametrize(
    ("drawing", "least", "slack", "needed"),
    [
        ("a: p40 q20 | b: r15", 0, 0.0, 1),
        ("a: p40 q20 | b: r15", 2, 0.0, 2),
        ("a: p40 | b: | c:", 0, 0.9, 2),
        ("a: p60 | b: q60", 0, 0.0, 2),
        ("a: p90 q40? | b: r80", 0, 0.0, 3),
        ("a: p40 | b^: q30", 0, 0.0, 1),
        ("a: p40 | b*:", 0, 0.0, 2),
    ],
    ids=["emptied", "minimum", "slack", "full", "opened", "stopping", "starting"],
)
def test_the_number_of_replicas_that_a_proposal_needs(drawing: str, least: int, slack: float, needed: int) -> None:
    made = watcher(Terms(limits=replace(LIMITS, slack=slack)), "pack:headroom_s=0,comfort=0,rest=0,plenty=1", least)
    assert proposed(made, observed(drawing, most=6)).replicas_needed == needed


def test_moves_beyond_the_bounds_are_counted_with_those_that_begin() -> None:
    made = watcher(Terms(limits=LIMITS, moves_per_replica=2))
    proposal = proposed(made, observed(CROWD))
    assert (len(proposal.plan.moves), len(proposal.moves), proposal.replicas_needed) == (2, 5, 2)


def test_an_empty_replica_lingers_before_its_closing_is_proposed() -> None:
    made = watcher(Terms(limits=replace(LIMITS, linger_s=5.0)))
    closed = [proposed(made, observed("a: p40! | b:", float(now))).plan.closed for now in (0, 4, 5, 6)]
    assert closed == [(), (), ("b",), ("b",)]


def test_acting_after_observing_begins_with_the_cluster_as_it_is() -> None:
    made = watcher()
    proposal = proposed(made, observed("a: p40 q20 | b: r15"))
    made.memory.set_mode(Mode.ACT)
    plan = made.decide(observed("a: p40 q20 | b: r15", 1.0))
    assert plan == replace(proposal.plan, proposed=None) != Plan()
