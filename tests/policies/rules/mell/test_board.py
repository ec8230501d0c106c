"""The indexes: kept right by `touch`, they answer as if they had been made anew, also after `Work.undo`."""

import random
from collections.abc import Iterator

import pytest

from policies.cluster.classes import Kind
from policies.cluster.cluster import Cluster
from policies.cluster.replica import Replica, Request
from policies.plan import Reason
from policies.rules.mell import mell
from policies.rules.mell.allocate import settle_in
from policies.rules.mell.board import CATEGORIES, Board
from policies.rules.mell.ranking import Weights
from policies.rules.mell.units import single
from policies.rules.mell.work import Work
from tests.policies.rules.mell.clusters import C, cluster, named, shown

WEIGHTS = Weights(1.0, 0.01, 1.0)


def board(made: Cluster) -> Board:
    return Board(made, WEIGHTS, clears=True)


def answers(asked: Board) -> Iterator[Replica | Request | Kind | None]:
    """All that can be asked, for requests of some sizes."""
    some = [single(q) for q in cluster(waiting="a.05 b.15 c.3 d.4 e.6").waiting.values()]
    for replica in asked.cluster.replicas.values():
        yield asked.category(replica)
        yield asked.largest_middle(replica)
        yield asked.preferred_middle(replica)
    for category in CATEGORIES:
        yield asked.latest(category)
        for unit in some:
            yield asked.best(category, unit)
            yield asked.best_cleared(category, unit)
    yield from map(asked.idle, some)


@pytest.mark.parametrize("seed", range(4))
def test_kept_up_to_date(seed: int) -> None:
    rng = random.Random(seed)
    made = cluster("A: | B@n1: | C: | D@n1: | E: | F:", "L.6 L.55 M.4 M.45 S.3 S.26 T.2 T.15 G.1 G.05 G.02")
    kept = board(made)
    for _ in range(120):
        request = rng.choice(list(made.requests.values()))
        there, target = request.replica, rng.choice(list(made.replicas.values()))
        if there is not None:
            made.decisions.lift(request, Reason.FILL)
            kept.touch(there)
        if target.room >= request.tokens:
            made.decisions.place(request, target)
            kept.touch(target)
        assert list(answers(kept)) == list(answers(board(made)))


@pytest.mark.parametrize(
    ("drawing", "category"),
    [
        pytest.param("A:", None, id="empty"),
        pytest.param("A: G.1", Kind.TINY, id="grains"),
        pytest.param("A: S.3 T.2", Kind.SMALL, id="SMALL"),
        pytest.param("A: M.4 S.3", Kind.MEDIUM, id="MEDIUM"),
        pytest.param("A: L.6 M.4", Kind.LARGE, id="LARGE"),
        pytest.param("A*: L.6", None, id="not running"),
    ],
)
def test_category_is_that_of_the_largest_request(drawing: str, category: Kind | None) -> None:
    made = cluster(drawing)
    (replica,) = made.replicas.values()
    assert board(made).category(replica) is category


@pytest.mark.parametrize(
    ("size", "headroom", "need"),
    [
        pytest.param(".5", 0, 0.5, id="its size"),
        pytest.param(".5", 240, 0.6, id="and its growth"),
        pytest.param(".95", 240, 1.0, id="but no more than there is"),
    ],
)
def test_need(size: str, headroom: int, need: float) -> None:
    made = cluster(waiting=f"x{size}", headroom=headroom)
    assert board(made).need(single(named(made, "x"))) == need * C


def test_a_pinned_tiny_request_cannot_make_room() -> None:
    made = cluster("A: L.6 t.2", "x.4")
    assert board(made).best_cleared(Kind.LARGE, single(named(made, "x"))) is not None
    named(made, "t").pinned = True
    assert board(made).best_cleared(Kind.LARGE, single(named(made, "x"))) is None


def test_a_replica_that_runs_all_it_may_is_passed_over() -> None:
    made = cluster("A: T.2 | B: T.25", "x.2")
    first, second = made.replicas.values()
    first.max_requests = 1
    assert board(made).best(Kind.TINY, single(named(made, "x"))) is second


def test_a_pinned_medium_request_is_passed_over() -> None:
    made = cluster("A: L.6 | B: m.4 S.3")
    large, _ = made.replicas.values()
    named(made, "m").pinned = True
    assert board(made).largest_middle(large) is named(made, "S#2")


def test_where_moves_take_time_a_request_fits_its_home() -> None:
    made = cluster("A: L.6 x.4", holds=True)
    unit = single(named(made, "x"))
    made.decisions.lift(named(made, "x"), Reason.OVERLOAD)
    (home,) = made.replicas.values()
    assert home.room == 0
    assert board(made).fits(unit, home)


def test_undone_changes_leave_no_trace() -> None:
    made = cluster("A: L.55 T.2 T.13 | B: m.4 S.3 | C: T.2", "x.35")
    before = shown(made)
    work = Work(Board(made, WEIGHTS, clears=True), mell().reading)
    replica = next(iter(made.replicas.values()))
    mark = work.mark()
    work.lift(single(named(made, "m")), Reason.FILL)
    assert settle_in(work, single(named(made, "x")), replica)
    assert list(answers(work.board)) == list(answers(board(made)))
    work.undo(mark)
    assert shown(made) == before
    assert list(answers(work.board)) == list(answers(board(made)))
    assert made.decisions.settle().moves == ()
