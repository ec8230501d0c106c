"""Where requests go: past replicas that refuse or are dead, after a wait, and without a scheduler."""

import asyncio
import logging
from dataclasses import replace

import pytest

from app.ingress.errors import ApiError
from app.ingress.streams.placing import PromptContent
from deployments.api.calls import PlaceCall
from deployments.serve.routing import Unrouted
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import MigrationError, PeerLost, Refused, Stopping
from migration.protocol.ports import LossKind
from migration.protocol.record import Outcome
from migration.run.reader import NotServed
from policies.causes import Cause
from policies.cluster.changes import Arrival
from policies.cost.service import ReplicaSpeed
from policies.cost.steps import StepCosts, proportional
from policies.decision.placement import Decision, NoReplica, Place, ReplicaView
from policies.model import ReplicaId, RequestId, Tokens
from policies.plan import Move, Path, Reason
from policies.prefix.copies import Fetch
from tests.app.ingress.fakes import WAKE_S, Conversation, Hook, Service, make_service, output
from tests.app.ingress.streams.streaming import LONG, served, whole
from tests.migration.world import spec
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time


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
    async with service.open(request) as conversation:
        await service.reading(conversation, 20)
        assert len(service.hosts(request.id)) == 1
        assert await output(conversation) == whole(request)
    await service.idle()


async def test_the_scheduler_gets_the_adapter_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    service, request = make_service(), replace(spec(), adapter=Adapter("sql", 7, "/sql"))
    decide, asked = service.scheduler.decide, list[Arrival]()

    def decided(call: PlaceCall) -> Decision:
        asked.append(call.arrival)
        return decide(call)

    monkeypatch.setattr(service.scheduler, "decide", decided)
    await served(service, request)
    assert [arrival.adapter for arrival in asked] == [7]


async def test_the_scheduler_gets_the_content_of_a_request(monkeypatch: pytest.MonkeyPatch) -> None:
    service, request = make_service(), spec()
    decide, asked = service.scheduler.decide, list[Arrival]()

    def decided(call: PlaceCall) -> Decision:
        asked.append(call.arrival)
        return decide(call)

    monkeypatch.setattr(service.scheduler, "decide", decided)
    conversation = Conversation(request)
    content = PromptContent((1, 2), "session")
    async with service.streams.run(request, conversation.reader, conversation, content):
        await output(conversation)
    await served(service, replace(request, id=RequestId("other")))
    assert [(arrival.names, arrival.session) for arrival in asked] == [((1, 2), "session"), ((), "")]
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
    with pytest.raises(NotServed, match="no replica") as failed:
        await served(service, spec())
    assert failed.value.loss.kind is LossKind.UNAVAILABLE and service.streams.count == 0


async def test_while_every_replica_is_stopping_a_request_waits() -> None:
    service, request = make_service("a", no_replica_timeout_s=5), spec()
    service.replica("a").host.stopping = True
    asking = asyncio.create_task(served(service, request))
    await asyncio.sleep(0.3)
    assert not asking.done()
    service.replica("a").host.stopping = False
    assert await asking == whole(request)
    await service.idle()


def put_to_sleep(service: Service, *names: str) -> None:
    """Have these replicas sleep, by the scheduler's view and by their own."""
    service.scheduler.asleep = frozenset(map(ReplicaId, names))
    for name, replica in service.replicas.items():
        replica.host.asleep = name in service.scheduler.asleep


async def test_a_request_for_a_sleeping_model_waits_until_it_has_woken() -> None:
    service, request = make_service("a", no_replica_timeout_s=30), spec()
    put_to_sleep(service, "a")
    await service.placer.refresh()
    asking = asyncio.create_task(served(service, request))
    await asyncio.sleep(5.0)
    assert not asking.done()
    assert not [call for call in service.wires.calls if call[1] == "submit"], "a sleeper is not asked"
    put_to_sleep(service)
    began = now()
    assert await asking == whole(request) and now() - began < 0.5, "and it looks often while one wakes"
    await service.idle()


async def test_a_sleeper_that_the_ingress_takes_for_awake_refuses_and_the_request_waits() -> None:
    service, request = make_service("a", no_replica_timeout_s=30), spec()
    put_to_sleep(service, "a")
    asking = asyncio.create_task(served(service, request))
    await asyncio.sleep(1.0)
    assert not asking.done() and ("a", "submit") in service.wires.calls
    put_to_sleep(service)
    assert await asking == whole(request)
    await service.idle()


async def test_a_model_that_does_not_wake_in_time_is_asked_again_behind_the_time_of_a_wake() -> None:
    service = make_service("a", no_replica_timeout_s=1.0)
    put_to_sleep(service, "a")
    await service.placer.refresh()
    with pytest.raises(NotServed) as failed:
        await served(service, spec())
    assert ApiError.of(failed.value.loss).headers["Retry-After"] == f"{WAKE_S:.0f}"


async def test_while_the_scheduler_is_away_replicas_awake_serve() -> None:
    service = make_service("ab", no_replica_timeout_s=30)
    put_to_sleep(service, "a")
    await service.placer.refresh()
    service.scheduler.fault = PeerLost("it is away")
    assert await served(service, spec()) == whole(spec())
    await service.idle()


async def test_a_scheduler_that_does_not_answer_ends_no_wait_for_a_wake_before_its_time() -> None:
    service, later = make_service("a", no_replica_timeout_s=30), replace(spec(), id=RequestId("later"))
    put_to_sleep(service, "a")
    await service.placer.refresh()
    first = asyncio.create_task(served(service, spec()))
    await asyncio.sleep(20)
    second = asyncio.create_task(served(service, later))
    await asyncio.sleep(5)
    service.scheduler.fault = TimeoutError("it is busy")
    with pytest.raises(NotServed, match="the scheduler, which wakes it, does not answer"):
        await first
    assert now() > 29 and not second.done()
    service.scheduler.fault = None
    put_to_sleep(service)
    assert await second == whole(later)
    await service.idle()


async def test_a_sleeper_that_refuses_counts_as_asleep_though_no_view_has_said_so() -> None:
    service = make_service("a", no_replica_timeout_s=1.0)
    put_to_sleep(service, "a")
    service.scheduler.fault = PeerLost("it is away")
    with pytest.raises(NotServed, match="the model sleeps"):
        await served(service, spec())


async def test_the_soonest_first_token_is_not_that_of_a_sleeper() -> None:
    service = make_service("ab")
    service.scheduler.speed = ReplicaSpeed(StepCosts(proportional(0.001), 0.02), chunk_tokens=100)
    service.scheduler.seen = {ReplicaId("a"): ReplicaView(Tokens(1000), 0, 0, backlog=3000)}
    put_to_sleep(service, "b")
    await service.placer.refresh()
    assert service.placer.soonest_s() > 3.0, "behind the prefills of the only one awake"
    put_to_sleep(service, "a", "b")
    await service.placer.refresh()
    assert service.placer.soonest_s() == 0.0


async def test_a_request_does_not_wait_for_ever_for_replicas_that_are_stopping() -> None:
    service = make_service(no_replica_timeout_s=0.1)
    for replica in service.replicas.values():
        replica.host.stopping = True
    async with asyncio.timeout(2):
        with pytest.raises(NotServed, match="no replica is available") as failed:
            await served(service, spec())
    assert failed.value.loss.kind is LossKind.UNAVAILABLE


def refuse_all(service: Service, *errors: MigrationError) -> None:
    """Have the replicas refuse every submission, each for a reason of its own."""

    def refusing(error: MigrationError) -> Hook:
        async def refuse() -> None:
            raise error

        return refuse

    for replica, error in zip(service.replicas, errors, strict=True):
        service.wires.before[replica, "submit"] = refusing(error)


THE_REQUESTS = {
    "too long": (Refused("too long", Cause.TOO_LONG), LossKind.INVALID),
    "an adapter that cannot be loaded": (Refused("no such file", Cause.ADAPTER), LossKind.UNAVAILABLE),
    "not to be continued": (Refused("tied", Cause.IMMOVABLE), LossKind.UNAVAILABLE),
}
THE_REPLICAS: dict[str, MigrationError] = {
    "full": Refused("full", Cause.NO_ROOM),
    "an adapter that is being loaded": Stopping("loading", Cause.ADAPTER),
    "another version": Refused("another version", Cause.FINGERPRINT),
    "it is there": Refused("it is there", Cause.ALREADY_THERE),
    "superseded": Refused("superseded", Cause.SUPERSEDED),
    "an exception": Refused("internal error", Cause.UNEXPECTED),
    "an exception of the call": MigrationError("internal error"),
    "stopping or dead": Stopping("stopping"),
    "no answer": PeerLost("no answer", Cause.NO_ANSWER),
    "unknown to the router": Unrouted("not routable"),
}


@pytest.mark.parametrize(("error", "kind"), THE_REQUESTS.values(), ids=THE_REQUESTS)
async def test_a_refusal_by_all_for_a_reason_of_the_request_ends_it_at_once(error: Refused, kind: LossKind) -> None:
    service = make_service(no_replica_timeout_s=60)
    refuse_all(service, error, error)
    async with asyncio.timeout(1):
        with pytest.raises(NotServed, match=str(error)) as failed:
            await served(service, spec())
    assert failed.value.loss.kind is kind
    assert [call[1] for call in service.wires.calls].count("submit") == 2


async def test_a_refusal_by_all_that_are_awake_for_a_reason_of_the_request_does_not_wait_for_a_sleeper() -> None:
    service = make_service("ab", no_replica_timeout_s=60)
    put_to_sleep(service, "b")
    await service.placer.refresh()
    refuse_all(service, Refused("too long", Cause.TOO_LONG), Refused("too long", Cause.TOO_LONG))
    async with asyncio.timeout(1):
        with pytest.raises(NotServed, match="too long"):
            await served(service, spec())
    assert [call for call in service.wires.calls if call[1] == "submit"] == [("a", "submit")]


@pytest.mark.parametrize("error", THE_REPLICAS.values(), ids=THE_REPLICAS)
async def test_after_a_refusal_for_a_reason_of_the_replica_it_is_asked_again(error: MigrationError) -> None:
    service, request = make_service(no_replica_timeout_s=60), spec()
    refuse_all(service, error, error)
    asking = asyncio.create_task(served(service, request))
    await asyncio.sleep(50)
    submitted = [call for call in service.wires.calls if call[1] == "submit"]
    most = 1000 if isinstance(error, Unrouted) else 80  # What is not routable costs no message.
    assert not asking.done() and 20 < len(submitted) < most, "two replicas, every other second"
    service.wires.before.clear()
    assert await asking == whole(request)
    await service.idle()


@pytest.mark.parametrize("error", THE_REPLICAS.values(), ids=THE_REPLICAS)
async def test_refusals_for_reasons_of_the_replica_end_a_request_with_its_time(error: MigrationError) -> None:
    service = make_service(no_replica_timeout_s=60)
    refuse_all(service, error, error)
    began = now()
    with pytest.raises(NotServed, match=f"no replica is available: {error}") as failed:
        await served(service, spec())
    assert failed.value.loss.kind is LossKind.UNAVAILABLE and 60 <= now() - began < 65


async def test_one_replica_that_may_take_a_request_later_is_waited_for() -> None:
    service, request = make_service(no_replica_timeout_s=60), spec()
    refuse_all(service, Refused("too long", Cause.TOO_LONG), Refused("full", Cause.NO_ROOM))
    asking = asyncio.create_task(served(service, request))
    await asyncio.sleep(30)
    assert not asking.done() and service.wires.calls.count((ReplicaId("a"), "submit")) == 1
    del service.wires.before["b", "submit"]
    assert await asking == whole(request)


async def test_a_request_goes_to_a_new_replica_as_soon_as_that_is_listed() -> None:
    service, request = make_service("abc", no_replica_timeout_s=60), spec()
    service.members.become("a", "b")
    refuse_all(service, *[Refused("full", Cause.NO_ROOM)] * 2, Stopping("starting"))
    del service.wires.before["c", "submit"]
    asking = asyncio.create_task(served(service, request))
    await asyncio.sleep(30.3)
    service.members.become("a", "b", "c")
    async with asyncio.timeout(0.2):
        assert await asking == whole(request)


@pytest.mark.parametrize("fault", [RuntimeError("dead"), "silent"], ids=["dead", "silent"])
async def test_requests_are_placed_without_the_scheduler(fault: Exception | str) -> None:
    service = make_service()
    service.scheduler.fault = fault
    requests = [spec(f"r{n}") for n in range(4)]
    opened = [service.open(request) for request in requests]
    conversations: list[Conversation] = [await o.__aenter__() for o in opened]
    assert sorted(c.reader.host for c in conversations) == ["a", "a", "b", "b"]
    assert [await output(c) for c in conversations] == [whole(request) for request in requests]
    for o in opened:
        await o.__aexit__(None, None, None)
    await service.idle()


async def test_the_log_has_one_line_per_outage_of_the_scheduler(caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    service = make_service()
    for number, fault in enumerate(
        [None, RuntimeError("dead"), RuntimeError("dead"), None, RuntimeError("dead"), None]
    ):
        service.scheduler.fault = fault
        await served(service, spec(f"r{number}"))
    logged = [record.getMessage() for record in caplog.records if "scheduler" in record.getMessage()]
    outage = "the scheduler does not place requests (RuntimeError('dead')): this ingress chooses replicas itself"
    assert logged == [outage, "the scheduler places requests again"] * 2


async def test_requests_for_the_only_replica_do_not_wait_for_the_scheduler(monkeypatch: pytest.MonkeyPatch) -> None:
    service, now = make_service("a"), asyncio.get_running_loop().time
    decide, told = service.scheduler.decide, list[tuple[float, PlaceCall]]()

    def decided(call: PlaceCall) -> Decision:
        told.append((now(), call))
        return decide(call)

    monkeypatch.setattr(service.scheduler, "decide", decided)
    placed = [await service.streams._calls.place(spec(f"r{n}"), 0, frozenset()) for n in range(3)]
    assert placed == ["a"] * 3 and not told
    await asyncio.sleep(0.1)
    assert [(call.arrival.id, call.submitted) for _, call in told] == [("r0", True), ("r1", True), ("r2", True)]
    assert len({at for at, _ in told}) == 1, "the scheduler gets them together"


async def test_a_request_that_its_replica_refuses_is_not_announced_as_submitted(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    service, told = make_service("ab"), list[PlaceCall]()

    def decided(call: PlaceCall) -> Decision:
        told.append(call)
        return NoReplica()

    monkeypatch.setattr(service.scheduler, "decide", decided)
    service.placer.found_asleep(ReplicaId("b"))
    await service.placer.place(spec("r0"), 0, frozenset())
    service.placer.found_asleep(ReplicaId("a"))
    await service.placer.place(spec("r0"), 0, frozenset())
    await asyncio.sleep(0.1)
    assert [call.submitted for call in told] == [False]


async def test_requests_for_the_last_replica_that_is_left_do_not_wait_for_the_scheduler() -> None:
    service = make_service("ab")
    service.scheduler.fault = "silent"
    began = asyncio.get_running_loop().time()
    assert await service.streams._calls.place(spec("r1"), 0, frozenset({ReplicaId("a")})) == "b"
    assert asyncio.get_running_loop().time() == began
    assert await service.streams._calls.place(spec("r2"), 0, frozenset()) in ("a", "b")
    assert asyncio.get_running_loop().time() > began, "of two replicas, the scheduler is asked for one"


async def test_the_only_replica_has_its_requests_counted_while_the_scheduler_is_away(
    caplog: pytest.LogCaptureFixture,
) -> None:
    caplog.set_level(logging.INFO, "ray.serve")
    service, counted = make_service("a"), list[RequestId]()
    alone = service.streams._calls._placer._alone
    place = alone.place
    alone.place = lambda request, *rest: counted.append(request) or place(request, *rest)  # type: ignore[method-assign,func-returns-value]
    for number, fault in enumerate([None, RuntimeError("dead"), RuntimeError("dead"), None, None]):
        service.scheduler.fault = fault
        assert await service.streams._calls.place(spec(f"r{number}"), 0, frozenset()) == "a"
        await asyncio.sleep(0.1)
    assert counted == ["r2", "r3"]
    assert [record.getMessage() for record in caplog.records if "scheduler" in record.getMessage()] == [
        "the scheduler does not place requests (RuntimeError('dead')): this ingress chooses replicas itself",
        "the scheduler places requests again",
    ]


async def test_a_death_is_survived_without_the_scheduler() -> None:
    service, request = make_service(), spec(tokens=LONG)
    async with service.open(request) as conversation:
        await service.reading(conversation, 10)
        service.scheduler.fault = "silent"
        service.kill("a")
        assert await output(conversation) == whole(request)


async def test_what_comes_with_a_placement_goes_to_its_replica_with_the_first_submission() -> None:
    service, request = make_service(), spec()
    a, b = ReplicaId("a"), ReplicaId("b")
    then = Move(request.id, a, b, Tokens(64), Reason.DISAGGREGATE, 1)
    placed = Place(a, fetch=Fetch(b, Tokens(32), 0.01, 0.5), then=then)
    service.scheduler.decide = lambda call: placed  # type: ignore[method-assign]
    assert await service.streams._calls.place(request, 0, frozenset()) == "a"
    placer = service.streams._calls._placer
    assert placer.take(request.id, b) == Place(b), "it was placed on another one"
    await service.streams._calls.place(request, 0, frozenset())
    assert placer.take(request.id, a) == placed
    assert placer.take(request.id, a) == Place(a)
    await service.streams._calls.place(request, 0, frozenset())
    placer.ended(request.id)
    assert placer.take(request.id, a) == Place(a)


async def test_a_request_is_submitted_with_its_move() -> None:
    service, request = make_service(), spec()
    a, b = ReplicaId("a"), ReplicaId("b")
    then = Move(request.id, a, b, Tokens(64), Reason.DISAGGREGATE, 1, Path.KV)
    service.scheduler.decide = lambda call: Place(a, then=then)  # type: ignore[method-assign]
    assert await served(service, request) == whole(request)
    (record,) = service.replica("a").moves.records()
    assert (record.trigger, record.target, record.outcome) == (Reason.DISAGGREGATE, b, Outcome.COMMITTED)
    await service.idle()


@pytest.mark.parametrize("returns", [False, True])
async def test_a_request_names_the_replica_that_its_context_returns_to(returns: bool) -> None:
    service, request = make_service(), spec()
    a, ended = ReplicaId("a"), []
    service.scheduler.decide = lambda call: Place(a, returns=returns)  # type: ignore[method-assign]
    service.replica("a").host.on_context = lambda spec, outputs: ended.append((spec.returns_to, tuple(outputs)))
    assert await served(service, request) == whole(request)
    assert ended == [(a if returns else None, whole(request))]
