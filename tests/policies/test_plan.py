"""Every fault of a plan is found, and nothing else."""

from dataclasses import replace

import pytest

from policies.model import ReplicaId, RequestId, Tokens
from policies.plan import Close, Eviction, Move, Open, Placement, Plan, Reason
from tests.policies.rehearsal import Before, Host, violations

A, B, C, X = (ReplicaId(name) for name in "ABCX")
P, Q, R, S, T = (RequestId(name) for name in "pqrst")

BEFORE = Before(
    hosts={
        A: Host(Tokens(100), {P: Tokens(60), Q: Tokens(30)}),
        B: Host(Tokens(100), {R: Tokens(50)}),
        C: Host(Tokens(100), {}, running=False),
    },
    waiting={S: Tokens(40)},
    capacity=Tokens(100),
)
"""A and B run and C does not; `s` waits. Moving `q` to B is all right, moving `p` there is too much."""


def move(request: RequestId, source: ReplicaId, target: ReplicaId) -> Move:
    return Move(request, source, target, Tokens(0), Reason.FILL, 1)


def evict(request: RequestId, source: ReplicaId) -> Eviction:
    return Eviction(request, source, Tokens(0))


OPENING = Open(X, "node")

GOOD = {
    "nothing to do but wait": Plan.of(queued=(S,)),
    "a move and a placement": Plan.of(moves=(move(Q, A, B),), placements=(Placement(S, X),), opened=(OPENING,)),
    "a placement that fills a replica": Plan.of(placements=(Placement(S, B),)),
    "a swap that needs the room it frees": Plan.of(moves=(move(P, A, B), move(R, B, A)), queued=(S,)),
    "an eviction": Plan.of(evicted=(evict(P, A),), queued=(P, S)),
    "an eviction and a placement where it was": Plan.of((), (Placement(P, A),), (evict(P, A),), (S,)),
    "an eviction for a placement": Plan.of((), (Placement(S, A),), (evict(Q, A),), (Q,)),
    "a replica that is emptied and closed": Plan.of((move(R, B, X),), (), (), (S,), (OPENING,), (B,)),
    "a replica that does not run and is closed": Plan.of(queued=(S,), closed=(C,)),
}


@pytest.mark.parametrize("plan", GOOD.values(), ids=GOOD.keys())
def test_nothing_is_wrong_with(plan: Plan) -> None:
    assert violations(plan, BEFORE) == []


BAD = [
    (Plan.of(queued=(S,), opened=(Open(A, "node"),)), "A is opened but exists"),
    (Plan.of((move(Q, A, B),), queued=(S,), opened=(Open(A, "node"),)), "A is opened but exists"),
    (Plan.of(queued=(S,), opened=(OPENING, OPENING)), "X is opened but exists"),
    (Plan.of((move(Q, A, B), move(Q, B, A)), queued=(S,)), "q is moved 2 times"),
    (Plan.of((move(Q, A, A),), queued=(S,)), "q is moved from A to itself"),
    (Plan.of((move(Q, B, A),), queued=(S,)), "q is moved from B but is not there"),
    (Plan.of((move(S, B, A),), queued=(S,)), "s is moved from B but is not there"),
    (Plan.of((move(Q, X, A),), queued=(S,)), "q is moved from X but is not there"),
    (Plan.of((move(Q, A, X),), queued=(S,)), "q goes to X, which does not exist"),
    (Plan.of((move(Q, A, C),), queued=(S,)), "q goes to C, which takes no requests"),
    (Plan.of((move(P, A, B),), queued=(S,)), "B would hold 110 of 100 tokens"),
    (Plan.of(evicted=(evict(Q, B),), queued=(S,)), "q is evicted from B but is not there"),
    (Plan.of(evicted=(evict(Q, X),), queued=(S,)), "q is evicted from X but is not there"),
    (Plan.of(evicted=(evict(Q, A),), queued=(S,)), "q is forgotten"),
    (Plan(), "s is forgotten"),
    (Plan.of(placements=(Placement(S, B),), queued=(S,)), "s is decided on 2 times"),
    (Plan.of(queued=(S, S)), "s is decided on 2 times"),
    (Plan.of(queued=(S, T)), "t is not waiting"),
    (Plan.of(placements=(Placement(Q, B),), queued=(S,)), "q is not waiting"),
    (Plan.of(placements=(Placement(S, X),)), "s goes to X, which does not exist"),
    (Plan.of(placements=(Placement(S, C),)), "s goes to C, which takes no requests"),
    (Plan.of(placements=(Placement(S, A),)), "A would hold 130 of 100 tokens"),
    (Plan.of(queued=(S,), closed=(X,)), "X is closed but does not exist"),
    (Plan.of(queued=(S,), closed=(C, C)), "C is closed but does not exist"),
    (Plan.of(queued=(S,), closed=(A,)), "A is closed with 2 requests on it"),
]


@pytest.mark.parametrize(("plan", "sentence"), BAD, ids=[f"{n} {text}" for n, (_, text) in enumerate(BAD)])
def test_a_violation_is_found(plan: Plan, sentence: str) -> None:
    assert violations(plan, BEFORE) == [sentence]


def test_an_immovable_request_must_not_be_moved_but_may_be_evicted() -> None:
    before = replace(BEFORE, pinned=frozenset([Q]))
    assert violations(Plan.of((move(Q, A, B),), queued=(S,)), before) == ["q must stay but is moved"]
    assert violations(Plan.of(evicted=(evict(Q, A),), queued=(Q, S)), before) == []


def test_new_replicas_that_take_their_time_take_no_requests() -> None:
    before = replace(BEFORE, ready=False)
    plan = Plan.of(moves=(move(Q, A, X),), placements=(Placement(S, X),), opened=(OPENING,))
    assert violations(plan, before) == ["q goes to X, which takes no requests", "s goes to X, which takes no requests"]
    assert violations(Plan.of(queued=(S,), opened=(OPENING,)), before) == []


def test_new_replicas_have_the_capacity_of_new_replicas() -> None:
    before = replace(BEFORE, capacity=Tokens(30))
    assert violations(Plan.of(placements=(Placement(S, X),), opened=(OPENING,)), before) == [
        "X would hold 40 of 30 tokens"
    ]


# --- what holds room besides requests -----------------------------------------------------------------


@pytest.mark.parametrize("held", [True, False], ids=["held", "shared"])
def test_other_used_room_counts(held: bool) -> None:
    host = replace(BEFORE.hosts[B], held=51) if held else replace(BEFORE.hosts[B], unexplained=51)
    before = replace(BEFORE, hosts={B: host})
    assert violations(Plan.of(placements=(Placement(S, B),)), before) == ["B would hold 141 of 100 tokens"]
    assert violations(Plan.of(queued=(S,)), before) == [], "that was so before"


def test_shared_blocks_make_room() -> None:
    before = replace(BEFORE, hosts={B: replace(BEFORE.hosts[B], unexplained=-10), A: BEFORE.hosts[A]})
    assert violations(Plan.of(moves=(move(P, A, B),), queued=(S,)), before) == []


def test_with_holds_a_move_frees_no_room_for_another() -> None:
    plan = Plan.of(moves=(move(P, A, B), move(R, B, A)), queued=(S,))
    assert violations(plan, replace(BEFORE, holds=True)) == [
        "A would hold 140 of 100 tokens",
        "B would hold 110 of 100 tokens",
    ]


def test_with_holds_an_eviction_does() -> None:
    plan = Plan.of((), (Placement(S, A),), (evict(Q, A),), (Q,))
    assert violations(plan, replace(BEFORE, holds=True)) == []


def test_with_holds_a_replica_is_not_closed_before_its_moves_are_over() -> None:
    plan = Plan.of((move(R, B, X),), (), (), (S,), (OPENING,), (B,))
    assert violations(plan, replace(BEFORE, holds=True)) == ["B is closed while 50 tokens are held there"]


# --- replicas that are overloaded already, and full batches -------------------------------------------

OVERLOADED = replace(BEFORE, hosts={A: Host(Tokens(100), {P: Tokens(80), Q: Tokens(30)}), B: BEFORE.hosts[B]})


@pytest.mark.parametrize(
    ("plan", "wrong"),
    [
        pytest.param(Plan.of(queued=(S,)), [], id="left as it is"),
        pytest.param(Plan.of((move(Q, A, B),), queued=(S,)), [], id="cured"),
        pytest.param(
            Plan.of((), (Placement(S, A),), (evict(Q, A),), (Q,)), ["A would hold 120 of 100 tokens"], id="more"
        ),
    ],
)
def test_an_overload_is_not_added_to(plan: Plan, wrong: list[str]) -> None:
    assert violations(plan, OVERLOADED) == wrong


@pytest.mark.parametrize(
    ("most", "wrong"),
    [(1, ["B would run 2 requests of 1"]), (2, [])],
    ids=["is full", "has place for one more"],
)
def test_a_batch_that(most: int, wrong: list[str]) -> None:
    before = replace(BEFORE, hosts={B: replace(BEFORE.hosts[B], max_requests=most)})
    assert violations(Plan.of(placements=(Placement(S, B),)), before) == wrong


def test_a_batch_over_its_limit_may_stay_so() -> None:
    before = replace(BEFORE, hosts={A: replace(BEFORE.hosts[A], max_requests=1)})
    assert violations(Plan.of(queued=(S,)), before) == []


def test_actions_are_in_the_order_of_their_execution_kind_by_kind() -> None:
    plan = Plan.of((move(Q, A, X),), (Placement(S, X),), (evict(P, A),), opened=(OPENING,), closed=(B,))
    assert plan.actions == (OPENING, evict(P, A), move(Q, A, X), Placement(S, X), Close(B))
    assert (plan.moves, plan.opened, plan.closed) == ((move(Q, A, X),), (OPENING,), (B,))
