"""Replicas that die: a request goes on elsewhere, and gives the tokens of an undisturbed run."""

import asyncio
from dataclasses import replace

import pytest

from migration.protocol.messages import PathRequest
from migration.protocol.ports import LossKind
from migration.protocol.record import Outcome
from migration.protocol.tables.reader import ReaderState
from migration.run.reader import NotServed
from tests.app.ingress.fakes import eventually, make_service, output
from tests.app.ingress.streams.streaming import KV, LONG, TOKENS, served, whole
from tests.migration.world import spec

pytestmark = pytest.mark.virtual_time


@pytest.mark.parametrize("after", [0, 1, 30, 59])
async def test_a_request_survives_its_replica(after: int) -> None:
    service, request = make_service(), spec()
    async with service.open(request) as conversation:
        await service.reading(conversation, after)
        service.kill("a")
        assert await output(conversation) == whole(request)
    await service.idle()


async def test_a_death_is_recorded_as_a_migration_by_tokens() -> None:
    service, request = make_service(), spec()
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.kill("a")
        await output(conversation)
    (record,) = service.scheduler.records
    assert (record.request_id, record.label) == (request.id, request.label)
    assert (record.source, record.target, record.path, record.outcome) == ("a", "b", "tokens", Outcome.COMMITTED)
    assert record.reason.startswith("replica lost: ") and record.state == "resubmitted"


async def test_a_request_survives_death_after_death() -> None:
    service, request = make_service("abcde"), spec(tokens=LONG)
    async with service.open(request) as conversation:
        for turn, name in enumerate("abcd"):
            await service.reading(conversation, 30 * turn + 10)
            service.kill(name)
        assert await output(conversation) == whole(request)
    assert [(r.source, r.target) for r in service.scheduler.records] == [("a", "b"), ("b", "c"), ("c", "d"), ("d", "e")]
    await service.idle()


async def test_all_requests_of_a_dead_replica_go_on() -> None:
    service = make_service()
    requests = [spec(f"r{n}", tokens=100) for n in range(10)]
    answers = [asyncio.create_task(served(service, request)) for request in requests]
    await eventually(lambda: all(service.hosts(request.id) for request in requests))
    service.kill("a")
    assert await asyncio.gather(*answers) == [whole(request) for request in requests]
    assert len(service.scheduler.records) == 10
    await service.idle()


async def test_a_replica_that_is_listed_no_more_leaves_no_task() -> None:
    service = make_service("ab")
    await eventually(lambda: service.streams._readers.keys() == {"a", "b"})
    service.kill("a")
    service.members.become("b")
    await eventually(lambda: service.streams._readers.keys() == {"b"})
    await service.idle()


async def test_the_last_replica_dies_and_its_replacement_goes_on() -> None:
    service, request = make_service("ab"), spec()
    service.members.become("a")
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.kill("a")
        await asyncio.sleep(0.05)
        service.members.become("b")
        assert await output(conversation) == whole(request)
    await service.idle()


async def test_no_replacement_comes_in_time() -> None:
    service, request = make_service("a"), spec(tokens=LONG)
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.kill("a")
        with pytest.raises(NotServed, match="no replica") as failed:
            await output(conversation)
    assert failed.value.loss.kind is LossKind.UNAVAILABLE and service.streams.count == 0


@pytest.mark.parametrize("move", [KV, TOKENS])
async def test_a_replica_dies_between_its_last_event_and_its_confirmation(move: PathRequest) -> None:
    """Only the reader can make the target the owner of the request."""
    service, request = make_service(), spec(tokens=LONG)
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b", move)
        await eventually(lambda: conversation.reader.cursor.hop == 1)
        service.kill("a")
        assert await output(conversation) == whole(request)
    assert service.scheduler.records == []
    await service.idle()


async def test_the_target_dies_before_its_reader_comes() -> None:
    service, request = make_service("abc"), spec(tokens=LONG)

    async def die() -> None:
        service.kill("b")

    service.wires.before["b", "attach"] = die
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        assert await output(conversation) == whole(request)
    assert [(r.source, r.target) for r in service.scheduler.records] == [("b", "a")]
    await service.idle()


async def test_the_source_dies_amid_a_move_before_the_target_has_the_request() -> None:
    service, request = make_service("abc", order="acb"), spec(tokens=LONG)
    service.replica("b").faults["receive"] = "silent"
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await eventually(lambda: conversation.reader.state is ReaderState.MOVING)
        service.kill("a")
        assert await output(conversation) == whole(request)
    assert [(r.source, r.target) for r in service.scheduler.records] == [("a", "c")]
    await service.idle()


async def test_the_source_dies_amid_a_move_after_the_target_has_the_request() -> None:
    """Nothing is submitted again: the target is found to go on with it."""
    service, request = make_service("abc", order="acb"), spec(tokens=LONG)
    service.replica("b").faults["adopted"] = "silent"
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await eventually(lambda: "b" in service.hosts(request.id))
        service.kill("a")
        assert await output(conversation) == whole(request)
        assert conversation.reader.cursor.hop == 1
    assert ("c", "submit") not in service.wires.calls
    assert [(r.source, r.target) for r in service.scheduler.records] == [("a", "b")]
    await service.idle()


async def test_source_and_target_die_amid_a_move() -> None:
    service, request = make_service("abc"), spec(tokens=LONG)
    service.replica("b").faults["adopted"] = "silent"
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await eventually(lambda: "b" in service.hosts(request.id))
        service.kill("b")
        service.kill("a")
        assert await output(conversation) == whole(request)
    await service.idle()


async def test_the_source_dies_after_a_move_was_given_up() -> None:
    """The target has dropped what it had adopted: it must not be taken for the host."""
    service, request = make_service("abc", order="acb"), spec(tokens=900)
    service.replica("b").faults["adopted"] = "silent"
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await eventually(lambda: bool(service.replica("a").moves._done))
        assert service.replica("a").moves.records()[0].outcome is Outcome.ABORTED
        await eventually(lambda: service.hosts(request.id) == "a")
        service.kill("a")
        assert await output(conversation) == whole(request)
    assert [(r.source, r.target) for r in service.scheduler.records] == [("a", "c")]
    await service.idle()


async def test_a_request_that_the_engine_loses_goes_on_elsewhere() -> None:
    service, request = make_service(), spec()
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.replica("a").engine.dead = True
        assert await output(conversation) == whole(request)
    (record,) = service.scheduler.records
    assert "the engine died" in record.reason
    await service.idle()


async def test_an_answer_is_not_continued_by_another_version_of_the_model() -> None:
    service, request = make_service(), spec()
    service.replica("b").model = "newer"
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.kill("a")
        with pytest.raises(NotServed, match="another version"):
            await output(conversation)
    await service.idle()


async def test_a_request_that_every_replica_loses_is_given_up() -> None:
    service, request = make_service(), spec()
    for replica in service.replicas.values():
        replica.engine.dead = True
    lost: list[None] = []
    service.streams._world = replace(service.streams._world, on_lost=lambda: lost.append(None))
    with pytest.raises(NotServed, match="too many replicas") as failed:
        await served(service, request)
    assert (failed.value.loss.kind, len(lost)) == (LossKind.UNAVAILABLE, 1)
    assert [method for _, method in service.wires.calls].count("submit") == 9
    await service.idle()
