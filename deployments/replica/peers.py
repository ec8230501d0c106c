"""Connections to the replicas that requests may move to, made before the first move."""

import asyncio
import logging
from bisect import bisect
from collections.abc import Awaitable, Callable, Collection, Sequence

from policies.model import ReplicaId

log = logging.getLogger("ray.serve")

MOST = 16
"""The most peers that a replica connects to beforehand."""

_AT_ONCE = 4
_TIMEOUT_S = 10.0


class PeerConnections:
    """Calls each peer once, in the background, as soon as it is listed.

    Ray finds an actor and connects to it with the first call, which a move would have to wait for. Any replica may be a
    move's target, and connections between all of n replicas would be n². So a replica calls at most `MOST` peers, its
    successors in the ring of ids: all peers up to 17 replicas, and as many per replica beyond. Ids are drawn at
    random, so every replica is the successor of as many others, and one that is new is called by those before it. A
    move to another replica connects with its first call.

    Nothing waits for these calls. They are neither repeated nor reported on failure: a move finds that out itself. A
    successor of a dead replica has another id, and gets a call of its own.
    """

    def __init__(
        self, own: ReplicaId, call: Callable[[ReplicaId], Awaitable[object]], forget: Callable[[ReplicaId], None]
    ) -> None:
        """`call` makes a cheap call to a replica; `forget` drops the handles of one that is gone."""
        self._own = own
        self._send = call
        self._forget = forget
        self._called: set[ReplicaId] = set()
        self._tasks: set[asyncio.Task[None]] = set()
        self._gate = asyncio.Semaphore(_AT_ONCE)

    def follow(self, running: Collection[ReplicaId]) -> None:
        """Call the new ones among the peers of the `running` replicas, and drop the handles of those that left."""
        for gone in self._called.difference(running):
            self._forget(gone)
        self._called.intersection_update(running)
        for peer in successors(self._own, running):
            if peer not in self._called:
                self._called.add(peer)
                task = asyncio.create_task(self._call(peer))
                self._tasks.add(task)
                task.add_done_callback(self._tasks.discard)

    async def _call(self, peer: ReplicaId) -> None:
        async with self._gate:
            try:
                async with asyncio.timeout(_TIMEOUT_S):
                    await self._send(peer)
            except Exception as error:
                log.debug("no connection to %s beforehand: %r", peer, error)

    def close(self) -> None:
        """End the calls under way."""
        for task in self._tasks:
            task.cancel()


def successors(own: ReplicaId, replicas: Collection[ReplicaId]) -> Sequence[ReplicaId]:
    """The next `MOST` replicas after `own`, which need not be among them, in the ring of ids."""
    others = sorted(set(replicas) - {own})
    at = bisect(others, own)
    return [*others[at:], *others[:at]][:MOST]
