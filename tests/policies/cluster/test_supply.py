"""Where replicas come from: the lowest free slot, up to a limit."""

import pytest

from policies.cluster.supply import Supply
from policies.model import ReplicaId


def taken(supply: Supply, count: int) -> list[str]:
    return [supply.take()[0] for _ in range(count)]


def test_slots_are_numbered_and_fill_nodes_one_after_another() -> None:
    supply = Supply(per_node=2)
    assert [supply.take() for _ in range(3)] == [("gpu-0", "node-0"), ("gpu-1", "node-0"), ("gpu-2", "node-1")]


def test_lowest_free_slot_is_taken_first() -> None:
    supply = Supply()
    taken(supply, 4)
    for slot in (2, 0):
        supply.give_back(ReplicaId(f"gpu-{slot}"))
    assert taken(supply, 3) == ["gpu-0", "gpu-2", "gpu-4"]


def test_limit_counts_taken_slots() -> None:
    supply = Supply(limit=2)
    taken(supply, 2)
    assert supply.left == 0
    supply.give_back(ReplicaId("gpu-1"))
    assert supply.left == 1


def test_without_a_limit_there_is_always_one_more() -> None:
    supply = Supply()
    taken(supply, 3)
    assert supply.left == float("inf")


def test_taking_more_than_the_limit_raises() -> None:
    with pytest.raises(IndexError, match="the limit of replicas is reached"):
        Supply(limit=0).take()


@pytest.mark.parametrize("stranger", ["replica-a", "gpu-x", "gpu-7", "gpu-01", "gpu-²"])
def test_replicas_from_elsewhere_are_not_kept(stranger: str) -> None:
    supply = Supply(limit=10)
    taken(supply, 2)
    supply.give_back(ReplicaId(stranger))
    assert supply.left == 8
    assert taken(supply, 6) == [f"gpu-{n}" for n in range(2, 8)]


def test_giving_back_twice_gives_back_once() -> None:
    supply = Supply()
    taken(supply, 1)
    for _ in range(2):
        supply.give_back(ReplicaId("gpu-0"))
    assert taken(supply, 2) == ["gpu-0", "gpu-1"]
