"""The Mell that takes requests over, as one more replica for the readers of this ingress."""

import asyncio
import logging
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial

from app.client.api import ApiClient, is_loopback
from app.client.errors import ClientError
from app.ingress.hand_over.link import HandOverLink
from app.ingress.hand_over.rules import Standing, takes_requests, why_stays
from app.ingress.hand_over.wire import SILENCE_S, HandedRequest
from app.ingress.streams.streams import Streams
from deployments.api.calls import HandOverTarget
from migration.concurrency import Tasks, take_failure
from migration.protocol.errors import MigrationError, PeerLost, Refused, Stopping
from migration.protocol.request import Delta, Lost, RequestSpec, StreamEvent
from policies.causes import Cause
from policies.model import RETRY_S, ReplicaId, RequestId

log = logging.getLogger("ray.serve")

_CONNECT_S = 3.0

Connect = Callable[[str, str | None], ApiClient]


def connect(url: str, key: str | None) -> ApiClient:
    """The client of another Mell."""
    return ApiClient(url, key, timeout_s=SILENCE_S, connect_s=_CONNECT_S, proxies=not is_loopback(url))


@dataclass(slots=True)
class _Handed:
    """A request that is there under `hop`, by its number on a link. `began`: a token of it has come."""

    hop: int
    link: HandOverLink
    number: int
    accepted: bool = False
    began: bool = False


class OtherMell:
    """Implements `Successor`.

    After a failure it takes no request until it has answered that it would. It does not get a request again that it has
    refused, or has not answered twice.
    """

    def __init__(self, target: HandOverTarget, streams: Streams, connect: Connect) -> None:
        self.id = ReplicaId(target.url)
        self.target = target
        self._streams = streams
        self._connect = connect
        self._opened: asyncio.Task[HandOverLink] | None = None
        """Opens the link for new requests, or has opened it."""
        self._links: set[HandOverLink] = set()
        """The open ones."""
        self._asking: asyncio.Task[None] | None = None
        """Runs while it is away."""
        self._unanswered: set[RequestId] = set()
        self._refused: set[RequestId] = set()
        self._handed: dict[RequestId, _Handed] = {}
        self._closed = False
        self._tasks = Tasks()

    def renew(self, target: HandOverTarget) -> None:
        """The order has come again, with another key or model. Requests that are there keep their link."""
        self.target = target
        self._replace_link()

    def takes(self, spec: RequestSpec, outputs: int) -> bool:
        """See `Successor.takes`."""
        return self._asking is None and self.why_stays(spec, outputs) is None

    def awaits(self, request: RequestId) -> bool:
        """See `Successor.awaits`."""
        handed = self._handed.get(request)
        return handed is not None and not handed.began

    def why_stays(self, spec: RequestSpec, outputs: int) -> str | None:
        """The reason why a request is not handed over, however often that is tried."""
        return "refused there" if spec.id in self._refused else why_stays(spec, outputs, self.target.served.tied)

    async def submit(self, spec: RequestSpec, hop: int, outputs: tuple[int, ...], model: str | None) -> str:
        """See `Successor.submit`."""
        if model not in (None, self.target.served.model):
            self._refused.add(spec.id)
            raise Refused("a replica with other weights has begun it", Cause.FINGERPRINT)
        self.release(spec.id, None)
        try:
            return await self._submit(spec, hop, outputs, await self._link())
        except (PeerLost, Stopping) as error:
            self._without_answer(spec.id, error)
            raise
        except Refused:
            self._refused.add(spec.id)
            raise

    def release(self, request: RequestId, hop: int | None) -> None:
        """See `Successor.release`."""
        handed = self._handed.get(request)
        if handed is not None and (hop is None or handed.hop < hop):
            del self._handed[request]
            handed.link.leave(handed.number)
            self._close_unused()

    def forget(self, request: RequestId) -> None:
        """See `Successor.forget`."""
        self._refused.discard(request)
        self._unanswered.discard(request)

    async def close(self) -> None:
        """Close all connections, for good."""
        self._closed = True
        for task in (self._asking, self._opened):
            if task is not None:
                task.cancel()
        await asyncio.gather(*(link.close() for link in self._links))

    async def _submit(self, spec: RequestSpec, hop: int, outputs: tuple[int, ...], link: HandOverLink) -> str:
        precedence = spec.precedence
        request = HandedRequest(
            link.number(),
            spec.id,
            spec.label,
            spec.body,
            precedence.service_class,
            precedence.arrived_s,
            hop,
            outputs,
            self.target.served.model,
        )
        self._handed[spec.id] = handed = _Handed(hop, link, request.number)
        try:
            model = await link.submit(request)
            handed.accepted = True
            return model
        finally:
            if not handed.accepted and self._handed.get(spec.id) is handed:
                self.release(spec.id, None)

    # --- the link -------------------------------------------------------------------------------------

    async def _link(self) -> HandOverLink:
        """The link for new requests. Raises Stopping and PeerLost."""
        if self._closed:
            raise Stopping("this ingress ends")
        opened = self._opened
        if opened is None or (opened.done() and self._current() is None):
            opened = self._opened = asyncio.create_task(self._open())
            opened.add_done_callback(take_failure)
        return await asyncio.shield(opened)

    async def _open(self) -> HandOverLink:
        link = await HandOverLink.open(self.target.url, self.target.key, self._take)
        self._links.add(link)
        link.ended.add_done_callback(partial(self._ended, link))
        return link

    def _replace_link(self) -> None:
        """Open another link for new requests. Those that are there keep theirs."""
        self._opened = None
        self._close_unused()

    def _close_unused(self) -> None:
        """Close the links that have been replaced and have no requests any more."""
        used = {handed.link for handed in self._handed.values()}
        for link in self._links - used:
            if link is not self._current():
                self._links.discard(link)
                self._tasks.start(link.close())

    def _current(self) -> HandOverLink | None:
        """The open link for new requests."""
        opened = self._opened
        if opened is None or not opened.done() or opened.cancelled() or opened.exception() is not None:
            return None
        return None if (link := opened.result()).ended.done() else link

    def _take(self, event: StreamEvent) -> None:
        request, handed = event.request, self._handed.get(event.request)
        if handed is not None and isinstance(event, Delta | Lost) and event.hop == handed.hop:
            handed.began = True
            if isinstance(event, Lost) or event.finish is not None:
                del self._handed[request]
                self._close_unused()
        self._streams.take(event, self.id)

    def _ended(self, link: HandOverLink, ended: "asyncio.Future[PeerLost]") -> None:
        """A link has ended: its requests continue elsewhere. Those without an answer raise where they are submitted."""
        self._links.discard(link)
        lost = [(name, handed) for name, handed in self._handed.items() if handed.link is link and handed.accepted]
        if lost:
            self._fail(ended.result())
        for request, handed in lost:
            del self._handed[request]
            self._streams.lose(request, self.id, handed.hop, str(ended.result()))

    def _without_answer(self, request: RequestId, error: MigrationError) -> None:
        (self._refused if request in self._unanswered else self._unanswered).add(request)
        self._fail(error)

    def _fail(self, error: MigrationError) -> None:
        """It is away. The next link may reach another one of its processes."""
        self._replace_link()
        if self._asking is None and not self._closed:
            log.warning("%s takes no requests over for now: %s", self.id, error)
            self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        """Ask it every `RETRY_S` seconds, until it would take requests."""
        while True:
            await asyncio.sleep(RETRY_S)
            client = self._connect(self.target.url, self.target.key)
            try:
                standing = Standing.parse(await client.hand_over())
            except (ClientError, ValueError):
                continue
            finally:
                await client.aclose()
            if takes_requests(standing, self.target.served.model):
                log.info("%s takes requests over again", self.id)
                self._asking = None
                return
