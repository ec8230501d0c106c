"""The cluster that is made from reports."""

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
from policies.view import cluster_of


def load(name: str, free: int = 10, *requests: RequestLoad, state: ReplicaState = ReplicaState.RUNNING) -> ReplicaLoad:
    return ReplicaLoad(ReplicaId(name), state, "node", Tokens(160), 16, Blocks(free), 2, requests)


def request(name: str, tokens: int, phase: Phase = Phase.DECODE, immovable: str | None = None) -> RequestLoad:
    return RequestLoad(RequestId(name), "", Tokens(tokens), phase, 0.0, 0, immovable)


def test_every_request_is_where_it_was_reported() -> None:
    cluster = cluster_of(ClusterState((load("b", 4, request("q", 90)), load("a", 5, request("p", 70)))))
    assert {r.id: list(r.requests) for r in cluster.replicas.values()} == {"a": ["p"], "b": ["q"]}
    cluster.check_integrity()


def test_the_engines_free_blocks_are_the_room() -> None:
    shared = load("a", 6, request("p", 64), request("q", 64))
    assert cluster_of(ClusterState((shared,))).replicas[ReplicaId("a")].free == 96


@pytest.mark.parametrize(
    ("phase", "immovable", "movable"),
    [
        pytest.param(Phase.DECODE, None, True, id="decoding"),
        pytest.param(Phase.MOVING, None, False, id="already moving"),
        pytest.param(Phase.DECODE, "why", False, id="immovable"),
    ],
)
def test_what_may_move(phase: Phase, immovable: str | None, movable: bool) -> None:
    cluster = cluster_of(ClusterState((load("a", 5, request("p", 70, phase, immovable)),)))
    assert cluster.requests[RequestId("p")].movable is movable


@pytest.mark.parametrize(
    ("reported", "without", "accepts"),
    [
        (load("a"), (), True),
        (load("a"), (ReplicaId("a"),), False),
        (load("a", state=ReplicaState.STARTING), (), False),
        (load("a", state=ReplicaState.DRAINING), (), False),
        (load("a", 8, request("p", 1), request("q", 1)), (), False),
    ],
    ids=["running", "excluded", "starting", "draining", "full batch"],
)
def test_which_replicas_take_requests(reported: ReplicaLoad, without: tuple[ReplicaId, ...], accepts: bool) -> None:
    (replica,) = cluster_of(ClusterState((reported,)), without=without).replicas.values()
    assert replica.accepts is accepts


def test_no_replica_is_opened() -> None:
    assert cluster_of(ClusterState((load("a"),))).open() is None
