"""Which contexts of a replica that stops go where."""

from collections.abc import Mapping, Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from policies.model import Blocks, ReplicaId
from policies.prefix.evacuation import CachedContext, Evacuation, Survivor
from policies.prefix.tree import HeldPrefix

A, B = ReplicaId("a"), ReplicaId("b")
NOWHERE: Mapping[ReplicaId, HeldPrefix] = {}


def context(number: int, blocks: int, idle_s: float = 1.0, shared: int = 0, hbm: int | None = None) -> CachedContext:
    """The first `shared` blocks are those of all contexts; all are in HBM, or only `hbm` of them."""
    names = [*range(shared), *(number * 1000 + block for block in range(shared, blocks))]
    return CachedContext(number, names, idle_s, blocks if hbm is None else hbm)


def survivor(replica: ReplicaId, free: int = 1000, *own: CachedContext) -> Survivor:
    return Survivor(replica, Blocks(free), own)


def test_contexts_are_spread_over_those_that_stay() -> None:
    plan = Evacuation([survivor(A), survivor(B)])
    assert [plan.target(context(n, 5), NOWHERE) for n in (1, 2, 3, 4)] == [A, B, A, B]
    assert Evacuation([]).target(context(1, 5), NOWHERE) is None


def test_context_goes_to_where_most_of_it_is_unless_much_is_on_its_way_there() -> None:
    plan = Evacuation([survivor(A), survivor(B)])
    at_b = {B: HeldPrefix(3)}
    assert plan.target(context(1, 5), at_b) == B
    assert plan.target(context(2, 5), at_b) == B, "2 + 2 blocks are fewer than 5"
    assert plan.target(context(3, 5), at_b) == A, "4 + 2 blocks are more"


def test_blocks_that_come_with_another_context_are_sent_once() -> None:
    target = survivor(A, free=12)
    plan = Evacuation([target])
    assert plan.target(context(1, 8, shared=4), NOWHERE) == A
    assert plan.target(context(2, 8, shared=4), NOWHERE) == A
    assert target.assigned == 12
    assert plan.target(context(1, 3, shared=3), NOWHERE) is None, "all of it comes with a longer one"


@pytest.mark.parametrize("held", [HeldPrefix(5), HeldPrefix(2, 3)], ids=["in HBM", "with DRAM"])
def test_context_that_one_of_those_that_stay_has_goes_nowhere(held: HeldPrefix) -> None:
    assert Evacuation([survivor(A), survivor(B)]).target(context(1, 5), {B: held}) is None


def test_context_takes_the_place_of_colder_ones_only() -> None:
    own = [context(8, 60, idle_s=10.0), context(9, 30, idle_s=100.0)]
    assert survivor(A, 100, *own).room(5.0) == 100
    assert survivor(A, 100, *own).room(50.0) == 40
    assert survivor(A, 100, *own).room(500.0) == 10
    assert Evacuation([survivor(A, 100, *own)]).target(context(1, 41, idle_s=50.0), NOWHERE) is None
    assert Evacuation([survivor(A, 100, *own)]).target(context(1, 40, idle_s=50.0), NOWHERE) == A


def test_blocks_that_contexts_of_the_target_share_count_once() -> None:
    own = [context(8, 60, idle_s=10.0, shared=50), context(9, 60, idle_s=11.0, shared=50)]
    assert survivor(A, 100, *own).room(50.0) == 30


contexts = st.lists(st.tuples(st.integers(1, 20), st.integers(0, 5), st.floats(0.0, 100.0)), max_size=15)


@given(contexts, contexts, contexts, st.integers(0, 120))
def test_room_is_never_exceeded_and_nothing_hotter_is_displaced(
    mine: Sequence[tuple[int, int, float]],
    of_a: Sequence[tuple[int, int, float]],
    of_b: Sequence[tuple[int, int, float]],
    free: int,
) -> None:
    number = iter(range(1, 100))
    made = [
        sorted((context(next(number), n, idle_s, min(n, shared)) for n, shared, idle_s in each), key=lambda c: c.idle_s)
        for each in (mine, of_a, of_b)
    ]
    names = {A: {n for c in made[1] for n in c.names}, B: {n for c in made[2] for n in c.names}}
    plan = Evacuation([survivor(A, free, *made[1]), survivor(B, free, *made[2])])
    brought: dict[ReplicaId, set[int]] = {A: set(), B: set()}
    for each in made[0]:
        held = {
            replica: HeldPrefix(next((i for i, n in enumerate(each.names) if n not in have), len(each.names)))
            for replica, have in names.items()
        }
        if (target := plan.target(each, held)) is None:
            continue
        assert not any(set(each.names) <= names[r] | brought[r] for r in (A, B)), "somebody has it"
        brought[target] |= set(each.names) - names[target]
        hotter = {n for c in made[1 if target == A else 2] if c.idle_s < each.idle_s for n in c.names}
        assert len(brought[target]) + len(hotter) <= free


def test_blocks_that_only_the_host_has_move_too_and_take_no_room_of_their_own_replica() -> None:
    plan = Evacuation([survivor(A, 8, context(9, 20, idle_s=0.5, hbm=3))])
    assert plan.target(context(1, 5, hbm=0), NOWHERE) == A, "three of the eight blocks are hotter"
    assert plan.target(context(2, 1), NOWHERE) is None
