"""Orders to hand all requests over to another Mell, for all ingress processes of the application."""

import asyncio
import time
from collections import Counter
from collections.abc import Callable
from typing import Any

from app.client.api import ApiClient
from app.client.errors import BadAnswer, ClientError, ErrorAnswer
from app.ingress.errors import ApiError
from app.ingress.hand_over.rules import PROTOCOL, Standing, served_by_both, why_refused
from app.ingress.hand_over.successor import Connect, OtherMell, connect
from app.ingress.streams.streams import Streams
from deployments.api.calls import HandOverCounts, HandOverTarget, OrderedHandOver
from deployments.api.protocols import HandOverApi, RemoteReplicas
from deployments.serve.membership import Membership
from migration.concurrency import Tasks, repeat, settle
from migration.protocol.request import IngressId, ModelIdentity
from policies.model import ReplicaId

_LOOK_S = 0.1
AT_ONCE = 32
"""Requests of one ingress that are between two hosts, or wait at the other Mell for the token after its prefill."""

_PEER_S = 3.0
"""The longest wait for another ingress process, or for a replica's answer, and between two attempts, in seconds."""
_LATER_S = 1e-3
"""The least time between two orders, in seconds."""

_ASK_S = 6.0
"""The longest wait for the other Mell's answer to a question, in seconds."""


class HandOverOrders:
    """The hand-over as one ingress process has it. `application` is the application's id, new with each start of Serve.

    Each process passes its newest order on to the others, also to those that are silent for a while or start later.
    """

    def __init__(
        self,
        application: str,
        ingress: IngressId,
        streams: Streams,
        ingresses: tuple[RemoteReplicas[HandOverApi], Membership],
        taken: Callable[[], int] = lambda: 0,
        connect: Connect = connect,
    ) -> None:
        """`taken` is the number of requests that this process serves for another Mell."""
        self._application = application
        self._id = ReplicaId(ingress)
        self._streams = streams
        self._ingresses, self._members = ingresses
        self._taken = taken
        self._connect = connect
        self._other: OtherMell | None = None
        self._known: dict[str, OtherMell] = {}
        self._tasks = Tasks()
        self._working: asyncio.Task[None] | None = None
        self._newest = OrderedHandOver(0.0, None)
        self._informed: set[ReplicaId] = set()
        """The other processes that have got the newest order from this one."""

    @property
    def closed(self) -> str | None:
        """The reason why no request of another Mell is taken; None if they are."""
        return None if self._other is None else f"this Mell hands its requests over to {self._other.id}"

    async def document(self) -> dict[str, Any]:
        """The standing of this Mell, and the numbers of requests of all its ingress processes but the silent ones."""
        standing = await self._standing()
        others = self._others()
        found = await settle([self._at(peer).hand_over_counts() for peer in others], _PEER_S)
        counts = [self.counts(), *(each for each in found if isinstance(each, HandOverCounts))]
        staying: Counter[str] = Counter()
        for each in counts:
            staying.update(each.staying)
        return standing.document() | {
            "here": sum(each.here for each in counts),
            "there": sum(each.there for each in counts),
            "staying": dict(staying),
            "taken": sum(each.taken for each in counts),
            "silent": [peer for peer, each in zip(others, found, strict=True) if isinstance(each, BaseException)],
        }

    async def begin(self, url: str, key: str | None) -> dict[str, Any]:
        """Hand all requests over to the Mell at `url`, or go on with it. Raises ApiError 422 with the reason if not."""
        url = url.rstrip("/")
        other = await self._ask(url, key)
        own = await self._standing()
        if why := why_refused(url, own, other):
            raise ApiError(422, why, param="to")
        return await self._order(HandOverTarget(url, key, served_by_both(own, other)))

    async def undo(self) -> dict[str, Any]:
        """Hand no more requests over: new ones begin here again. Those that are there end there."""
        return await self._order(None)

    async def _order(self, order: HandOverTarget | None) -> dict[str, Any]:
        at = max(time.time(), self._newest.at + _LATER_S)
        self.succeed(OrderedHandOver(at, order))
        await self._inform()
        return await self.document()

    # --- of one process -------------------------------------------------------------------------------

    def succeed(self, order: OrderedHandOver) -> None:
        """See `HandOverApi.succeed`."""
        if order.at <= self._newest.at:
            return
        if not self._newest.at:
            self._tasks.start(repeat(self._inform, _PEER_S))
        self._newest = order
        self._informed.clear()
        self._other = None if order.target is None else self._mell(order.target)
        self._streams.succeed(self._other)
        if self._other is None and self._working is not None:
            self._working.cancel()
            self._working = None
        elif self._other is not None and self._working is None:
            self._working = self._tasks.start(repeat(self._work, _LOOK_S))

    def counts(self) -> HandOverCounts:
        """See `HandOverApi.hand_over_counts`."""
        (here, there), other = self._streams.by_place(), self._other
        whys = [] if other is None else [other.why_stays(spec, outputs) for spec, outputs in here]
        staying = Counter(why for why in whys if why is not None)
        return HandOverCounts(len(here), there, dict(staying), self._taken())

    async def close(self) -> None:
        """End the connections."""
        for task in list(self._tasks):
            task.cancel()
        for other in self._known.values():
            await other.close()

    def _mell(self, target: HandOverTarget) -> OtherMell:
        """The other Mell: the same one for the same URL, since it may have requests."""
        known = self._known.get(target.url)
        if known is None:
            known = self._known[target.url] = OtherMell(target, self._streams, self._connect)
        elif known.target != target:
            known.renew(target)
        return known

    async def _work(self) -> None:
        self._streams.hand_over(AT_ONCE)

    async def _inform(self) -> None:
        """Pass the newest order on to the ingress processes that do not have it yet."""
        order, missing = self._newest, [peer for peer in self._others() if peer not in self._informed]
        outcomes = await settle([self._at(peer).succeed(order) for peer in missing], _PEER_S)
        if order is self._newest:
            self._informed.update(peer for peer, outcome in zip(missing, outcomes, strict=True) if outcome is None)

    def _others(self) -> list[ReplicaId]:
        return [peer for peer in self._members.running if peer != self._id]

    def _at(self, peer: ReplicaId) -> HandOverApi:
        return self._ingresses.at(peer, routed=False)

    async def _standing(self) -> Standing:
        try:
            async with asyncio.timeout(_PEER_S):
                served = await self._streams.served()
        except TimeoutError:
            served = None
        served = served or ModelIdentity("", frozenset())
        to = None if self._other is None else self._other.target.url
        return Standing(PROTOCOL, self._application, served.model or None, tuple(sorted(served.tied)), to)

    async def _ask(self, url: str, key: str | None) -> Standing:
        """The standing of another Mell. Raises ApiError 422 if there is none at the URL, or the key is wrong."""
        client: ApiClient | None = None
        try:
            client = self._connect(url, key)
            async with asyncio.timeout(_ASK_S):
                return Standing.parse(await client.hand_over())
        except ErrorAnswer as error:
            raise ApiError(422, f"{url}: {_explained(error)}", param="to") from None
        except (BadAnswer, ValueError) as error:
            raise ApiError(422, f"{url} is no Mell: {error}", param="to") from None
        except (ClientError, TimeoutError) as error:
            raise ApiError(422, f"{url} does not answer: {error or 'time-out'}", param="to") from None
        finally:
            if client is not None:
                await client.aclose()


def _explained(error: ErrorAnswer) -> str:
    match error.status:
        case 404:
            return "no Mell answers there, or an older one, without hand-overs (HTTP 404)"
        case 401:
            return f"the admin key is not that Mell's: {error.message}"
        case _:
            return error.message
