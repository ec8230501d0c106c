"""Serve's list of the replicas of a pool, read from its controller."""

import asyncio
import logging
from collections.abc import Collection
from typing import Any, Protocol

from deployments.serve.internals import controller
from policies.decision.observation import Status
from policies.model import Blocks, PoolId, ReplicaId, ReplicaState, Tokens

log = logging.getLogger("ray.serve")

_LEAVING = ("STOPPING", "PENDING_MIGRATION")
"""Serve's states of replicas that still serve but will stop: after a downscale, a redeploy, or a drain of the node."""

_STATES = {"STARTING": ReplicaState.STARTING, "RECOVERING": ReplicaState.STARTING, "UPDATING": ReplicaState.STARTING}


class Listing(Protocol):
    """Serve's list of replicas as of the last `refresh`, empty before the first."""

    is_current: bool
    """False if Serve's controller has not answered to the last `refresh`."""

    deployed_at: float | None
    """The time at which the application was deployed, in seconds since 1970; None: unknown, or `serve.run` did it."""

    async def refresh(self) -> None:
        """Read the list from Serve's controller. If it does not answer, the old list stays."""
        ...

    @property
    def listed(self) -> bool:
        """True if the list has a replica."""
        ...

    @property
    def wanted_by_serve(self) -> int:
        """The number of replicas without those that Serve is stopping; starting ones count."""
        ...

    def lists(self, replica: ReplicaId) -> bool:
        """True if the list has the replica, in any state."""
        ...

    def runs(self, replica: ReplicaId) -> bool:
        """True if the replica is running, and Serve has not begun to stop it."""
        ...

    def stopping(self) -> tuple[ReplicaId, ...]:
        """The replicas that Serve is stopping. They still serve, so those that have never started are left out."""
        ...

    def leaving(self) -> tuple[ReplicaId, ...]:
        """The replicas that Serve is stopping or is about to stop."""
        ...

    def others(self, reported: Collection[ReplicaId]) -> tuple[Status, ...]:
        """The statuses, without room, of the replicas outside of `reported`: starting replicas and silent ones."""
        ...


class ServeListing:
    """Implements `Listing` for one pool of an application."""

    def __init__(self, app: str, pool: PoolId, timeout_s: float) -> None:
        self._app = app
        self._pool = pool
        self._timeout_s = timeout_s
        self._listed: dict[ReplicaId, tuple[str, str]] = {}
        self._unstarted: frozenset[ReplicaId] = frozenset()
        self.is_current = False
        self.deployed_at: float | None = None

    async def refresh(self) -> None:
        """See `Listing.refresh`."""
        try:
            async with asyncio.timeout(self._timeout_s):
                details: dict[str, Any] = await controller().get_serve_instance_details.remote()
            application = details["applications"][self._app]
            listed = {
                ReplicaId(r["replica_id"]): (str(getattr(r["state"], "value", r["state"])), r.get("node_id") or "")
                for r in application["deployments"][self._pool]["replicas"]
            }
        except Exception as error:
            # The controller may be restarting. A replica may have started meanwhile.
            log.debug("Serve's controller did not answer: %r", error)
            self.is_current, self._unstarted = False, frozenset()
            return
        before, self._listed, self.is_current = self._unstarted, listed, True
        self._unstarted = frozenset(
            replica
            for replica, (state, _) in listed.items()
            if state == "STARTING" or (state == "STOPPING" and replica in before)
        )
        # The time of `serve.run` is not kept in a restart of the controller.
        self.deployed_at = application["last_deployed_time_s"] if application.get("deployed_app_config") else None

    @property
    def listed(self) -> bool:
        """See `Listing.listed`."""
        return bool(self._listed)

    @property
    def wanted_by_serve(self) -> int:
        """See `Listing.wanted_by_serve`."""
        return sum(state != "STOPPING" for state, _ in self._listed.values())

    def lists(self, replica: ReplicaId) -> bool:
        """See `Listing.lists`."""
        return replica in self._listed

    def runs(self, replica: ReplicaId) -> bool:
        """See `Listing.runs`."""
        return self._state(replica) in ("RUNNING", "PENDING_MIGRATION")

    def stopping(self) -> tuple[ReplicaId, ...]:
        """See `Listing.stopping`."""
        stopping = (replica for replica, (state, _) in self._listed.items() if state == "STOPPING")
        return tuple(replica for replica in stopping if replica not in self._unstarted)

    def leaving(self) -> tuple[ReplicaId, ...]:
        """See `Listing.leaving`."""
        return tuple(replica for replica, (state, _) in self._listed.items() if state in _LEAVING)

    def others(self, reported: Collection[ReplicaId]) -> tuple[Status, ...]:
        """See `Listing.others`."""
        return tuple(
            Status(replica, _STATES.get(state, ReplicaState.DRAINING), node, Tokens(0), 1, Blocks(0), 0)
            for replica, (state, node) in self._listed.items()
            if replica not in reported
        )

    def _state(self, replica: ReplicaId) -> str:
        return self._listed.get(replica, ("", ""))[0]
