"""Stubs call the method that their protocol names, and the deployments have it."""

import asyncio
import inspect
from types import SimpleNamespace
from typing import Any, cast

import msgspec
import pytest

from app.service.deployment import IngressReplica
from deployments.api.calls import PlaceAnswer
from deployments.api.protocols import (
    DISPATCH_METHODS,
    ControlApi,
    EngineApi,
    IngressApi,
    NoticeApi,
    PlacingApi,
    ReaderApi,
    SchedulerApi,
)
from deployments.api.stubs import (
    EngineStub,
    IngressStub,
    SchedulerStub,
    ServeReplicas,
    ServeSchedulerClient,
)
from deployments.channels.wire import Failure
from deployments.replica.deployment import EngineReplica
from deployments.scheduler.deployment import EpochScheduler
from deployments.serve.cancellation import CalleeCancelled
from deployments.serve.routing import ReplicaHandles, Unrouted
from migration.protocol.errors import Stopping
from policies.causes import Cause
from policies.decision.placement import Decision, NoReplica, Place, Queue
from policies.model import SOLE_POOL, ReplicaId

pytestmark = pytest.mark.virtual_time

R = ReplicaId("r")


def methods(api: type) -> list[str]:
    """The methods of a protocol."""
    found = inspect.getmembers(api, lambda member: inspect.isfunction(member) and member.__module__ == api.__module__)
    return [name for name, _ in found if not name.startswith("_")]


def arguments(api: type, method: str) -> list[str]:
    """A placeholder for each of a method's arguments."""
    return [name for name in inspect.signature(getattr(api, method)).parameters if name != "self"]


class Handles:
    """In place of `ReplicaHandles`: notes calls, and answers "done"."""

    def __init__(self) -> None:
        self.calls: list[tuple[Any, ...]] = []

    async def call(self, replica: ReplicaId, method: str, *args: Any) -> str:
        self.calls.append(("routed", replica, method, *args))
        return "done"

    async def call_actor(self, replica: ReplicaId, method: str, *args: Any) -> str:
        self.calls.append(("direct", replica, method, *args))
        return "done"

    async def stream(self, replica: ReplicaId, method: str, *args: Any) -> Any:
        self.calls.append(("stream", replica, method, *args))
        yield "an item"

    def forget(self, replica: ReplicaId) -> None:
        self.calls.append(("forget", replica))


class FakeLink:
    """In place of `Link`, and of the end of a channel: notes calls, and answers "done"."""

    def __init__(self, answer: Any = "done", fault: Exception | None = None) -> None:
        self.calls: list[tuple[Any, ...]] = []
        self.answer, self.fault = answer, fault

    async def call(self, method: Any, *args: Any) -> Any:
        self.calls.append((method.__name__, *args))
        if self.fault is not None:
            raise self.fault
        return self.answer


def served(handles: Handles, control: Any = None, channel: Any = None) -> ServeReplicas[EngineStub]:
    channels = {} if channel is None else {R: channel}
    return ServeReplicas(cast(ReplicaHandles, handles), lambda calls: EngineStub(calls, 10.0, channels, control))


@pytest.mark.parametrize("method", methods(ControlApi))
async def test_an_engines_stub_takes_orders_over_a_channel(method: str) -> None:
    handles, control, given = Handles(), FakeLink(), arguments(ControlApi, method)
    await getattr(served(handles, control).at(R), method)(*given)
    assert control.calls == [(method, *given)] and not handles.calls
    assert inspect.iscoroutinefunction(getattr(EngineReplica, method))


@pytest.mark.parametrize("method", methods(ReaderApi))
async def test_a_reader_calls_over_its_channel_if_there_is_one(method: str) -> None:
    handles, channel, given = Handles(), FakeLink(), arguments(ReaderApi, method)
    await getattr(served(handles, channel=channel).at(R), method)(*given)
    assert channel.calls == [(method, *given)] and not handles.calls


async def test_submissions_need_a_channel() -> None:
    channel = FakeLink(("m", Failure("Stopping", "it stops", Cause.STOPPING)))
    model, refusal = await served(Handles(), channel=channel).at(R).submit(())
    assert (model, type(refusal), str(refusal)) == ("m", Stopping, "it stops")
    with pytest.raises(Unrouted):
        await served(Handles()).at(R).submit(())


@pytest.mark.parametrize("method", sorted({*methods(EngineApi)} - {"channel"} - {*methods(ControlApi)}))
@pytest.mark.parametrize("routed", [True, False], ids=["routed", "direct"])
async def test_an_engines_stub_calls_the_method_of_that_name(method: str, routed: bool) -> None:
    handles, given = Handles(), arguments(EngineApi, method)
    await getattr(served(handles).at(R, routed), method)(*given)
    assert handles.calls == [("routed" if routed else "direct", R, method, *given)]
    assert inspect.iscoroutinefunction(getattr(EngineReplica, method))


async def test_a_channel_is_a_stream() -> None:
    handles = Handles()
    items: list[Any] = [item async for item in served(handles).at(R).channel(cast(Any, "i"))]
    assert items == ["an item"]
    assert handles.calls == [("stream", R, "channel", "i")]
    assert inspect.isasyncgenfunction(EngineReplica.channel)


async def test_the_state_kept_for_a_replica_can_be_dropped() -> None:
    handles = Handles()
    served(handles).forget(R)
    assert handles.calls == [("forget", R)]


@pytest.mark.parametrize("method", methods(IngressApi))
async def test_an_ingresss_stub_calls_the_method_of_that_name(method: str) -> None:
    handles, given = Handles(), arguments(IngressApi, method)
    await getattr(ServeReplicas(cast(ReplicaHandles, handles), IngressStub).at(R), method)(*given)
    assert handles.calls == [("routed", R, method, *given)]
    assert inspect.iscoroutinefunction(getattr(IngressReplica, method))


# --- the scheduler ------------------------------------------------------------------------------------


class Handle:
    """A deployment's handle: every method notes its call and answers after `takes_s`; `fault` is raised."""

    def __init__(self, takes_s: float = 0.0, fault: BaseException | None = None) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.takes_s, self.fault = takes_s, fault

    def __getattr__(self, method: str) -> Any:
        async def remote(*args: Any) -> str:
            self.calls.append((method, args))
            await asyncio.sleep(self.takes_s)
            if self.fault is not None:
                raise self.fault
            return "done"

        return SimpleNamespace(remote=remote)


@pytest.mark.parametrize("method", sorted({*methods(SchedulerApi)} - {*methods(NoticeApi), *methods(PlacingApi)}))
async def test_the_schedulers_stub_calls_the_method_of_that_name(method: str) -> None:
    handle, given = Handle(), arguments(SchedulerApi, method)
    await getattr(SchedulerStub(cast(Any, handle), cast(Any, None), 1.0), method)(*given)
    assert handle.calls == [(method, tuple(given))]
    assert inspect.iscoroutinefunction(getattr(EpochScheduler, method))


@pytest.mark.parametrize("method", [*methods(NoticeApi), "view"])
async def test_the_schedulers_stub_takes_notices_over_a_channel(method: str) -> None:
    link, given = FakeLink(), arguments(SchedulerApi, method)
    await getattr(SchedulerStub(cast(Any, Handle()), cast(Any, link), 1.0), method)(*given)
    assert link.calls == [(method, *given)]
    assert inspect.iscoroutinefunction(getattr(EpochScheduler, method))


async def test_decisions_of_every_kind_travel() -> None:
    decisions: list[Decision] = [Place(R), Queue(R), NoReplica()]
    sent = msgspec.msgpack.encode(tuple(map(PlaceAnswer.of, decisions)))
    link = FakeLink(DISPATCH_METHODS["place_all"].result.decode(sent))
    assert await SchedulerStub(cast(Any, Handle()), cast(Any, link), 1.0).place(()) == decisions
    assert link.calls == [("place_all", ())]


async def test_a_slow_scheduler_is_not_waited_for() -> None:
    with pytest.raises(TimeoutError):
        await SchedulerStub(cast(Any, Handle(takes_s=2.0)), cast(Any, None), 1.0).state(SOLE_POOL)


async def test_a_call_that_the_scheduler_breaks_off_ends_no_task_of_ours() -> None:
    with pytest.raises(CalleeCancelled):
        await SchedulerStub(cast(Any, Handle(fault=asyncio.CancelledError())), cast(Any, None), 1.0).state(SOLE_POOL)


@pytest.mark.parametrize("fault", [None, RuntimeError("away")], ids=["heard", "not heard"])
async def test_a_message_is_not_waited_for_and_may_be_lost(fault: Exception | None) -> None:
    client, link = ServeSchedulerClient(cast(Any, Handle())), FakeLink(fault=fault)
    client._link = cast(Any, link)
    client.notify(lambda scheduler: scheduler.hurry())
    assert link.calls == []
    await asyncio.sleep(0.1)
    assert link.calls == [("hurry",)]


async def test_a_scheduler_offers_its_channel_by_its_handle() -> None:
    handle = Handle(fault=RuntimeError("away"))
    client = ServeSchedulerClient(cast(Any, handle))
    with pytest.raises(RuntimeError, match="away"):
        await client.within(1.0).view(SOLE_POOL)
    assert handle.calls == [("channel", ())]


async def test_a_scheduler_that_is_away_is_not_waited_for() -> None:
    client = ServeSchedulerClient(cast(Any, Handle(takes_s=100.0)))
    began = asyncio.get_running_loop().time()
    with pytest.raises(TimeoutError):
        await client.within(1.0).view(SOLE_POOL)
    assert asyncio.get_running_loop().time() == began + 1.0
