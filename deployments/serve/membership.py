"""The list of a deployment's replicas, pushed by Serve's controller.

Uses Serve's long poll, which is internal to Ray (ray.serve.llm relies on it too); tested with Ray 2.60.
"""

import asyncio
from collections.abc import Callable
from typing import Any, Protocol

from ray.serve._private.long_poll import LongPollClient, LongPollNamespace

from deployments.serve.internals import DeploymentID, controller
from policies.model import ReplicaId


class Membership(Protocol):
    """The replicas of a deployment that accept calls. `listed` is set with the first list."""

    running: tuple[ReplicaId, ...]
    listed: asyncio.Event

    def stop(self) -> None:
        """Stop following the list."""
        ...


class ServeMembership:
    """Implements `Membership`; `on_change` is called on the loop after each change."""

    def __init__(
        self, deployment: str, app: str, client: str, on_change: Callable[[Membership], None] | None = None
    ) -> None:
        self.running: tuple[ReplicaId, ...] = ()
        self.listed = asyncio.Event()
        self._on_change = on_change
        self._client = LongPollClient(
            controller(),
            {(LongPollNamespace.DEPLOYMENT_TARGETS, DeploymentID(deployment, app)): self._take},
            call_in_event_loop=asyncio.get_running_loop(),
            client_id=f"mell-{client}",
        )

    def _take(self, targets: Any) -> None:
        self.running = tuple(sorted(ReplicaId(r.replica_id.unique_id) for r in targets.running_replicas))
        self.listed.set()
        if self._on_change is not None:
            self._on_change(self)

    def stop(self) -> None:
        """See `Membership.stop`."""
        self._client.stop()
