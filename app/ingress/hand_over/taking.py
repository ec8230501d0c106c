"""Requests that another Mell hands over to this one: they are served like the ingress's own, and answered in frames."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.ingress.asgi import read_label
from app.ingress.hand_over.wire import HandedRequest, LeftRequest, decode_message
from app.ingress.streams.placing import PromptContent
from app.ingress.streams.streams import Streams
from app.settings import IngressSettings
from deployments.channels.wire import encode_answer, encode_batch
from migration.concurrency import Tasks, repeat
from migration.protocol.continuing import to_spec
from migration.protocol.core_messages import decode_request as decode_body
from migration.protocol.errors import MigrationError, Refused, Stopping
from migration.protocol.ports import Loss, LossKind
from migration.protocol.reading import Output, Reader
from migration.protocol.request import Delta, IngressId, Lost, RequestSpec, StreamEvent
from migration.run.reader import NotServed
from policies.causes import Cause
from policies.model import RequestId
from policies.precedence import NO_CLASSES, Precedence, ServiceClasses

log = logging.getLogger("ray.serve")

Content = Callable[[RequestSpec], PromptContent]

LOOK_S = 2.0
"""The time between two looks for a replica, in seconds."""

WITHOUT_REPLICAS = 2
"""The looks for which a request waits at a Mell without replicas."""

_MOST_EVENTS = 100_000
"""The most events that wait for a caller that does not read them."""

_LONGEST_OF_PROXY = 16 << 20
"""The longest message that uvicorn takes by default, in bytes."""

_NO_REQUEST = 1007
"""WebSocket's code for a message that is none of the protocol."""


def longest_message(settings: IngressSettings) -> int:
    """The size of the longest message that a caller may send, in bytes; Serve's proxy has a limit of its own."""
    longest = settings.max_body_bytes + settings.max_media_bytes
    return longest if settings.port is not None else min(longest, _LONGEST_OF_PROXY)


class TakenRequests:
    """Serves them. `count` is the number under way. `content` describes the prompt of a request to the placement."""

    def __init__(
        self, streams: Streams, ingress: IngressId, content: Content, classes: ServiceClasses = NO_CLASSES
    ) -> None:
        self.count = 0
        self.streams = streams
        self._ingress = ingress
        self._content = content
        self._classes = classes

    async def serve(self, connection: WebSocket, closed: Callable[[], str | None]) -> None:
        """Serve an accepted connection to its end. `closed` is the reason why no request is taken."""
        await TakingLink(self, connection, closed).serve()

    async def run(self, handed: HandedRequest, relay: "Relay", accepted: Callable[[], None]) -> None:
        """Run a request until it is over. Raises Refused and Stopping before it is accepted."""
        self.count += 1
        try:
            if not self.streams.serving:
                raise Stopping("no replica is running")
            spec, reader = self._spec(handed), Reader(handed.outputs)
            async with self.streams.run(spec, reader, relay, self._content(spec), handed.model):
                accepted()
                await relay.over.wait()
        except NotServed as error:
            text = error.loss.text
            raise (Refused(text, Cause.IMMOVABLE) if self.streams.serving else Stopping(text)) from None
        finally:
            self.count -= 1

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

    def __init__(self, handed: HandedRequest, publish: Callable[[StreamEvent], None]) -> None:
        self.over = asyncio.Event()
        self._request, self._hop = RequestId(handed.request), handed.hop
        self._publish = publish

    def deliver(self, output: Output) -> None:
        """See `Listener.deliver`."""
        self._publish(Delta(self._request, self._hop, output.index, output.tokens, output.finish, output.extras))
        if output.finish is not None:
            self.over.set()

    def lost(self, loss: Loss) -> None:
        """See `Listener.lost`. The caller may continue it, unless no engine takes it."""
        invalid, died = loss.kind is LossKind.INVALID, loss.kind is LossKind.SUSPECT
        if not self.over.is_set():
            self._publish(Lost(self._request, self._hop, loss.text, invalid, died))
        self.over.set()


class TakingLink:
    """A connection of another Mell, with the requests that it has handed over by it, by their numbers."""

    def __init__(self, taken: TakenRequests, connection: WebSocket, closed: Callable[[], str | None]) -> None:
        self._taken = taken
        self._connection = connection
        self._closed = closed
        self._running: dict[int, tuple[asyncio.Task[None], Relay]] = {}
        self._events: list[StreamEvent] = []
        self._answers: list[bytes] = []
        """Frames that go before the events."""
        self._ready = asyncio.Event()
        self._looks = 0
        """The looks in a row that have found no replica."""
        self._tasks = Tasks()

    async def serve(self) -> None:
        """Serve the connection to its end, which ends its requests."""
        self._tasks.start(self._send())
        self._tasks.start(repeat(self._look, LOOK_S))
        try:
            while True:
                self._take(decode_message(await self._connection.receive_bytes()))
        except WebSocketDisconnect:
            pass
        except (msgspec.DecodeError, KeyError) as error:  # Starlette raises KeyError for a message of text
            log.warning("a hand-over to this Mell is closed: its caller has sent no request: %s", error)
            await self._connection.close(_NO_REQUEST)
        finally:
            for task in list(self._tasks):
                task.cancel()

    def _take(self, message: HandedRequest | LeftRequest) -> None:
        number = message.number
        if isinstance(message, LeftRequest):
            if running := self._running.get(number):
                running[0].cancel()
        elif number in self._running:
            raise msgspec.DecodeError(f"request {number} is there twice")
        else:
            relay = Relay(message, self._publish)
            self._running[number] = self._tasks.start(self._run(message, relay)), relay

    async def _run(self, handed: HandedRequest, relay: Relay) -> None:
        accepted = False

        def accept() -> None:
            nonlocal accepted
            accepted = True
            self._answer(handed.number, handed.model)

        try:
            if (reason := self._closed()) is not None:
                raise Stopping(reason)
            await self._taken.run(handed, relay, accept)
        except MigrationError as error:
            self._answer(handed.number, error)
        except Exception as error:
            log.exception("request %s could not be taken over", handed.request)
            if not accepted:
                self._answer(handed.number, error)
            else:
                relay.lost(Loss(LossKind.UNAVAILABLE, "internal error"))
        finally:
            del self._running[handed.number]

    async def _look(self) -> None:
        """Give requests back that have had no replica for a while: the caller may have one."""
        self._looks = 0 if self._taken.streams.serving else self._looks + 1
        if self._looks >= WITHOUT_REPLICAS:
            for _, relay in list(self._running.values()):
                relay.lost(Loss(LossKind.UNAVAILABLE, "no replica is running"))

    # --- to the caller --------------------------------------------------------------------------------

    def _answer(self, number: int, result: str | Exception) -> None:
        self._answers.append(encode_answer(number, result))
        self._ready.set()

    def _publish(self, event: StreamEvent) -> None:
        self._events.append(event)
        self._ready.set()

    async def _send(self) -> None:
        """Send answers, and all events since the last message, as fast as the caller reads them."""
        with contextlib.suppress(WebSocketDisconnect, RuntimeError):
            while len(self._events) <= _MOST_EVENTS:
                await self._ready.wait()
                self._ready.clear()
                answers, self._answers = self._answers, []
                events, self._events = self._events, []
                await self._connection.send_bytes(b"".join(answers) + (encode_batch(events) if events else b""))
            await self._connection.close()
