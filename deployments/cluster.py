"""Gathers what replicas report, and what Serve says of them."""

import asyncio
import logging
import time
from dataclasses import replace
from typing import Any

from deployments.membership import Membership
from deployments.report import ReplicaReport
from deployments.retirement import controller
from deployments.routing import Replicas
from migration.errors import PeerLost, Refused
from policies.model import Blocks, ReplicaId, ReplicaLoad, ReplicaState, Tokens

log = logging.getLogger("ray.serve")

_LEAVING = ("STOPPING", "PENDING_MIGRATION")
"""Serve's states of replicas that still serve, and are to be gone: by a downscale, a redeploy, a node that drains."""

SILENCE_S = 5.0
"""How long a replica may be silent until nothing is sent there any more."""

_STATES = {"STARTING": ReplicaState.STARTING, "RECOVERING": ReplicaState.STARTING, "UPDATING": ReplicaState.STARTING}


class Cluster:
    """The engine replicas of one application."""

    def __init__(self, replicas: Replicas, membership: Membership, app: str, timeout_s: float) -> None:
        self._replicas = replicas
        self._membership = membership
        self._app = app
        self._timeout_s = timeout_s
        self._reports: dict[ReplicaId, ReplicaReport] = {}
        self._heard: dict[ReplicaId, float] = {}
        self._failed: set[ReplicaId] = set()
        self._listed: dict[ReplicaId, tuple[str, str]] = {}

    async def gather(self, fence: int, timeout_s: float | None = None) -> dict[ReplicaId, ReplicaReport]:
        """The newest report of every replica that serves; one that does not answer in time keeps its last for a while.

        One that is silent for longer, or answers with an error, has none any more: nothing is to be sent there. One
        that is to be gone by Serve's word is DRAINING, whatever it says itself.

        Raises:
            Refused: a newer scheduler is at work.
        """
        asked = dict.fromkeys((*self._membership.running, *self._stopping()))
        limit = self._timeout_s if timeout_s is None else timeout_s
        self._failed.clear()
        fresh = await asyncio.gather(*(self._ask(replica, fence, limit) for replica in asked))
        now = time.monotonic()
        self._heard.update({report.load.id: now for report in fresh if report is not None})
        silent = {r for r, heard in self._heard.items() if now - heard > SILENCE_S}
        known = {r: self._reports[r] for r in asked if r in self._reports and r not in self._failed | silent}
        newest = known | {report.load.id: report for report in fresh if report is not None}
        self._reports = {replica: self._as_listed(report) for replica, report in newest.items()}
        self._heard = {replica: heard for replica, heard in self._heard.items() if replica in asked}
        return self._reports

    async def _ask(self, replica: ReplicaId, fence: int, limit_s: float) -> ReplicaReport | None:
        try:
            async with asyncio.timeout(limit_s):
                report: ReplicaReport = await self._replicas.call(replica, "report", fence)
                return report
        except (TimeoutError, PeerLost) as error:
            log.warning("replica %s did not report: %r", replica, error)
        except Refused:
            raise
        except Exception as error:
            log.warning("replica %s failed to report: %r", replica, error)
            self._failed.add(replica)
        return None

    async def refresh(self) -> None:
        """Ask Serve for its replicas."""
        try:
            async with asyncio.timeout(self._timeout_s):
                details: dict[str, Any] = await controller().get_serve_instance_details.remote()
            deployment = details["applications"][self._app]["deployments"]["Engine"]
            self._listed = {
                ReplicaId(r["replica_id"]): (str(getattr(r["state"], "value", r["state"])), r.get("node_id") or "")
                for r in deployment["replicas"]
            }
        except Exception as error:
            # The controller may be restarting; what it said last is the best there is.
            log.debug("Serve's controller did not answer: %r", error)

    def others(self) -> tuple[ReplicaLoad, ...]:
        """Replicas that Serve lists and that have not reported: STARTING ones, and silent ones."""
        return tuple(
            _unreported(replica, state, node)
            for replica, (state, node) in self._listed.items()
            if replica not in self._reports
        )

    @property
    def listed(self) -> bool:
        """Whether Serve has ever said which replicas it has."""
        return bool(self._listed)

    @property
    def wanted_by_serve(self) -> int:
        """How many replicas Serve has or starts, without those that it is stopping."""
        return sum(state != "STOPPING" for state, _ in self._listed.values())

    def knows(self, replica: ReplicaId) -> bool:
        """Whether Serve lists the replica, in whatever state."""
        return replica in self._listed

    def runs(self, replica: ReplicaId) -> bool:
        """Whether Serve runs the replica and has not begun to stop it."""
        return self._listed.get(replica, ("", ""))[0] in ("RUNNING", "PENDING_MIGRATION")

    def _stopping(self) -> tuple[ReplicaId, ...]:
        running = self._membership.running
        return tuple(r for r, (state, _) in self._listed.items() if state == "STOPPING" and r not in running)

    def _as_listed(self, report: ReplicaReport) -> ReplicaReport:
        state, _ = self._listed.get(report.load.id, ("", ""))
        if state not in _LEAVING:
            return report
        return replace(report, load=replace(report.load, state=ReplicaState.DRAINING))


def _unreported(replica: ReplicaId, state: str, node: str) -> ReplicaLoad:
    """A replica of which only Serve's word is known."""
    return ReplicaLoad(
        id=replica,
        state=_STATES.get(state, ReplicaState.DRAINING),
        node=node,
        capacity_tokens=Tokens(0),
        block_size=1,
        free_blocks=Blocks(0),
        max_requests=0,
    )
