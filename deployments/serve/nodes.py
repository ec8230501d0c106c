"""The nodes of the Ray cluster: their names, and Ray's drain of a node that goes away.

Ray starts nothing more on a draining node, Serve starts replacements for its replicas elsewhere, the scheduler moves
their requests, and Ray ends the node once nothing runs there.
"""

import asyncio
import time
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any, Protocol, Self

import ray
from ray import _raylet
from ray.core.generated.autoscaler_pb2 import DrainNodeReason

from migration.protocol.errors import PeerLost, Refused
from policies.causes import Cause

_HEAD = "node:__internal_head__"
_TIMEOUT_S = 5.0
_MESSAGE = "an operator drains the node"


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the cluster, which may have ended: its id, and its address and host name, which others may share."""

    id: str
    address: str
    hostname: str
    is_alive: bool = True
    is_head: bool = False

    @classmethod
    def of(cls, entry: dict[str, Any]) -> Self:
        """A node in the list of `ray.nodes`."""
        head = _HEAD in entry.get("Resources", {})
        return cls(entry["NodeID"], entry["NodeManagerAddress"], entry["NodeManagerHostname"], entry["Alive"], head)

    def has_name(self, name: str) -> bool:
        """True if `name` is the node's id, address or host name."""
        return name in (self.id, self.address, self.hostname)


class ClusterNodes(Protocol):
    """The nodes of a cluster. Every call raises PeerLost if Ray does not answer."""

    async def all_nodes(self) -> Iterable[Node]:
        """All nodes, ended ones included."""
        ...

    async def drain_node(self, id: str, within_s: float | None) -> None:
        """Have Ray drain a node, which ends in `within_s` seconds, if that is known. Raises Refused."""
        ...


class RayNodes:
    """Implements `ClusterNodes` for the cluster of this process."""

    async def all_nodes(self) -> Iterable[Node]:
        """See `ClusterNodes.all_nodes`."""
        return [Node.of(entry) for entry in await _answered(ray.nodes)]

    async def drain_node(self, id: str, within_s: float | None) -> None:
        """See `ClusterNodes.drain_node`."""
        ends_ms = 0 if within_s is None else int(1e3 * (time.time() + within_s))
        reason = DrainNodeReason.DRAIN_NODE_REASON_PREEMPTION

        def order() -> tuple[bool, str]:
            gcs = _raylet.GcsClient(address=ray.get_runtime_context().gcs_address)  # type: ignore[attr-defined]
            answer: tuple[bool, str] = gcs.drain_node(id, reason, _MESSAGE, ends_ms)
            return answer

        is_accepted, message = await _answered(order)
        if not is_accepted:
            raise Refused(f"Ray does not drain node {id}: {message}", Cause.NOT_RUNNING)


async def _answered(call: Any) -> Any:
    """The answer of a blocking call to Ray. Raises PeerLost."""
    try:
        async with asyncio.timeout(_TIMEOUT_S):
            return await asyncio.to_thread(call)
    except Exception as error:
        raise PeerLost(f"Ray does not answer: {error!r}") from error
