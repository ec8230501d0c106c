"""Channels that stay open for calls, each opened by the first call, or before, and again if it has broken."""

import asyncio
from collections.abc import Awaitable, Callable, Coroutine
from typing import Any, Concatenate, ParamSpec, TypeVar

from deployments.channels.calling import CallerEnd, connect
from deployments.channels.wire import ChannelOffer, Methods
from migration.concurrency import take_failure
from migration.protocol.errors import PeerLost
from policies.model import ReplicaId

_OFFER_S = 10.0
"""Time limit of the offer of a channel."""

P = ParamSpec("P")
R = TypeVar("R")


class CallLink:
    """The channel to one process. `offer` has it offer a channel, by a call through Ray."""

    def __init__(self, callee: str, offer: Callable[[], Awaitable[ChannelOffer]], methods: Methods) -> None:
        self._callee = callee
        self._offer = offer
        self._methods = methods
        self._opened: asyncio.Task[CallerEnd] | None = None

    async def open(self) -> CallerEnd:
        """The open channel. Raises PeerLost."""
        opened = self._opened
        if opened is None or (opened.done() and (opened.exception() is not None or opened.result().lost)):
            opened = self._opened = asyncio.create_task(self._connect())
            opened.add_done_callback(take_failure)
        return await asyncio.shield(opened)

    async def _connect(self) -> CallerEnd:
        try:
            async with asyncio.timeout(_OFFER_S):
                offer = await self._offer()
        except TimeoutError:
            raise PeerLost(f"{self._callee} offered no channel in time") from None
        return await connect(self._callee, offer, self._methods)

    async def call(
        self, method: Callable[Concatenate[Any, P], Coroutine[Any, Any, R]], *args: P.args, **kwargs: P.kwargs
    ) -> R:
        """Call one of the methods. Raises PeerLost, and the method's MigrationErrors."""
        end = await self.open()
        return await end.call(method, *args, **kwargs)

    def close(self) -> None:
        """Close the channel behind the calls that are under way."""
        if self._opened is not None:
            self._opened.add_done_callback(_close_when_idle)
            self._opened = None


def _close_when_idle(opened: asyncio.Task[CallerEnd]) -> None:
    if not opened.cancelled() and opened.exception() is None:
        opened.result().close_when_idle()


class CallLinks:
    """The channels to replicas; `offer` has one of them offer a channel."""

    def __init__(self, offer: Callable[[ReplicaId], Awaitable[ChannelOffer]], methods: Methods) -> None:
        self._offer = offer
        self._methods = methods
        self._links: dict[ReplicaId, CallLink] = {}

    def at(self, replica: ReplicaId) -> CallLink:
        """The channel to one replica."""
        link = self._links.get(replica)
        if link is None:
            link = CallLink(f"replica {replica}", lambda: self._offer(replica), self._methods)
            self._links[replica] = link
        return link

    async def open(self, replica: ReplicaId) -> None:
        """Open the channel to a replica. Raises PeerLost."""
        await self.at(replica).open()

    def forget(self, replica: ReplicaId) -> None:
        """Close the channel to a replica that is gone, behind the calls that are under way."""
        if link := self._links.pop(replica, None):
            link.close()

    def close(self) -> None:
        """Close all channels."""
        for replica in list(self._links):
            self.forget(replica)
