"""Both policies through random histories in which something is always short."""

from collections.abc import Iterator
from dataclasses import dataclass

from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.capacity import overloaded
from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.cluster.conditions import EpochConditions
from policies.cluster.supply import Supply
from policies.decision.limits import Limits
from policies.model import ReplicaState, RequestId, Tokens
from policies.plan import Plan
from policies.rules.mell import Mell, mell, mell_repaired
from tests.policies.rehearsal import before, violations
from tests.policies.rules.mell.clusters import C
from tests.policies.settings import unhurried
from tests.policies.stepping import Events, begin, decide, step_each

Epoch = tuple[int, list[int], list[int], int]
"""By how much requests grow, which ones leave (counted from the oldest), sizes of arrivals, one that is pinned."""


@dataclass(frozen=True, slots=True)
class Shortage:
    """The scarce resource."""

    holds: bool
    starts_as: ReplicaState
    replicas: int | None
    max_requests: int
    limits: Limits
    least: int

    def cluster(self, policy: Mell) -> Cluster:
        """An empty one."""
        conditions = EpochConditions(round(10 * policy.headroom_s), min_replicas=self.least)
        return Cluster(C, Supply(limit=self.replicas), conditions, holds=self.holds, starts_as=self.starts_as)


policies = st.sampled_from([mell(), mell_repaired(), mell_repaired(0)])
sizes = st.integers(1, C // 4) | st.integers(1, C) | st.sampled_from([300, 301, 600, 601, 800, 801, 1200, 1201, C])
epochs = st.tuples(
    st.integers(0, 300),
    st.lists(st.integers(0, 30), max_size=5),
    st.lists(sizes, max_size=6),
    st.integers(0, 99),
)
histories = st.lists(epochs, min_size=1, max_size=12)
shortages = st.builds(
    Shortage,
    holds=st.booleans(),
    starts_as=st.sampled_from([ReplicaState.RUNNING, ReplicaState.STARTING]),
    replicas=st.sampled_from([None, 3, 6]),
    max_requests=st.sampled_from([1 << 30, 3]),
    limits=st.builds(
        Limits,
        moves_per_epoch=st.sampled_from([None, 0, 2, 6]),
        cooldown_s=st.sampled_from([0.0, 2.0]),
    ),
    least=st.sampled_from([0, 2]),
)


def happening(cluster: Cluster, now: int, epoch: Epoch) -> Events:
    """The events of an epoch. Moves take an epoch, and replicas that start are ready every third."""
    growth, leaving, arriving, pinned = epoch
    there = list(cluster.requests.values())
    departed = [there[i].id for i in sorted(set(leaving)) if i < len(there)]
    if pinned < len(there):
        there[pinned].pinned = True
    starting = [r.id for r in cluster.replicas.values() if r.state is ReplicaState.STARTING]
    return Events(
        sizes={q.id: Tokens(min(C, q.tokens + growth)) for q in there if q.replica and q.id not in departed},
        departed=departed,
        arrived=[Arrival(RequestId(f"{now}.{i}"), Tokens(size)) for i, size in enumerate(arriving)],
        moved=[q.id for q in there if q.source is not None],
        started=starting if now % 3 == 0 else [],
    )


def lived(policy: Mell, shortage: Shortage, history: list[Epoch]) -> Iterator[Plan]:
    """The plan of each epoch, checked against the cluster that it was made for."""
    cluster = shortage.cluster(policy)
    for now, epoch in enumerate(history):
        changes = begin(cluster, happening(cluster, now, epoch), shortage.limits, now)
        for replica in cluster.replicas.values():
            replica.max_requests = shortage.max_requests
        was = before(cluster)
        plan = decide(cluster, changes, policy, shortage.limits, now)
        assert violations(plan, was) == []
        cluster.check_integrity()
        yield plan


@unhurried
@given(policies, shortages, histories)
def test_plans_can_be_carried_out_and_nothing_is_evicted(
    policy: Mell, shortage: Shortage, history: list[Epoch]
) -> None:
    for plan in lived(policy, shortage, history):
        assert plan.evicted == ()
        assert len(plan.moves) <= (shortage.limits.moves_per_epoch or 0) or shortage.limits.moves_per_epoch is None


@unhurried
@given(policies, shortages, histories)
def test_the_same_history_gives_the_same_plans(policy: Mell, shortage: Shortage, history: list[Epoch]) -> None:
    assert list(lived(policy, shortage, history)) == list(lived(policy, shortage, history))


@unhurried
@given(policies, histories)
def test_one_operation_at_a_time_nothing_waits_or_overflows_either(policy: Mell, history: list[Epoch]) -> None:
    cluster = Cluster(C)
    for now, (growth, leaving, arriving, _) in enumerate(history):
        step_each(cluster, happening(cluster, now, (growth, leaving, arriving, 99)), policy)
        cluster.check_integrity()
        assert not cluster.waiting and not overloaded(cluster)
