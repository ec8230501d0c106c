"""Undo: as if what is taken back had never been."""

import copy

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.cluster import Cluster
from policies.plan import Plan, Reason
from tests.policies.cluster.named import move, named, picture, replica, request
from tests.policies.settings import unhurried

Action = tuple[str, int, int]


def state(cluster: Cluster) -> object:
    """All that undo has to restore, and the plan that would follow."""
    loads = [(r.id, r.load, r.held, r.room, sorted(r.requests)) for r in cluster.replicas.values()]
    places = {q.id: q.replica and q.replica.id for q in cluster.requests.values()}
    return (
        loads,
        places,
        sorted(cluster.waiting),
        cluster.decisions.moves_left,
        copy.deepcopy(cluster).decisions.settle(),
    )


def do(cluster: Cluster, action: Action) -> None:
    """Do it, if it is allowed now."""
    name, one, other = action
    chosen = list(cluster.requests.values())[one % len(cluster.requests)]
    target = list(cluster.replicas.values())[other % len(cluster.replicas)]
    running = chosen.replica is not None
    if name == "place" and not running:
        cluster.decisions.place(chosen, target)
    elif name == "move" and running and cluster.decisions.may_move(chosen):
        cluster.decisions.move(chosen, target, list(Reason)[other % len(Reason)], unit=one)
    elif name == "lift" and running and cluster.decisions.may_move(chosen):
        cluster.decisions.lift(chosen, list(Reason)[other % len(Reason)], unit=one)
    elif name == "evict" and running and chosen.source is None:
        cluster.decisions.evict(chosen)


actions = st.lists(
    st.tuples(st.sampled_from(["place", "move", "lift", "evict"]), st.integers(0, 5), st.integers(0, 5)), max_size=9
)


@unhurried
@given(st.booleans(), st.sampled_from([0, 1, 2, 9]), actions, actions)
def test_undo_restores_everything(holds: bool, budget: int, kept: list[Action], taken_back: list[Action]) -> None:
    cluster = named("A: p30 q20 | B: r40 | C:", "s10 t5", holds=holds)
    cluster.decisions.moves_left = budget
    for action in kept:
        do(cluster, action)
    before, mark = state(cluster), cluster.decisions.mark()
    for action in taken_back:
        do(cluster, action)
    cluster.decisions.undo(mark)
    assert state(cluster) == before
    cluster.check_integrity()


@unhurried
@given(st.booleans(), st.sampled_from([0, 1, 2, 9]), actions)
def test_moves_never_exceed_the_budget_and_use_that_of_the_plan(holds: bool, budget: int, done: list[Action]) -> None:
    cluster = named("A: p30 q20 | B: r40 | C:", "s10 t5", holds=holds)
    cluster.decisions.moves_left = budget
    for action in done:
        do(cluster, action)
        assert cluster.decisions.moves_left >= 0
    assert len(cluster.decisions.settle().moves) == budget - cluster.decisions.moves_left
    cluster.check_integrity()


def test_undo_of_an_eviction_leaves_none() -> None:
    cluster = named("A: p30", holds=True)
    mark = cluster.decisions.mark()
    cluster.decisions.evict(request(cluster, "p"))
    cluster.decisions.undo(mark)
    assert cluster.decisions.settle() == Plan()


def test_undo_restores_reason_and_unit() -> None:
    cluster = named("A: p30 | B: | C:")
    move(cluster, "p", "B", Reason.FILL, 1)
    mark = cluster.decisions.mark()
    move(cluster, "p", "C", Reason.DRAIN, 2)
    cluster.decisions.undo(mark)
    assert [(m.target, m.reason, m.unit) for m in cluster.decisions.settle().moves] == [("B", Reason.FILL, 1)]


def test_undone_steps_may_be_repeated() -> None:
    cluster = named("A: p30 | B: | C:")
    mark = cluster.decisions.mark()
    for _ in range(2):
        move(cluster, "p", "B")
        cluster.decisions.undo(mark)
    move(cluster, "p", "C")
    assert [m.target for m in cluster.decisions.settle().moves] == ["C"]


def test_opened_replicas_stay_open() -> None:
    cluster = named("A: p30")
    mark = cluster.decisions.mark()
    opened = cluster.decisions.open()
    assert opened is not None
    cluster.decisions.move(request(cluster, "p"), opened, Reason.FILL)
    cluster.decisions.undo(mark)
    assert picture(cluster) == "A: p30 | gpu-0:"


@pytest.mark.parametrize("ends", ["a replica is closed", "the epoch ends"])
def test_a_mark_holds_until(ends: str) -> None:
    cluster = named("A: p30 | B: | C:")
    mark = cluster.decisions.mark()
    move(cluster, "p", "C")
    if ends == "a replica is closed":
        cluster.decisions.close(replica(cluster, "A"))
    else:
        cluster.decisions.settle()
    with pytest.raises(ValueError, match="cannot be undone"):
        cluster.decisions.undo(mark)
    assert picture(cluster).endswith("B: | C: p30")
