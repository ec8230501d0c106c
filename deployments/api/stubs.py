"""Stubs: the deployments' protocols (`deployments.api.protocols`) by calls to other processes.

A stub takes the name of a remote method from the protocol's own method, so mypy checks name, arguments and result.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, AsyncIterator, Awaitable, Callable, Coroutine, Sequence
from typing import TYPE_CHECKING, Any, Concatenate, Generic, ParamSpec, TypeVar

from ray import serve
from ray.serve.handle import DeploymentHandle

from deployments.api.calls import (
    HandOverCounts,
    MoveAnswer,
    OrderedHandOver,
    PairOrder,
    PinAnswer,
    PlaceCall,
    SeatAnswer,
    SeatCall,
    Submission,
)
from deployments.api.protocols import (
    CHANNEL_METHODS,
    CONTROL_METHODS,
    DISPATCH_METHODS,
    ChannelApi,
    ControlApi,
    DispatchApi,
    EngineApi,
    IngressApi,
    ReaderApi,
    SchedulerApi,
    ServingApi,
)
from deployments.api.report import ReplicaReport
from deployments.channels.calling import CallerEnd, Channels, channel_batches
from deployments.channels.links import CallLink, CallLinks
from deployments.channels.wire import Batch, ChannelOffer
from deployments.engine.port import ProfileSession
from deployments.metrics.exposition import Family
from deployments.serve.cancellation import callee_cancelled
from deployments.serve.routing import ReplicaHandles, Unrouted
from migration.concurrency import Tasks
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import Refused
from migration.protocol.messages import PathRequest
from migration.protocol.record import CopyRecord, MigrationRecord
from migration.protocol.request import IngressId, ModelIdentity
from migration.run.donor import CopyOrder
from migration.run.source import Order
from policies.cluster.changes import Arrival
from policies.cost.latencies import ClassCounts
from policies.decision.limits import Mode
from policies.decision.placement import Decision, PlacingView
from policies.memory.ledger import MemoryOrder, MemoryReport
from policies.model import Blocks, PoolId, ReplicaId, RequestId, Role
from policies.prefix.evacuation import CachedContext, ContextCopy

log = logging.getLogger("ray.serve")

_NOTIFY_S = 5.0
_OFFER_S = 5.0

Api = TypeVar("Api")
P = ParamSpec("P")
R = TypeVar("R")


class ReplicaCalls:
    """Calls to one replica."""

    def __init__(self, handles: ReplicaHandles, replica: ReplicaId, routed: bool) -> None:
        self.replica = replica
        self._handles = handles
        self._routed = routed

    async def call(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call the replica's method of that name. Raises PeerLost, and the method's own exceptions."""
        send = self._handles.call if self._routed else self._handles.call_actor
        answer: R = await send(self.replica, method.__name__, *args, **kwargs)
        return answer

    def stream(
        self, method: Callable[Concatenate[Any, P], AsyncIterator[R]], *args: P.args, **kwargs: P.kwargs
    ) -> AsyncGenerator[R]:
        """Iterate over the replica's generator of that name. Raises PeerLost when the stream breaks."""
        return self._handles.stream(self.replica, method.__name__, *args, **kwargs)


class EngineStub:
    """Implements `EngineApi` and `ServingApi` for one replica.

    A replica that sends no events for `silence_s` seconds counts as lost; a living one sends at least empty batches.
    """

    def __init__(self, calls: ReplicaCalls, silence_s: float, channels: Channels, control: CallLink) -> None:
        """`channels` are those that stubs have opened to all replicas; `control` is for the methods of `ControlApi`."""
        self._calls = calls
        self._silence_s = silence_s
        self._channels = channels
        self._control = control

    async def metrics(self) -> Sequence[Family]:
        """See `MetricsApi.metrics`."""
        return await self._calls.call(EngineApi.metrics)

    def events(self, ingress: IngressId) -> AsyncIterator[Batch]:
        """See `ServingApi.events`."""
        offers = self.channel(ingress)
        return channel_batches(self._calls.replica, offers, CHANNEL_METHODS, self._silence_s, self._channels)

    def channel(self, ingress: IngressId) -> AsyncGenerator[ChannelOffer]:
        """See `EngineApi.channel`."""
        return self._calls.stream(EngineApi.channel, ingress)

    async def control_channel(self) -> ChannelOffer:
        """See `EngineApi.control_channel`."""
        return await self._calls.call(EngineApi.control_channel)

    async def peer_channel(self) -> ChannelOffer:
        """See `EngineApi.peer_channel`."""
        return await self._calls.call(EngineApi.peer_channel)

    async def tasks(self) -> tuple[str, ...]:
        """See `RequestApi.tasks`."""
        return await self._calls.call(EngineApi.tasks)

    async def served(self) -> ModelIdentity:
        """See `RequestApi.served`."""
        return await self._calls.call(EngineApi.served)

    async def submit(self, requests: tuple[Submission, ...]) -> Sequence[Refused | str]:
        """See `ServingApi.submit`. Raises Unrouted if there is no channel to the replica yet, or no more."""
        channel = self._channels.get(self._calls.replica)
        if channel is None:
            raise Unrouted(f"there is no channel to replica {self._calls.replica}")
        answers = await channel.call(ChannelApi.submit, requests)
        return [each if isinstance(each, str) else each.refusal() for each in answers]

    async def _ask(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call the replica over its channel, or through Ray if there is none."""
        channel = self._channels.get(self._calls.replica)
        return await (channel or self._calls).call(method, *args, **kwargs)

    async def load_adapter(self, adapter: Adapter) -> None:
        """See `AdapterApi.load_adapter`."""
        await self._calls.call(EngineApi.load_adapter, adapter)

    async def attach(self, request: RequestId, hop: int, index: int) -> bool:
        """See `ServingApi.attach`."""
        return await self._ask(ReaderApi.attach, request, hop, index)

    async def keep(self, request: RequestId, hop: int, next_hop: int) -> None:
        """See `ServingApi.keep`."""
        await self._ask(ReaderApi.keep, request, hop, next_hop)

    async def release(self, request: RequestId, hop: int | None) -> None:
        """See `ServingApi.release`."""
        await self._ask(ReaderApi.release, request, hop)

    async def report(self, fence: int, version: int | None) -> ReplicaReport:
        """See `ControlApi.report`."""
        return await self._control.call(ControlApi.report, fence, version)

    async def move(self, order: Order, target: ReplicaId, fence: int) -> MigrationRecord:
        """See `ControlApi.move`."""
        return await self._control.call(ControlApi.move, order, target, fence)

    async def drain(self, fence: int) -> None:
        """See `ControlApi.drain`."""
        await self._control.call(ControlApi.drain, fence)

    async def close(self, fence: int) -> None:
        """See `ControlApi.close`."""
        await self._control.call(ControlApi.close, fence)

    async def reopen(self, fence: int) -> None:
        """See `ControlApi.reopen`."""
        await self._control.call(ControlApi.reopen, fence)

    async def set_memory(self, order: MemoryOrder, shrink_s: float, fence: int) -> MemoryReport:
        """See `ControlApi.set_memory`."""
        return await self._control.call(ControlApi.set_memory, order, shrink_s, fence)

    async def pair(self, order: PairOrder, fence: int) -> None:
        """See `ControlApi.pair`."""
        await self._control.call(ControlApi.pair, order, fence)

    async def unpair(self, epoch: int, fence: int) -> None:
        """See `ControlApi.unpair`."""
        await self._control.call(ControlApi.unpair, epoch, fence)

    async def cached_contexts(self, fence: int) -> tuple[CachedContext, ...]:
        """See `ControlApi.cached_contexts`."""
        return await self._control.call(ControlApi.cached_contexts, fence)

    async def evacuate(self, copies: tuple[ContextCopy, ...], within_s: float, fence: int) -> int:
        """See `ControlApi.evacuate`."""
        return await self._control.call(ControlApi.evacuate, copies, within_s, fence)

    async def delete_blocks(self, names: tuple[int, ...] | None) -> Blocks:
        """See `CacheApi.delete_blocks`."""
        return await self._calls.call(EngineApi.delete_blocks, names)

    async def pin_blocks(self, names: tuple[int, ...], ttl_s: float) -> PinAnswer:
        """See `CacheApi.pin_blocks`."""
        return await self._calls.call(EngineApi.pin_blocks, names, ttl_s)

    async def reset_prefix_cache(self) -> str | None:
        """See `UtilityApi.reset_prefix_cache`."""
        return await self._calls.call(EngineApi.reset_prefix_cache)

    async def start_profile(self, session: ProfileSession) -> str | None:
        """See `UtilityApi.start_profile`."""
        return await self._calls.call(EngineApi.start_profile, session)

    async def stop_profile(self) -> str | None:
        """See `UtilityApi.stop_profile`."""
        return await self._calls.call(EngineApi.stop_profile)

    async def copy_prefix(self, order: CopyOrder, to: ReplicaId) -> CopyRecord:
        """See `CopyApi.copy_prefix`."""
        return await self._calls.call(EngineApi.copy_prefix, order, to)


class IngressStub:
    """Implements `IngressApi` for one replica of the Ingress deployment."""

    def __init__(self, calls: ReplicaCalls) -> None:
        self._calls = calls

    async def metrics(self) -> Sequence[Family]:
        """See `MetricsApi.metrics`."""
        return await self._calls.call(IngressApi.metrics)

    async def refresh_adapters(self) -> None:
        """See `AdapterListApi.refresh_adapters`."""
        await self._calls.call(IngressApi.refresh_adapters)

    async def succeed(self, order: OrderedHandOver) -> None:
        """See `HandOverApi.succeed`."""
        await self._calls.call(IngressApi.succeed, order)

    async def hand_over_counts(self) -> HandOverCounts:
        """See `HandOverApi.hand_over_counts`."""
        return await self._calls.call(IngressApi.hand_over_counts)


class ServeReplicas(Generic[Api]):
    """Implements `RemoteReplicas` for a deployment; `stub` makes a replica's stub, and `forgets` is called with it."""

    def __init__(
        self,
        handles: ReplicaHandles,
        stub: Callable[[ReplicaCalls], Api],
        forgets: Callable[[ReplicaId], None] = lambda replica: None,
    ) -> None:
        self._handles = handles
        self._stub = stub
        self._forgets = forgets

    def at(self, replica: ReplicaId, routed: bool = True) -> Api:
        """See `RemoteReplicas.at`."""
        return self._stub(ReplicaCalls(self._handles, replica, routed))

    def forget(self, replica: ReplicaId) -> None:
        """See `RemoteReplicas.forget`."""
        self._handles.forget(replica)
        self._forgets(replica)


def engines(app: str, pool: PoolId, silence_s: float = 10.0) -> ServeReplicas[EngineStub]:
    """The engine replicas of an application's pool."""
    handles, channels = ReplicaHandles(pool, app), dict[ReplicaId, CallerEnd]()

    async def offer(replica: ReplicaId) -> ChannelOffer:
        return await ReplicaCalls(handles, replica, routed=False).call(EngineApi.control_channel)

    control = CallLinks(offer, CONTROL_METHODS)
    return ServeReplicas(
        handles, lambda calls: EngineStub(calls, silence_s, channels, control.at(calls.replica)), control.forget
    )


def ingresses(app: str) -> ServeReplicas[IngressStub]:
    """The ingresses of an application. Their router is Serve's own, so calls go to their actors."""
    return ServeReplicas(ReplicaHandles("Ingress", app, routed=False), IngressStub)


class SchedulerStub:
    """Implements `SchedulerApi` with a time limit per call. `handle` is the deployment's, `link` for `DispatchApi`."""

    def __init__(self, handle: DeploymentHandle, link: CallLink, timeout_s: float) -> None:
        self._handle = handle
        self._link = link
        self._timeout_s = timeout_s

    async def _call(
        self,
        method: Callable[Concatenate[SchedulerApi, P], Coroutine[Any, Any, R]],
        *args: P.args,
        **kwargs: P.kwargs,
    ) -> R:
        with callee_cancelled():
            async with asyncio.timeout(self._timeout_s):
                answer: R = await getattr(self._handle, method.__name__).remote(*args, **kwargs)
                return answer

    async def _dispatch(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        async with asyncio.timeout(self._timeout_s):
            return await self._link.call(method, *args, **kwargs)

    async def channel(self) -> ChannelOffer:
        """See `SchedulerApi.channel`."""
        return await self._call(SchedulerApi.channel)

    async def metrics(self) -> Sequence[Family]:
        """See `MetricsApi.metrics`."""
        return await self._call(SchedulerApi.metrics)

    async def place(self, calls: tuple[PlaceCall, ...]) -> list[Decision]:
        """See `PlacingApi.place`."""
        return [each.decision() for each in await self._dispatch(DispatchApi.place_all, calls)]

    async def view(self, pool: PoolId) -> PlacingView:
        """See `PlacingApi.view`."""
        return await self._dispatch(DispatchApi.view, pool)

    async def record(self, pool: PoolId, record: MigrationRecord) -> None:
        """See `NoticeApi.record`."""
        await self._dispatch(DispatchApi.record, pool, record)

    async def copied(self, pool: PoolId, record: CopyRecord) -> None:
        """See `NoticeApi.copied`."""
        await self._dispatch(DispatchApi.copied, pool, record)

    async def latencies(self, pool: PoolId, ingress: IngressId, counts: ClassCounts) -> None:
        """See `NoticeApi.latencies`."""
        await self._dispatch(DispatchApi.latencies, pool, ingress, counts)

    async def hurry(self) -> None:
        """See `NoticeApi.hurry`."""
        await self._dispatch(DispatchApi.hurry)

    async def seat(self, call: SeatCall) -> SeatAnswer:
        """See `SeatApi.seat`."""
        return await self._call(SchedulerApi.seat, call)

    async def evacuate(self, pool: PoolId, replica: ReplicaId, model: str, within_s: float) -> None:
        """See `EvacuationApi.evacuate`."""
        await self._call(SchedulerApi.evacuate, pool, replica, model, within_s)

    async def wanted(self, pool: PoolId) -> int | None:
        """See `OperatorApi.wanted`."""
        return await self._call(SchedulerApi.wanted, pool)

    async def state(self, pool: PoolId) -> dict[str, Any]:
        """See `OperatorApi.state`."""
        return await self._call(SchedulerApi.state, pool)

    async def migrations(self, pool: PoolId) -> dict[str, Any]:
        """See `OperatorApi.migrations`."""
        return await self._call(SchedulerApi.migrations, pool)

    async def snapshot(self, pool: PoolId) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `OperatorApi.snapshot`."""
        return await self._call(SchedulerApi.snapshot, pool)

    async def migrate(self, pool: PoolId, id: str, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        """See `OperatorApi.migrate`."""
        return await self._call(SchedulerApi.migrate, pool, id, reference, target, path)

    async def drain(self, pool: PoolId, replica: str) -> MoveAnswer:
        """See `OperatorApi.drain`."""
        return await self._call(SchedulerApi.drain, pool, replica)

    async def set_role(self, pool: PoolId, replica: str, role: Role | None) -> MoveAnswer:
        """See `OperatorApi.set_role`."""
        return await self._call(SchedulerApi.set_role, pool, replica, role)

    async def set_memory(self, pool: PoolId, replica: str, blocks: int | None) -> MoveAnswer:
        """See `OperatorApi.set_memory`."""
        return await self._call(SchedulerApi.set_memory, pool, replica, blocks)

    async def set_asleep(self, pool: PoolId, replica: str | None, asleep: bool) -> MoveAnswer:
        """See `OperatorApi.set_asleep`."""
        return await self._call(SchedulerApi.set_asleep, pool, replica, asleep)

    async def pair(self, pool: PoolId, lower: str, upper: str) -> MoveAnswer:
        """See `OperatorApi.pair`."""
        return await self._call(SchedulerApi.pair, pool, lower, upper)

    async def unpair(self, pool: PoolId, replica: str) -> MoveAnswer:
        """See `OperatorApi.unpair`."""
        return await self._call(SchedulerApi.unpair, pool, replica)

    async def set_mode(self, mode: Mode) -> MoveAnswer:
        """See `OperatorApi.set_mode`."""
        return await self._call(SchedulerApi.set_mode, mode)

    async def set_bounds(self, pool: PoolId, least: int, most: int) -> MoveAnswer:
        """See `OperatorApi.set_bounds`."""
        return await self._call(SchedulerApi.set_bounds, pool, least, most)

    async def set_level(
        self, pool: PoolId, service_class: str, ttft_p99_s: float | None, itl_p99_s: float | None
    ) -> MoveAnswer:
        """See `OperatorApi.set_level`."""
        return await self._call(SchedulerApi.set_level, pool, service_class, ttft_p99_s, itl_p99_s)

    async def match(self, pool: PoolId, arrival: Arrival) -> dict[str, Any]:
        """See `OperatorApi.match`."""
        return await self._call(SchedulerApi.match, pool, arrival)


if TYPE_CHECKING:
    _stubs: tuple[type[EngineApi], type[ServingApi], type[IngressApi], type[SchedulerApi]] = (
        EngineStub,
        EngineStub,
        IngressStub,
        SchedulerStub,
    )


class ServeSchedulerClient:
    """Implements `SchedulerClient`; `handle` is that of the Scheduler deployment."""

    def __init__(self, handle: DeploymentHandle) -> None:
        self._handle = handle
        self._link = CallLink("the scheduler", self._offer, DISPATCH_METHODS)
        self._tasks = Tasks()

    async def _offer(self) -> ChannelOffer:
        return await self.within(_OFFER_S).channel()

    def within(self, timeout_s: float) -> SchedulerStub:
        """See `SchedulerClient.within`."""
        return SchedulerStub(self._handle, self._link, timeout_s)

    def notify(self, message: Callable[[SchedulerStub], Awaitable[None]]) -> None:
        """See `SchedulerClient.notify`."""
        self._tasks.start(self._send(message))

    async def _send(self, message: Callable[[SchedulerStub], Awaitable[None]]) -> None:
        try:
            await message(self.within(_NOTIFY_S))
        except Exception as error:
            log.debug("a message did not reach the scheduler: %r", error)


def scheduler_client(app: str) -> ServeSchedulerClient:
    """The client of an application's scheduler.

    To be made before the process serves: it asks Serve's controller and makes Serve's router, and the event loop waits.
    """
    return ServeSchedulerClient(serve.get_deployment_handle("Scheduler", app).options(_by_reference=False))
