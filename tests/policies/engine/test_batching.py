"""The scheduler of a batch: who is admitted, who is preempted, and who gets the tokens of a step."""

from collections.abc import Iterable
from dataclasses import dataclass

from policies.engine.batching import BatchScheduler, divide


@dataclass(eq=False)
class Request:
    id: str
    todo: int = 1
    turn: float = 0.0


def scheduler(*requests: Request, running: int = 0) -> BatchScheduler[Request]:
    made = BatchScheduler[Request]()
    for request in requests:
        made.enqueue(request)
    for _ in range(running):
        made.admit(lambda _: True)
    return made


def ids(requests: Iterable[Request]) -> str:
    return "".join(request.id for request in requests)


def test_equal_turns_are_first_come_first_served() -> None:
    made = scheduler(Request("a", turn=1), Request("b"), Request("c", turn=1), Request("d"))
    assert ids(made.waiting) == "bdac"


def test_nobody_overtakes_a_request_that_does_not_fit() -> None:
    made = scheduler(Request("a", todo=9), Request("b"))
    assert made.admit(lambda request: request.todo < 5) is None
    assert ids(made.waiting) == "ab"


def test_the_youngest_of_the_last_turn_is_preempted_and_waits_before_its_turn() -> None:
    made = scheduler(*(Request(name, turn=turn) for name, turn in (("a", 0), ("b", 1), ("c", 1), ("d", 1))), running=3)
    left: list[Request] = []
    assert made.preempt(left.append).id == "c" == ids(left)
    assert (ids(made.running.values()), ids(made.waiting), made.preemptions) == ("ab", "cd", 1)


def test_a_bound_on_running_requests() -> None:
    made = BatchScheduler[Request](max_running=1)
    made.enqueue(Request("a"))
    made.enqueue(Request("b"))
    assert [made.admit(lambda _: True) is not None for _ in range(2)] == [True, False]


def test_only_a_running_request_frees_memory_when_removed() -> None:
    a, b = Request("a"), Request("b")
    made = scheduler(a, b, running=1)
    assert [made.remove(request) for request in (a, b, b)] == [True, False, False]


def test_a_step_takes_no_request_that_its_budget_does_not_reach() -> None:
    taken = iter([Request("a", 3), Request("b", 4), Request("c")])
    assert [(request.id, tokens) for request, tokens in divide(taken, 5)] == [("a", 3), ("b", 2)]
    assert next(taken).id == "c"
