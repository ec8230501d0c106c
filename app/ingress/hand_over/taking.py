"""Requests that another Mell hands over to this one: they are served like the ingress's own, and answered in frames."""

import asyncio
import contextlib
import logging
import uuid
from collections.abc import Callable
from dataclasses import dataclass

import msgspec
from starlette.websockets import WebSocket, WebSocketDisconnect

from app.ingress.asgi import read_label
from app.ingress.hand_over.wire import PING_S, SILENCE_S, HandedRequest, LeftRequest, decode_message
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

_LONGEST_OF_PROXY = 16 << 20
"""The longest message that uvicorn takes by default, in bytes."""

_NO_REQUEST = 1007
"""WebSocket's code for a message that is none of the protocol."""

_NO_REPLICA = "no replica is running"


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
                raise Stopping(_NO_REPLICA)
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


@dataclass(slots=True)
class _Running:
    """A request of a link. `relay` has no event of it before it is `accepted`."""

    task: asyncio.Task[None]
    relay: Relay
    accepted: bool = False


class TakingLink:
    """A connection of another Mell, with the requests that it has handed over by it, by their numbers."""

    def __init__(self, taken: TakenRequests, connection: WebSocket, closed: Callable[[], str | None]) -> None:
        self._taken = taken
        self._connection = connection
        self._closed = closed
        self._running: dict[int, _Running] = {}
        self._events: list[StreamEvent] = []
        self._answers: list[bytes] = []
        """Frames that go before the events."""
        self._ready = asyncio.Event()
        self._code = 1000
        """The code with which it is closed."""
        self._looks = 0
        """The looks in a row that have found no replica."""
        self._tasks = Tasks()

    async def serve(self) -> None:
        """Serve the connection to its end, which ends its requests."""
        working = [self._tasks.start(work) for work in (self._receive(), self._send(), repeat(self._look, LOOK_S))]
        try:
            await asyncio.wait(working, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in list(self._tasks):
                task.cancel()
        with contextlib.suppress(
            WebSocketDisconnect, RuntimeError, TimeoutError
        ):  # it is closed, or its caller is stuck
            async with asyncio.timeout(PING_S):
                await self._connection.close(self._code)

    # --- of the caller --------------------------------------------------------------------------------

    async def _receive(self) -> None:
        try:
            while True:
                self._take(decode_message(await self._connection.receive_bytes()))
        except WebSocketDisconnect:
            pass
        except (msgspec.DecodeError, KeyError) as error:  # Starlette raises KeyError for a message of text
            log.warning("a hand-over to this Mell is closed: its caller has sent no request: %s", error)
            self._code = _NO_REQUEST

    def _take(self, message: HandedRequest | LeftRequest) -> None:
        number = message.number
        if isinstance(message, LeftRequest):
            if running := self._running.get(number):
                running.task.cancel()
        elif number in self._running:
            raise msgspec.DecodeError(f"request {number} is there twice")
        else:
            relay = Relay(message, self._publish)
            task = self._tasks.start(self._run(message, relay))
            self._running[number] = _Running(task, relay)
            task.add_done_callback(lambda _: self._running.pop(number))

    async def _run(self, handed: HandedRequest, relay: Relay) -> None:
        running = self._running[handed.number]

        def accept() -> None:
            running.accepted = True
            self._answer(handed.number, handed.model)

        try:
            if (reason := self._closed()) is not None:
                raise Stopping(reason)
            await self._taken.run(handed, relay, accept)
        except MigrationError as error:
            self._answer(handed.number, error)
        except Exception as error:
            log.exception("request %s could not be taken over", handed.request)
            if not running.accepted:
                self._answer(handed.number, error)
            else:
                relay.lost(Loss(LossKind.UNAVAILABLE, "internal error"))

    async def _look(self) -> None:
        """Give requests back that have had no replica for a while: the caller may have one."""
        self._looks = 0 if self._taken.streams.serving else self._looks + 1
        if self._looks < WITHOUT_REPLICAS:
            return
        for number, running in list(self._running.items()):
            if running.accepted:
                running.relay.lost(Loss(LossKind.UNAVAILABLE, _NO_REPLICA))
            elif running.task.cancel():
                self._answer(number, Stopping(_NO_REPLICA))

    # --- to the caller --------------------------------------------------------------------------------

    def _answer(self, number: int, result: str | Exception) -> None:
        self._answers.append(encode_answer(number, result))
        self._ready.set()

    def _publish(self, event: StreamEvent) -> None:
        self._events.append(event)
        self._ready.set()

    async def _send(self) -> None:
        """Send answers, and all events since the last message, as long as the caller reads them."""
        while True:
            await self._ready.wait()
            self._ready.clear()
            answers, self._answers = self._answers, []
            events, self._events = self._events, []
            message = b"".join(answers) + (encode_batch(events) if events else b"")
            try:
                async with asyncio.timeout(SILENCE_S):
                    await self._connection.send_bytes(message)
            except (WebSocketDisconnect, RuntimeError):  # it is closed
                return
            except TimeoutError:
                log.warning("a hand-over to this Mell is closed: its caller has not read for %g s", SILENCE_S)
                return
