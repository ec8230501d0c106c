"""Calls to one particular replica: handles that name their target, and a request router that follows them.

The target travels as the handle's session id. The router itself assigns the replica to the pending request, since
Serve's base class may give a chosen replica to another pending request of the same parent.

A stopping replica has left the routers' lists but still serves: calls then go to its actor, as Serve's own processes
call each other. That interface is internal to Ray (tested with Ray 2.60); if it fails, the replica is `Unrouted`.
"""

import asyncio
import pickle
import random
import time
import uuid
from collections.abc import AsyncGenerator, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.actor import ActorHandle
from ray.exceptions import RayActorError, RayError, RayTaskError
from ray.serve._private.common import ReplicaID as FullReplicaId
from ray.serve._private.common import RequestMetadata
from ray.serve.exceptions import RayServeException, ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from deployments.serve.cancellation import CalleeCancelled, callee_cancelled
from deployments.serve.internals import SERVE_NAMESPACE, DeploymentID
from migration.protocol.errors import PeerLost
from migration.protocol.ports import Clock
from policies.model import PoolId, ReplicaId


class Unrouted(PeerLost):
    """This process's router does not list the replica: it is stopping or gone, or too new for the router's list."""


@contextmanager
def _peer_errors(replica: ReplicaId) -> Iterator[None]:
    """Turn Ray's errors about a replica into Mell's, and unwrap exceptions of the called method.

    Ray wraps such an exception in an object of both classes, whose text is a traceback and whose `cause` is the
    exception.
    """
    try:
        with callee_cancelled():
            yield
    except ReplicaUnavailableError as error:
        raise Unrouted(f"replica {replica} is not routable") from error
    except RayActorError as error:
        raise PeerLost(f"replica {replica} died: {type(error).__name__}") from error
    except CalleeCancelled as error:
        raise PeerLost(f"replica {replica} cancelled the call") from error
    except RayTaskError as error:
        if not isinstance(error.cause, Exception):
            raise
        raise error.cause from None
    except (RayError, RayServeException) as error:
        raise PeerLost(f"replica {replica} cannot be called: {error!r}") from error


AWAY_S = 1.0
"""Seconds without requests for an unreachable replica. Serve alone would retry without a pause."""


class TargetRouter(RequestRouter):
    """Routes a request to the replica named in its session id; without a session id, to the less busy of two."""

    def initialize_state(self, clock: Clock = time.monotonic) -> None:
        """Called by Serve after the router's construction."""
        self._clock = clock
        self._away: dict[str, float] = {}

    def on_replica_actor_unavailable(self, replica_id: ReplicaID) -> None:
        """Called by Serve after a failure to send a request to a listed replica."""
        super().on_replica_actor_unavailable(replica_id)
        now = self._clock()
        self._away = {replica: until for replica, until in self._away.items() if until > now}
        self._away[replica_id.unique_id] = now + AWAY_S

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Choose a replica for `pending_request`, and assign it directly."""
        if pending_request is None or not candidate_replicas:
            return []
        pending_request.routing_context.should_backoff = True
        target = pending_request.metadata.session_id
        if target:
            reachable = self._away.get(target, 0.0) <= self._clock()
            found = [r for r in candidate_replicas if r.replica_id.unique_id == target and reachable]
        else:
            found = random.sample(candidate_replicas, min(2, len(candidate_replicas)))
        self._settle(pending_request, found, target)
        return [[candidate_replicas[0]]]

    def _settle(self, pending: PendingRequest, found: list[RunningReplica], target: str) -> None:
        if not pending.future.done():
            if found:
                self._record_queue_wait_time(pending)
                pending.future.set_result(min(found, key=lambda r: self._queue_length(r.replica_id)))
            else:
                pending.future.set_exception(ReplicaUnavailableError(target))
            self._remove_pending_request_from_indices(pending)

    def _queue_length(self, replica: ReplicaID) -> int:
        return self.replica_queue_len_cache.get(replica) or 0


class ReplicaHandles:
    """Serve's handles to single replicas of one deployment. Calls raise PeerLost if the replica is unreachable.

    `routed` must be false unless the deployment's router is `TargetRouter`: calls then go to the replica's actor.
    """

    def __init__(self, deployment: str, app: str, routed: bool = True) -> None:
        self._routed = routed
        self._deployment = DeploymentID(deployment, app)
        self._handle: DeploymentHandle = serve.get_deployment_handle(deployment, app)
        self._one: dict[ReplicaId, DeploymentHandle] = {}
        self._actors: dict[ReplicaId, ActorHandle] = {}
        self._streams: dict[ReplicaId, DeploymentHandle] = {}

    async def call(self, replica: ReplicaId, method: str, *args: Any, **kwargs: Any) -> Any:
        """Call a method of one replica. Raises the method's own exceptions, too."""
        if not self._routed:
            return await self.call_actor(replica, method, *args, **kwargs)
        handle = self._one.get(replica)
        if handle is None:
            handle = self._handle.options(session_id=replica, _by_reference=False)
            self._one[replica] = handle
        with _peer_errors(replica):
            try:
                return await getattr(handle, method).remote(*args, **kwargs)
            except ReplicaUnavailableError:
                return await self.call_actor(replica, method, *args, **kwargs)

    async def call_actor(self, replica: ReplicaId, method: str, *args: Any, **kwargs: Any) -> Any:
        """As `call`, but without Serve's router.

        The router has an event loop in a thread of its own, which a call and its answer pass through. It repeats a call
        to a dead replica, and logs each time.
        """
        with _peer_errors(replica):
            return await self._call_actor(replica, method, args, kwargs)

    async def _call_actor(self, replica: ReplicaId, method: str, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        try:
            actor = self._actors.get(replica)
            if actor is None:
                name = FullReplicaId(replica, self._deployment).to_full_id_str()
                actor = self._actors[replica] = ray.get_actor(name, namespace=SERVE_NAMESPACE)
            id = uuid.uuid4().hex
            metadata = RequestMetadata(request_id=id, internal_request_id=id, call_method=method)
            answer = actor.handle_request.remote(pickle.dumps(metadata), *args, **kwargs)
        except (ValueError, AttributeError, TypeError) as error:
            raise Unrouted(f"replica {replica} is not routable") from error
        return await answer

    async def stream(self, replica: ReplicaId, method: str, *args: Any, **kwargs: Any) -> AsyncGenerator[Any]:
        """Iterate over a generator method of one replica."""
        handle = self._streams.get(replica)
        if handle is None:
            handle = self._handle.options(session_id=replica, stream=True, _by_reference=False)
            self._streams[replica] = handle
        items = getattr(handle, method).remote(*args, **kwargs)
        with _peer_errors(replica):
            try:
                async for item in items:
                    yield item
            except (GeneratorExit, asyncio.CancelledError):
                items.cancel()
                raise

    def forget(self, replica: ReplicaId) -> None:
        """Drop the handles of a replica that is gone."""
        self._one.pop(replica, None)
        self._actors.pop(replica, None)
        self._streams.pop(replica, None)


def own_id() -> ReplicaId:
    """The id of the Serve replica that this code runs in."""
    return ReplicaId(serve.get_replica_context().replica_id.unique_id)


def own_pool() -> PoolId:
    """The pool of the engine replica that this code runs in: the name of its deployment."""
    return PoolId(serve.get_replica_context().replica_id.deployment_id.name)


def own_app() -> str:
    """The name of the Serve application that this code runs in, by which its deployments find each other."""
    return str(serve.get_replica_context().app_name)


def own_node() -> str:
    """The Ray node that this code runs on."""
    return str(ray.get_runtime_context().get_node_id())
