"""Units and multi-items, and choosing few of them."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.cluster.classes import Kind
from policies.plan import Reason
from policies.rules.mell.units import Unit, fewest, single, tiny_units, units
from tests.policies.rules.mell.clusters import C, cluster, named
from tests.policies.settings import unhurried


def grouped(drawing: str) -> list[list[str]]:
    """The names in each TINY unit of a replica."""
    made = cluster(f"A: {drawing}")
    (replica,) = made.replicas.values()
    return [[q.id for q in unit.requests] for unit in tiny_units(replica, made.classes)]


@pytest.mark.parametrize(
    ("drawing", "groups"),
    [
        pytest.param("a.1 b.02", [["a", "b"]], id="too little for a group is one"),
        pytest.param("a.1 b.02 c.01", [["a", "b", "c"]], id="closed above C/8"),
        pytest.param("a.1 b.02 c.01 d.1", [["a", "b", "c"], ["d"]], id="what is left over"),
        pytest.param("a.125 b.1", [["a", "b"]], id="not at C/8"),
        pytest.param("a.05 b.12 c.05", [["a", "b"], ["c"]], id="the oldest first"),
        pytest.param("a.2 b.05 c.1", [["a"], ["b", "c"]], id="a TINY request by itself"),
        pytest.param("a.3 b.4 c.05", [["c"]], id="nothing larger"),
    ],
)
def test_tiny_units(drawing: str, groups: list[list[str]]) -> None:
    assert grouped(drawing) == groups


@unhurried
@given(st.lists(st.integers(1, C // 8), max_size=40))
def test_multi_items_are_tiny_and_complete(sizes: list[int]) -> None:
    made = cluster("A: " + " ".join(f"G{size / C:.6f}".replace("0.", ".") for size in sizes))
    (replica,) = made.replicas.values()
    groups = tiny_units(replica, made.classes)
    assert all(C // 8 < group.tokens <= C // 4 for group in groups[:-1])
    assert all(group.tokens <= C // 4 and group.kind is Kind.TINY for group in groups)
    assert [q for group in groups for q in group.requests] == list(replica.requests.values())


def test_multi_items_go_by_age_and_not_by_when_a_request_came_to_the_replica() -> None:
    made = cluster("A: a.1 b.1 c.1")
    (replica,) = made.replicas.values()
    made.decisions.lift(named(made, "a"), Reason.FILL)
    made.decisions.place(named(made, "a"), replica)
    assert [[q.id for q in unit.requests] for unit in tiny_units(replica, made.classes)] == [["a", "b"], ["c"]]


def test_units_are_formed_of_movable_requests() -> None:
    made = cluster("A: a.1 b.1 c.1 d.2 e.4")
    named(made, "b").pinned = True
    (replica,) = made.replicas.values()
    formed = units(replica, made.classes, lambda request: request.movable)
    assert [[q.id for q in unit.requests] for unit in formed] == [["e"], ["d"], ["a", "c"]]


def test_a_single_grain_counts_as_tiny() -> None:
    made = cluster("A: x.01")
    assert single(named(made, "x")) == Unit(Kind.TINY, (named(made, "x"),), 24, named(made, "x").replica)


@pytest.mark.parametrize(
    ("sizes", "gap", "chosen"),
    [
        pytest.param([5, 3, 9], 0, [], id="nothing is missing"),
        pytest.param([5, 3, 9], 4, [5], id="the smallest that is enough"),
        pytest.param([5, 3, 9], 11, [9, 3], id="else the largest and the smallest that then is"),
        pytest.param([5, 3, 9], 17, [9, 5, 3], id="all"),
        pytest.param([5, 3, 9], 18, None, id="not even all"),
    ],
)
def test_fewest(sizes: list[int], gap: int, chosen: list[int] | None) -> None:
    assert fewest(((size, size) for size in sizes), gap) == chosen
