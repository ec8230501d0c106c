"""A burst that nobody could foresee: requests that queue at full replicas are placed anew, the oldest first."""

import pytest

from policies.cluster.capacity import spare_capacity, total_demand
from policies.cost.service import ReplicaSpeed, ServiceLevel
from policies.cost.steps import StepCosts, proportional
from policies.decision.limits import LiveLimits, Terms
from policies.decision.memory import PoolMemory
from policies.model import ReplicaId
from policies.plan import Path, Reason
from tests.policies.decision.observed import Watcher, observed

LIMITS = LiveLimits(linger_s=1e9, foresight_s=0.0, lead_s=0.0)
FAST = ReplicaSpeed(StepCosts(proportional(1e-4), overhead_s=0.02))
SLOW = ReplicaSpeed(StepCosts(proportional(0.01), overhead_s=0.02))
"""A hundred tokens take a second, so that few of them fit into the boundary of an epoch's prefills."""
QUEUED = " ".join(f"q{'abcdefghij'[n]}8?" for n in range(7))
"""Seven requests in a queue, the oldest first."""


def watcher(
    level: ServiceLevel | None = None, policy: str = "pack:headroom_s=0", speed: ReplicaSpeed = SLOW
) -> Watcher:
    return Watcher(PoolMemory(Terms(policy, LIMITS, service=level, speed=speed)))


@pytest.mark.parametrize("policy", ["pack:headroom_s=0", "load_balance", "best_fit", "mell"])
def test_a_whole_queue_goes_to_a_new_replica_at_once_the_oldest_first(policy: str) -> None:
    made = watcher(policy=policy)
    assert made.decide(observed(f"a: p97 {QUEUED} | b*:", most=2)).moves == ()
    moves = made.decide(observed(f"a: p97 {QUEUED} | b:", 1.0, most=2)).moves
    assert [move.request for move in moves] == [f"q{name}" for name in "abcdefg"]
    assert {(move.target, move.reason, move.path) for move in moves} == {("b", Reason.ADMIT, Path.TOKENS)}


def test_with_little_room_the_oldest_go_first() -> None:
    made = watcher()
    moves = made.decide(observed(f"a: p97 {QUEUED} | b: r70!", most=2)).moves
    assert [move.request for move in moves] == ["qa", "qb", "qc"]


def test_requests_that_run_keep_to_the_bounds() -> None:
    leaving = "a^: " + " ".join(f"r{name}8" for name in "abcdefg") + " | b:"
    moves = watcher(speed=FAST).decide(observed(leaving, most=2)).moves
    assert len(moves) == Terms().moves_per_replica and {move.reason for move in moves} == {Reason.EVACUATE}


def test_a_queue_keeps_a_replica_busy_until_the_next_epoch_however_short_waits_have_to_be() -> None:
    made = watcher(ServiceLevel(ttft_p99_s=0.2))
    moves = made.decide(observed(f"a: p97 {QUEUED} | b:", most=2)).moves
    assert [move.request for move in moves] == [f"q{name}" for name in "abcdefg"], "0.7 s of prefills"
    assert made.memory.cluster.conditions.speed is not None and made.memory.cluster.conditions.speed.wait_s < 0.2
    assert not made.memory.cluster.replicas[ReplicaId("b")].accepts, "an arrival would be late"


def test_replicas_are_opened_for_the_part_of_a_queue_that_others_cannot_serve_in_time() -> None:
    made = watcher(ServiceLevel(ttft_p99_s=60.0))
    for now in range(60):
        made.memory.learned.experience.observe_running(10, float(now))
        made.memory.learned.experience.observe_arrival(8, float(now))
    made.decide(observed(f"a: p97 {QUEUED} | b*: | c*:", 60.0))
    cluster = made.memory.cluster
    # Requests stay for ten seconds, and may wait for sixty: a seventh of the queue has to have room at a time.
    assert sum(request.tokens for request in cluster.waiting.values()) == 56
    assert (total_demand(cluster), spare_capacity(cluster)) == (97 + 8, 200 - 8)
