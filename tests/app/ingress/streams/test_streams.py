"""Streams that outlive replicas: whatever happens to a replica, the client gets the tokens of an undisturbed run."""

import asyncio

import pytest

from deployments.engine.port import InvalidRequest
from migration.protocol.errors import Refused
from migration.protocol.messages import PathRequest
from migration.protocol.ports import LossKind
from migration.protocol.request import Delta, Moved, RequestSpec
from migration.run.reader import NotServed
from policies.causes import Cause
from policies.model import RequestId
from tests.app.ingress.fakes import eventually, make_service, output
from tests.app.ingress.streams.streaming import KV, LONG, SLOW_S, TOKENS, served, whole
from tests.migration.world import INGRESS, spec

pytestmark = pytest.mark.virtual_time

# --- no harm ------------------------------------------------------------------------------------------


async def test_a_request_is_served_and_forgotten() -> None:
    service, request = make_service(), spec()
    assert await served(service, request) == whole(request)
    assert service.streams.count == 0 and service.scheduler.records == []
    await service.idle()


async def test_every_step_comes_by_itself() -> None:
    service, request = make_service(), spec()
    async with service.open(request) as conversation:
        assert [len(step) async for step in conversation.steps()] == [1] * 60


async def test_many_requests_share_one_stream_per_replica() -> None:
    service = make_service()
    requests = [spec(f"r{n}", tokens=30) for n in range(30)]
    outputs = await asyncio.gather(*(served(service, request) for request in requests))
    assert outputs == [whole(request) for request in requests]
    assert service.wires.streams == 2
    await service.idle()


# --- moves --------------------------------------------------------------------------------------------


@pytest.mark.parametrize("path", [KV, TOKENS])
@pytest.mark.parametrize("after", [0, 1, 7, 58])
async def test_a_reader_follows_a_move(path: PathRequest, after: int) -> None:
    service, request = make_service(), spec()
    async with service.open(request) as conversation:
        await service.reading(conversation, after)
        service.move(request.id, "b", path)
        assert await output(conversation) == whole(request)
    await service.idle()


async def test_a_reader_follows_many_moves() -> None:
    service, request = make_service("abc"), spec(tokens=LONG)
    async with service.open(request) as conversation:
        for turn, to in enumerate("bcacb", start=1):
            await service.reading(conversation, 40 * turn)
            service.move(request.id, to, KV if turn % 2 else TOKENS)
            await eventually(lambda to=to: conversation.reader.host == to)  # type: ignore[misc]
        assert await output(conversation) == whole(request)
        assert conversation.reader.cursor.hop == 5
    assert service.scheduler.records == []
    await service.idle()


async def test_a_move_that_fails_is_not_noticed() -> None:
    service, request = make_service(), spec()
    service.replica("b").faults["adopt"] = Refused("no", Cause.NO_ROOM)
    async with service.open(request) as conversation:
        await service.reading(conversation, 5)
        service.move(request.id, "b")
        assert await output(conversation) == whole(request) and conversation.reader.host == "a"
    await service.idle()


# --- sampling -----------------------------------------------------------------------------------------


async def test_a_request_that_no_engine_can_continue_exactly_ends_with_its_replica() -> None:
    service, request = make_service(), spec(tokens=LONG)
    service.tie()
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        with pytest.raises(Refused, match="seeded sampling"):
            service.move(request.id, "b")
        service.kill("a")
        with pytest.raises(NotServed, match=r"cannot be continued here exactly \(seeded sampling") as failed:
            await output(conversation)
    assert failed.value.loss.kind is LossKind.UNAVAILABLE
    await service.idle()


async def test_a_request_without_output_begins_elsewhere_with_any_sampling() -> None:
    service, request = make_service(step_s=0.05), spec(tokens=3)
    service.tie()
    async with service.open(request) as conversation:
        service.kill("a")
        assert await output(conversation) == whole(request)


async def test_a_request_that_no_engine_takes_is_the_clients_error_and_not_retried() -> None:
    service, request = make_service(), spec()
    await asyncio.sleep(0.01)  # Without a stream of events, a replica cannot be called either.

    def refuse(spec: RequestSpec, outputs: tuple[int, ...]) -> None:
        raise InvalidRequest("not a grammar")

    service.replica("a").engine._check = refuse  # type: ignore[method-assign]
    with pytest.raises(NotServed, match="not a grammar") as failed:
        await served(service, request)
    assert failed.value.loss.kind is LossKind.INVALID
    assert [method for _, method in service.wires.calls].count("submit") == 1
    await service.idle()


@pytest.mark.parametrize("harm", ["move", "kill"])
@pytest.mark.parametrize("min_tokens", [0, 40])
async def test_a_stop_ends_an_answer_on_any_replica(harm: str, min_tokens: int) -> None:
    """The tokens from before count: towards the least there must be, and the most there may be."""
    service, request = make_service(), spec(tokens=LONG)
    drawn = whole(request)
    request = spec(tokens=LONG, stop_token_ids=[drawn[30], drawn[50]], min_tokens=min_tokens)
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        if harm == "move":
            service.move(request.id, "b")
        else:
            service.kill("a")
        assert await output(conversation) == drawn[: 51 if min_tokens else 31]
        assert conversation.reader.host == "b"
    await service.idle()


# --- clients that leave -------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 20])
async def test_a_client_that_leaves_ends_its_request(after: int) -> None:
    service, request = make_service(step_s=SLOW_S), spec(tokens=900)
    async with service.open(request) as conversation:
        await service.reading(conversation, after)
    await service.idle()


@pytest.mark.parametrize("call", ["prepare", "receive", "adopt", "adopted"])
@pytest.mark.parametrize("path", [KV, TOKENS])
async def test_a_client_that_leaves_amid_a_move_leaves_nothing(call: str, path: PathRequest) -> None:
    service, request = make_service(step_s=SLOW_S), spec(tokens=900)
    service.replica("b").faults[call] = "silent"
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b", path)
        await asyncio.sleep(0.02)
    await service.idle()


@pytest.mark.parametrize("pause_s", [0, 0.002, 0.004, 0.006, 0.008, 0.01, 0.02])
async def test_a_client_that_leaves_at_any_moment_of_a_move_leaves_nothing(pause_s: float) -> None:
    service, request = make_service(step_s=SLOW_S), spec(tokens=900)
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await asyncio.sleep(pause_s)
    await service.idle()


async def test_a_client_that_leaves_while_its_request_is_resubmitted_leaves_nothing() -> None:
    service, request = make_service(step_s=SLOW_S), spec(tokens=900)
    service.wires.after["b", "submit"] = asyncio.Event().wait
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.kill("a")
        await eventually(lambda: service.hosts(request.id) == "b")
    await service.idle()


async def test_a_request_without_a_reader_is_ended_on_its_replica() -> None:
    """The ingress restarted under the same name, or its message was lost."""
    service, request = make_service(step_s=SLOW_S), spec("stray", tokens=900)
    service.replica("b").moves.submit(request, 0, ())
    await eventually(lambda: ("b", "release") in service.wires.calls)
    await service.idle()


async def test_events_of_unknown_requests_get_no_unnecessary_answer() -> None:
    service = make_service()
    for event in (Delta(RequestId("x"), 0, 0, (1,), "length"), Moved(RequestId("x"), 0, 1, 5, "b")):
        service.replica("a").outboxes.put(INGRESS, event)
    await asyncio.sleep(0.02)
    assert service.wires.calls == []


async def test_a_client_that_leaves_before_its_request_was_sent_leaves_nothing() -> None:
    """Its submission waits behind another one, and goes out after it has left."""
    service, gate = make_service(step_s=SLOW_S), asyncio.Event()
    service.wires.before["a", "submit"] = gate.wait
    first, second = [asyncio.create_task(served(service, spec(name, tokens=900))) for name in "xy"]
    await eventually(lambda: ("a", "submit") in service.wires.calls and service.streams.count == 2)
    second.cancel()
    await asyncio.sleep(0.01)
    gate.set()
    await eventually(lambda: service.hosts(RequestId("x")) == "a")
    first.cancel()
    await asyncio.wait({first, second})
    await service.idle()


async def test_a_submission_that_is_refused_does_not_harm_those_beside_it() -> None:
    service = make_service()
    requests = [spec("long", prompt=1000, tokens=100), spec("short")]
    answers = [asyncio.create_task(served(service, request)) for request in requests]
    assert await answers[1] == whole(requests[1])
    answers[0].cancel()
    await asyncio.wait(answers)
    await service.idle()
