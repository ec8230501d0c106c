"""The order in which contexts return."""

from policies.prefix.returning import AT_MOST, PATIENCE_S, ReturnQueue


def test_oldest_context_returns_first_unless_it_has_waited_too_long() -> None:
    queue = ReturnQueue[str]()
    for number, name in enumerate("abc"):
        queue.end(name, float(number))
    assert queue.next(3.0) == queue.next(3.0) == "a"
    queue.take()
    assert queue.next(3.0) == "b"
    assert queue.next(2.0 + PATIENCE_S) == "c"
    assert queue.next(2.1 + PATIENCE_S) is None


def test_newest_contexts_wait() -> None:
    queue = ReturnQueue[int]()
    for number in range(AT_MOST + 1):
        queue.end(number, 0.0)
    assert queue.next(0.0) == 1
    queue.clear()
    assert queue.next(0.0) is None
