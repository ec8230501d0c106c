"""The deployments' remote methods, by caller. Values travel pickled between processes.

A caller holds a port (`RemoteReplicas`, `SchedulerClient`) whose stubs (`api.stubs`) implement these protocols.
Every call may raise PeerLost when the replica is dead or unreachable, and whatever its method raises.
"""

from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from typing import Any, Protocol, TypeVar

from deployments.api.calls import Batch, MoveAnswer, PlaceCall, Submission
from deployments.api.report import ReplicaReport
from deployments.metrics.exposition import Family
from migration.protocol.errors import Refused
from migration.protocol.messages import Adopt, Chunk, PathRequest, Prepare, Prepared
from migration.protocol.record import MigrationRecord
from migration.protocol.request import IngressId
from migration.run.source import Order
from policies.decision.placement import Decision
from policies.model import ClusterState, ReplicaId, RequestId


class MetricsApi(Protocol):
    """For the ingress that is scraped."""

    async def metrics(self) -> Sequence[Family]:
        """The process's metrics, rendered."""
        ...


class ServingApi(Protocol):
    """An engine replica, for ingresses."""

    def events(self, ingress: IngressId) -> AsyncIterator[Batch]:
        """All events for an ingress, one batch per engine step, and empty batches as a sign of life."""
        ...

    async def submit(self, requests: tuple[Submission, ...]) -> list[Refused | str]:
        """Run requests; for each, the refusal, or the model that runs it."""
        ...

    async def attach(self, request: RequestId, hop: int, index: int) -> bool:
        """The reader reads the request here, from output token `index` on; False if it does not run here."""
        ...

    async def keep(self, request: RequestId, hop: int, next_hop: int) -> None:
        """The reader's answer to a `Doubt`: go on."""
        ...

    async def release(self, request: RequestId, hop: int | None) -> None:
        """The reader reads the request under `hop` now, or no more: end what runs here under a lower one."""
        ...


class ControlApi(Protocol):
    """An engine replica, for the scheduler. Every call raises Refused if a scheduler with a higher fence is at work."""

    async def report(self, fence: int) -> ReplicaReport:
        """The replica as of now."""
        ...

    async def move(self, order: Order, target: ReplicaId, fence: int) -> MigrationRecord:
        """Begin to move a request. Raises RequestGone or Refused."""
        ...

    async def drain(self, fence: int) -> None:
        """Take nothing new from now on; the requests here are to be moved away."""
        ...

    async def close(self, fence: int) -> None:
        """Take nothing new, if nothing is here. Raises Refused if something is, or is on its way here."""
        ...

    async def reopen(self, fence: int) -> None:
        """Take requests again. Raises Refused if Serve is stopping the replica."""
        ...


class TargetApi(Protocol):
    """An engine replica, for replicas whose requests come to it: `migration.protocol.ports.Peer`, call by call."""

    async def migration_prepare(self, message: Prepare) -> Prepared:
        """See `Peer.prepare`."""
        ...

    async def migration_receive(self, message: Chunk) -> None:
        """See `Peer.receive`."""
        ...

    async def migration_adopt(self, message: Adopt) -> None:
        """See `Peer.adopt`."""
        ...

    async def migration_cancel(self, migration: str) -> None:
        """See `Peer.cancel`."""
        ...

    async def migration_resumed(self, migration: str) -> float | None:
        """See `Peer.resumed`."""
        ...


class EngineApi(ServingApi, ControlApi, TargetApi, MetricsApi, Protocol):
    """The Engine deployment."""


class PlacingApi(Protocol):
    """The scheduler, for placing requests."""

    async def place(self, calls: tuple[PlaceCall, ...]) -> list[Decision]:
        """Where requests go; each counts there from now on."""
        ...

    async def view(self) -> ClusterState:
        """The cluster as the scheduler believes it to be, for ingresses to fall back on."""
        ...


class NoticeApi(Protocol):
    """The scheduler, for whoever has news."""

    async def record(self, record: MigrationRecord) -> None:
        """A migration has ended, or an ingress has resubmitted a request."""
        ...

    async def hurry(self) -> None:
        """A replica is short of room, or about to stop: run the next epoch soon."""
        ...


class OperatorApi(Protocol):
    """The scheduler, for operators."""

    async def wanted(self) -> int | None:
        """The number of replicas that there are to be; None before the first report."""
        ...

    async def state(self) -> dict[str, Any]:
        """`/mell/state`, from fresh reports."""
        ...

    async def migrations(self) -> dict[str, Any]:
        """`/mell/migrations`, from fresh reports, newest first."""
        ...

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`/mell/state` and `/mell/migrations` as of the last gathering: no replica is asked."""
        ...

    async def migrate(self, id: str, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        """Move the request with that id or label; the migration gets `id`. The same call again changes nothing."""
        ...

    async def drain(self, replica: str) -> MoveAnswer:
        """Empty a replica and stop it."""
        ...


class SchedulerApi(PlacingApi, NoticeApi, OperatorApi, MetricsApi, Protocol):
    """The Scheduler deployment."""


Api_co = TypeVar("Api_co", covariant=True)


class RemoteReplicas(Protocol[Api_co]):
    """The replicas of one deployment."""

    def at(self, replica: ReplicaId, routed: bool = True) -> Api_co:
        """One replica. Not `routed`, calls go past Serve's router, which repeats and logs calls to a dead replica."""
        ...

    def forget(self, replica: ReplicaId) -> None:
        """Drop what is kept for a replica that is gone."""
        ...


class SchedulerClient(Protocol[Api_co]):
    """The scheduler, which may be slow, restarting or dead: serving goes on."""

    def within(self, timeout_s: float) -> Api_co:
        """The scheduler. Calls raise TimeoutError after `timeout_s`, and CalleeCancelled if it breaks them off."""
        ...

    def tell(self, message: Callable[[Api_co], Awaitable[None]]) -> None:
        """Make a call without waiting. If it does not arrive, the next report has the same news."""
        ...
