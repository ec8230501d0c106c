"""Replicas that die: a request goes on elsewhere, and gives the tokens of an undisturbed run."""

import asyncio
from collections.abc import Callable
from dataclasses import replace

import pytest

from deployments.engine.paced import PacedEngine
from deployments.engine.port import EngineDead, RequestFailed
from migration.protocol.errors import PeerLost
from migration.protocol.messages import PathRequest, Tail
from migration.protocol.ports import LossKind, OutputSink
from migration.protocol.record import Outcome
from migration.protocol.request import RequestSpec
from migration.protocol.tables.reader import ReaderState
from migration.run.reader import NotServed
from policies.causes import Cause
from policies.model import ReplicaId
from tests.app.ingress.fakes import eventually, make_service, output
from tests.app.ingress.streams.streaming import KV, LONG, TOKENS, served, whole
from tests.migration.world import POOL, spec
from tests.virtual_time import now

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
    assert record.pool == POOL
    assert record.reason.startswith("replica lost: ") and record.state == "resubmitted"


async def test_a_request_survives_death_after_death() -> None:
    service, request = make_service("abcde", max_engine_losses=5), spec(tokens=LONG)
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
        service.replica("a").engine.shutdown()
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


@pytest.mark.parametrize("names", ["a", "ab", "abc"])
@pytest.mark.parametrize("all_of", ["engines", "replicas"])
async def test_requests_go_on_after_the_death_of_all(names: str, all_of: str) -> None:
    service = make_service(f"{names}z", no_replica_timeout_s=60)
    service.members.become(*names)
    requests = [spec(f"r{n}", tokens=LONG) for n in range(6)]
    answers = [asyncio.create_task(served(service, request)) for request in requests]
    await eventually(lambda: all(run.reader.cursor.next_index > 20 for run in service.streams._live.values()))
    for name in names:
        if all_of == "replicas":
            service.kill(name, noticed=False)
        service.replica(name).engine.shutdown()
    await asyncio.sleep(20)
    asking = asyncio.create_task(served(service, spec("new")))
    await asyncio.sleep(20)
    assert not any(answer.done() for answer in (*answers, asking))
    assert len(service.wires.calls) < 7 * 3 * 45, "each is asked every other second"
    service.members.become("z")
    assert await asyncio.gather(*answers, asking) == [*map(whole, requests), whole(spec("new"))]
    await service.idle()


@pytest.mark.parametrize("way", ["engine", "replica"])
@pytest.mark.parametrize("most", [1, 2, 3])
async def test_a_request_that_takes_engines_down_ends(way: str, most: int) -> None:
    service, request = make_service("abcde", max_engine_losses=most), spec(tokens=LONG)
    lost: list[None] = []
    service.streams._world = replace(service.streams._world, on_lost=lambda: lost.append(None))
    async with service.open(request) as conversation:
        for name in "abcde"[:most]:
            await service.reading(conversation, conversation.reader.cursor.next_index + 10)
            if way == "replica":
                service.kill(name, noticed=False)
            else:
                service.replica(name).engine.shutdown()
        with pytest.raises(NotServed, match="not given to another engine") as failed:
            await output(conversation)
    assert (failed.value.loss.kind, len(lost)) == (LossKind.SUSPECT, 1)
    assert {replica for replica, method in service.wires.calls if method == "submit"} == set("abcde"[:most])
    await service.idle()


async def test_a_request_that_ends_its_engine_with_its_first_step_ends_after_two() -> None:
    service, request = make_service("abcd"), spec()
    for replica in service.replicas.values():
        replica.engine.add = dying(replica.engine)  # type: ignore[method-assign]
    await eventually(lambda: service.wires.streams == 4)
    with pytest.raises(NotServed, match="2 engines have died"):
        await served(service, request)
    assert [r.id for r in service.replicas.values() if r.engine.death] == ["a", "b"]


def dying(engine: PacedEngine) -> Callable[..., None]:
    """An engine's `add` that ends it."""

    def add(key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None) -> None:
        engine.shutdown()
        asyncio.get_running_loop().call_soon(sink.fail, EngineDead("a bad request"))

    return add


async def test_engines_that_were_dead_before_do_not_count() -> None:
    service, request = make_service("abcd"), spec(tokens=LONG)
    service.replica("b").engine.shutdown()
    service.kill("c", noticed=False)
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.replica("a").engine.shutdown()
        assert await output(conversation) == whole(request)
    assert (conversation.reader.engine_losses, conversation.reader.host) == (1, "d")


async def test_a_replica_that_serve_stops_does_not_count() -> None:
    service, request = make_service("abc", max_engine_losses=1), spec(tokens=LONG)
    async with service.open(request) as conversation:
        for name, rest in (("a", "bc"), ("b", "c")):
            await service.reading(conversation, conversation.reader.cursor.next_index + 10)
            service.members.become(*rest)
            await service.reading(conversation, conversation.reader.cursor.next_index + 10)
            service.kill(name)  # The grace period is over.
        assert await output(conversation) == whole(request)
    assert (conversation.reader.engine_losses, conversation.reader.host) == (0, "c")


async def test_moves_and_replicas_that_stand_still_do_not_count() -> None:
    service, request = make_service("abc", max_engine_losses=1), spec(tokens=LONG)
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await eventually(lambda: conversation.reader.host == "b")
        service.wires.hushed.add(ReplicaId("b"))
        service.wires.cut("b", PeerLost("replica b was silent", Cause.NO_ANSWER))
        assert await output(conversation) == whole(request)
    assert conversation.reader.engine_losses == 0


async def test_a_request_that_engines_fail_and_survive_ends_with_its_time() -> None:
    service, request = make_service(no_replica_timeout_s=60), spec()
    for replica in service.replicas.values():
        replica.engine.add = failing  # type: ignore[method-assign]
    began = now()
    with pytest.raises(NotServed, match="no replica is available") as failed:
        async with service.open(request) as conversation:
            await output(conversation, within_s=100)
    assert failed.value.loss.kind is LossKind.UNAVAILABLE and 60 <= now() - began < 65
    assert len(service.wires.calls) < 100


def failing(key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None) -> None:
    """An engine's `add` that fails the request."""
    asyncio.get_running_loop().call_soon(sink.fail, RequestFailed("no blocks"))
