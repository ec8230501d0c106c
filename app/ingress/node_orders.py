"""Orders of operators about nodes of the cluster."""

from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from typing import Any

from app.ingress.errors import ApiError
from deployments.serve.nodes import ClusterNodes, Node
from migration.protocol.errors import PeerLost, Refused


@dataclass(frozen=True, slots=True)
class DrainingNodes:
    """Nodes that drain, by id, and the replicas on them."""

    nodes: list[str]
    replicas: list[str]


class NodeOrders:
    """Drains nodes. `state` gives the document at `/mell/state`."""

    def __init__(self, nodes: ClusterNodes, state: Callable[[], Awaitable[dict[str, Any]]]) -> None:
        self._nodes = nodes
        self._state = state

    async def drain(self, name: str, within_s: float | None) -> DrainingNodes:
        """Drain the nodes with this id, address or host name, which end in `within_s` seconds, if that is known.

        Nodes that have ended are left out.

        Raises:
            ApiError: 404 without such a node, 422 for the head node or for all nodes, 503 if Ray does not answer.
        """
        try:
            nodes = list(await self._nodes.all_nodes())
            found = self._named(name, nodes)
            for node in found:
                await self._nodes.drain_node(node.id, within_s)
        except PeerLost as error:
            raise ApiError(503, str(error), code="unavailable") from error
        except Refused as error:
            raise ApiError(422, str(error)) from error
        ids = [node.id for node in found]
        replicas = (await self._state())["replicas"] if ids else []
        return DrainingNodes(ids, [replica["id"] for replica in replicas if replica.get("node") in ids])

    def _named(self, name: str, nodes: list[Node]) -> list[Node]:
        """The living nodes of that name. Raises ApiError if there has never been one, or if they may not be drained."""
        named = [node for node in nodes if node.has_name(name)]
        alive = [node for node in nodes if node.is_alive]
        if not named:
            known = sorted(node.hostname for node in alive)
            raise ApiError(404, f"no node has the id, address or host name {name!r}", details={"nodes": known})
        found = [node for node in named if node.is_alive]
        if any(node.is_head for node in found):
            raise ApiError(422, f"{name} is Ray's head node, without which the cluster ends: it cannot be drained")
        if found and len(found) == len(alive):
            raise ApiError(422, f"{name} is the only node: its replicas have nowhere to go")
        return found
