"""Streams that break while the replica lives: they are opened again, and nothing is lost or read twice."""

import asyncio

import pytest

from app.ingress.streams.replica_calls import RECONNECT_S
from migration.protocol.errors import PeerLost
from migration.protocol.request import Delta, Moved, Moving
from tests.app.ingress.fakes import Service, eventually, make_service, output
from tests.app.ingress.streams.streaming import LONG, served, whole
from tests.migration.world import spec

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("after", [0, 1, 30])
async def test_a_broken_stream_is_opened_again_without_loss_or_duplicate(after: int) -> None:
    service, request = make_service(), spec(tokens=LONG)
    async with service.open(request) as conversation:
        await service.reading(conversation, after)
        service.wires.cut("a", ConnectionError("broken"))
        assert await output(conversation) == whole(request)
    assert service.scheduler.records == []
    await service.idle()


async def test_the_log_has_one_traceback_while_a_stream_cannot_be_opened(caplog: pytest.LogCaptureFixture) -> None:
    service, request = make_service(), spec(tokens=LONG)
    async with service.open(request) as conversation:
        await service.reading(conversation, 1)
        service.wires.lose = lambda batch: True
        service.wires.cut("a", ConnectionError("broken"))
        await asyncio.sleep(5 * RECONNECT_S)
        service.wires.lose = lambda batch: False
        assert await output(conversation) == whole(request)
    assert [record.getMessage() for record in caplog.records] == ["reading replica a failed"]
    await service.idle()


def once(want: type, service: Service) -> None:
    """Lose the next batch that holds such an event, and break its stream."""
    lost: list[object] = []

    def lose(batch: tuple[object, ...]) -> bool:
        if not lost and any(isinstance(event, want) for event in batch):
            lost.append(batch)
            return True
        return False

    service.wires.lose = lose


async def test_tokens_lost_with_a_stream_are_asked_for_again() -> None:
    service, request = make_service(), spec(tokens=LONG)
    async with service.open(request) as conversation:
        await service.reading(conversation, 20)
        once(Delta, service)
        assert await output(conversation) == whole(request)
    assert ("a", "attach") in service.wires.calls and service.scheduler.records == []
    await service.idle()


async def test_the_end_lost_with_a_stream_is_asked_for_again() -> None:
    service, request = make_service(), spec()
    lost: list[object] = []

    def lose(batch: tuple[object, ...]) -> bool:
        if not lost and any(isinstance(event, Delta) and event.finish for event in batch):
            lost.append(batch)
            return True
        return False

    service.wires.lose = lose
    assert await served(service, request) == whole(request) and lost
    await service.idle()


async def test_a_whole_answer_lost_with_a_stream_is_asked_for_again() -> None:
    service, request = make_service(), spec(tokens=1)
    once(Delta, service)
    async with service.open(request) as conversation:
        assert await output(conversation, within_s=2) == whole(request)


@pytest.mark.parametrize("lost", [Moving, Moved])
async def test_an_event_of_a_move_lost_with_a_stream_costs_nothing(lost: type) -> None:
    service, request = make_service("abc", order="acb"), spec(tokens=LONG)
    async with service.open(request) as conversation:
        await service.reading(conversation, 20)
        once(lost, service)
        service.move(request.id, "b")
        assert await output(conversation, within_s=2) == whole(request)
    await service.idle()


async def test_a_stream_of_an_idle_replica_breaks_and_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ingress.streams.streams.ROUTER_SKEW_S", 0.1)
    service, request = make_service("a"), spec()
    await asyncio.sleep(0.2)
    service.wires.cut("a", ConnectionError("broken"))
    await asyncio.sleep(0.1)
    async with service.open(request) as conversation:
        assert await output(conversation, within_s=2) == whole(request)


async def test_a_replica_that_was_unreachable_for_a_moment_is_read_again() -> None:
    """Ray raises ActorUnavailableError (a RayActorError, hence PeerLost) of a replica that may well be alive."""
    service, request = make_service("a"), spec()
    await eventually(lambda: service.wires.streams == 1)
    service.wires.cut("a", PeerLost("unavailable"))
    await eventually(lambda: service.wires.streams == 0)
    async with service.open(request) as conversation:
        assert await output(conversation, within_s=2) == whole(request)
