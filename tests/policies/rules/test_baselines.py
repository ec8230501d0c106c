"""Invariants of every baseline for any events: plans that can be executed, and no replica over its capacity."""

from collections.abc import Iterator

from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from policies.cluster.capacity import overloaded
from policies.cluster.changes import Arrival
from policies.cluster.cluster import Cluster
from policies.cluster.conditions import EpochConditions
from policies.cluster.supply import Supply
from policies.decision.limits import Limits
from policies.model import ReplicaState, RequestId, Tokens
from policies.plan import Plan
from policies.rules.best_fit import BestFit
from policies.rules.load_balance import LoadBalance
from policies.rules.overload import Overload
from policies.rules.policy import Policy
from policies.rules.worst_fit import WorstFit
from tests.policies.rehearsal import before, violations
from tests.policies.stepping import Events, begin, decide

CAPACITY = 100

evicting = [BestFit(), WorstFit(headroom_s=1.0)]
stalling = [BestFit(overload=Overload.STALL)]
moving = [LoadBalance(), LoadBalance(drain=True), LoadBalance(drain=True, threshold=0, spare=0)]
policies = st.sampled_from([*evicting, *stalling, *moving])

Epoch = tuple[int, list[int], list[int]]
"""By how much every request grows, which ones leave (counted from the oldest), the sizes of those that arrive."""

epochs = st.tuples(
    st.integers(0, 20), st.lists(st.integers(0, 9), max_size=3), st.lists(st.integers(1, 90), max_size=4)
)
histories = st.lists(epochs, min_size=1, max_size=12)
unhurried = settings(deadline=None, suppress_health_check=[HealthCheck.too_slow])


def happening(cluster: Cluster, last: Plan, now: int, epoch: Epoch) -> Events:
    """The events of one epoch. Moves are over and replicas have started one epoch after they were decided."""
    growth, leaving, sizes = epoch
    there = list(cluster.requests)
    departed = [there[i] for i in sorted(set(leaving)) if i < len(there)]
    grown = {q.id: Tokens(min(CAPACITY, q.tokens + growth)) for q in cluster.requests.values() if q.replica is not None}
    return Events(
        sizes={r: tokens for r, tokens in grown.items() if r not in departed},
        departed=departed,
        arrived=[Arrival(RequestId(f"{now}.{i}"), Tokens(size)) for i, size in enumerate(sizes)],
        moved=[m.request for m in last.moves if cluster.holds],
        started=[o.replica for o in last.opened if cluster.starts_as is ReplicaState.STARTING],
    )


def play(cluster: Cluster, policy: Policy, history: list[Epoch]) -> Iterator[Plan]:
    """The plans of a history, each checked against the cluster that it was made for."""
    plan = Plan()
    for now, epoch in enumerate(history):
        changes = begin(cluster, happening(cluster, plan, now, epoch), Limits(), now)
        was = before(cluster)
        plan = decide(cluster, changes, policy, Limits(), now)
        assert violations(plan, was) == []
        cluster.check_integrity()
        yield plan


@unhurried
@given(policies, histories, st.booleans(), st.sampled_from([ReplicaState.RUNNING, ReplicaState.STARTING]))
def test_plans_can_be_carried_out(policy: Policy, history: list[Epoch], holds: bool, starts_as: ReplicaState) -> None:
    conditions = EpochConditions(3)
    cluster = Cluster(Tokens(CAPACITY), supply=Supply(limit=4), conditions=conditions, holds=holds, starts_as=starts_as)
    assert len(list(play(cluster, policy, history))) == len(history)


@unhurried
@given(st.sampled_from([*evicting, *moving]), histories)
def test_nothing_waits_or_overflows_where_replicas_abound(policy: Policy, history: list[Epoch]) -> None:
    cluster = Cluster(Tokens(CAPACITY))
    for plan in play(cluster, policy, history):
        assert not plan.queued
        assert not overloaded(cluster)


@unhurried
@given(st.sampled_from([*evicting, *stalling]), histories)
def test_without_migration_nothing_moves(policy: Policy, history: list[Epoch]) -> None:
    assert not any(plan.moves for plan in play(Cluster(Tokens(CAPACITY)), policy, history))


@unhurried
@given(policies, histories)
def test_the_same_history_gives_the_same_plans(policy: Policy, history: list[Epoch]) -> None:
    first, second = (list(play(Cluster(Tokens(CAPACITY)), policy, history)) for _ in range(2))
    assert first == second


@unhurried
@given(st.sampled_from([*evicting, *stalling]), st.lists(st.integers(1, CAPACITY), min_size=2, max_size=20))
def test_no_replica_is_opened_while_another_has_room(policy: Policy, sizes: list[int]) -> None:
    cluster = Cluster(Tokens(CAPACITY))
    list(play(cluster, policy, [(0, [], sizes)]))
    loads = sorted(replica.load for replica in cluster.replicas.values())
    assert len(loads) == 1 or loads[0] + loads[1] > CAPACITY
