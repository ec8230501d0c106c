"""A dry run over what happens in the idealised world decides what that world decides."""

from collections.abc import Sequence
from dataclasses import replace

import pytest

from app.simulator.costs.costs import IDEAL
from app.simulator.world.observer import Life, Transfer
from app.simulator.world.setup import Setup
from app.simulator.world.world import simulate
from policies.cluster.cluster import Cluster
from policies.decision.limits import Limits, LiveLimits, Mode, Terms
from policies.decision.memory import PoolMemory
from policies.decision.shadow import Shadow
from policies.model import Blocks, Phase, ReplicaId, ReplicaLoad, ReplicaState, RequestLoad, Tokens
from policies.plan import Plan
from policies.rules.registry import policy
from tests.app.simulator.world.test_world import workload
from tests.policies.decision.observed import Drawn, Watcher
from tests.policies.history import places

CAPACITY = Tokens(1000)

NOTHING_FOR_GROWTH = [
    "best_fit",
    "worst_fit",
    "load_balance",
    "load_balance:drain=true",
    "mell",
    "mell_repaired:headroom_s=0",
    "pack:headroom_s=0",
]
"""Policies for which it does not matter how fast requests grow: that is learned, and the world knows it."""


class Follower:
    """Has a shadow live through what a world goes through: only which requests there are, and how large."""

    def __init__(self, spec: str, limits: Limits, least: int) -> None:
        terms = Terms(spec, LiveLimits(limits, limits.linger_s, limits.foresight_s), epoch_s=0.0)
        self.watcher = Watcher(PoolMemory(replace(terms, mode=Mode.OBSERVE)), least)
        self.shadow = Shadow(terms, self.watcher.memory.experience)
        self.moves = 0
        self.gpu_seconds = 0

    def decided(self, now: float, cluster: Cluster, plans: Sequence[Plan], closing: int = 0) -> None:
        """The shadow makes the decisions of the world."""
        report = self.watcher.report(Drawn(now, (_all_on_one(cluster),), most=1000))
        assert [self.shadow.observe(report, now)] == list(plans)
        assert places(self.shadow.cluster) == places(cluster)
        so_far = self.shadow.so_far
        assert so_far is not None
        self.moves += sum(len(plan.moves) + len(plan.evicted) for plan in plans)
        assert (so_far.moves, so_far.gpu_seconds_needed) == (self.moves, self.gpu_seconds)
        self.gpu_seconds += len(cluster.replicas)

    def stepped(self, now: float, step_s: float, tokens: float) -> None:
        """Not of interest."""

    def transferred(self, now: float, transfer: Transfer) -> None:
        """Not of interest."""

    def preempted(self, now: float, tokens: Tokens) -> None:
        """Not of interest."""

    def finished(self, now: float, life: Life) -> None:
        """Not of interest."""


def _all_on_one(cluster: Cluster) -> ReplicaLoad:
    """The cluster's requests as found on a single overfull replica, the oldest last."""
    newest_first = sorted(cluster.requests.values(), key=lambda q: -q.order)
    requests = [RequestLoad(q.id, "", q.tokens, Phase.WAITING, 1e6 - q.order, 0) for q in newest_first]
    return ReplicaLoad(
        ReplicaId("real"), ReplicaState.RUNNING, "n", CAPACITY, 1, Blocks(0), 1 << 30, requests=tuple(requests)
    )


LIMITS = {
    "none": (1, Limits()),
    "budget": (1, Limits(moves_per_epoch=2, cooldown_s=5.0)),
    "slack": (2, Limits(slack=0.5, foresight_s=20.0, linger_s=10.0)),
}


@pytest.mark.parametrize(("least", "limits"), LIMITS.values(), ids=LIMITS)
@pytest.mark.parametrize("spec", NOTHING_FOR_GROWTH)
def test_it_is_the_idealised_world_whatever_replicas_are_really_there(spec: str, least: int, limits: Limits) -> None:
    setup = Setup(CAPACITY, 25.0, horizon_s=90.0, gpus_per_node=1, min_replicas=least, limits=limits)
    follower = Follower(spec, limits, least)
    simulate(workload(3, 70.0, rate=1.0), policy(spec), setup, IDEAL, follower)
    assert follower.gpu_seconds > 90
    assert follower.moves > 5
