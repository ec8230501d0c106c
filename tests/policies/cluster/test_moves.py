"""The requests that may move, and the moves' costs in an epoch's budget."""

from collections.abc import Callable

import pytest

from policies.cluster.cluster import Cluster
from policies.model import ReplicaId, RequestId, Tokens
from policies.plan import Eviction, Plan
from tests.policies.cluster.named import evict, lift, move, named, picture, place, request, settled

A, B, P = ReplicaId("A"), ReplicaId("B"), RequestId("p")


def pin(cluster: Cluster) -> None:
    request(cluster, "p").pinned = True


def rest(cluster: Cluster) -> None:
    cluster.rest(P, until=10.0)


def send(cluster: Cluster) -> None:
    """Have an earlier move of the request under way."""
    move(cluster, "p", "C")
    cluster.decisions.settle()


def use_up(cluster: Cluster) -> None:
    cluster.decisions.moves_left = 0


@pytest.mark.parametrize("hinder", [pin, rest, send, use_up])
@pytest.mark.parametrize("leave", [lift, lambda cluster, name: move(cluster, name, "B")], ids=["lift", "move"])
def test_a_pinned_request_stays(hinder: Callable[[Cluster], None], leave: Callable[[Cluster, str], None]) -> None:
    cluster = named("A: p30 | B: | C:", holds=True)
    hinder(cluster)
    before = picture(cluster)
    assert not cluster.decisions.may_move(request(cluster, "p"))
    with pytest.raises(ValueError, match="p must stay where it is"):
        leave(cluster, "p")
    assert picture(cluster) == before and settled(cluster) == Plan()


@pytest.mark.parametrize("hinder", [pin, rest, use_up])
def test_a_request_that_must_not_move_may_be_evicted(hinder: Callable[[Cluster], None]) -> None:
    cluster = named("A: p30")
    hinder(cluster)
    evict(cluster, "p")
    assert settled(cluster).evicted == (Eviction(P, A, Tokens(30)),)


def test_a_request_on_the_move_is_not_evicted() -> None:
    cluster = named("A: p30 | C:", holds=True)
    send(cluster)
    with pytest.raises(ValueError, match="p is on its way from A"):
        evict(cluster, "p")
    assert settled(cluster) == Plan()


def test_a_running_request_is_not_placed() -> None:
    cluster = named("A: p30 | B:")
    with pytest.raises(ValueError, match="p is on A"):
        place(cluster, "p", "B")
    assert settled(cluster) == Plan()


# --- the budget counts what it comes to ---------------------------------------------------------------


def test_moving_on_or_back_costs_no_more() -> None:
    cluster = named("A: p30 q10 | B: | C:")
    cluster.decisions.moves_left = 1
    move(cluster, "p", "B")
    assert cluster.decisions.moves_left == 0 and not cluster.decisions.may_move(request(cluster, "q"))
    move(cluster, "p", "C")
    assert cluster.decisions.moves_left == 0
    move(cluster, "p", "A")
    assert cluster.decisions.moves_left == 1 and cluster.decisions.may_move(request(cluster, "q"))


@pytest.mark.parametrize("waited", [True, False], ids=["it waited", "it was evicted"])
def test_a_placed_request_moves_without_budget(waited: bool) -> None:
    cluster = named("A: p30 | B:", "s10")
    cluster.decisions.moves_left = 0
    if not waited:
        evict(cluster, "p")
    name = "s" if waited else "p"
    place(cluster, name, "A")
    move(cluster, name, "B")
    assert cluster.decisions.moves_left == 0
    assert [p.replica for p in settled(cluster).placements] == [B]


def test_lifted_and_placed_costs_one_and_an_eviction_nothing() -> None:
    cluster = named("A: p30 q10 | B:")
    cluster.decisions.moves_left = 2
    lift(cluster, "p")
    lift(cluster, "q")
    assert cluster.decisions.moves_left == 0
    place(cluster, "p", "B")
    evict(cluster, "q")
    assert cluster.decisions.moves_left == 1


def test_lifted_and_never_placed_gives_the_move_back() -> None:
    cluster = named("A: p30")
    cluster.decisions.moves_left = 1
    lift(cluster, "p")
    cluster.decisions.settle()
    assert cluster.decisions.moves_left == 1


def test_undo_gives_back() -> None:
    cluster = named("A: p30 q10 | B:")
    cluster.decisions.moves_left = 2
    move(cluster, "p", "B")
    mark = cluster.decisions.mark()
    lift(cluster, "q")
    cluster.decisions.undo(mark)
    assert cluster.decisions.moves_left == 1
