"""Machines of several replicas: which replica is emptied and closed, and that no more replicas stay open for it."""

from collections.abc import Sequence

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from policies.cluster.capacity import replicas_by_machine
from policies.cluster.cluster import Cluster
from policies.cluster.supply import Supply
from policies.decision.limits import Limits
from policies.model import ReplicaId, RequestId, Tokens
from policies.rules.pack import Pack
from tests.policies.cluster.named import impose
from tests.policies.settings import many
from tests.policies.stepping import UNLIMITED, Events, step

PACK = Pack(comfort=0.0)


def machines(drawing: str, by_machine: bool = True) -> Cluster:
    """Machines between `||`, their replicas between `|`, as the sizes of their requests; 100 tokens each."""
    return cluster_of(
        [[[int(size) for size in replica.split()] for replica in m.split("|")] for m in drawing.split("||")],
        by_machine,
    )


def cluster_of(
    contents: Sequence[Sequence[Sequence[int]]], by_machine: bool, capacities: Sequence[int] = (100,)
) -> Cluster:
    """Machines of replicas of requests; replicas have the `capacities` in turn."""
    cluster = Cluster(Tokens(100), Supply(), by_machine=by_machine)
    for number, replicas in enumerate(contents):
        for sizes in replicas:
            name = f"r{len(cluster.replicas)}"
            capacity = Tokens(capacities[len(cluster.replicas) % len(capacities)])
            replica = cluster.add_replica(ReplicaId(name), str(number), capacity)
            for size in sizes:
                request = cluster.add_request(RequestId(f"q{len(cluster.requests)}"), Tokens(size))
                cluster.decisions.place(request, replica)
    cluster.decisions.settle()
    return cluster


def stepped(cluster: Cluster, limits: Limits = UNLIMITED, least: int = 0) -> str:
    """The number of replicas on each machine after an epoch without events."""
    impose(cluster, min_replicas=least)
    step(cluster, Events(), PACK, limits)
    cluster.check_integrity()
    left = replicas_by_machine(cluster)
    return " ".join(f"{machine}:{number}" for machine, number in sorted(left.items()))


@pytest.mark.parametrize(
    ("before", "without", "after"),
    [
        pytest.param("60 | 60 | 10 || 60 | 20 5", "0:2 1:2", "0:3 1:1", id="though it takes more moves"),
        pytest.param("60 | 20 5 || 70 | 10", "0:2 1:1", "0:2 1:1", id="of machines of one size, the fewest moves"),
        pytest.param("60 | 9 || 70 | 8 || 20 20", "0:2 1:1 2:1", "0:2 1:2", id="the last replica of a machine"),
        pytest.param("30|30|30|30|30|30|30|9||80|20 20", "0:7 1:2", "0:8 1:1", id="a machine of eight stays"),
        pytest.param("60 10 | 30 | 20", "0:2", "0:2", id="one machine"),
    ],
)
def test_a_replica_of_the_smallest_machine_is_emptied(before: str, without: str, after: str) -> None:
    least = before.replace("||", "|").count("|")
    assert stepped(machines(before, by_machine=False), least=least) == without
    assert stepped(machines(before), least=least) == after


def test_machines_of_one_replica_make_no_difference() -> None:
    drawing = "60 || 30 5 || 20 || 10 60 || 8 8"
    assert stepped(machines(drawing)) == stepped(machines(drawing, by_machine=False))


def test_machines_do_not_count_if_fewer_replicas_would_be_emptied() -> None:
    """With three moves, of which emptying the smallest machine would take two."""
    drawing, three = "60 30 | 10 | 30 || 10 60 | 10 60 || 30", Limits(moves_per_epoch=3)
    assert stepped(machines(drawing), three) == stepped(machines(drawing, by_machine=False), three)


def test_machines_are_emptied_one_after_the_other() -> None:
    cluster = machines("30 | 30 | 30 || 30 | 30 || 60 | 60 | 60 | 60")
    assert [stepped(cluster, Limits(moves_per_epoch=1)) for _ in range(3)] == ["0:3 1:1 2:4", "0:3 2:4", "0:2 2:4"]


@pytest.mark.parametrize(
    ("before", "closings", "without", "after"),
    [
        pytest.param("90 | || 90 | 90 | ", 1, "0:2 1:2", "0:1 1:3", id="on the smaller machine"),
        pytest.param(" || 90 | | ", 1, "0:1 1:2", "1:3", id="the only one of a machine"),
        pytest.param(" | || 90 | | || | ", 2, "0:2 1:3", "0:2 1:3", id="all of one machine"),
        pytest.param(" | || 90 | || 90 | 90 | | ", 2, "0:2 1:2 2:2", "1:2 2:4", id="an empty machine before others"),
    ],
)
def test_empty_replicas_close_machine_by_machine(before: str, closings: int, without: str, after: str) -> None:
    least = before.replace("||", "|").count("|") + 1 - closings
    assert stepped(machines(before, by_machine=False), least=least) == without
    assert stepped(machines(before), least=least) == after


def test_machines_do_not_count_if_fewer_replicas_would_close() -> None:
    """With 110 tokens to spare, either the replica of 100 tokens closes, which is alone, or both of 50."""
    contents: list[list[list[int]]] = [[[]], [[90], [], []]]
    left = []
    for by_machine in (False, True):
        cluster = cluster_of(contents, by_machine, capacities=[100, 100, 50, 50])
        left.append(stepped(cluster, Limits(slack=0.9)))
    assert left == ["0:1 1:1", "0:1 1:1"]


replicas = st.lists(st.integers(1, 6).map(lambda tenths: 10 * tenths), max_size=3)
pools = st.sampled_from([2, 8]).flatmap(
    lambda per_machine: st.lists(st.lists(replicas, min_size=1, max_size=per_machine), min_size=1, max_size=4)
)


@pytest.mark.slow
@many
@given(
    pools,
    st.sampled_from([[100], [100, 104, 97], [100, 50]]),
    st.sampled_from([0.0, 0.3, 1.0]),
    st.none() | st.integers(0, 4),
    st.integers(0, 3),
    st.booleans(),
)
@example([[[], [], [50, 60]], [[10, 10], [50, 60]]], [100, 50], 0.0, None, 0, True)
def test_no_more_replicas_stay_open_for_the_sake_of_machines(
    contents: list[list[list[int]]],
    capacities: list[int],
    slack: float,
    moves: int | None,
    least: int,
    holds: bool,
) -> None:
    """A replica that its last requests are leaving, as they do where moves take time, closes when they are gone."""
    left, in_use = [], []
    for by_machine in (False, True):
        cluster = cluster_of(contents, by_machine, capacities)
        cluster.holds = holds
        stepped(cluster, Limits(slack=slack, moves_per_epoch=moves), least)
        left.append(sum(bool(replica.requests) or not replica.held for replica in cluster.replicas.values()))
        in_use.append(sum(bool(replica.requests) for replica in cluster.replicas.values()))
    assert left[1] <= left[0] and in_use[1] <= in_use[0]
