"""Calls to one particular replica: the request router that obeys, and handles that name their target.

The target travels as the handle's session id. The router settles the very request it was asked about: Serve's
base class may hand a chosen replica to another pending request of the same parent.
"""

import random
from collections.abc import AsyncIterator, Iterator
from contextlib import contextmanager
from typing import Any

import ray
from ray import serve
from ray.exceptions import RayActorError
from ray.serve.exceptions import ReplicaUnavailableError
from ray.serve.handle import DeploymentHandle
from ray.serve.request_router import PendingRequest, ReplicaID, RequestRouter, RunningReplica

from migration.errors import PeerLost
from policies.model import ReplicaId


class Unrouted(PeerLost):
    """This process's router does not list the replica: it is stopping or gone, or the news of it is under way."""


@contextmanager
def _peer_errors(replica: ReplicaId) -> Iterator[None]:
    """Turn Ray's errors about a replica into Mell's."""
    try:
        yield
    except ReplicaUnavailableError as error:
        raise Unrouted(f"replica {replica} is not routable") from error
    except RayActorError as error:
        raise PeerLost(f"replica {replica} died: {type(error).__name__}") from error


class TargetRouter(RequestRouter):
    """Routes a request to the replica named in its session id; without one, to the less busy of two."""

    async def choose_replicas(
        self, candidate_replicas: list[RunningReplica], pending_request: PendingRequest | None = None
    ) -> list[list[RunningReplica]]:
        """Choose for `pending_request` and settle it here."""
        if pending_request is None or not candidate_replicas:
            return []
        pending_request.routing_context.should_backoff = True
        target = pending_request.metadata.session_id
        if target:
            found = [r for r in candidate_replicas if r.replica_id.unique_id == target]
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


class Replicas:
    """Handles to single replicas of one deployment. Calls raise PeerLost when the replica is unreachable."""

    def __init__(self, deployment: str, app: str) -> None:
        self._handle: DeploymentHandle = serve.get_deployment_handle(deployment, app)
        self._one: dict[ReplicaId, DeploymentHandle] = {}
        self._streams: dict[ReplicaId, DeploymentHandle] = {}

    async def call(self, replica: ReplicaId, method: str, *args: Any) -> Any:
        """Call a method of one replica. What the method raises is raised here."""
        handle = self._one.get(replica)
        if handle is None:
            handle = self._handle.options(session_id=replica, _by_reference=False)
            self._one[replica] = handle
        with _peer_errors(replica):
            return await getattr(handle, method).remote(*args)

    async def stream(self, replica: ReplicaId, method: str, *args: Any) -> AsyncIterator[Any]:
        """Iterate over a generator method of one replica."""
        handle = self._streams.get(replica)
        if handle is None:
            handle = self._handle.options(session_id=replica, stream=True, _by_reference=False)
            self._streams[replica] = handle
        with _peer_errors(replica):
            async for item in getattr(handle, method).remote(*args):
                yield item

    def forget(self, replica: ReplicaId) -> None:
        """Drop the handles of a replica that is gone."""
        self._one.pop(replica, None)
        self._streams.pop(replica, None)


def own_id() -> ReplicaId:
    """The id of the Serve replica that this code runs in."""
    return ReplicaId(serve.get_replica_context().replica_id.unique_id)


def own_node() -> str:
    """The Ray node that this code runs on."""
    return str(ray.get_runtime_context().get_node_id())
