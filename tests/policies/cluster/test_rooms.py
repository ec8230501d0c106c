"""Best and worst fit against a search through every replica."""

from collections.abc import Callable
from itertools import islice

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.capacity import overloaded
from policies.cluster.changes import Crossing
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica
from policies.cluster.search import fits, needed_room, roomiest, tightest, widest
from policies.cluster.sizes import Size
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Reason
from tests.policies.cluster.named import impose, named, picture, replica, request
from tests.policies.settings import unhurried


def names(*chosen: Replica | None) -> list[str | None]:
    return [None if r is None else r.id for r in chosen]


def test_best_fit_takes_the_least_room_that_is_enough() -> None:
    cluster = named("A: p30 | B: q60 | C: r80")
    assert names(*(tightest(cluster, Size(tokens)) for tokens in (40, 41, 71))) == ["B", "A", None]


def test_worst_fit_takes_the_most_room_if_it_is_enough() -> None:
    cluster = named("A: p60 | B: q30 | C: r80")
    assert names(widest(cluster, Size(10)), widest(cluster, Size(70)), widest(cluster, Size(71))) == ["B", "B", None]


def test_of_equals_best_fit_takes_the_oldest_and_worst_fit_the_youngest() -> None:
    cluster = named("C: p50 | A: q50 | B: r50")
    assert names(tightest(cluster, Size(50)), widest(cluster, Size(50))) == ["C", "B"]


def test_roomiest_are_those_with_the_most_room() -> None:
    cluster = named("A: p60 | B: q30 | C: r80 | D: s30")
    assert names(*roomiest(cluster)) == ["D", "B", "A", "C"]


@pytest.mark.parametrize("others", [0, 40], ids=["most have grown", "one of many has grown"])
def test_a_replica_whose_requests_have_grown_has_less_room(others: int) -> None:
    cluster = named("A: p60 | B: q50")
    for number in range(others):
        cluster.add_replica(ReplicaId(f"X{number}"), "node", Tokens(10))
    assert names(*islice(roomiest(cluster), 2)) == ["B", "A"]
    crossed: list[Crossing] = []
    cluster.resize([(RequestId("q"), Tokens(70))], crossed)
    assert names(*islice(roomiest(cluster), 2)) == ["A", "B"]
    assert names(tightest(cluster, Size(25))) == ["B"]
    cluster.check_integrity()


def test_opened_replicas_are_found_and_closed_ones_are_not() -> None:
    cluster = named("A: p60 | B:")
    assert names(widest(cluster, Size(10))) == ["B"]
    cluster.decisions.close(replica(cluster, "B"))
    assert names(widest(cluster, Size(10))) == ["A"]
    cluster.decisions.open()
    assert names(widest(cluster, Size(10))) == ["gpu-0"]


def test_a_replica_that_changed_before_it_closed_is_not_found() -> None:
    cluster = named("A: p60 | B: q10")
    assert names(widest(cluster, Size(10))) == ["B"]
    cluster.decisions.evict(request(cluster, "q"))
    cluster.decisions.close(replica(cluster, "B"))
    assert names(widest(cluster, Size(10))) == ["A"]


def test_a_lost_replica_is_not_found() -> None:
    cluster = named("A: p60 | B: q10")
    assert names(widest(cluster, Size(10))) == ["B"]
    cluster.lose(replica(cluster, "B"))
    assert names(widest(cluster, Size(10))) == ["A"]


def test_room_is_found_once_a_move_is_over() -> None:
    cluster = named("A: p60 | B:", holds=True)
    cluster.decisions.move(request(cluster, "p"), replica(cluster, "B"), Reason.FILL)
    cluster.decisions.settle()
    assert names(tightest(cluster, Size(50))) == [None]
    cluster.release(request(cluster, "p"))
    assert names(tightest(cluster, Size(50))) == ["A"]


def test_accept_is_asked() -> None:
    cluster = named("A: p30 | B: q60")
    assert names(
        tightest(cluster, Size(10), lambda r: r.id != "B"), widest(cluster, Size(10), lambda r: r.id != "A")
    ) == ["A", "B"]


@pytest.mark.parametrize("accept", [None, lambda replica: True], ids=["by default", "whatever the caller accepts"])
def test_full_batches_are_passed_over(accept: Callable[[Replica], bool] | None) -> None:
    cluster = named("A: p60 | B: q10")
    for name, most in ("A", 1), ("B", 1):
        replica(cluster, name).max_requests = most
    assert names(tightest(cluster, Size(10), accept), widest(cluster, Size(10), accept)) == [None, None]


@pytest.mark.parametrize("state", [s for s in ReplicaState if s is not ReplicaState.RUNNING])
def test_only_running_replicas_are_found(state: ReplicaState) -> None:
    cluster = named("A: p10")
    cluster.add_replica(ReplicaId("B"), "node", Tokens(100), state)
    assert names(tightest(cluster, Size(91)), widest(cluster, Size(91))) == [None, None]


def test_room_for_everyones_growth_is_kept() -> None:
    cluster = named("A: p30 q20 | B: r70", headroom=5)
    assert names(*(tightest(cluster, Size(tokens)) for tokens in (35, 36, 20))) == ["A", None, "B"]


@pytest.mark.parametrize(
    ("tokens", "need"), [(10, 15), (95, 100), (99, 100), (100, 100), (101, 101)], ids=lambda n: str(n)
)
def test_need_is_capped_by_an_empty_replica_but_never_below_the_size(tokens: int, need: int) -> None:
    assert needed_room(named(headroom=5), tokens) == need


def test_a_request_larger_than_a_replica_fits_nowhere() -> None:
    cluster = named("A:", "p101")
    assert tightest(cluster, Size(101)) is None and not fits(cluster, request(cluster, "p"), replica(cluster, "A"))


@pytest.mark.parametrize(("tokens", "expected"), [(40, True), (41, False)], ids=["the last token", "one too many"])
def test_fits(tokens: int, expected: bool) -> None:
    cluster = named("A: p60", f"s{tokens}")
    assert fits(cluster, request(cluster, "s"), replica(cluster, "A")) is expected


def test_a_full_batch_takes_no_more() -> None:
    cluster = named("A: p60", "s10")
    replica(cluster, "A").max_requests = 1
    assert not fits(cluster, request(cluster, "s"), replica(cluster, "A"))


@pytest.mark.parametrize(("shared", "expected"), [(-1, []), (0, []), (1, ["A"])])
def test_overloaded_replicas_exceed_their_capacity(shared: int, expected: list[str]) -> None:
    cluster = named("A: p60 q40 | B: r90")
    replica(cluster, "A").shared = shared
    assert names(*overloaded(cluster)) == expected


def test_reserve_changes_replicas_old_and_new() -> None:
    cluster = named("A: p50 q20")
    assert names(tightest(cluster, Size(30))) == ["A"]
    impose(cluster, headroom=10)
    opened = cluster.decisions.open()
    assert opened is not None and opened.headroom == 10
    assert names(tightest(cluster, Size(1))) == ["gpu-0"]


# --- any sequence of changes --------------------------------------------------------------------------


def search(cluster: Cluster, tokens: int, accept: Callable[[Replica], bool]) -> list[str | None]:
    """Best and worst fit by looking at every replica."""
    need = needed_room(cluster, tokens)
    fitting = [r for r in cluster.replicas.values() if r.accepts and r.room >= need and accept(r)]
    tightest = min(fitting, key=lambda r: (r.room, r.order), default=None)
    widest = max(fitting, key=lambda r: (r.room, r.order), default=None)
    return names(tightest, widest)


def change(cluster: Cluster, action: int, one: int, other: int) -> None:
    """Do one of the things that a policy may do, to a request and a replica chosen by number."""
    replicas = list(cluster.replicas.values())
    target = replicas[one % len(replicas)]
    chosen = list(cluster.requests.values())[other % len(cluster.requests)]
    running = chosen.replica is not None
    match action:
        case 0 if not running:
            cluster.decisions.place(chosen, target)
        case 1 if running and chosen.movable:
            cluster.decisions.move(chosen, target, Reason.FILL)
        case 2 if running and chosen.movable:
            cluster.decisions.lift(chosen, Reason.MAKE_ROOM)
        case 3 if running and chosen.source is None:
            cluster.decisions.evict(chosen)
        case 4:
            cluster.decisions.undo(max(cluster.decisions.mark() - other, cluster.decisions._final))
        case 5:
            cluster.decisions.open()
        case 6:
            for replica in replicas[1:]:
                if not replica.requests and not replica.held:
                    cluster.decisions.close(replica)
        case 7:
            cluster.decisions.settle()
        case _:
            cluster.add_request(RequestId(f"n{cluster._arrivals}"), Tokens(1 + other))


@unhurried
@given(
    st.booleans(),
    st.integers(0, 3),
    st.lists(st.tuples(st.integers(0, 8), st.integers(0, 9), st.integers(0, 9)), max_size=25),
    st.integers(1, 60),
)
def test_index_agrees_with_a_search_after_any_changes(
    holds: bool, headroom: int, changes: list[tuple[int, int, int]], tokens: int
) -> None:
    cluster = named("A: p30 q20 | B: r70 | C: s5 t5 | D: u5", "v10 w20", holds=holds, headroom=headroom)
    for action, one, other in changes:
        change(cluster, action, one, other)
        for accept in (lambda r: True), (lambda r: r.order % 2 == 0):
            found = names(tightest(cluster, Size(tokens), accept), widest(cluster, Size(tokens), accept))
            assert found == search(cluster, tokens, accept), picture(cluster)
        cluster.check_integrity()
