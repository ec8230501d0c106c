"""The values that policies see."""

import pytest

from policies.model import (
    Blocks,
    ClusterState,
    Phase,
    ReplicaId,
    ReplicaLoad,
    ReplicaState,
    RequestId,
    RequestLoad,
    Tokens,
)


def replica(id: str, free: int = 2, capacity: int = 64, state: ReplicaState = ReplicaState.RUNNING) -> ReplicaLoad:
    request = RequestLoad(RequestId(f"on-{id}"), "", Tokens(1), Phase.DECODE, 0.0, 0)
    return ReplicaLoad(ReplicaId(id), state, "node", Tokens(capacity), 16, Blocks(free), 4, (request,))


@pytest.mark.parametrize(
    ("free", "used"), [(0, 64), (1, 48), (4, 0), (9, 0)], ids=["full", "in between", "empty", "more free than there is"]
)
def test_used_tokens_are_those_in_blocks_that_are_not_free(free: int, used: int) -> None:
    assert replica("a", free).used_tokens == used


def test_replicas_are_ordered_by_id() -> None:
    a, b = replica("a"), replica("b")
    assert ClusterState((b, a)) == ClusterState((a, b))
    assert ClusterState((b, a)).replicas == (a, b)


def test_only_running_replicas_take_requests() -> None:
    state = ClusterState(tuple(replica(s.value, state=s) for s in ReplicaState))
    assert [r.id for r in state.running()] == ["RUNNING"]


def test_requests_come_with_their_replica() -> None:
    pairs = ClusterState((replica("b"), replica("a"))).requests()
    assert [(r.id, q.id) for r, q in pairs] == [("a", "on-a"), ("b", "on-b")]
