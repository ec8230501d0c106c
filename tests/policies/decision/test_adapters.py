"""Placements and moves of requests with LoRA adapters, of which an engine runs two at a time."""

import pytest

from policies.cluster.changes import Arrival
from policies.decision.deciding import place, preview
from policies.decision.limits import Limits, LiveLimits, Terms
from policies.decision.memory import PoolMemory
from policies.decision.placement import Place, Queue
from policies.model import AdapterId, ReplicaId, RequestId, Tokens
from policies.rules.registry import POLICIES
from tests.policies.decision.observed import Watcher, observed

A, B = ReplicaId("a"), ReplicaId("b")


def watcher(drawing: str, policy: str = "worst_fit") -> Watcher:
    made = Watcher(PoolMemory(Terms(policy, LiveLimits(Limits(), 5.0, 0.0, 60.0, 0.0))))
    made.observe(observed(drawing))
    return made


def arrival(adapter: int | None, name: str = "x", tokens: int = 10) -> Arrival:
    return Arrival(RequestId(name), Tokens(tokens), adapter=None if adapter is None else AdapterId(adapter))


def moves(made: Watcher, drawing: str, now: float) -> list[tuple[str, str]]:
    return [(move.request, move.target) for move in made.decide(observed(drawing, now)).moves]


@pytest.mark.parametrize("policy", sorted(POLICIES))
def test_a_replica_with_as_many_adapters_as_it_runs_gets_no_other(policy: str) -> None:
    drawing = "a: p10+1 q10+2 | b: r30+1 s30+3"
    assert place(watcher(drawing, policy).memory, arrival(3), 0.0) == Place(B)
    assert place(watcher(drawing, policy).memory, arrival(2), 0.0) == Place(A)


def test_the_policy_chooses_among_replicas_that_run_the_adapter_or_one_more() -> None:
    drawing = "a: p10+1 q10+2 | b: r30+1 | c: s50"
    assert place(watcher(drawing).memory, arrival(1), 0.0) == Place(A)
    assert place(watcher(drawing).memory, arrival(3), 0.0) == Place(B)
    assert place(watcher(drawing, "best_fit").memory, arrival(3), 0.0) == Place(ReplicaId("c"))


def test_a_request_of_the_model_alone_goes_anywhere() -> None:
    assert place(watcher("a: p10+1 q10+2 | b: r30").memory, arrival(None), 0.0) == Place(A)


def test_replicas_that_run_an_adapter_come_first_only_if_adapters_are_scarce() -> None:
    assert place(watcher("a: p10+1 q20 | b: r10").memory, arrival(1), 0.0) == Place(B)
    assert place(watcher("a: p10+1 q20+2 | b: r10+3").memory, arrival(1), 0.0) == Place(A)
    full = watcher("a: p90+1 | b: r10+2 | c: s20+3").memory
    assert place(full, arrival(1, tokens=20), 0.0) == Place(B), "the adapter's own replica has no room"


def test_placements_since_the_last_report_count() -> None:
    memory = watcher("a: p10 | b: q50").memory
    assert [place(memory, arrival(n, f"x{n}"), 0.0) for n in (1, 2, 3)] == [Place(A), Place(A), Place(B)]
    assert preview(memory, arrival(3)) == Place(B)
    memory.cluster.check_integrity()


def test_a_request_that_waits_for_its_adapter_everywhere_goes_where_any_other_would() -> None:
    full = "a: p45+1 q45+2 | b: r30+1 s30+2 t35"
    assert place(watcher(full).memory, arrival(3), 0.0) == Place(A)
    assert place(watcher(full).memory, arrival(3, tokens=50), 0.0) == Queue(A), "the fewest requests"


def test_a_request_queues_where_it_need_not_wait_for_its_adapter_if_it_can() -> None:
    assert place(watcher("a: p90+1 | b: r50+2 t45+1 s5+3").memory, arrival(3, tokens=20), 0.0) == Queue(A)
    assert place(watcher("a: p90+4 q5+5 | b: r50 t45 s5+3").memory, arrival(3, tokens=20), 0.0) == Queue(B)


def test_the_adapters_that_came_first_run() -> None:
    made = watcher("a: p30+1 q30+2 r10+3 | b: s10+4 t10+5")
    assert place(made.memory, arrival(3), 0.0) == Place(B), "it would wait on both"
    made.observe(observed("a: q30+2 r10+3 | b: s10+4 t10+5", 1.0))
    assert place(made.memory, arrival(3, "y"), 1.0) == Place(A)


def test_a_request_does_not_move_to_where_it_would_wait_for_its_adapter() -> None:
    balanced = "load_balance:threshold=0"
    drawing = "a: p40+1 q40+1 | b: r{} s{}"
    assert moves(watcher("", balanced), drawing.format("5+2", "5+3"), 0.0) == []
    assert len(moves(watcher("", balanced), drawing.format("5+2", "5+1"), 0.0)) == 1
    assert len(moves(watcher("", balanced), drawing.format("5+2", "5"), 0.0)) == 1


def test_two_requests_with_new_adapters_do_not_move_to_the_last_place() -> None:
    drawing = "a: p60+1 q60+2 | b: r60+3 s60+4 | c: t5+5"
    assert len(moves(watcher("", "load_balance"), drawing, 0.0)) == 1


def test_a_replica_that_is_about_to_stop_is_emptied_all_the_same() -> None:
    assert moves(watcher(""), "a^: p10+1 | b: r10+2 s10+3", 0.0) == [("p", "b")]
    assert moves(watcher(""), "a^: p10+1 | b: r10+2 s10+3 | c: t40", 0.0) == [("p", "c")]
