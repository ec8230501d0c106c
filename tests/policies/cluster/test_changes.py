"""The effects of events on a cluster, and the changes that policies get."""

from collections.abc import Callable

import pytest

from policies.cluster.changes import Arrival, Changes
from policies.cluster.classes import Kind
from policies.cluster.cluster import Cluster
from policies.cluster.search import tightest
from policies.cluster.sizes import Size
from policies.model import ReplicaId, ReplicaState, RequestId, Tokens
from policies.plan import Move, Reason
from tests.policies.cluster.named import move, named, picture, replica, request
from tests.policies.stepping import Events, apply

A, B, P, Q, S = ReplicaId("A"), ReplicaId("B"), RequestId("p"), RequestId("q"), RequestId("s")


def sizes(**tokens: int) -> dict[RequestId, Tokens]:
    return {RequestId(name): Tokens(n) for name, n in tokens.items()}


def applied(cluster: Cluster, events: Events) -> Changes:
    """The changes, and the cluster is whole."""
    changes = apply(cluster, events)
    cluster.check_integrity()
    return changes


def waiting(changes: Changes) -> str:
    return "".join(q.id for q in changes.waiting)


def held(cluster: Cluster) -> dict[str, int]:
    """The tokens that are held on replicas for requests that have left them."""
    return {r.id: r.held for r in cluster.replicas.values() if r.held}


# --- requests come, grow and go -----------------------------------------------------------------------


def test_arrivals_wait_behind_those_that_wait() -> None:
    cluster = named("A: p30", "s10")
    arrived = [Arrival(RequestId(name), Tokens(5)) for name in "zy"]
    assert waiting(applied(cluster, Events(arrived=arrived))) == "szy"


def test_a_departure_has_its_class_and_its_replica() -> None:
    cluster = named("A: p30 q60")
    (departure,) = applied(cluster, Events(departed=[Q])).departed
    assert (departure.request, departure.kind, departure.replica.id) == (Q, Kind.LARGE, "A")
    assert picture(cluster) == "A: p30" and replica(cluster, "A").load == 30


def test_a_departure_from_the_queue_is_no_change_of_a_replica() -> None:
    cluster = named("A: p30", "s10")
    assert applied(cluster, Events(departed=[S])) == Changes()
    assert not cluster.waiting


def test_growth_counts_on_its_replica() -> None:
    cluster = named("A: p13 q20", "s10")
    assert applied(cluster, Events(sizes=sizes(p=20, s=12))).crossed == ()
    assert picture(cluster) == "A: p20 q20" and request(cluster, "s").tokens == 12


@pytest.mark.parametrize(
    ("tokens", "was", "now"),
    [
        pytest.param(25, Kind.TINY, Kind.TINY, id="up to its ceiling it stays"),
        pytest.param(26, Kind.TINY, Kind.SMALL, id="one token above it crosses"),
        pytest.param(51, Kind.TINY, Kind.LARGE, id="over several classes"),
        pytest.param(13, Kind.TINY, Kind.TINY, id="it may shrink within its class"),
        pytest.param(12, Kind.TINY, Kind.GRAIN, id="or out of it"),
    ],
)
def test_crossing(tokens: int, was: Kind, now: Kind) -> None:
    cluster = named("A: p20")
    crossed = applied(cluster, Events(sizes=sizes(p=tokens))).crossed
    assert [(c.request.id, c.was, c.request.kind) for c in crossed] == ([] if was is now else [(P, was, now)])


def test_it_crosses_once() -> None:
    cluster = named("A: p20")
    assert applied(cluster, Events(sizes=sizes(p=30))).crossed
    assert not applied(cluster, Events(sizes=sizes(p=33))).crossed


def test_a_shrunken_request_crosses_when_it_grows_again() -> None:
    cluster = named("A: p60")
    kinds = [applied(cluster, Events(sizes=sizes(p=tokens))).crossed[0].was for tokens in (20, 60)]
    assert kinds == [Kind.LARGE, Kind.TINY]


def test_a_waiting_request_changes_class_without_a_crossing() -> None:
    cluster = named("A: p20", "s10")
    assert not applied(cluster, Events(sizes=sizes(s=60))).crossed
    assert request(cluster, "s").kind is Kind.LARGE


def test_the_order_by_room_follows_events() -> None:
    cluster = named("A: p30 | B: q20")
    assert tightest(cluster, Size(10)) is replica(cluster, "A")
    applied(cluster, Events(sizes=sizes(q=40)))
    assert tightest(cluster, Size(10)) is replica(cluster, "B")


# --- replicas start and are lost ----------------------------------------------------------------------


def test_a_started_replica_takes_requests() -> None:
    cluster = named("", "s10", starts_as=ReplicaState.STARTING)
    opened = cluster.decisions.open()
    assert opened is not None and tightest(cluster, Size(10)) is None
    cluster.decisions.settle()
    applied(cluster, Events(started=[opened.id]))
    assert tightest(cluster, Size(10)) is opened


def test_requests_of_a_lost_replica_wait_in_their_old_order() -> None:
    cluster = named("A: p30 q10 | B: r20", "s10")
    assert waiting(applied(cluster, Events(lost=[A], arrived=[Arrival(RequestId("t"), Tokens(1))]))) == "pqst"
    assert picture(cluster) == "B: r20"


def test_a_lost_replica_may_be_opened_again() -> None:
    cluster = named(supply=1)
    cluster.decisions.open()
    cluster.decisions.settle()
    applied(cluster, Events(lost=[ReplicaId("gpu-0")]))
    assert cluster.decisions.open() is not None


def test_departures_and_crossings_on_a_lost_replica_are_left_out() -> None:
    cluster = named("A: p20 q30")
    changes = applied(cluster, Events(departed=[Q], sizes=sizes(p=60), lost=[A]))
    assert not changes.departed and not changes.crossed
    assert waiting(changes) == "p" and request(cluster, "p").kind is Kind.LARGE


# --- moves take their time ----------------------------------------------------------------------------


def moving() -> Cluster:
    """`p` is on its way from A to B."""
    cluster = named("A: p30 q10 | B: r20", holds=True)
    move(cluster, "p", "B")
    assert [m.request for m in cluster.decisions.settle().moves] == [P]
    cluster.check_integrity()
    return cluster


def test_the_source_keeps_its_blocks_until_the_move_is_done() -> None:
    cluster = moving()
    assert held(cluster) == {"A": 30} and replica(cluster, "A").room == 60
    assert replica(cluster, "A").overload == -90, "what is leaving does not count"
    applied(cluster, Events(moved=[P]))
    assert held(cluster) == {} and picture(cluster) == "A: q10 | B: p30 r20"
    assert request(cluster, "p").movable


def test_without_holds_the_room_is_free_at_once() -> None:
    cluster = named("A: p30 | B:")
    move(cluster, "p", "B")
    assert replica(cluster, "A").room == 100
    cluster.decisions.settle()
    assert request(cluster, "p").movable and replica(cluster, "A").room == 100


def test_a_request_on_the_move_grows_at_both_ends() -> None:
    cluster = moving()
    applied(cluster, Events(sizes=sizes(p=33)))
    assert held(cluster) == {"A": 33} and replica(cluster, "B").load == 53
    applied(cluster, Events(sizes=sizes(p=34), moved=[P]))
    assert held(cluster) == {} and replica(cluster, "B").load == 54


def test_a_request_that_stayed_is_where_it_was() -> None:
    cluster = moving()
    applied(cluster, Events(stayed=[P], sizes=sizes(p=33)))
    assert held(cluster) == {} and picture(cluster) == "A: p33 q10 | B: r20"
    assert request(cluster, "p").movable


def test_departure_on_the_move_frees_both_ends() -> None:
    cluster = moving()
    (departure,) = applied(cluster, Events(departed=[P])).departed
    assert departure.replica.id == "B"
    assert held(cluster) == {} and picture(cluster) == "A: q10 | B: r20"


def test_when_the_source_is_lost_it_lives_at_the_target() -> None:
    cluster = moving()
    assert waiting(applied(cluster, Events(lost=[A]))) == "q"
    assert picture(cluster) == "B: p30 r20" and request(cluster, "p").movable


def test_when_the_target_is_lost_it_lives_at_the_source() -> None:
    cluster = moving()
    assert waiting(applied(cluster, Events(lost=[B]))) == "r"
    assert held(cluster) == {} and picture(cluster) == "A: p30 q10"


@pytest.mark.parametrize("lost", [[A, B], [B, A]], ids=["source first", "target first"])
def test_when_both_are_lost_it_waits(lost: list[ReplicaId]) -> None:
    assert waiting(applied(moving(), Events(lost=lost))) == "pqr"


@pytest.mark.parametrize(("end", "lost"), [("moved", B), ("stayed", A)], ids=["the target", "the source"])
def test_a_request_that_arrived_on_a_lost_replica_waits(end: str, lost: ReplicaId) -> None:
    events = Events(moved=[P], lost=[lost]) if end == "moved" else Events(stayed=[P], lost=[lost])
    assert "p" in waiting(applied(moving(), events))


def test_a_move_is_over_once() -> None:
    cluster = moving()
    applied(cluster, Events(moved=[P]))
    applied(cluster, Events(moved=[P], stayed=[P]))
    assert picture(cluster) == "A: q10 | B: p30 r20"


def test_one_request_after_another_may_be_on_the_move() -> None:
    cluster = moving()
    move(cluster, "q", "B", Reason.FILL, 5)
    assert cluster.decisions.settle().moves == (Move(Q, A, B, Tokens(10), Reason.FILL, 5),)
    assert held(cluster) == {"A": 40}
    applied(cluster, Events(moved=[Q], stayed=[P]))
    assert held(cluster) == {} and picture(cluster) == "A: p30 | B: q10 r20"


# --- what cannot have happened ------------------------------------------------------------------------

X, Y = ReplicaId("X"), RequestId("x")


@pytest.mark.parametrize(
    "events",
    [
        Events(sizes=sizes(x=1)),
        Events(departed=[Y]),
        Events(departed=[P, P]),
        Events(departed=[P], sizes=sizes(p=31)),
        Events(moved=[Y]),
        Events(stayed=[Y]),
        Events(started=[X]),
        Events(lost=[X]),
        Events(lost=[A, A]),
    ],
    ids=["grew", "departed", "twice", "grew afterwards", "moved", "stayed", "started", "lost", "lost twice"],
)
def test_unknown_ids_raise(events: Events) -> None:
    with pytest.raises(KeyError):
        apply(named("A: p30"), events)


@pytest.mark.parametrize("where", [lambda: named("A: p30"), lambda: named("", "p30")], ids=["running", "waiting"])
def test_a_request_arrives_once(where: Callable[[], Cluster]) -> None:
    with pytest.raises(ValueError, match="there is a request p"):
        apply(where(), Events(arrived=[Arrival(P, Tokens(1))]))


def test_a_name_may_be_used_again_and_is_not_resting() -> None:
    cluster = named("A: p30")
    cluster.rest(P, until=10.0)
    applied(cluster, Events(departed=[P], arrived=[Arrival(P, Tokens(5))]))
    assert request(cluster, "p").movable
    cluster.decisions.begin_epoch(cluster.conditions, 10.0)
