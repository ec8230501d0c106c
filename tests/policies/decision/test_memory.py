"""What a memory makes of an observation."""

from dataclasses import replace

import pytest

from policies.cluster.replica import Replica, Request
from policies.decision.limits import Terms
from policies.decision.memory import PoolMemory
from policies.decision.observation import Pool, PoolReport, Status
from policies.model import SOLE_POOL, Blocks, ReplicaId, ReplicaState, RequestId, Tokens
from tests.policies.decision.observed import Drawn, Watcher, observed


def seen(drawn: Drawn, watcher: Watcher | None = None) -> PoolMemory:
    watcher = watcher or Watcher(PoolMemory(Terms()))
    watcher.observe(drawn)
    watcher.memory.cluster.check_integrity()
    return watcher.memory


def replica(made: PoolMemory, name: str) -> Replica:
    return made.cluster.replicas[ReplicaId(name)]


def request(made: PoolMemory, name: str) -> Request:
    return made.cluster.requests[RequestId(name)]


def test_every_request_is_where_it_was_reported() -> None:
    made = seen(observed("a: p70 | b: q60 r10"))
    assert {r.id: list(r.requests) for r in made.cluster.replicas.values()} == {"a": ["p"], "b": ["q", "r"]}
    assert [(r.load, r.shared, r.free) for r in made.cluster.replicas.values()] == [(70, 0, 30), (70, 0, 30)]


def test_the_node_of_a_replica_is_known_once_it_has_been_put_there() -> None:
    made, pool = PoolMemory(Terms()), Pool(SOLE_POOL, max_replicas=1)
    starting = Status(ReplicaId("a"), ReplicaState.STARTING, "", Tokens(0))
    for now, status in enumerate((starting, replace(starting, node="node-3"))):
        made.observe(PoolReport(pool, (status,)), float(now))
        assert replica(made, "a").node == status.node


@pytest.mark.parametrize(("drawn", "movable"), [("p7", True), ("p7~", True), ("p7>", False), ("p7!", False)])
def test_what_may_move(drawn: str, movable: bool) -> None:
    assert request(seen(observed(f"a: {drawn}")), "p").movable is movable


@pytest.mark.parametrize(("name", "accepts"), [("a", True), ("a*", False)])
def test_which_replicas_take_requests(name: str, accepts: bool) -> None:
    assert replica(seen(observed(f"{name}:")), "a").accepts is accepts


def test_a_full_batch_takes_no_more() -> None:
    assert not replica(seen(observed("a: a1 b1 c1 d1 e1 f1 g1 h1")), "a").accepts


# --- what the engine says of its room -------------------------------------------------------------------


def with_free(drawn: Drawn, free: int) -> Drawn:
    (load,) = drawn.loads
    return replace(drawn, loads=(replace(load, free_blocks=Blocks(free)),))


@pytest.mark.parametrize(
    ("drawn", "free", "room"),
    [
        pytest.param("p40 q40", 40, 40, id="two share twenty blocks"),
        pytest.param("p40 q40", 10, 10, id="ten are used by nobody"),
        pytest.param("p40 q40~", 60, 20, id="a prefill without blocks yet will need them"),
        pytest.param("p40 q40~", 35, 20, id="a prefill with some of its blocks"),
        pytest.param("p40 q40~", 5, 5, id="more than prefills explain"),
        pytest.param("p40 q40~", 70, 30, id="sharing shows beside a prefill"),
    ],
)
def test_the_engines_free_blocks_are_the_truth(drawn: str, free: int, room: int) -> None:
    assert replica(seen(with_free(observed(f"a: {drawn}"), free)), "a").free == room


# --- what is on its way -----------------------------------------------------------------------------------


def test_a_request_under_way_is_at_its_target_and_held_at_its_source() -> None:
    made = seen(observed("a: p40 | b:", moves="p:a>b"))
    assert request(made, "p").replica is replica(made, "b")
    assert (replica(made, "a").held, replica(made, "a").free, replica(made, "b").free) == (40, 60, 60)
    assert not request(made, "p").movable


def test_one_that_has_arrived_is_there_once() -> None:
    made = seen(observed("a: | b: p40", moves="p:a>b"))
    assert (replica(made, "a").free, replica(made, "b").free) == (100, 60)


def test_one_that_runs_on_two_replicas_counts_at_its_target_and_is_held_at_its_source() -> None:
    found = observed("a: p40> | b: p40", moves="p:a>b")
    a, b = found.loads
    newer = replace(b, requests=(replace(b.requests[0], hop=1),))
    made = seen(replace(found, loads=(a, newer)))
    assert [list(r.requests) for r in made.cluster.replicas.values()] == [[], ["p"]]
    assert replica(made, "a").held == 40


@pytest.mark.parametrize("target", ["b^:", "b*:", ""], ids=["draining", "starting", "gone"])
def test_a_target_that_takes_nothing_is_none(target: str) -> None:
    made = seen(observed(f"a: p40 | {target}", moves="p:a>c" if not target else "p:a>b"))
    assert request(made, "p").replica is replica(made, "b" if target == "b*:" else "a")


# --- who waits ----------------------------------------------------------------------------------------------


def test_a_queued_request_waits_and_has_a_home() -> None:
    made = seen(observed("a: p90 q30? | b:"))
    assert list(made.cluster.waiting) == ["q"]
    assert (made.locations.homes, made.locations.leaving) == ({"q": "a"}, {})


@pytest.mark.parametrize(("drawn", "waiting"), [("p70 q30? r10?", "r"), ("p71 q30? r10?", "q"), ("q30? r10?", "")])
def test_what_is_queued_where_there_is_room_runs_there(drawn: str, waiting: str) -> None:
    made = seen(observed(f"a: {drawn} | b:"))
    assert sorted(made.cluster.waiting) == list(waiting) == list(made.locations.homes)
    assert replica(made, "a").queued == len(waiting)


def test_what_is_on_a_draining_replica_waits() -> None:
    made = seen(observed("a^: p40 q30? r10! | b:"))
    assert list(made.cluster.waiting) == ["p", "q"]
    assert list(made.locations.leaving) == ["p", "q"]
    assert "a" not in made.cluster.replicas


# --- order and number -----------------------------------------------------------------------------------------


def test_who_came_first_stays_first() -> None:
    known = Watcher(PoolMemory(Terms()))
    seen(observed("b: q10"), known)
    made = seen(observed("a: p10 s10 | b: q10"), known)
    assert sorted(made.cluster.requests.values(), key=lambda q: q.order) == [request(made, n) for n in "qps"]
    assert [r.id for r in made.cluster.replicas.values()] == ["b", "a"]


@pytest.mark.parametrize(
    ("drawn", "most", "opening", "left"),
    [("a: | b:", 2, 0, 0), ("a: | b:", 5, 0, 3), ("a: | b*:", 5, 2, 1), ("a: | b^:", 3, 0, 1), ("a: | b:", 1, 0, 0)],
)
def test_how_many_may_be_opened(drawn: str, most: int, opening: int, left: int) -> None:
    made = seen(observed(drawn, most=most, opening=opening))
    assert made.cluster.supply.left == left


def test_replicas_that_were_asked_for_are_starting() -> None:
    made = seen(observed("a:", most=3, opening=2))
    states = [r.state for r in made.cluster.replicas.values()]
    assert states == [ReplicaState.RUNNING, ReplicaState.STARTING, ReplicaState.STARTING]


def test_a_replicas_capacity_is_known_from_the_others() -> None:
    known = Watcher(PoolMemory(Terms()))
    seen(observed("a:"), known)
    assert replica(seen(observed("b*:"), known), "b").capacity == 100


@pytest.mark.parametrize(
    ("second", "crossed"), [("a: p60", 1), ("a: q90 p60?", 0), ("a^: p60!", 0), ("a: | b: p60", 1)]
)
def test_a_request_that_grew_into_another_class_counts_if_it_is_on_a_replica(second: str, crossed: int) -> None:
    watcher = Watcher(PoolMemory(Terms()))
    watcher.observe(observed("a: p40"))
    changes = watcher.observe(observed(second, 1.0))
    assert len([each for each in changes.crossed if each.request.id == "p"]) == crossed
