"""Orders of operators to the engines of running replicas: to all at once, or to one."""

import asyncio
from collections.abc import Callable, Coroutine, Mapping, Sequence
from typing import Any, Protocol, TypeVar

from app.ingress.errors import ApiError
from deployments.api.calls import PinAnswer, PinRefusal
from deployments.api.protocols import CacheApi, CopyApi, RemoteReplicas, UtilityApi
from deployments.engine.port import ProfileSession
from deployments.serve.membership import Membership
from migration.concurrency import settle
from migration.protocol.errors import PeerLost, Refused
from migration.protocol.record import CopyOutcome, CopyRecord
from migration.protocol.request import RequestSpec
from migration.run.donor import CopyOrder
from policies.model import Blocks, ReplicaId
from policies.prefix.copies import CopyReason

Item = TypeVar("Item")

Failures = Mapping[ReplicaId, str]
"""The reasons of the replicas that could not carry an order out."""

_CACHE_S = 10.0
_COPY_S = 11.0
_START_S = 60.0
_STOP_S = 900.0
"""Longest waits. At the end of a session a profiler writes its files, which may take minutes."""


class OrderedReplica(CacheApi, CopyApi, UtilityApi, Protocol):
    """An engine replica, for these orders."""


class EngineOrders:
    """Sends orders to the running replicas of some pools. Those that start later do not get them."""

    def __init__(self, pools: Sequence[tuple[RemoteReplicas[OrderedReplica], Membership]]) -> None:
        self._pools = pools

    async def delete_blocks(
        self, names: tuple[int, ...] | None, replica: str | None
    ) -> tuple[Mapping[ReplicaId, Blocks], Failures]:
        """Delete the cached blocks of these names, None: all, on one replica or, with None, on all of them.

        Returns the numbers of deleted blocks, and the failures. Raises ApiError 404 if the replica does not run.
        """
        return await self._ask(lambda engine: engine.delete_blocks(names), self._chosen(replica), _CACHE_S)

    async def pin_blocks(
        self, names: tuple[int, ...], ttl_s: float, replica: str | None
    ) -> tuple[Mapping[ReplicaId, Blocks], Failures]:
        """Keep a prefix in the host's memory of one replica or, with None, of all that have it; 0 s ends its pins.

        Returns the numbers of blocks, and the failures. Raises ApiError if none was pinned: 404 if the replica does not
        run, or none has the prefix, 409 if there is no tier of host memory or the budget is exceeded, else 503.
        """
        chosen = self._chosen(replica)
        answers, failures = await self._ask(lambda engine: engine.pin_blocks(names, ttl_s), chosen, _CACHE_S)
        pinned = {id: answer.blocks for id, answer in answers.items() if answer.refusal is None}
        refused = {id: answer for id, answer in answers.items() if answer.refusal is not None}
        if not pinned:
            raise _not_pinned(list(refused.values()), failures)
        # Replicas that do not have the prefix have nothing to keep.
        full = {id: each.why for id, each in refused.items() if each.refusal is not PinRefusal.UNKNOWN}
        return pinned, {**failures, **full}

    async def copy(self, prefix: RequestSpec, source: str, target: str) -> CopyRecord:
        """Copy the full blocks of a request's prompt from one replica to another; the copy's record.

        Raises:
            ApiError: a replica does not run (404), the copy was aborted (409), or the donor does not answer (503).
        """
        donor, to = self._running(source, "from"), self._running(target, "to")
        order = CopyOrder(prefix.id, prefix, CopyReason.MANUAL, within_s=_CACHE_S)
        try:
            async with asyncio.timeout(_COPY_S):
                record = await self._at(donor).copy_prefix(order, to)
        except (TimeoutError, PeerLost) as error:
            raise ApiError(503, f"replica {source} does not answer", code="unavailable") from error
        except Refused as error:
            raise ApiError(409, str(error), code="not_copied") from error
        if record.outcome is not CopyOutcome.DONE:
            details = {"copy": record.to_json()}
            raise ApiError(409, f"the copy was aborted: {record.error}", code="not_copied", details=details)
        return record

    def _chosen(self, replica: str | None) -> Sequence[ReplicaId]:
        """The replica of that name, None: all that run. Raises ApiError 404 if it does not run."""
        return self._all if replica is None else (self._running(replica, "replica"),)

    def _running(self, replica: str, param: str) -> ReplicaId:
        """The replica of that name. Raises ApiError 404 if it does not run."""
        running = self._all
        if replica not in running:
            details = {"replicas": sorted(running)}
            raise ApiError(404, f"no replica {replica!r} is running", param=param, details=details)
        return ReplicaId(replica)

    @property
    def _all(self) -> tuple[ReplicaId, ...]:
        """The running replicas of all pools."""
        return tuple(replica for _, membership in self._pools for replica in membership.running)

    def _at(self, replica: ReplicaId) -> OrderedReplica:
        """The stub of a running replica, or of one that has just left."""
        pools = [replicas for replicas, membership in self._pools if replica in membership.running]
        return (pools or [self._pools[0][0]])[0].at(replica)

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
        answers, failures = await self._ask(order, self._all, within_s)
        return {**failures, **{replica: reason for replica, reason in answers.items() if reason is not None}}

    async def _ask(
        self,
        order: Callable[[OrderedReplica], Coroutine[Any, Any, Item]],
        replicas: Sequence[ReplicaId],
        within_s: float,
    ) -> tuple[dict[ReplicaId, Item], dict[ReplicaId, str]]:
        """The answers to an order, and the reasons of the replicas that have given none."""
        outcomes = await settle([order(self._at(replica)) for replica in replicas], within_s)
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


def _not_pinned(refused: Sequence[PinAnswer], failures: Failures) -> ApiError:
    """The error of an order that has pinned nothing: the gravest reason of the replicas."""
    for answer in refused:
        if answer.refusal is not PinRefusal.UNKNOWN:
            return ApiError(409, answer.why, code="not_pinned")
    if refused:
        return ApiError(404, refused[0].why)
    return ApiError(503, "; ".join(failures.values()) or "no replica is running", code="unavailable")
