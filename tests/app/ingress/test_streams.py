"""Streams that outlive replicas: whatever happens to a replica, the client gets the tokens of an undisturbed run."""

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace

import pytest

from app.ingress.conversation import Conversation
from app.ingress.errors import ApiError
from deployments.engine.fake import expected
from deployments.engine.port import Generated, InvalidRequest
from migration.errors import PeerLost, Refused
from migration.messages import PathRequest
from migration.record import Outcome
from migration.request import Delta, Moved, Moving, RequestSpec, Sampling
from policies.model import RequestId
from tests.app.ingress.fakes import Service, eventually, make_service, output
from tests.migration.world import INGRESS, spec

KV, TOKENS = PathRequest.KV, PathRequest.TOKENS
LONG = 300
SLOW_S = 0.01
"""At this pace nothing ends by itself while a test waits for it to be ended."""


def whole(request: RequestSpec) -> tuple[int, ...]:
    """The output of an undisturbed run."""
    return expected(request.prompt, request.sampling.max_tokens)


def sampled(seed: int | None, tokens: int = LONG) -> RequestSpec:
    return replace(spec(), sampling=Sampling(tokens, temperature=1.0, seed=seed))


async def served(service: Service, request: RequestSpec) -> tuple[int, ...]:
    async with service.streams.open(request) as conversation:
        return await output(conversation)


# --- no harm ------------------------------------------------------------------------------------------


async def test_a_request_is_served_and_forgotten() -> None:
    service, request = make_service(), spec()
    assert await served(service, request) == whole(request)
    assert service.placer._sent == {} and service.scheduler.records == []
    await service.idle()


async def test_every_step_comes_by_itself() -> None:
    service, request = make_service(), spec()
    async with service.streams.open(request) as conversation:
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
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, after)
        service.move(request.id, "b", path)
        assert await output(conversation) == whole(request)
    await service.idle()


async def test_a_reader_follows_many_moves() -> None:
    service, request = make_service("abc"), spec(tokens=LONG)
    async with service.streams.open(request) as conversation:
        for turn, to in enumerate("bcacb", start=1):
            await service.reading(conversation, 40 * turn)
            service.move(request.id, to, KV if turn % 2 else TOKENS)
            await eventually(lambda to=to: conversation.host == to)  # type: ignore[misc]
        assert await output(conversation) == whole(request)
        assert conversation.cursor.hop == 5
    assert service.scheduler.records == []
    await service.idle()


async def test_a_move_that_fails_is_not_noticed() -> None:
    service, request = make_service(), spec()
    service.replica("b").faults["adopt"] = Refused("no")
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 5)
        service.move(request.id, "b")
        assert await output(conversation) == whole(request) and conversation.host == "a"
    await service.idle()


# --- deaths -------------------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 30, 59])
async def test_a_request_survives_its_replica(after: int) -> None:
    service, request = make_service(), spec()
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, after)
        service.kill("a")
        assert await output(conversation) == whole(request)
    await service.idle()


async def test_a_death_is_told_as_a_migration_by_tokens() -> None:
    service, request = make_service(), spec()
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.kill("a")
        await output(conversation)
    (record,) = service.scheduler.records
    assert (record.request_id, record.label) == (request.id, request.label)
    assert (record.source, record.target, record.path, record.outcome) == ("a", "b", "tokens", Outcome.COMMITTED)
    assert record.reason.startswith("replica lost: ") and record.state == "resubmitted"


async def test_a_request_survives_death_after_death() -> None:
    service, request = make_service("abcde"), spec(tokens=LONG)
    async with service.streams.open(request) as conversation:
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


async def test_the_last_replica_dies_and_its_replacement_goes_on() -> None:
    service, request = make_service("ab"), spec()
    service.members.become("a")
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.kill("a")
        await asyncio.sleep(0.05)
        service.members.become("b")
        assert await output(conversation) == whole(request)
    await service.idle()


async def test_no_replacement_comes_in_time() -> None:
    service, request = make_service("a"), spec(tokens=LONG)
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.kill("a")
        with pytest.raises(ApiError, match="no replica") as failed:
            await output(conversation)
    assert failed.value.status == 503 and service.streams.count == 0


@pytest.mark.parametrize("move", [KV, TOKENS])
async def test_a_replica_dies_between_its_last_word_and_its_confirmation(move: PathRequest) -> None:
    """Only the reader can tell the target that it owns the request."""
    service, request = make_service(), spec(tokens=LONG)
    service.replica("b").faults["commit"] = "silent"
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b", move)
        await eventually(lambda: conversation.cursor.hop == 1)
        service.kill("a")
        assert await output(conversation) == whole(request)
    assert service.scheduler.records == []
    await service.idle()


async def test_the_target_dies_before_its_reader_comes() -> None:
    service, request = make_service("abc"), spec(tokens=LONG)

    async def die() -> None:
        service.kill("b")

    service.wires.before["b", "attach"] = die
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        assert await output(conversation) == whole(request)
    assert [(r.source, r.target) for r in service.scheduler.records] == [("b", "a")]
    await service.idle()


async def test_the_source_dies_amid_a_move_before_the_target_has_the_request() -> None:
    service, request = make_service("abc", order="acb"), spec(tokens=LONG)
    service.replica("b").faults["receive"] = "silent"
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await eventually(lambda: conversation.moving is not None)
        service.kill("a")
        assert await output(conversation) == whole(request)
    assert [(r.source, r.target) for r in service.scheduler.records] == [("a", "c")]
    await service.idle()


async def test_the_source_dies_amid_a_move_after_the_target_has_the_request() -> None:
    """Nothing is submitted again: the target is found to go on with it."""
    service, request = make_service("abc", order="acb"), spec(tokens=LONG)
    service.replica("b").faults["adopted"] = "silent"
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await eventually(lambda: "b" in service.hosts(request.id))
        service.kill("a")
        assert await output(conversation) == whole(request)
        assert conversation.cursor.hop == 1
    assert ("c", "submit") not in service.wires.calls
    assert [(r.source, r.target) for r in service.scheduler.records] == [("a", "b")]
    await service.idle()


async def test_source_and_target_die_amid_a_move() -> None:
    service, request = make_service("abc"), spec(tokens=LONG)
    service.replica("b").faults["adopted"] = "silent"
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await eventually(lambda: "b" in service.hosts(request.id))
        service.kill("b")
        service.kill("a")
        assert await output(conversation) == whole(request)
    await service.idle()


async def test_the_source_dies_after_a_move_was_given_up() -> None:
    """The target has dropped what it had adopted: it must not be taken for the host."""
    service, request = make_service("abc", order="acb"), spec(tokens=LONG)
    service.replica("b").faults["adopted"] = "silent"
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await eventually(lambda: bool(service.replica("a").moves._done))
        assert service.replica("a").moves.records()[0].outcome is Outcome.ABORTED
        await eventually(lambda: service.hosts(request.id) == "a")
        service.kill("a")
        assert await output(conversation) == whole(request)
    assert [(r.source, r.target) for r in service.scheduler.records] == [("a", "c")]
    await service.idle()


async def test_what_the_engine_loses_goes_on_elsewhere() -> None:
    service, request = make_service(), spec()
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.replica("a").engine.dead = True
        assert await output(conversation) == whole(request)
    (record,) = service.scheduler.records
    assert "the engine died" in record.reason
    await service.idle()


async def test_an_answer_is_not_continued_by_another_version_of_the_model() -> None:
    service, request = make_service(), spec()
    service.replica("b").model = "newer"
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.kill("a")
        with pytest.raises(ApiError, match="another version"):
            await output(conversation)
    await service.idle()


async def test_what_every_replica_loses_is_given_up() -> None:
    service, request = make_service(), spec()
    for replica in service.replicas.values():
        replica.engine.dead = True
    lost: list[None] = []
    service.streams._recovery._lost = lambda: lost.append(None)
    with pytest.raises(ApiError, match="too many replicas") as failed:
        await served(service, request)
    assert (failed.value.status, len(lost)) == (503, 1)
    assert [method for _, method in service.wires.calls].count("submit") == 9
    await service.idle()


# --- sampling -----------------------------------------------------------------------------------------


async def test_what_no_engine_can_continue_exactly_stays_and_ends_with_its_replica() -> None:
    service, request = make_service(), spec(tokens=LONG)
    service.tie("no two are alike")
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        with pytest.raises(Refused, match="no two are alike"):
            service.move(request.id, "b")
        service.kill("a")
        with pytest.raises(ApiError, match=r"cannot be continued here exactly \(no two are alike") as failed:
            await output(conversation)
    assert failed.value.status == 503
    await service.idle()


async def test_what_has_not_begun_begins_elsewhere_however_it_is_sampled() -> None:
    service, request = make_service(step_s=0.05), spec(tokens=3)
    service.tie("no two are alike")
    async with service.streams.open(request) as conversation:
        service.kill("a")
        assert await output(conversation) == whole(request)


async def test_what_no_engine_takes_is_the_clients_error_and_not_tried_again() -> None:
    service, request = make_service(), spec()

    async def refuse(*args: object) -> AsyncIterator[Generated]:
        for _ in range(1):
            raise InvalidRequest("not a grammar")
        yield Generated(())

    service.replica("a").engine.generate = refuse  # type: ignore[assignment, method-assign]
    with pytest.raises(ApiError, match="not a grammar") as failed:
        await served(service, request)
    assert failed.value.status == 400
    assert [method for _, method in service.wires.calls].count("submit") == 1
    await service.idle()


@pytest.mark.parametrize("harm", ["move", "kill"])
@pytest.mark.parametrize("min_tokens", [0, 40])
async def test_what_ends_an_answer_ends_it_wherever_it_is(harm: str, min_tokens: int) -> None:
    """The tokens from before count: towards the least there must be, and the most there may be."""
    service, request = make_service(), spec(tokens=LONG)
    drawn = whole(request)
    sampling = replace(request.sampling, stop_token_ids=(drawn[30], drawn[50]), min_tokens=min_tokens)
    async with service.streams.open(replace(request, sampling=sampling)) as conversation:
        await service.reading(conversation, 10)
        if harm == "move":
            service.move(request.id, "b")
        else:
            service.kill("a")
        assert await output(conversation) == drawn[: 51 if min_tokens else 31]
        assert conversation.host == "b"
    await service.idle()


# --- streams that break while the replica lives -------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 30])
async def test_a_broken_stream_is_opened_again_without_loss_or_duplicate(after: int) -> None:
    service, request = make_service(), spec(tokens=LONG)
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, after)
        service.wires.cut("a", ConnectionError("broken"))
        assert await output(conversation) == whole(request)
    assert service.scheduler.records == []
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
    async with service.streams.open(request) as conversation:
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
    async with service.streams.open(request) as conversation:
        assert await output(conversation, within_s=2) == whole(request)


@pytest.mark.parametrize("lost", [Moving, Moved])
async def test_a_word_of_a_move_lost_with_a_stream_costs_nothing(lost: type) -> None:
    service, request = make_service("abc", order="acb"), spec(tokens=LONG)
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 20)
        once(lost, service)
        service.move(request.id, "b")
        assert await output(conversation, within_s=2) == whole(request)
    await service.idle()


async def test_a_stream_of_an_idle_replica_breaks_and_is_opened_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("app.ingress.streams.ROUTER_SKEW_S", 0.1)
    service, request = make_service("a"), spec()
    await asyncio.sleep(0.2)
    service.wires.cut("a", ConnectionError("broken"))
    await asyncio.sleep(0.1)
    async with service.streams.open(request) as conversation:
        assert await output(conversation, within_s=2) == whole(request)


async def test_a_replica_that_was_unreachable_for_a_moment_is_read_again() -> None:
    """Ray says ActorUnavailableError (a RayActorError, hence PeerLost) of a replica that may well be alive."""
    service, request = make_service("a"), spec()
    await eventually(lambda: service.wires.streams == 1)
    service.wires.cut("a", PeerLost("unavailable"))
    await eventually(lambda: service.wires.streams == 0)
    async with service.streams.open(request) as conversation:
        assert await output(conversation, within_s=2) == whole(request)


# --- placing ------------------------------------------------------------------------------------------


async def test_a_replica_that_refuses_is_passed_over() -> None:
    service, request = make_service(), spec()
    service.replica("a").host.stopping = True
    assert await served(service, request) == whole(request)
    assert [call for call in service.wires.calls if call[1] == "submit"] == [("a", "submit"), ("b", "submit")]
    await service.idle()


async def test_a_replica_that_is_dead_but_listed_is_passed_over() -> None:
    service, request = make_service(), spec()
    service.kill("a", noticed=False)
    assert await served(service, request) == whole(request)
    await service.idle()


async def test_a_replica_that_dies_while_it_is_asked_runs_nothing_twice() -> None:
    service, request = make_service("abc"), spec(tokens=LONG)

    async def die() -> None:
        service.kill("a")
        await asyncio.sleep(0.02)

    service.wires.after["a", "submit"] = die
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 20)
        assert len(service.hosts(request.id)) == 1
        assert await output(conversation) == whole(request)
    await service.idle()


async def test_a_request_waits_for_a_replica() -> None:
    service, request = make_service("a", no_replica_timeout_s=2), spec()
    service.members.become()
    asking = asyncio.create_task(served(service, request))
    await asyncio.sleep(0.1)
    assert not asking.done()
    service.members.become("a")
    assert await asking == whole(request)


async def test_a_request_does_not_wait_for_ever() -> None:
    service = make_service("a", no_replica_timeout_s=0.1)
    service.members.become()
    with pytest.raises(ApiError, match="no replica") as failed:
        await served(service, spec())
    assert failed.value.status == 503 and service.streams.count == 0 and service.placer._sent == {}


async def test_a_request_that_every_replica_refuses_does_not_wait_for_ever() -> None:
    service = make_service(no_replica_timeout_s=0.1)
    for replica in service.replicas.values():
        replica.host.stopping = True
    async with asyncio.timeout(2):
        with pytest.raises(ApiError) as failed:
            await served(service, spec())
    assert failed.value.status == 503


@pytest.mark.parametrize("fault", [RuntimeError("dead"), "silent"], ids=["dead", "silent"])
async def test_requests_are_placed_without_the_scheduler(fault: Exception | str) -> None:
    service = make_service()
    service.scheduler.fault = fault
    requests = [spec(f"r{n}") for n in range(4)]
    opened = [service.streams.open(request) for request in requests]
    conversations: list[Conversation] = [await o.__aenter__() for o in opened]
    assert sorted(c.host for c in conversations) == ["a", "a", "b", "b"]
    assert [await output(c) for c in conversations] == [whole(request) for request in requests]
    for o in opened:
        await o.__aexit__(None, None, None)
    await service.idle()


async def test_a_death_is_survived_without_the_scheduler() -> None:
    service, request = make_service(), spec(tokens=LONG)
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.scheduler.fault = "silent"
        service.kill("a")
        assert await output(conversation) == whole(request)


# --- clients that leave -------------------------------------------------------------------------------


@pytest.mark.parametrize("after", [0, 1, 20])
async def test_a_client_that_leaves_ends_its_request(after: int) -> None:
    service, request = make_service(step_s=SLOW_S), spec(tokens=900)
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, after)
    await service.idle()


@pytest.mark.parametrize("call", ["prepare", "receive", "adopt", "adopted", "commit"])
@pytest.mark.parametrize("path", [KV, TOKENS])
async def test_a_client_that_leaves_amid_a_move_leaves_nothing(call: str, path: PathRequest) -> None:
    service, request = make_service(step_s=SLOW_S), spec(tokens=900)
    service.replica("b").faults[call] = "silent"
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b", path)
        await asyncio.sleep(0.02)
    await service.idle()


@pytest.mark.parametrize("pause_s", [0, 0.002, 0.004, 0.006, 0.008, 0.01, 0.02])
async def test_a_client_that_leaves_at_any_moment_of_a_move_leaves_nothing(pause_s: float) -> None:
    service, request = make_service(step_s=SLOW_S), spec(tokens=900)
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.move(request.id, "b")
        await asyncio.sleep(pause_s)
    await service.idle()


async def test_a_client_that_leaves_while_its_request_is_resubmitted_leaves_nothing() -> None:
    service, request = make_service(step_s=SLOW_S), spec(tokens=900)
    service.wires.after["b", "submit"] = asyncio.Event().wait
    async with service.streams.open(request) as conversation:
        await service.reading(conversation, 10)
        service.kill("a")
        await eventually(lambda: service.hosts(request.id) == "b")
    await service.idle()


async def test_what_nobody_reads_is_ended_where_it_runs() -> None:
    """The ingress restarted under the same name, or its word did not arrive."""
    service, request = make_service(step_s=SLOW_S), spec("stray", tokens=900)
    service.replica("b").moves.submit(request, 0, ())
    await eventually(lambda: ("b", "abandon") in service.wires.calls)
    await service.idle()


async def test_events_of_the_unknown_that_need_no_answer_get_none() -> None:
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
    await eventually(lambda: ("a", "submit") in service.wires.calls and len(service.placer._sent) == 2)
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
