"""Orders of operators to the engines of all running replicas at once."""

from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from app.ingress.errors import ApiError
from deployments.api.protocols import CacheApi, RemoteReplicas, UtilityApi
from deployments.engine.port import ProfileSession
from deployments.serve.membership import Membership
from migration.concurrency import settle
from policies.model import Blocks, ReplicaId

Item = TypeVar("Item")

Failures = Mapping[ReplicaId, str]
"""The reasons of the replicas that could not carry an order out."""

_CACHE_S = 10.0
_START_S = 60.0
_STOP_S = 900.0
"""Longest waits. At the end of a session a profiler writes its files, which may take minutes."""


class OrderedReplica(CacheApi, UtilityApi, Protocol):
    """An engine replica, for these orders."""


class EngineOrders:
    """Sends orders to the running replicas. Those that start later do not get them."""

    def __init__(self, replicas: RemoteReplicas[OrderedReplica], membership: Membership) -> None:
        self._replicas = replicas
        self._membership = membership

    async def delete_blocks(
        self, names: tuple[int, ...] | None, replica: str | None
    ) -> tuple[Mapping[ReplicaId, Blocks], Failures]:
        """Delete the cached blocks of these names, None: all, on one replica or, with None, on all of them.

        Returns the numbers of deleted blocks, and the failures. Raises ApiError 404 if the replica does not run.
        """
        running = self._membership.running
        if replica is not None and replica not in running:
            details = {"replicas": sorted(running)}
            raise ApiError(404, f"no replica {replica!r} is running", param="replica", details=details)
        chosen = running if replica is None else (ReplicaId(replica),)
        return await self._ask(lambda engine: engine.delete_blocks(names), chosen, _CACHE_S)

    async def reset_prefix_cache(self) -> Failures:
        """Drop the cached blocks of ended requests."""
        return await self._send(lambda replica: replica.reset_prefix_cache(), _CACHE_S)

    async def start_profile(self, session: ProfileSession) -> Failures:
        """Start the profilers."""
        return await self._send(lambda replica: replica.start_profile(session), _START_S)

    async def stop_profile(self) -> Failures:
        """Stop the profilers; returns once their files are written."""
        return await self._send(lambda replica: replica.stop_profile(), _STOP_S)

    async def _send(self, order: Callable[[UtilityApi], Coroutine[Any, Any, str | None]], within_s: float) -> Failures:
        answers, failures = await self._ask(order, self._membership.running, within_s)
        return {**failures, **{replica: reason for replica, reason in answers.items() if reason is not None}}

    async def _ask(
        self,
        order: Callable[[OrderedReplica], Coroutine[Any, Any, Item]],
        replicas: Sequence[ReplicaId],
        within_s: float,
    ) -> tuple[dict[ReplicaId, Item], dict[ReplicaId, str]]:
        """The answers to an order, and the reasons of the replicas that have given none."""
        outcomes = await settle([order(self._replicas.at(replica)) for replica in replicas], within_s)
        answers: dict[ReplicaId, Item] = {}
        failures: dict[ReplicaId, str] = {}
        for replica, outcome in zip(replicas, outcomes, strict=True):
            match outcome:
                case TimeoutError():
                    failures[replica] = f"no answer within {within_s:g} s"
                case BaseException():
                    failures[replica] = str(outcome) or repr(outcome)
                case _:
                    answers[replica] = outcome
        return answers, failures
