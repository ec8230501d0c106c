"""The paper's theorems (section VII) as properties of random histories, and with what exceptions they hold."""

import random
from collections.abc import Iterator, Sequence
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.bounds import martello_toth_l2
from policies.cluster.changes import Arrival
from policies.cluster.classes import Kind
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica
from policies.model import RequestId, Tokens
from policies.rules.mell import Mell, mell, mell_repaired
from tests.policies.cluster.named import impose
from tests.policies.rules.mell.clusters import C
from tests.policies.settings import many, unhurried
from tests.policies.stepping import Events, step, step_each

both = pytest.mark.parametrize("policy", [mell(), mell_repaired()], ids=["mell", "mell_repaired"])
RATE = 20
"""Tokens by which a request grows in an epoch."""

CONSTANT = 4
"""The additive constant of Theorem 2, which the paper leaves open: one replica of each category."""

Sizes = tuple[int, int]
ANY, SMALL, MIXED = (1, C), (1, C // 3), (C // 12, C // 2)


@dataclass(slots=True)
class Traffic:
    """Requests that arrive with part of their final size, grow to it and leave; about `per_epoch` in an epoch."""

    seed: int
    sizes: Sizes
    per_epoch: float

    def __iter__(self) -> Iterator[Events]:
        rng = random.Random(self.seed)
        ends: dict[RequestId, Tokens] = {}
        sizes: dict[RequestId, Tokens] = {}
        while True:
            departed = [name for name, size in sizes.items() if size >= ends[name]]
            for name in departed:
                del sizes[name], ends[name]
            sizes = {name: Tokens(min(size + RATE, ends[name])) for name, size in sizes.items()}
            grown, arrived = dict(sizes), []
            while rng.random() < self.per_epoch / (1 + self.per_epoch):
                name = RequestId(f"{rng.random()}")
                ends[name] = Tokens(rng.randint(*self.sizes))
                sizes[name] = Tokens(rng.randint(1, ends[name]))
                arrived.append(Arrival(name, sizes[name]))
            yield Events(sizes=grown, departed=departed, arrived=arrived)


def lived(policy: Mell, traffic: Traffic, epochs: int) -> Iterator[Cluster]:
    """The cluster after each epoch."""
    cluster = Cluster(C)
    impose(cluster, headroom=round(policy.headroom_s * RATE))
    for now, events in zip(range(epochs), traffic, strict=False):
        step(cluster, events, policy, now=now)
        yield cluster


def exceptions(cluster: Cluster) -> list[int]:
    """The number of replicas without each of the properties of Theorem 1."""
    by: dict[Kind, list[Replica]] = {kind: [] for kind in Kind}
    for replica in cluster.replicas.values():
        by[max(Kind.TINY, *(q.kind for q in replica.requests.values()))].append(replica)
    middles = [q.tokens for r in by[Kind.SMALL] + by[Kind.MEDIUM] for q in r.requests.values() if q.kind > Kind.TINY]
    low = [r for r in by[Kind.LARGE] + by[Kind.MEDIUM] if r.load < 0.75 * C]
    return [
        sum(count(r, Kind.MEDIUM) != 2 for r in by[Kind.MEDIUM]),
        sum(count(r, Kind.SMALL) != 3 for r in by[Kind.SMALL]),
        sum(r.load < 0.75 * C for r in by[Kind.TINY]),
        sum(could_take_one_of(r, middles) for r in by[Kind.LARGE]),
        len(low) if by[Kind.TINY] else 0,
    ]


def count(replica: Replica, kind: Kind) -> int:
    return sum(request.kind is kind for request in replica.requests.values())


def could_take_one_of(replica: Replica, middles: Sequence[int]) -> bool:
    """Property 4 is violated: a LARGE request alone, though a SMALL or MEDIUM one elsewhere would fit beside it."""
    sizes = [request.tokens for request in replica.requests.values() if request.kind > Kind.TINY]
    return len(sizes) == 1 and min(middles, default=C) <= C - sizes[0]


def unit_moves(policy: Mell, traffic: Traffic, epochs: int) -> Iterator[int]:
    """The number of units that each operation moves with one change at a time, as in Algorithm 1."""
    cluster = Cluster(C)
    impose(cluster, headroom=round(policy.headroom_s * RATE))
    for _, events in zip(range(epochs), traffic, strict=False):
        for event in one_by_one(events):
            for plan in step_each(cluster, event, policy):
                yield len({move.unit for move in plan.moves})


def one_by_one(events: Events) -> Iterator[Events]:
    """Every event alone."""
    yield from (Events(departed=[name]) for name in events.departed)
    yield from (Events(sizes={name: size}) for name, size in events.sizes.items())
    yield from (Events(arrived=[arrival]) for arrival in events.arrived)


traffics = st.builds(
    Traffic, seed=st.integers(0, 1 << 30), sizes=st.sampled_from([ANY, SMALL, MIXED]), per_epoch=st.floats(0.3, 3)
)


@both
@pytest.mark.parametrize("per_epoch", [1.0, 4.0])
def test_theorem_1_with_exceptions(policy: Mell, per_epoch: float) -> None:
    """The paper allows a constant number of them. So it is for SMALL and TINY replicas (2, 3 and 5 of the list), and
    for `mell` with 4. MEDIUM replicas (1) that growth or a departure has left with one request are refilled only by
    chance, as are LARGE ones (4) by `mell_repaired`, which does not move what may stay: these grow with the cluster.
    """
    worst = [0] * 5
    for epoch, cluster in enumerate(lived(policy, Traffic(1, ANY, per_epoch), 120)):
        if epoch >= 40:
            worst = [max(pair) for pair in zip(worst, exceptions(cluster), strict=True)]
    replicas = len(cluster.replicas)
    constant = 8
    assert all(n <= constant for n in (worst[1], worst[2], worst[4]))
    assert worst[3] <= (2 if policy == mell() else constant + replicas // 10)
    assert worst[0] <= constant + replicas // 20


@both
@unhurried
@given(traffics)
def test_theorem_2_four_thirds_of_the_lower_bound(policy: Mell, traffic: Traffic) -> None:
    for cluster in lived(policy, traffic, 40):
        least = martello_toth_l2([q.tokens for q in cluster.requests.values()], C)
        assert least <= len(cluster.replicas) <= 4 / 3 * least + CONSTANT


@pytest.mark.slow
@both
@unhurried
@given(traffics)
def test_theorem_3_ten_moves_for_one_operation(policy: Mell, traffic: Traffic) -> None:
    assert max(unit_moves(policy, traffic, 25), default=0) <= 10


@pytest.mark.slow
@both
@many
@given(traffics)
def test_theorems_2_and_3_in_many_histories(policy: Mell, traffic: Traffic) -> None:
    assert max(unit_moves(policy, traffic, 40), default=0) <= 10
    for cluster in lived(policy, traffic, 40):
        least = martello_toth_l2([q.tokens for q in cluster.requests.values()], C)
        assert least <= len(cluster.replicas) <= 4 / 3 * least + CONSTANT
