"""The plans that decisions on a cluster add up to, and their costs."""

import copy
from collections.abc import Callable

import pytest

from policies.cluster.cluster import Cluster
from policies.cluster.search import tightest
from policies.cluster.sizes import Size
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Eviction, Move, Open, Placement, Plan, Reason
from tests.policies.cluster.named import evict, lift, move, named, picture, place, replica, request, settled, turn

A, B, C, P, Q, S = ReplicaId("A"), ReplicaId("B"), ReplicaId("C"), RequestId("p"), RequestId("q"), RequestId("s")
FILL, DRAIN = Reason.FILL, Reason.DRAIN


# --- what it comes to ---------------------------------------------------------------------------------


def test_a_move() -> None:
    cluster = named("A: p30 | B:")
    move(cluster, "p", "B", DRAIN, unit=7)
    assert settled(cluster) == Plan.of(moves=(Move(P, A, B, Tokens(30), DRAIN, 7),))
    assert picture(cluster) == "A: | B: p30"


def test_there_and_back_is_nothing() -> None:
    cluster = named("A: p30 | B:")
    move(cluster, "p", "B")
    move(cluster, "p", "A")
    assert settled(cluster) == Plan()


def test_two_moves_are_one_and_the_last_ones_reason_counts() -> None:
    cluster = named("A: p30 | B: | C:")
    move(cluster, "p", "B", FILL, unit=1)
    move(cluster, "p", "C", DRAIN, unit=2)
    assert settled(cluster).moves == (Move(P, A, C, Tokens(30), DRAIN, 2),)


def test_moves_without_a_unit_are_units_of_their_own() -> None:
    cluster = named("A: p30 q10 | B:")
    for name in "p", "q":
        move(cluster, name, "B")
    assert len({m.unit for m in settled(cluster).moves}) == 2


def test_a_placement() -> None:
    cluster = named("A:", "s10 t10")
    place(cluster, "s", "A")
    assert settled(cluster) == Plan.of(placements=(Placement(S, A),), queued=(RequestId("t"),))


def test_a_request_placed_and_then_moved_is_placed_on_the_target() -> None:
    cluster = named("A: | B:", "s10")
    place(cluster, "s", "A")
    move(cluster, "s", "B")
    assert settled(cluster) == Plan.of(placements=(Placement(S, B),))


def test_a_request_placed_and_then_evicted_waits() -> None:
    cluster = named("A:", "s10")
    place(cluster, "s", "A")
    evict(cluster, "s")
    assert settled(cluster) == Plan.of(queued=(S,))


def test_lift_and_place_is_a_move() -> None:
    cluster = named("A: p30 | B:")
    lift(cluster, "p")
    place(cluster, "p", "B")
    plan = settled(cluster)
    assert [(m.source, m.target, m.reason) for m in plan.moves] == [(A, B, Reason.MAKE_ROOM)]
    assert not plan.placements and not plan.evicted


def test_lift_and_place_where_it_was_is_nothing() -> None:
    cluster = named("A: p30")
    lift(cluster, "p")
    place(cluster, "p", "A")
    assert settled(cluster) == Plan()


@pytest.mark.parametrize("holds", [False, True], ids=["instant", "holds"])
def test_lifted_and_never_placed_is_evicted_and_its_blocks_are_free(holds: bool) -> None:
    cluster = named("A: p30 q20", holds=holds)
    lift(cluster, "p")
    assert settled(cluster) == Plan.of(evicted=(Eviction(P, A, Tokens(30)),), queued=(P,))
    assert replica(cluster, "A").free == 80


@pytest.mark.parametrize("to", ["A", "B"], ids=["where it was", "elsewhere"])
def test_evict_and_place_is_both(to: str) -> None:
    cluster = named("A: p30 | B:")
    evict(cluster, "p")
    place(cluster, "p", to)
    assert settled(cluster) == Plan.of((), (Placement(P, ReplicaId(to)),), (Eviction(P, A, Tokens(30)),))


@pytest.mark.parametrize("leave", [lift, lambda cluster, name: move(cluster, name, "B")], ids=["lifted", "moved"])
def test_evicted_after_it_left_is_evicted_from_where_it_was(leave: Callable[[Cluster, str], None]) -> None:
    cluster = named("A: p30 | B:", holds=True)
    leave(cluster, "p")
    evict(cluster, "p")
    assert settled(cluster) == Plan.of(evicted=(Eviction(P, A, Tokens(30)),), queued=(P,))
    assert replica(cluster, "A").free == 100


def test_an_evicted_request_stays_evicted_when_it_is_moved_on() -> None:
    cluster = named("A: p30 | B: | C:")
    evict(cluster, "p")
    place(cluster, "p", "B")
    move(cluster, "p", "C")
    assert settled(cluster) == Plan.of((), (Placement(P, C),), (Eviction(P, A, Tokens(30)),))


# --- replicas open and close --------------------------------------------------------------------------


def test_opened_and_closed_in_one_epoch_is_nothing_and_the_slot_is_free() -> None:
    cluster = named(supply=1)
    opened = cluster.decisions.open()
    assert opened is not None and cluster.decisions.open() is None
    cluster.decisions.close(opened)
    assert cluster.supply.left == 1
    assert settled(cluster) == Plan()


def test_open_and_close_are_in_the_plan() -> None:
    cluster = named("A: | B: p10")
    cluster.decisions.close(replica(cluster, "A"))
    cluster.decisions.open()
    assert settled(cluster) == Plan.of(opened=(Open(ReplicaId("gpu-0"), "node-0"),), closed=(A,))


def test_the_name_of_a_closed_replica_is_not_used_again_in_the_same_epoch() -> None:
    cluster = named()
    first = cluster.decisions.open()
    assert first is not None
    cluster.decisions.settle()
    cluster.decisions.close(first)
    second = cluster.decisions.open()
    assert second is not None and second.id == "gpu-1"
    cluster.decisions.settle()
    third = cluster.decisions.open()
    assert third is not None and third.id == "gpu-0"


@pytest.mark.parametrize("holds", [False, True], ids=["that runs", "whose move away is under way"])
def test_close_with_a_request_raises(holds: bool) -> None:
    cluster = named("A: p10 | B:", holds=holds)
    if holds:
        move(cluster, "p", "B")
    with pytest.raises(ValueError, match="A is not empty"):
        cluster.decisions.close(replica(cluster, "A"))


def test_a_second_replica_of_one_id_raises() -> None:
    cluster = named("A: p10")
    with pytest.raises(ValueError, match="there is a replica A"):
        cluster.add_replica(A, "node", Tokens(100))
    assert picture(cluster) == "A: p10"


@pytest.mark.parametrize(
    ("name", "tokens", "message"), [("p", 10, "there is a request p"), ("q", 0, "q holds 0 tokens")], ids=["id", "size"]
)
def test_a_request_that_cannot_be_raises(name: str, tokens: int, message: str) -> None:
    with pytest.raises(ValueError, match=message):
        named("A: p10").add_request(RequestId(name), Tokens(tokens))


# --- replicas that take their time to start -----------------------------------------------------------


def starting(holds: bool = False) -> Cluster:
    cluster = named("A: p30", "s10", holds=holds, starts_as=ReplicaState.STARTING)
    cluster.decisions.open()
    return cluster


def test_placed_on_a_starting_replica_is_queued() -> None:
    cluster = starting()
    place(cluster, "s", "gpu-0")
    assert settled(cluster) == Plan.of(queued=(S,), opened=(Open(ReplicaId("gpu-0"), "node-0"),))
    assert picture(cluster) == "A: p30 | gpu-0:" and S in cluster.waiting


def test_a_running_request_is_not_moved_to_a_starting_replica() -> None:
    cluster = starting()
    with pytest.raises(ValueError, match="gpu-0 is not running"):
        move(cluster, "p", "gpu-0")
    assert picture(cluster) == "A: p30 | gpu-0:"


@pytest.mark.parametrize("leave", [lift, evict], ids=["lifted", "evicted"])
def test_a_running_request_that_is_put_on_a_starting_replica_is_evicted(leave: Callable[[Cluster, str], None]) -> None:
    cluster = starting(holds=True)
    leave(cluster, "p")
    place(cluster, "p", "gpu-0")
    plan = settled(cluster)
    assert plan.evicted == (Eviction(P, A, Tokens(30)),) and plan.queued == (P, S)
    assert not plan.moves and not plan.placements


def test_there_and_back_on_a_replica_that_drains_is_nothing() -> None:
    cluster = named("A: p30 | B:")
    turn(cluster, replica(cluster, "A"), ReplicaState.DRAINING)
    mark = cluster.decisions.mark()
    move(cluster, "p", "B")
    cluster.decisions.undo(mark)
    assert settled(cluster) == Plan()
    assert picture(cluster) == "A: p30 | B:"


# --- a wrong sum is found -----------------------------------------------------------------------------


def lose_request(cluster: Cluster) -> None:
    del replica(cluster, "A").requests[P]


def double_request(cluster: Cluster) -> None:
    cluster.waiting[P] = request(cluster, "p")


def load_more(cluster: Cluster) -> None:
    replica(cluster, "A").load += 1


def hold_more(cluster: Cluster) -> None:
    replica(cluster, "B").held += 1


def misclass(cluster: Cluster) -> None:
    request(cluster, "p").tokens = Tokens(90)


def forget_hold(cluster: Cluster) -> None:
    del cluster.held[Q]


def strand(cluster: Cluster) -> None:
    """A request on the move waits."""
    cluster._leave(request(cluster, "q"))
    cluster._enter(request(cluster, "q"), None)


def mistake_index(cluster: Cluster) -> None:
    tightest(cluster, Size(1))
    replica(cluster, "B").shared += 1


@pytest.mark.parametrize(
    "damage", [lose_request, double_request, load_more, hold_more, misclass, forget_hold, strand, mistake_index]
)
def test_integrity_fails_when_something_is_wrong(damage: Callable[[Cluster], None]) -> None:
    cluster = named("A: p30 q10 | B:", holds=True)
    move(cluster, "q", "B")
    settled(cluster)
    damage(cluster)
    with pytest.raises(AssertionError):
        cluster.check_integrity()


def test_a_copy_decides_alike() -> None:
    cluster = named("A: p30 q10 | B:", "s10", holds=True)
    twin = copy.deepcopy(cluster)
    for each in cluster, twin:
        move(each, "p", "B")
        place(each, "s", "A")
    assert settled(cluster) == settled(twin) and picture(cluster) == picture(twin)


def test_a_request_that_is_found_on_a_replica_was_not_placed() -> None:
    cluster = named("A: p30", "s10")
    cluster.locate(request(cluster, "s"), replica(cluster, "A"))
    assert picture(cluster) == "A: p30 s10"
    assert settled(cluster) == Plan()
