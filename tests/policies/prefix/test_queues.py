"""The prefills that wait on replicas."""

from hypothesis import given
from hypothesis import strategies as st

from policies.model import ReplicaId, RequestId
from policies.prefix.queues import PrefillQueues

A, B = ReplicaId("a"), ReplicaId("b")


def test_work_is_done_in_order_as_time_passes() -> None:
    queues = PrefillQueues()
    queues.add(RequestId("p"), A, 2.0, now=10.0)
    queues.add(RequestId("q"), A, 3.0, now=10.0)
    assert [queues.wait_s(A, now) for now in (10.0, 11.0, 14.0, 15.0, 99.0)] == [5.0, 4.0, 1.0, 0.0, 0.0]
    assert queues.wait_s(B, 10.0) == 0.0


def test_work_that_is_over_early_is_waited_for_no_more() -> None:
    queues = PrefillQueues()
    queues.add(RequestId("p"), A, 2.0, now=0.0)
    queues.add(RequestId("q"), A, 3.0, now=0.0)
    queues.end(RequestId("p"))
    assert queues.wait_s(A, 0.5) == 3.0
    queues.end(RequestId("q"))
    queues.end(RequestId("q"))
    assert queues.wait_s(A, 0.5) == 0.0


def test_a_repeated_move_changes_nothing() -> None:
    queues = PrefillQueues()
    queues.add(RequestId("p"), A, 2.0, now=0.0)
    queues.add(RequestId("q"), B, 3.0, now=0.0)
    queues.move(RequestId("p"), B, now=0.0)
    queues.move(RequestId("p"), B, now=0.0)
    assert queues.wait_s(B, 0.0) == 5.0
    queues.end(RequestId("p"))
    assert queues.wait_s(B, 2.5) == 2.5, "the end of both, not of three"


def test_a_request_waits_on_one_replica() -> None:
    queues = PrefillQueues()
    queues.add(RequestId("p"), A, 2.0, now=0.0)
    queues.add(RequestId("p"), B, 4.0, now=0.0)
    assert (queues.wait_s(A, 0.0), queues.wait_s(B, 0.0)) == (0.0, 4.0)
    queues.forget(B)
    assert queues.wait_s(B, 0.0) == 0.0
    assert list(queues.waiting()) == []


def test_work_moves_with_its_request() -> None:
    queues = PrefillQueues()
    queues.add(RequestId("p"), A, 2.0, now=0.0)
    queues.add(RequestId("q"), A, 3.0, now=0.0)
    queues.move(RequestId("p"), B, now=0.0)
    queues.move(RequestId("nobody"), B, now=0.0)
    assert (queues.wait_s(A, 0.0), queues.wait_s(B, 0.0)) == (3.0, 2.0)
    assert list(queues.of(A)) == [RequestId("q")] and list(queues.of(B)) == [RequestId("p")]
    queues.end(RequestId("p"))
    assert not list(queues.of(B)) and queues.wait_s(B, 0.0) == 0.0


@given(st.lists(st.tuples(st.integers(0, 5), st.sampled_from([A, B]), st.floats(0, 9), st.booleans()), max_size=30))
def test_waits_are_never_longer_than_the_work_and_empty_queues_have_none(
    events: list[tuple[int, ReplicaId, float, bool]],
) -> None:
    queues, work = PrefillQueues(), dict[int, tuple[ReplicaId, float]]()
    for now, (number, replica, seconds, ends) in enumerate(events):
        if ends:
            queues.end(RequestId(str(number)))
            work.pop(number, None)
        else:
            queues.add(RequestId(str(number)), replica, seconds, now)
            work[number] = (replica, seconds)
        for each in (A, B):
            total_s = sum(s for home, s in work.values() if home == each)
            assert 0 <= queues.wait_s(each, now) <= total_s + 1e-9
    assert set(queues.waiting()) == {RequestId(str(number)) for number in work}
