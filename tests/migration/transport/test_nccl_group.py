"""The NCCL backend's waits, and its state after a failure. CuPy and NCCL are faked.

Both ranks are in this process, one thread each. No test depends on a duration, only on the end of an operation.
"""

import os
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor
from types import SimpleNamespace
from typing import Any

import pytest
from ray.util.collective.backend_registry import _global_registry
from ray.util.collective.types import RecvOptions, SendOptions

from migration.transport import nccl_group
from migration.transport.nccl_group import NcclPair
from migration.transport.nccl_link import NcclLink, join
from tests.migration import fake_cupy
from tests.ray_store import replace_store

SIZE = 1 << 16
LONG_S, SHORT_S = 60.0, 0.3
"""A time limit that no test reaches, and one that tests wait for."""


@pytest.fixture(autouse=True)
def store(monkeypatch: pytest.MonkeyPatch) -> dict[bytes, bytes]:
    """Ray's key-value store."""
    return replace_store(monkeypatch)


@pytest.fixture
def cupy() -> Iterator[Any]:
    with fake_cupy.installed() as fake:
        yield fake


@pytest.fixture
def threads() -> Iterator[ThreadPoolExecutor]:
    with ThreadPoolExecutor(4) as pool:
        yield pool


class Ends:
    """Both ends of a group, with their buffers."""

    def __init__(self, cupy: Any, threads: ThreadPoolExecutor, name: str = "a>b#1") -> None:
        self.sender, self.receiver = NcclPair(2, 0, name), NcclPair(2, 1, name)
        self.sender.timeout_s = self.receiver.timeout_s = LONG_S
        self.sent, self.received = (cupy.empty(SIZE, cupy.uint8) for _ in range(2))
        self.received[:] = 0
        self._threads = threads

    def send(self) -> "Future[None]":
        """Begin to send new random bytes."""
        self.sent[:] = memoryview(os.urandom(SIZE))
        return self._threads.submit(self.sender.send, [self.sent], SendOptions())

    def receive(self) -> "Future[None]":
        return self._threads.submit(self.receiver.recv, [self.received], RecvOptions())

    def transfer(self) -> bool:
        """True if the bytes arrive."""
        for end in (self.send(), self.receive()):
            end.result(LONG_S)
        return bool((self.sent == self.received).all())

    def connected(self) -> "Ends":
        """These ends, after a first transfer."""
        assert self.transfer()
        self.received[:] = 0
        return self


@pytest.fixture
def ends(cupy: Any, threads: ThreadPoolExecutor) -> Ends:
    return Ends(cupy, threads)


def until(condition: Callable[[], object]) -> None:
    """Wait until another thread makes the condition true."""
    waiting = threading.Event()
    for _ in range(int(LONG_S / 0.005)):
        if condition():
            return
        waiting.wait(0.005)
    raise AssertionError("the condition did not become true")


def test_bytes_arrive(ends: Ends) -> None:
    assert ends.transfer()


def test_one_communicator_serves_all_transfers_of_a_group(ends: Ends, cupy: Any) -> None:
    assert all(ends.transfer() for _ in range(3))
    assert len(cupy.cuda.nccl.ids) == 1 and len(cupy.cuda.nccl.made) == 2


def test_groups_of_other_names_are_other_communicators(cupy: Any, threads: ThreadPoolExecutor) -> None:
    assert Ends(cupy, threads, "a>b#1").transfer() and Ends(cupy, threads, "b>a#1").transfer()
    assert len(set(cupy.cuda.nccl.ids)) == 2


def test_store_is_empty_after_the_rendezvous(ends: Ends, store: dict[bytes, bytes]) -> None:
    assert ends.transfer() and store == {}


def test_constructor_of_a_group_does_not_wait(store: dict[bytes, bytes], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "cupy", None)
    NcclPair(2, 0, "a>nobody#1")
    assert store == {}


# --- a peer that is missing ---------------------------------------------------------------------------


def test_sender_without_a_receiver_times_out_and_creates_no_id(ends: Ends, cupy: Any) -> None:
    ends.sender.timeout_s = SHORT_S
    with pytest.raises(TimeoutError, match="timed out, the peer did not appear"):
        ends.send().result(LONG_S)
    assert cupy.cuda.nccl.ids == []


def test_receiver_without_a_sender_times_out(ends: Ends, store: dict[bytes, bytes]) -> None:
    ends.receiver.timeout_s = SHORT_S
    with pytest.raises(TimeoutError, match="timed out"):
        ends.receive().result(LONG_S)
    ends.receiver.destroy_group()
    assert store == {}


def test_peer_that_dies_before_it_joins_times_out(ends: Ends, store: dict[bytes, bytes], cupy: Any) -> None:
    """The peer's entry is in the store, so the sender is inside NCCL, where it cannot be woken."""
    store[b"nccl/a>b#1/receiver"] = b"here"
    ends.sender.timeout_s = SHORT_S
    with pytest.raises(TimeoutError, match="timed out: the peer did not join"):
        ends.send().result(LONG_S)
    assert cupy.cuda.nccl.made == []


def test_late_communicator_is_aborted(ends: Ends, store: dict[bytes, bytes], cupy: Any) -> None:
    store[b"nccl/a>b#1/receiver"] = b"here"
    ends.sender.timeout_s = SHORT_S
    with pytest.raises(TimeoutError, match="timed out"):
        ends.send().result(LONG_S)
    late = cupy.cuda.nccl.NcclCommunicator(2, cupy.cuda.nccl.ids[0], 1)
    until(lambda: late.peer.aborted)


def test_late_link_is_aborted() -> None:
    go_on, aborted = threading.Event(), threading.Event()

    def make() -> Any:
        go_on.wait(LONG_S)
        return SimpleNamespace(abort=aborted.set)

    with pytest.raises(TimeoutError, match="did not join"):
        join(make, 0.0)
    go_on.set()
    assert aborted.wait(LONG_S)


# --- a peer that falls silent -------------------------------------------------------------------------


def test_silent_receiver_times_out_and_is_aborted(ends: Ends, cupy: Any) -> None:
    ends.connected().sender.timeout_s = SHORT_S
    with pytest.raises(TimeoutError, match=r"timed out after 0\.3 s"):
        ends.send().result(LONG_S)
    assert [end.aborted for end in cupy.cuda.nccl.made if end.rank == 0] == [True]


def test_silent_sender_times_out_and_memory_is_unchanged(ends: Ends, cupy: Any) -> None:
    ends.connected().receiver.timeout_s = SHORT_S
    with pytest.raises(TimeoutError, match="timed out"):
        ends.receive().result(LONG_S)
    ends.sender.timeout_s = SHORT_S
    with pytest.raises(TimeoutError, match="timed out"):
        ends.send().result(LONG_S)
    assert not ends.received.any()


def test_failed_group_fails_all_later_transfers_at_once(ends: Ends) -> None:
    ends.connected().sender.timeout_s = SHORT_S
    for kind, text in ((TimeoutError, "timed out"), (RuntimeError, "was closed")):
        with pytest.raises(kind, match=text):
            ends.send().result(LONG_S)
        ends.sender.timeout_s = LONG_S


def test_next_pair_works_after_a_silent_peer(ends: Ends, cupy: Any, threads: ThreadPoolExecutor) -> None:
    ends.connected().sender.timeout_s = SHORT_S
    with pytest.raises(TimeoutError, match="timed out"):
        ends.send().result(LONG_S)
    for end in (ends.sender, ends.receiver):
        end.destroy_group()
    assert Ends(cupy, threads, "a>b#2").transfer()


def test_transfer_does_not_wait_until_nccl_has_taken_the_communicator_apart(
    ends: Ends, cupy: Any, threads: ThreadPoolExecutor
) -> None:
    ends.connected().sender.timeout_s = SHORT_S
    cupy.cuda.nccl.apart.clear()
    try:
        with pytest.raises(TimeoutError, match="timed out"):
            ends.send().result(LONG_S)
        ends.receiver.destroy_group()
        assert Ends(cupy, threads, "a>b#2").transfer()
    finally:
        cupy.cuda.nccl.apart.set()


def test_aborting_twice_ends_the_communicator_once(ends: Ends, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    link, calls = ends.connected().sender._link, []
    assert link is not None
    monkeypatch.setattr(link._communicator, "abort", lambda: calls.append(1))
    link.abort()
    link.abort()
    until(lambda: calls)
    assert calls == [1]


def test_asynchronous_nccl_error_ends_the_transfer(ends: Ends, cupy: Any) -> None:
    ends.connected()
    cupy.cuda.nccl.error = fake_cupy.NcclError("NCCL_ERROR_REMOTE_ERROR: remote process exited")
    with pytest.raises(RuntimeError, match="remote process exited"):
        ends.send().result(LONG_S)
    assert all(end.aborted for end in cupy.cuda.nccl.made if end.rank == 0)


# --- a group that is destroyed ------------------------------------------------------------------------


def test_destroying_a_group_ends_its_transfer(ends: Ends, cupy: Any) -> None:
    sending = ends.connected().send()
    until(lambda: any(end.transfers for end in cupy.cuda.nccl.made))
    ends.sender.destroy_group()
    with pytest.raises(RuntimeError, match="a>b#1 was closed"):
        sending.result(LONG_S)
    assert all(end.aborted for end in cupy.cuda.nccl.made if end.rank == 0)


def test_destroying_a_group_that_waits_for_its_peer_ends_the_wait(ends: Ends, store: dict[bytes, bytes]) -> None:
    receiving = ends.receive()
    until(lambda: store)
    ends.receiver.destroy_group()
    with pytest.raises(RuntimeError, match="closed while waiting"):
        receiving.result(LONG_S)
    assert store == {}


def test_destroying_an_idle_group_aborts_its_communicator(ends: Ends, cupy: Any) -> None:
    ends.connected().sender.destroy_group()
    until(lambda: any(end.aborted for end in cupy.cuda.nccl.made))


def test_communicator_is_aborted_by_its_own_thread(ends: Ends, cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """An abort frees the communicator, which a thread inside NCCL would still use."""
    at, abort = set(), NcclLink.abort

    def noted(link: NcclLink) -> None:
        at.add(threading.current_thread())
        abort(link)

    sending = ends.connected().send()
    until(lambda: any(end.transfers for end in cupy.cuda.nccl.made))
    monkeypatch.setattr(NcclLink, "abort", noted)
    ends.sender.destroy_group()
    with pytest.raises(RuntimeError, match="was closed"):
        sending.result(LONG_S)
    assert threading.current_thread() not in at and len(at) == 1
    assert not any(thread.name.startswith("nccl") for thread in at)


def test_name_can_be_reused(ends: Ends, cupy: Any, threads: ThreadPoolExecutor) -> None:
    ends.connected()
    for end in (ends.sender, ends.receiver):
        end.destroy_group()
    assert Ends(cupy, threads).transfer()
    assert len(set(cupy.cuda.nccl.ids)) == 2


# --- Ray's interface -----------------------------------------------------------------------------------


def test_backend_is_available_with_cupy_nccl_and_a_gpu(cupy: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    assert NcclPair.check_backend_availability()
    monkeypatch.setattr(cupy.cuda, "is_available", lambda: False)
    assert not NcclPair.check_backend_availability()


def test_backend_is_not_available_without_cupy(monkeypatch: pytest.MonkeyPatch) -> None:
    with monkeypatch.context() as patch:
        patch.setitem(sys.modules, "cupy", None)
        assert not NcclPair.check_backend_availability()


def test_groups_have_two_ranks() -> None:
    with pytest.raises(ValueError, match="MELL_NCCL groups have two ranks, not 3"):
        NcclPair(3, 0, "a>b#1")


@pytest.mark.parametrize("name", ["allreduce", "barrier", "reduce", "broadcast", "allgather", "reducescatter"])
def test_other_collectives_are_refused(name: str) -> None:
    with pytest.raises(NotImplementedError, match="only send and receive"):
        getattr(NcclPair(2, 0, "a>b#1"), name)(SimpleNamespace())


def test_registering_twice_keeps_the_latest_time_limit(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(NcclPair, "timeout_s", NcclPair.timeout_s)
    for limit in (1.0, 2.0):
        nccl_group.register(limit)
    assert NcclPair.timeout_s == 2.0
    assert _global_registry.get(nccl_group.BACKEND) is NcclPair
