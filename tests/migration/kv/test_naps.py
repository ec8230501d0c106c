"""Readers of vLLM's message queues sleep between two looks, and are woken as before once they are idle."""

import threading
import time
from collections.abc import Iterator

import pytest
import zmq
from vllm.distributed.device_communicators import shm_broadcast
from vllm.distributed.device_communicators.shm_broadcast import MessageQueue, SpinCondition

from migration.kv.naps import nap_between_looks
from tests.migration.kv.test_connector import make_connector


@pytest.fixture(autouse=True)
def restored(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers of other tests wait as vLLM's do."""
    monkeypatch.setattr(SpinCondition, "wait", SpinCondition.wait)


@pytest.fixture
def reader() -> Iterator[SpinCondition]:
    condition = SpinCondition(is_reader=True, context=zmq.Context.instance(), notify_address="inproc://nobody")
    yield condition
    for end in (condition.local_notify_socket, condition.read_cancel_socket, condition.write_cancel_socket):
        end.close(linger=0)


def test_a_reader_sleeps_between_two_looks(reader: SpinCondition, monkeypatch: pytest.MonkeyPatch) -> None:
    yields: list[None] = []
    monkeypatch.setattr(shm_broadcast, "sched_yield", lambda: yields.append(None))
    reader.record_read()
    reader.wait(10_000)
    assert len(yields) == 1, "vLLM's way"
    nap_between_looks()
    began, computed = time.monotonic(), time.thread_time()
    while time.monotonic() < began + 0.2:
        reader.wait(10_000)
    assert time.thread_time() - computed < 0.1
    assert len(yields) < 5_000, "looks that follow each other at once, for 0.1 ms"


def test_messages_reach_a_reader_that_sleeps_and_one_that_is_idle() -> None:
    nap_between_looks()
    writer = MessageQueue(1, 1, local_reader_ranks=[0])
    reader = MessageQueue.create_from_handle(writer.export_handle(), 0)
    thread = threading.Thread(target=writer.wait_until_ready)
    thread.start()
    reader.wait_until_ready()
    thread.join()
    for idle_s in (0.0, 0.0, -1.0):
        reader._spin_condition.busy_loop_s = idle_s or 1.0
        sending = threading.Timer(0.05, writer.enqueue, [idle_s])
        sending.start()
        assert reader.dequeue(timeout=5) == idle_s
        sending.join()


@pytest.mark.parametrize(("device", "naps"), [("cpu", True), ("cuda", False)])
def test_only_engines_on_cpus_do_so(device: str, naps: bool) -> None:
    before = SpinCondition.wait
    make_connector(device=device)
    assert (SpinCondition.wait is not before) == naps
