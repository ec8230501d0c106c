"""The stream from a replica to an ingress: batches, one reader at a time, and how silence is noticed."""

import asyncio
from collections.abc import AsyncIterator

import pytest

from deployments.channels.wire import ACKNOWLEDGE_S, Batch
from deployments.replica.outbox import HEARTBEAT_S, MOST_EVENTS, Outboxes
from migration.protocol.request import Delta, IngressId
from policies.model import RequestId

HERE, THERE = IngressId("here"), IngressId("there")


class Clock:
    """Time that a test sets."""

    def __init__(self) -> None:
        self.now = 100.0

    def __call__(self) -> float:
        return self.now


def event(index: int) -> Delta:
    return Delta(RequestId("r"), 0, index, (index,))


async def connect(boxes: Outboxes, ingress: IngressId = HERE) -> AsyncIterator[Batch]:
    """A reader that has had its first, empty batch."""
    stream = boxes.read(ingress)
    assert await anext(stream) == ()
    return stream


async def rest(stream: AsyncIterator[Batch]) -> list[Batch]:
    async with asyncio.timeout(5):
        return [batch async for batch in stream]


async def test_events_before_the_reader_came_are_one_batch() -> None:
    boxes = Outboxes(Clock())
    boxes.put(HERE, event(0))
    boxes.put(HERE, event(1))
    assert await anext(await connect(boxes)) == (event(0), event(1))


async def test_reader_is_woken_by_a_later_event() -> None:
    boxes = Outboxes(Clock())
    stream = await connect(boxes)
    batch = asyncio.ensure_future(anext(stream))
    await asyncio.sleep(0)
    assert not batch.done()
    boxes.put(HERE, event(0))
    assert await batch == (event(0),)


async def test_a_reader_without_events_gets_heartbeats(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("deployments.replica.outbox.HEARTBEAT_S", 0.01)
    boxes = Outboxes(Clock())
    stream = await connect(boxes)
    async with asyncio.timeout(5):
        assert [await anext(stream), await anext(stream)] == [(), ()]
        boxes.put(HERE, event(0))
        assert await anext(stream) == (event(0),)


async def test_every_event_is_read_once() -> None:
    boxes = Outboxes(Clock())
    stream = await connect(boxes)
    boxes.put(HERE, event(0))
    assert await anext(stream) == (event(0),)
    boxes.put(HERE, event(1))
    assert await anext(stream) == (event(1),)


async def test_ingresses_have_streams_of_their_own() -> None:
    boxes = Outboxes(Clock())
    boxes.put(HERE, event(0))
    boxes.put(THERE, event(1))
    assert await anext(await connect(boxes, THERE)) == (event(1),)
    assert await anext(await connect(boxes, HERE)) == (event(0),)


async def test_new_reader_ends_the_one_before() -> None:
    boxes = Outboxes(Clock())
    first = await connect(boxes)
    waiting = asyncio.create_task(rest(first))
    await asyncio.sleep(0)
    second = await connect(boxes)
    assert await waiting == []
    boxes.put(HERE, event(0))
    assert await anext(second) == (event(0),)


async def test_closed_outbox_is_read_to_its_end() -> None:
    boxes = Outboxes(Clock())
    stream = await connect(boxes)
    boxes.put(HERE, event(0))
    boxes.close()
    assert await rest(stream) == [(event(0),)]


async def test_close_wakes_a_reader_that_waits() -> None:
    boxes = Outboxes(Clock())
    waiting = asyncio.create_task(rest(await connect(boxes)))
    await asyncio.sleep(0)
    boxes.close()
    assert await waiting == []


async def test_stream_opened_after_the_close_ends_at_once() -> None:
    boxes = Outboxes(Clock())
    boxes.close()
    assert await rest(boxes.read(HERE)) == [()]


async def test_forgotten_ingress_has_its_stream_ended_and_loses_unread_events() -> None:
    boxes = Outboxes(Clock())
    stream = await connect(boxes, THERE)
    boxes.put(HERE, event(0))
    boxes.forget(HERE)
    boxes.forget(THERE)
    boxes.forget(IngressId("unknown"))
    assert await rest(stream) == []
    boxes.close()
    assert await rest(boxes.read(HERE)) == [()]


@pytest.mark.parametrize(("passed", "silent"), [(5.0, ()), (5.1, (HERE,))], ids=["up to the limit", "past the limit"])
async def test_ingress_that_never_came_is_silent_since_its_first_event(
    passed: float, silent: tuple[IngressId, ...]
) -> None:
    clock = Clock()
    boxes = Outboxes(clock)
    boxes.put(HERE, event(0))
    clock.now += passed
    assert boxes.silent(5.0) == silent


async def test_ingress_that_acknowledges_is_never_silent() -> None:
    clock = Clock()
    boxes = Outboxes(clock)
    stream = await connect(boxes)
    for _ in range(100):
        clock.now += ACKNOWLEDGE_S + HEARTBEAT_S
        assert boxes.silent(0.1) == ()
        boxes.acknowledged(HERE)
    assert stream is not None


async def test_ingress_that_is_connected_and_does_not_read_is_silent() -> None:
    clock = Clock()
    boxes = Outboxes(clock)
    stream = await connect(boxes)
    boxes.put(HERE, event(0))
    assert await anext(stream) == (event(0),), "the kernel takes events for a process that stands still"
    clock.now += 5 + ACKNOWLEDGE_S + HEARTBEAT_S
    assert boxes.silent(5.0) == ()
    clock.now += 0.1
    assert boxes.silent(5.0) == (HERE,)


async def test_events_wait_up_to_a_bound_and_then_the_ingress_is_given_up() -> None:
    boxes = Outboxes(Clock())
    stream = await connect(boxes)
    for index in range(MOST_EVENTS):
        boxes.put(HERE, event(index))
    assert boxes.silent(5.0) == () and not boxes.given_up(HERE).is_set()
    boxes.put(HERE, event(MOST_EVENTS))
    assert boxes.silent(5.0) == (HERE,) and boxes.given_up(HERE).is_set()
    boxes.put(HERE, event(MOST_EVENTS + 1))
    assert await rest(stream) == [], "nothing is sent behind a gap"
    boxes.forget(HERE)
    boxes.put(HERE, event(0))
    assert boxes.silent(5.0) == () and await anext(await connect(boxes)) == (event(0),)


async def test_large_events_wait_up_to_a_bound_of_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("deployments.replica.outbox.MOST_BYTES", 100)
    boxes = Outboxes(Clock())
    stream = await connect(boxes)
    for _ in range(3):
        for index in range(2):
            boxes.put(HERE, Delta(RequestId("r"), 0, index, (index,), None, ((index, bytes(50)),)))
        assert len(await anext(stream)) == 2, "only what waits counts"
    for index in range(3):
        boxes.put(HERE, Delta(RequestId("r"), 0, index, (index,), None, ((index, bytes(50)),)))
    assert boxes.given_up(HERE).is_set()


async def test_ingress_is_silent_from_the_end_of_its_stream_on() -> None:
    clock = Clock()
    boxes = Outboxes(clock)
    task = asyncio.create_task(rest(await connect(boxes)))
    clock.now += 1_000
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait({task})
    assert boxes.silent(5.0) == ()
    clock.now += 6
    assert boxes.silent(5.0) == (HERE,)


async def test_end_of_a_replaced_reader_is_not_silence() -> None:
    clock = Clock()
    boxes = Outboxes(clock)
    waiting = asyncio.create_task(rest(await connect(boxes)))
    await asyncio.sleep(0)
    second = await connect(boxes)
    await waiting
    clock.now += 5
    assert boxes.silent(5.0) == ()
    assert second is not None
