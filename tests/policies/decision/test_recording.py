"""Recordings: a plan has a member for each kind of action, and is read as it was written."""

import json

from policies.cluster.changes import Arrival
from policies.cost.service import ServiceLevel
from policies.decision.limits import Terms
from policies.decision.observation import Observation
from policies.decision.recording import Epoch, Ordered, PlacedCall, RoleOrdered, epoch_line, parse_recording, terms_line
from policies.model import SOLE_POOL, PoolId, ReplicaId, RequestId, Role, Tokens
from policies.plan import Eviction, Move, Open, Pair, Placement, Plan, Proposal, Reason, Unpair

A, B, P = ReplicaId("a"), ReplicaId("b"), RequestId("p")
MOVE = Move(P, A, B, Tokens(30), Reason.DRAIN, 1)
PAIRS = Unpair(A, B), Pair(A, B, Tokens(500), 3.0)
PLAN = Plan.of((MOVE,), (Placement(P, B),), (Eviction(P, A, Tokens(30)),), (P,), (Open(B, "n"),), (A,), (MOVE,))
PLAN = PLAN.with_pairs(PAIRS).with_pairs(PAIRS[1:], proposed=True)


def test_a_recorded_plan_has_a_member_for_each_kind_of_action_and_is_read_as_it_was() -> None:
    epoch = Epoch((), Observation(1.0, ()), {SOLE_POOL: (PLAN, Plan(proposed=Proposal(PLAN, (MOVE,), 2)))})
    line = epoch_line(epoch)
    (recorded, observing) = json.loads(line)["plans"][SOLE_POOL]
    assert list(recorded) == [
        "moves",
        "placements",
        "evicted",
        "queued",
        "opened",
        "closed",
        "deferred",
        "proposed",
        "pairs",
        "proposed_pairs",
    ]
    assert (recorded["opened"], recorded["closed"]) == ([{"replica": "b", "node": "n"}], ["a"])
    assert observing["proposed"]["plan"] == recorded
    assert list(parse_recording([terms_line(Terms()), line], "recorded")[1]) == [epoch]


def test_entries_of_a_recording_without_pools_belong_to_the_sole_pool() -> None:
    def entries(pool: PoolId) -> tuple[PlacedCall, Ordered, RoleOrdered]:
        return (
            PlacedCall(1.0, Arrival(P, Tokens(30)), (A,), "label", 1, pool),
            Ordered(1.0, MOVE, 2, pool),
            RoleOrdered(1.0, A, Role.PREFILL, 3, pool),
        )

    line = json.loads(epoch_line(Epoch(entries(PoolId("Other")), Observation(1.0, ()), {})))
    terms = terms_line(Terms())
    (named,) = parse_recording([terms, json.dumps(line).encode()], "recorded")[1]
    assert named.entries == entries(PoolId("Other"))
    for entry in line["entries"]:
        del entry["pool"]
    (unnamed,) = parse_recording([terms, json.dumps(line).encode()], "recorded")[1]
    assert unnamed.entries == entries(SOLE_POOL)


def test_the_terms_of_pools_are_recorded() -> None:
    own = Terms(service=ServiceLevel(2.0, None), prefill_replicas=1)
    terms, _ = parse_recording([terms_line(Terms(pools={PoolId("Engine-chat"): own}))], "recorded")
    assert terms.of(PoolId("Engine-chat")) == own and terms.of(PoolId("Engine-code")).service is None
