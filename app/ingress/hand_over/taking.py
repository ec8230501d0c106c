"""Requests that another Mell hands over to this one: they are served like the ingress's own, and answered in frames."""

import asyncio
import contextlib
import uuid
from collections.abc import AsyncGenerator, Callable

import msgspec

from app.ingress.asgi import read_label
from app.ingress.errors import ApiError
from app.ingress.hand_over.rules import PROTOCOL
from app.ingress.hand_over.wire import HEARTBEAT_S, WITHOUT_REPLICAS, HandedRequest, decode_request
from app.ingress.streams.placing import PromptContent
from app.ingress.streams.streams import Streams
from deployments.channels.wire import END, encode_answer, encode_batch
from migration.protocol.continuing import to_spec
from migration.protocol.core_messages import decode_request as decode_body
from migration.protocol.errors import Refused, Stopping
from migration.protocol.ports import Loss, LossKind
from migration.protocol.reading import Output, Reader
from migration.protocol.request import Delta, IngressId, Lost, RequestSpec, StreamEvent
from migration.run.reader import NotServed
from policies.causes import Cause
from policies.model import RequestId
from policies.precedence import NO_CLASSES, Precedence, ServiceClasses

Content = Callable[[RequestSpec], PromptContent]


class TakenRequests:
    """Serves them. `count` is the number under way. `content` describes the prompt of a request to the placement."""

    def __init__(
        self, streams: Streams, ingress: IngressId, content: Content, classes: ServiceClasses = NO_CLASSES
    ) -> None:
        self.count = 0
        self._streams = streams
        self._ingress = ingress
        self._content = content
        self._classes = classes

    def parse(self, protocol: str | None, body: bytes) -> HandedRequest:
        """The request in a call. Raises ApiError for another version, and for anything but a request."""
        if protocol != str(PROTOCOL):
            raise ApiError(422, f"this Mell has version {PROTOCOL} of hand-overs, and the caller {protocol}")
        try:
            return decode_request(body)
        except msgspec.DecodeError as error:
            raise ApiError(400, f"the body is no handed-over request: {error}", code="invalid_body") from None

    async def answer(self, handed: HandedRequest, closed: str | None) -> AsyncGenerator[bytes]:
        """The frames of the answer; closing it ends the request. `closed`: the reason why none is taken."""
        self.count += 1
        try:
            if closed is not None or not self._streams.serving:
                raise Stopping(closed or "no replica is running")
            relay, spec, reader = Relay(handed), self._spec(handed), Reader(handed.outputs)
            async with self._streams.run(spec, reader, relay, self._content(spec), handed.model):
                yield encode_answer(0, handed.model)
                async with contextlib.aclosing(relay.batches(lambda: self._streams.serving)) as batches:
                    async for batch in batches:
                        yield encode_batch(batch)
        except Refused as error:
            yield encode_answer(0, error)
        except NotServed as error:
            text = error.loss.text
            yield encode_answer(0, Refused(text, Cause.IMMOVABLE) if self._streams.serving else Stopping(text))
        finally:
            self.count -= 1
        yield END

    def _spec(self, handed: HandedRequest) -> RequestSpec:
        """The request as one of this ingress, under an id of its own. Raises Refused for one that is none."""
        precedence = Precedence(handed.service_class, handed.arrived_s)
        label = read_label(handed.label) or ""
        id = RequestId(uuid.uuid4().hex)
        priority = self._classes.priority(precedence)
        try:
            request = decode_body(handed.body)
            spec = to_spec(request, handed.body, id, label, self._ingress, precedence, priority)
        except (ValueError, msgspec.DecodeError) as error:
            raise Refused(f"not a request: {error}", Cause.IMMOVABLE) from None
        if spec.adapter is not None:
            raise Refused("the adapters of two Mells are not compared", Cause.ADAPTER)
        return spec


class Relay:
    """Implements `Listener`: the output of a request, as events for the Mell that has handed it over."""

    def __init__(self, handed: HandedRequest) -> None:
        self._request, self._hop = RequestId(handed.request), handed.hop
        self._events: list[StreamEvent] = []
        self._ready = asyncio.Event()
        self._over = False

    def deliver(self, output: Output) -> None:
        """See `Listener.deliver`."""
        self._put(
            Delta(self._request, self._hop, output.index, output.tokens, output.finish, output.extras),
            output.finish is not None,
        )

    def lost(self, loss: Loss) -> None:
        """See `Listener.lost`. The caller may continue it, unless no engine takes it."""
        invalid, died = loss.kind is LossKind.INVALID, loss.kind is LossKind.SUSPECT
        self._put(Lost(self._request, self._hop, loss.text, invalid, died), over=True)

    def _put(self, event: StreamEvent, over: bool) -> None:
        self._events.append(event)
        self._over = self._over or over
        self._ready.set()

    async def batches(self, serving: Callable[[], bool]) -> AsyncGenerator[tuple[StreamEvent, ...]]:
        """The events since the last batch, to the last one; none as a heartbeat.

        The request is lost after `WITHOUT_REPLICAS` heartbeats in a row without anything `serving`: the caller may have
        replicas.
        """
        silent = 0
        while self._events or not self._over:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(HEARTBEAT_S):
                    await self._ready.wait()
            silent = 0 if serving() else silent + 1
            if silent == WITHOUT_REPLICAS and not self._events:
                self.lost(Loss(LossKind.UNAVAILABLE, "no replica is running"))
            self._ready.clear()
            events, self._events = tuple(self._events), []
            yield events
