"""Recordings: a plan has a member for each kind of action, and is read as it was written."""

import json

from policies.decision.limits import Terms
from policies.decision.observation import Observation
from policies.decision.recording import Epoch, epoch_line, parse_recording, terms_line
from policies.model import SOLE_POOL, ReplicaId, RequestId, Tokens
from policies.plan import Eviction, Move, Open, Placement, Plan, Proposal, Reason

A, B, P = ReplicaId("a"), ReplicaId("b"), RequestId("p")
MOVE = Move(P, A, B, Tokens(30), Reason.DRAIN, 1)
PLAN = Plan.of((MOVE,), (Placement(P, B),), (Eviction(P, A, Tokens(30)),), (P,), (Open(B, "n"),), (A,), (MOVE,))


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
    ]
    assert (recorded["opened"], recorded["closed"]) == ([{"replica": "b", "node": "n"}], ["a"])
    assert observing["proposed"]["plan"] == recorded
    assert list(parse_recording([terms_line(Terms()), line], "recorded")[1]) == [epoch]
