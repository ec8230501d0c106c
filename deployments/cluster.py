"""Gathers what replicas report, and what Serve says of those that do not report yet."""

import asyncio
import logging
from typing import Any

import ray
from ray.serve._private.constants import SERVE_CONTROLLER_NAME, SERVE_NAMESPACE

from deployments.membership import Membership
from deployments.report import ReplicaReport
from deployments.routing import Replicas
from migration.errors import PeerLost, Refused
from policies.model import Blocks, ReplicaId, ReplicaLoad, ReplicaState, Tokens

log = logging.getLogger("ray.serve")


class Cluster:
    """The engine replicas of one application."""

    def __init__(self, replicas: Replicas, membership: Membership, app: str, timeout_s: float) -> None:
        self._replicas = replicas
        self._membership = membership
        self._app = app
        self._timeout_s = timeout_s
        self._reports: dict[ReplicaId, ReplicaReport] = {}
        self._failed: set[ReplicaId] = set()
        self._others: tuple[ReplicaLoad, ...] = ()

    async def gather(self, fence: int, timeout_s: float | None = None) -> dict[ReplicaId, ReplicaReport]:
        """The newest report of every running replica; one that does not answer in time keeps its last.

        One that answers with an error has none any more: nothing is to be sent there.

        Raises:
            Refused: a newer scheduler is at work.
        """
        running = self._membership.running
        limit = self._timeout_s if timeout_s is None else timeout_s
        self._failed.clear()
        fresh = await asyncio.gather(*(self._ask(replica, fence, limit) for replica in running))
        known = {r: self._reports[r] for r in running if r in self._reports and r not in self._failed}
        self._reports = known | {report.load.id: report for report in fresh if report is not None}
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

    async def others(self) -> tuple[ReplicaLoad, ...]:
        """Replicas that Serve knows and that do not accept calls: STARTING, or on their way out."""
        try:
            async with asyncio.timeout(self._timeout_s):
                controller = ray.get_actor(SERVE_CONTROLLER_NAME, namespace=SERVE_NAMESPACE)
                details: dict[str, Any] = await controller.get_serve_instance_details.remote()
            deployment = details["applications"][self._app]["deployments"]["Engine"]
            self._others = tuple(
                _unreported(replica)
                for replica in deployment["replicas"]
                if replica["replica_id"] not in self._membership.running
            )
        except Exception as error:
            # The controller may be restarting; what it said last is the best there is.
            log.debug("Serve's controller did not answer: %r", error)
        return self._others


_STATES = {"STARTING": ReplicaState.STARTING, "RECOVERING": ReplicaState.STARTING}


def _unreported(replica: dict[str, Any]) -> ReplicaLoad:
    """A replica of which only Serve's word is known."""
    state = str(getattr(replica["state"], "value", replica["state"]))
    return ReplicaLoad(
        id=ReplicaId(replica["replica_id"]),
        state=_STATES.get(state, ReplicaState.DRAINING),
        node=replica.get("node_id") or "",
        capacity_tokens=Tokens(0),
        block_size=1,
        free_blocks=Blocks(0),
        max_requests=0,
    )
