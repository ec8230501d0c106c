"""Calls between replicas, over a channel from each to every other one that its requests may move to.

Some of these calls are inside a move's pause, and through Ray each takes some milliseconds of processor time.
"""

import asyncio
import logging
from bisect import bisect
from collections.abc import Awaitable, Callable, Collection, Sequence
from typing import TYPE_CHECKING

from deployments.api.protocols import PeerApi
from deployments.channels.links import CallLinks
from deployments.engine.port import Engine
from deployments.replica.ingress_channels import Lacks, require_adapter
from deployments.replica.moves import Moves
from deployments.replica.pairing import PairKeeper
from deployments.replica.prefix_cache.copies import Copies
from migration.concurrency import Tasks
from migration.memory.pair_run import PairProposal
from migration.protocol.errors import Refused
from migration.protocol.messages import Adopt, Chunk, CopyRound, Prepare, Prepared
from migration.protocol.record import CopyRecord
from migration.run.donor import CopyOrder
from policies.causes import Cause
from policies.model import ReplicaId

log = logging.getLogger("ray.serve")

MOST = 16
"""The most peers that a replica connects to beforehand."""

_AT_ONCE = 4


class ChannelPeer:
    """Implements `PeerApi`: another replica, behind the channel to it."""

    def __init__(self, links: CallLinks, replica: ReplicaId) -> None:
        self.id = replica
        self._link = links.at(replica)

    async def prepare(self, message: Prepare) -> Prepared:
        """See `Peer.prepare`."""
        return await self._link.call(PeerApi.prepare, message)

    async def load(self, message: CopyRound) -> None:
        """See `Peer.load`."""
        await self._link.call(PeerApi.load, message)

    async def receive(self, message: Chunk) -> None:
        """See `Peer.receive`."""
        await self._link.call(PeerApi.receive, message)

    async def renew(self, migration: str) -> None:
        """See `Peer.renew`."""
        await self._link.call(PeerApi.renew, migration)

    async def adopt(self, message: Adopt) -> None:
        """See `Peer.adopt`."""
        await self._link.call(PeerApi.adopt, message)

    async def cancel(self, migration: str) -> None:
        """See `Peer.cancel`."""
        await self._link.call(PeerApi.cancel, migration)

    async def resumed(self, migration: str) -> float | None:
        """See `Peer.resumed`."""
        return await self._link.call(PeerApi.resumed, migration)

    async def copy_prefix(self, order: CopyOrder, to: ReplicaId) -> CopyRecord:
        """See `CopyApi.copy_prefix`."""
        return await self._link.call(PeerApi.copy_prefix, order, to)

    async def propose_pair(self, proposal: PairProposal) -> str:
        """See `PairApi.propose_pair`."""
        return await self._link.call(PeerApi.propose_pair, proposal)

    async def pair_state(self, epoch: int) -> str | None:
        """See `PairApi.pair_state`."""
        return await self._link.call(PeerApi.pair_state, epoch)


class PeerCalls:
    """Implements `PeerApi`: takes the calls of other replicas."""

    def __init__(
        self,
        own: ReplicaId,
        moves: Moves,
        copies: Copies,
        lacks: Lacks,
        engine: Engine,
        adopt_s: float,
        pairs: PairKeeper,
    ) -> None:
        """A grammar that the engine has not compiled within `adopt_s` seconds is not continued here."""
        self.id = own
        self._moves = moves
        self._copies = copies
        self._lacks = lacks
        self._engine = engine
        self._adopt_s = adopt_s
        self._pairs = pairs
        self._entering: set[str] = set()
        """The migrations that wait for an adapter or a grammar, and are not cancelled."""

    async def copy_prefix(self, order: CopyOrder, to: ReplicaId) -> CopyRecord:
        """See `CopyApi.copy_prefix`."""
        return await self._copies.copy(order, to)

    async def propose_pair(self, proposal: PairProposal) -> str:
        """See `PairApi.propose_pair`."""
        return await self._pairs.accept(proposal)

    async def pair_state(self, epoch: int) -> str | None:
        """See `PairApi.pair_state`."""
        return self._pairs.state(epoch)

    async def prepare(self, message: Prepare) -> Prepared:
        """See `Peer.prepare`."""
        self._entering.add(message.migration)
        try:
            await require_adapter(message.spec, self._lacks)
            if not message.copies:
                await self._check_grammar(message)
            if message.migration not in self._entering:
                raise Refused("the migration was cancelled meanwhile", Cause.MIGRATION_GONE)
            return self._moves.prepare(message)
        finally:
            self._entering.discard(message.migration)

    async def load(self, message: CopyRound) -> None:
        """See `Peer.load`."""
        await self._moves.load(message)

    async def receive(self, message: Chunk) -> None:
        """See `Peer.receive`."""
        await self._moves.receive(message)

    async def renew(self, migration: str) -> None:
        """See `Peer.renew`."""
        self._moves.renew(migration)

    async def adopt(self, message: Adopt) -> None:
        """See `Peer.adopt`."""
        await self._moves.adopt(message)

    async def resumed(self, migration: str) -> float | None:
        """See `Peer.resumed`."""
        return await self._moves.resumed(migration)

    async def cancel(self, migration: str) -> None:
        """See `Peer.cancel`."""
        self._entering.discard(migration)
        self._moves.cancel(migration)

    async def _check_grammar(self, message: Prepare) -> None:
        """Raise Refused if the engine cannot continue a request's grammar: the source still runs the request."""
        try:
            async with asyncio.timeout(self._adopt_s):
                await self._engine.check_grammar(message.spec, message.outputs)
        except TimeoutError:
            raise Refused(f"the grammar was not ready within {self._adopt_s:.3g} s", Cause.GRAMMAR) from None


class PeerConnections:
    """Connects to each peer once, in the background, as soon as it is listed.

    A move would have to wait for its connection. Any replica may be a move's target, and connections between all of n
    replicas would be n². So a replica connects to at most `MOST` peers, its successors in the ring of ids: all peers up
    to 17 replicas, and as many per replica beyond. Ids are drawn at random, so every replica is the successor of as
    many others, and those before a new one connect to it. A move to another replica connects with its first call.

    Nothing waits for these connections. They are neither repeated nor reported on failure: a move finds that out
    itself. A successor of a dead replica has another id, and gets a connection of its own.
    """

    def __init__(
        self, own: ReplicaId, connect: Callable[[ReplicaId], Awaitable[object]], forget: Callable[[ReplicaId], None]
    ) -> None:
        """`connect` opens the connection to a replica; `forget` drops those of one that is gone, if it has any."""
        self._own = own
        self._connect = connect
        self._forget = forget
        self._listed: frozenset[ReplicaId] = frozenset()
        self._called: set[ReplicaId] = set()
        self._tasks = Tasks()
        self._gate = asyncio.Semaphore(_AT_ONCE)

    def follow(self, running: Collection[ReplicaId]) -> None:
        """Connect to the new ones among the peers of the `running` replicas, and forget those that are gone.

        A move may have connected to any replica that was listed.
        """
        for gone in self._listed.difference(running):
            self._forget(gone)
        self._listed = frozenset(running)
        self._called.intersection_update(running)
        for peer in successors(self._own, running):
            if peer not in self._called:
                self._called.add(peer)
                self._tasks.start(self._try(peer))

    async def _try(self, peer: ReplicaId) -> None:
        async with self._gate:
            try:
                await self._connect(peer)
            except Exception as error:
                log.debug("no connection to %s beforehand: %r", peer, error)

    def close(self) -> None:
        """End the attempts under way."""
        for task in self._tasks:
            task.cancel()


def successors(own: ReplicaId, replicas: Collection[ReplicaId]) -> Sequence[ReplicaId]:
    """The next `MOST` replicas after `own`, which need not be among them, in the ring of ids."""
    others = sorted(set(replicas) - {own})
    at = bisect(others, own)
    return [*others[at:], *others[:at]][:MOST]


if TYPE_CHECKING:
    _peers: tuple[type[PeerApi], type[PeerApi]] = (ChannelPeer, PeerCalls)
