"""A starting replica's wait for memory of its node: before its engine starts, and before it serves."""

import asyncio
import logging
from typing import Protocol

from deployments.api.calls import MeasuredEngine, SeatAnswer, SeatCall, SeatGiven, SeatLater, SeatRefused
from policies.model import PoolId, ReplicaId

log = logging.getLogger("ray.serve")

RETRY_S = 0.5
"""The time between two calls, in seconds."""

_CALL_S = 5.0


class SeatStub(Protocol):
    """The scheduler."""

    async def seat(self, call: SeatCall) -> SeatAnswer:
        """See `SeatApi.seat`."""
        ...


class SeatClient(Protocol):
    """The way to the scheduler."""

    def within(self, timeout_s: float) -> SeatStub:
        """Calls that take no longer than that. They raise any error while there is no scheduler."""
        ...


class Seating:
    """The memory of one replica while it starts on `node`."""

    def __init__(self, client: SeatClient, pool: PoolId, replica: ReplicaId, node: str) -> None:
        self._client = client
        self._pool = pool
        self._replica = replica
        self._node = node

    async def wait(self, measured: MeasuredEngine | None = None) -> SeatGiven:
        """Wait for memory, also until there is a scheduler. Raises ValueError if it is refused."""
        call, shown = SeatCall(self._pool, self._replica, self._node, measured), ""
        while True:
            try:
                answer = await self._client.within(_CALL_S).seat(call)
            except Exception as error:
                answer = SeatLater(f"the scheduler does not answer ({error!r})")
            match answer:
                case SeatGiven():
                    return answer
                case SeatRefused(reason=reason):
                    raise ValueError(reason)
                case SeatLater(reason=reason):
                    if reason != shown:
                        log.info("this replica waits for memory: %s", reason)
                        shown = reason
            await asyncio.sleep(RETRY_S)
