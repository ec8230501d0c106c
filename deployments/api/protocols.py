"""The deployments' remote methods, by caller. Values travel through Ray, or over a channel (`deployments.channels`).

A caller holds a port (`RemoteReplicas`, `SchedulerClient`) whose stubs (`api.stubs`) implement these protocols.
Every call raises PeerLost if the replica is dead or unreachable, besides the exceptions of its method.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from deployments.api.calls import (
    HandOverCounts,
    MoveAnswer,
    OrderedHandOver,
    PairOrder,
    PinAnswer,
    PlaceAnswer,
    PlaceCall,
    SeatAnswer,
    SeatCall,
    Submission,
)
from deployments.api.report import ReplicaReport
from deployments.channels.wire import Batch, ChannelOffer, Failure, methods_of
from deployments.engine.port import ProfileSession
from deployments.metrics.exposition import Family
from migration.memory.pair_run import PairProposal
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import Refused
from migration.protocol.messages import PathRequest
from migration.protocol.ports import Peer
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


class MetricsApi(Protocol):
    """Any of Mell's processes, for the ingress that is scraped."""

    async def metrics(self) -> Sequence[Family]:
        """The process's metrics, rendered."""
        ...


class ReaderApi(Protocol):
    """An engine replica, for the readers of requests."""

    async def attach(self, request: RequestId, hop: int, index: int) -> bool:
        """Stream the request to its reader from output token `index` on; False if it does not run here."""
        ...

    async def keep(self, request: RequestId, hop: int, next_hop: int) -> None:
        """Go on with the request: the reader's answer to a `Doubt`. It will not follow the request to `next_hop`."""
        ...

    async def release(self, request: RequestId, hop: int | None) -> None:
        """End the runs of the request under hops below `hop`, which the reader reads now; None: end all of them."""
        ...


class RequestApi(ReaderApi, Protocol):
    """An engine replica, for requests of ingresses."""

    async def tasks(self) -> tuple[str, ...]:
        """The tasks of the replica's model, with vLLM's names."""
        ...

    async def served(self) -> ModelIdentity:
        """The replica's model."""
        ...


class ChannelApi(ReaderApi, Protocol):
    """An engine replica, for the ingress at the other end of a channel."""

    async def submit(self, requests: tuple[Submission, ...]) -> tuple[str | Failure, ...]:
        """Run requests. Returns for each the model that runs it, or the refusal."""
        ...


CHANNEL_METHODS = methods_of(ChannelApi)


class AdapterApi(Protocol):
    """An engine replica, for orders to load adapters."""

    async def load_adapter(self, adapter: Adapter) -> None:
        """Load a LoRA adapter, however long that takes. Raises Refused if the engine cannot load it."""
        ...


class ServingApi(RequestApi, Protocol):
    """An engine replica, for ingresses."""

    def events(self, ingress: IngressId) -> AsyncIterator[Batch]:
        """All events for an ingress: one batch per engine step, and empty batches as heartbeats."""
        ...

    async def submit(self, requests: tuple[Submission, ...]) -> Sequence[Refused | str]:
        """Run requests, while the events are being read. Returns for each the refusal, or the model that runs it."""
        ...


class ControlApi(Protocol):
    """An engine replica, for the scheduler. Every call raises Refused if a scheduler with a higher fence has called."""

    async def report(self, fence: int, version: int | None) -> ReplicaReport:
        """The replica's changes since `version`; a snapshot if that is not its last answer's version, or None."""
        ...

    async def move(self, order: Order, target: ReplicaId, fence: int) -> MigrationRecord:
        """Begin to move a request. Raises RequestGone or Refused."""
        ...

    async def drain(self, fence: int) -> None:
        """Take no new requests from now on; the scheduler moves the present ones away."""
        ...

    async def close(self, fence: int) -> None:
        """Take no new requests, if the replica is empty. Raises Refused if a request is here, or on its way here."""
        ...

    async def reopen(self, fence: int) -> None:
        """Take requests again. Raises Refused if Serve is stopping the replica."""
        ...

    async def set_memory(self, order: MemoryOrder, shrink_s: float, fence: int) -> MemoryReport:
        """Converge to a memory plan, unless a newer order has come; the state of that.

        Requests that do not fit into a smaller KV pool have `shrink_s` seconds to move away. Raises Refused if the pool
        keeps its size.
        """
        ...

    async def pair(self, order: PairOrder, fence: int) -> None:
        """Begin to form a pair, as its lower half. The order may come again.

        Raises Refused: it cannot be in a pair, or is in another one.
        """
        ...

    async def unpair(self, epoch: int, fence: int) -> None:
        """Undo the replica's pair of that epoch. Raises Refused if it is in none, or in another one."""
        ...

    async def cached_contexts(self, fence: int) -> tuple[CachedContext, ...]:
        """The contexts of ended requests that the replica's cache has a block of, the hottest first."""
        ...

    async def evacuate(self, copies: tuple[ContextCopy, ...], within_s: float, fence: int) -> int:
        """Copy contexts to other replicas in that order, for at most `within_s` seconds; the number of those done."""
        ...


CONTROL_METHODS = methods_of(ControlApi)


class CacheApi(Protocol):
    """An engine replica's prefix cache, for operators."""

    async def delete_blocks(self, names: tuple[int, ...] | None) -> Blocks:
        """Delete the blocks of these names, None: all; their number. Raises TransferFailed: see `Engine.delete`."""
        ...

    async def pin_blocks(self, names: tuple[int, ...], ttl_s: float) -> PinAnswer:
        """Keep a prefix in the host's memory for a time; 0 ends its pin. Raises TransferFailed: see `Pins.pin`."""
        ...


class UtilityApi(Protocol):
    """An engine replica, for operators. Each method returns the reason why it had no effect, None if it had one."""

    async def reset_prefix_cache(self) -> str | None:
        """Drop the cached blocks of ended requests."""
        ...

    async def start_profile(self, session: ProfileSession) -> str | None:
        """Start the engine's profiler; the replica's id becomes a part of its files' names."""
        ...

    async def stop_profile(self) -> str | None:
        """Stop the engine's profiler; returns once its files are written."""
        ...


class CopyApi(Protocol):
    """An engine replica as the donor of copies, for operators, the scheduler and other replicas."""

    async def copy_prefix(self, order: CopyOrder, to: ReplicaId) -> CopyRecord:
        """Copy a prefix into another replica's prefix cache; the record of the copy's end, also of a failure.

        Both replicas keep what they need for it under leases.

        Raises:
            Refused: `to` is this replica, the copy is under way already, or too many are.
        """
        ...


class PairApi(Protocol):
    """An engine replica as the buddy of another one, see `migration.memory.pair_tables`."""

    async def propose_pair(self, proposal: PairProposal) -> str:
        """Begin a pair as its upper half; the address of the worker. Raises Refused."""
        ...

    async def pair_state(self, epoch: int) -> str | None:
        """The state of its half of the pair of this epoch; None if it is in no such pair."""
        ...


class PeerApi(Peer, CopyApi, PairApi, Protocol):
    """An engine replica, for the replica at the other end of a channel."""


PEER_METHODS = methods_of(PeerApi)


class EngineApi(RequestApi, AdapterApi, ControlApi, CacheApi, CopyApi, UtilityApi, MetricsApi, Protocol):
    """A deployment of engine replicas: a pool."""

    def channel(self, ingress: IngressId) -> AsyncIterator[ChannelOffer]:
        """Offer a channel to an ingress; ends with the channel."""
        ...

    async def peer_channel(self) -> ChannelOffer:
        """Offer a channel to another replica, for the methods of `PeerApi`."""
        ...

    async def control_channel(self) -> ChannelOffer:
        """Offer a channel to a scheduler, for the methods of `ControlApi`."""
        ...


class AdapterListApi(Protocol):
    """An ingress, for the list of adapters."""

    async def refresh_adapters(self) -> None:
        """Serve the adapters that the store has now."""
        ...


class HandOverApi(Protocol):
    """An ingress, for the hand-over of all requests to another Mell."""

    async def succeed(self, order: OrderedHandOver) -> None:
        """Follow an order from now on, unless a newer one has come."""
        ...

    async def hand_over_counts(self) -> HandOverCounts:
        """The process's requests, here and at another Mell."""
        ...


class IngressApi(MetricsApi, AdapterListApi, HandOverApi, Protocol):
    """The Ingress deployment."""


class PlacingApi(Protocol):
    """The scheduler, for placing requests."""

    async def place(self, calls: tuple[PlaceCall, ...]) -> list[Decision]:
        """The replicas of new requests. Each request counts on its replica from now on."""
        ...

    async def view(self, pool: PoolId) -> PlacingView:
        """The pool's running replicas, for ingresses that have to place without the scheduler."""
        ...


class NoticeApi(Protocol):
    """The scheduler, for notices from replicas and ingresses. They are lost without harm."""

    async def record(self, pool: PoolId, record: MigrationRecord) -> None:
        """Take the record of a migration in the pool that has ended, or of a resubmission by an ingress."""
        ...

    async def copied(self, pool: PoolId, record: CopyRecord) -> None:
        """Take the record of a copy between replicas of the pool that has ended."""
        ...

    async def latencies(self, pool: PoolId, ingress: IngressId, counts: ClassCounts) -> None:
        """Take the latencies of all requests to the pool since the ingress's start, by service class."""
        ...

    async def hurry(self) -> None:
        """Run the next epoch soon, since a replica is short of room or about to stop."""
        ...


class SeatApi(Protocol):
    """The scheduler, for replicas that start with `memory.budget_mib`."""

    async def seat(self, call: SeatCall) -> SeatAnswer:
        """Give memory of its node to a replica that starts, once there is room. Repeating the call has no effect."""
        ...


class EvacuationApi(Protocol):
    """The scheduler, for replicas that stop."""

    async def evacuate(self, pool: PoolId, replica: ReplicaId, model: str, within_s: float) -> None:
        """Have a replica that stops, and has no request any more, copy its cache to those of pool and model that stay.

        Returns once that is over, or has failed, after `within_s` seconds at the latest.
        """
        ...


class OperatorApi(Protocol):
    """The scheduler, for operators. Whatever is not about all pools names one."""

    async def wanted(self, pool: PoolId) -> int | None:
        """The wanted number of replicas; None before the first report."""
        ...

    async def state(self, pool: PoolId) -> dict[str, Any]:
        """`/mell/state`, from fresh reports."""
        ...

    async def migrations(self, pool: PoolId) -> dict[str, Any]:
        """`/mell/migrations`, from fresh reports, newest first."""
        ...

    async def snapshot(self, pool: PoolId) -> tuple[dict[str, Any], dict[str, Any]]:
        """`/mell/state` and `/mell/migrations` from the newest reports at hand, without calls to replicas."""
        ...

    async def migrate(self, pool: PoolId, id: str, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        """Move the request with that id or label; the migration gets `id`. Repeating the call has no effect."""
        ...

    async def drain(self, pool: PoolId, replica: str) -> MoveAnswer:
        """Empty a replica and stop it."""
        ...

    async def set_role(self, pool: PoolId, replica: str, role: Role | None) -> MoveAnswer:
        """Set a replica's role; with None, the scheduler assigns it again."""
        ...

    async def set_memory(self, pool: PoolId, replica: str, blocks: int | None) -> MoveAnswer:
        """Set the size of a replica's KV pool; with None, the scheduler sizes it again."""
        ...

    async def set_asleep(self, pool: PoolId, replica: str | None, asleep: bool) -> MoveAnswer:
        """Have a replica fall asleep, or wake. Without one: all of the pool fall asleep, or one that sleeps wakes."""
        ...

    async def pair(self, pool: PoolId, lower: str, upper: str) -> MoveAnswer:
        """Form a pair of two replicas."""
        ...

    async def unpair(self, pool: PoolId, replica: str) -> MoveAnswer:
        """Undo the pair of a replica."""
        ...

    async def set_mode(self, mode: Mode) -> MoveAnswer:
        """Set the mode of all pools until the application is deployed again.

        No epoch in another mode acts after the answer.
        """
        ...

    async def set_bounds(self, pool: PoolId, least: int, most: int) -> MoveAnswer:
        """Set the bounds on the number of replicas, until other ones are configured."""
        ...

    async def set_level(
        self, pool: PoolId, service_class: str, ttft_p99_s: float | None, itl_p99_s: float | None
    ) -> MoveAnswer:
        """Set a class's service level, until other levels are configured. What is None stays the same."""
        ...

    async def match(self, pool: PoolId, arrival: Arrival) -> dict[str, Any]:
        """`/mell/cache/match`: the placement that the arrival would get now. Nothing is placed or promised."""
        ...


class DispatchApi(NoticeApi, Protocol):
    """The scheduler, for the ingress or replica at the other end of a channel."""

    async def place_all(self, calls: tuple[PlaceCall, ...]) -> tuple[PlaceAnswer, ...]:
        """See `PlacingApi.place`."""
        ...

    async def view(self, pool: PoolId) -> PlacingView:
        """See `PlacingApi.view`."""
        ...


DISPATCH_METHODS = methods_of(DispatchApi)


class SchedulerApi(PlacingApi, NoticeApi, SeatApi, EvacuationApi, OperatorApi, MetricsApi, Protocol):
    """The Scheduler deployment."""

    async def channel(self) -> ChannelOffer:
        """Offer a channel to an ingress or a replica, for the methods of `DispatchApi`."""
        ...


Api_co = TypeVar("Api_co", covariant=True)


class RemoteReplicas(Protocol[Api_co]):
    """The replicas of one deployment."""

    def at(self, replica: ReplicaId, routed: bool = True) -> Api_co:
        """One replica. Calls that are not `routed` bypass Serve's router, which repeats and logs calls to the dead."""
        ...

    def forget(self, replica: ReplicaId) -> None:
        """Drop the state kept for a replica that is gone."""
        ...


class SchedulerClient(Protocol[Api_co]):
    """The scheduler, which may be slow, restarting or dead: serving goes on."""

    def within(self, timeout_s: float) -> Api_co:
        """The scheduler. Calls raise TimeoutError after `timeout_s`, and CalleeCancelled if the scheduler ends them."""
        ...

    def notify(self, message: Callable[[Api_co], Awaitable[None]]) -> None:
        """Make a call without waiting. Losing it does no harm: the next report has the same information."""
        ...
