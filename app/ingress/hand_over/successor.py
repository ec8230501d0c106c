"""The Mell that takes requests over, as one more replica for the readers of this ingress."""

import asyncio
import contextlib
import logging
from collections.abc import Callable
from dataclasses import dataclass

import httpx
import msgspec

from app.client.api import HAND_OVER_REQUESTS, ApiClient, is_loopback
from app.client.errors import ClientError, message_in
from app.ingress.hand_over.rules import PROTOCOL, PROTOCOL_HEADER, Standing, takes_requests, why_stays
from app.ingress.hand_over.wire import HEARTBEAT_S, HandedRequest, encode_request
from app.ingress.streams.streams import Streams
from deployments.api.calls import HandOverTarget
from deployments.channels.wire import CallAnswer, FrameDecoder
from migration.concurrency import take_failure
from migration.protocol.errors import MigrationError, PeerLost, Refused, Stopping
from migration.protocol.request import RequestSpec
from policies.causes import Cause
from policies.model import RETRY_S, ReplicaId, RequestId

log = logging.getLogger("ray.serve")

_CONNECT_S = 3.0
SILENCE_S = 5 * HEARTBEAT_S
"""The longest time without a byte of an answer, in seconds."""

_ANSWER_S = 5.0
"""The longest wait for its answer to a request, in seconds."""

_UPLOAD_BYTES_PER_S = 1e6
"""The slowest upload of a request that is waited for, in bytes per second."""

Connect = Callable[[str, str | None], ApiClient]


def connect(url: str, key: str | None) -> ApiClient:
    """The client of another Mell."""
    proxies = not is_loopback(url)
    return ApiClient(url, key, timeout_s=SILENCE_S, connect_s=_CONNECT_S, silence_s=SILENCE_S, proxies=proxies)


@dataclass(slots=True)
class _Handed:
    """A request that is there, under `hop`. `began`: a token of it has come."""

    hop: int
    reading: "asyncio.Task[None]"
    began: bool = False


class OtherMell:
    """Implements `Successor`.

    After a failure it takes no request until it has answered that it would. It does not get a request again that it has
    refused, or has not answered twice.
    """

    def __init__(self, target: HandOverTarget, streams: Streams, connect: Connect) -> None:
        self.id = ReplicaId(target.url)
        self._streams = streams
        self._connect = connect
        self._clients: list[ApiClient] = []
        self._asking: asyncio.Task[None] | None = None
        """Runs while it is away."""
        self._unanswered: set[RequestId] = set()
        self._refused: set[RequestId] = set()
        self._handed: dict[RequestId, _Handed] = {}
        self.renew(target)

    def renew(self, target: HandOverTarget) -> None:
        """The order has come again, with another key or model. Requests that are there keep their connections."""
        self.target = target
        self._clients.append(self._connect(target.url, target.key))

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
        answer: asyncio.Future[str] = asyncio.get_running_loop().create_future()
        answer.add_done_callback(take_failure)
        reading = asyncio.create_task(self._read(spec, hop, outputs, answer))
        self._handed[spec.id] = handed = _Handed(hop, reading)
        reading.add_done_callback(lambda _: self._ended(spec.id, handed))
        within_s = _ANSWER_S + sum(map(len, spec.body)) / _UPLOAD_BYTES_PER_S
        try:
            async with asyncio.timeout(within_s):
                return await answer
        except TimeoutError:
            late = PeerLost(f"{self.id} did not answer within {within_s:.3g} s")
            self._without_answer(spec.id, late)
            raise late from None
        except (PeerLost, Stopping) as error:
            self._without_answer(spec.id, error)
            raise
        except Refused:
            self._refused.add(spec.id)
            raise
        finally:
            if not answer.done() or answer.cancelled():
                reading.cancel()

    def release(self, request: RequestId, hop: int | None) -> None:
        """See `Successor.release`."""
        handed = self._handed.get(request)
        if handed is not None and (hop is None or handed.hop < hop):
            handed.reading.cancel()

    def forget(self, request: RequestId) -> None:
        """See `Successor.forget`."""
        self._refused.discard(request)
        self._unanswered.discard(request)

    async def close(self) -> None:
        """Close all connections."""
        if self._asking is not None:
            self._asking.cancel()
        for client in self._clients:
            await client.aclose()

    def _ended(self, request: RequestId, handed: _Handed) -> None:
        if self._handed.get(request) is handed:
            del self._handed[request]

    def _without_answer(self, request: RequestId, error: MigrationError) -> None:
        (self._refused if request in self._unanswered else self._unanswered).add(request)
        self._fail(error)

    def _fail(self, error: MigrationError) -> None:
        if self._asking is None:
            log.warning("%s takes no requests over for now: %s", self.id, error)
            self._asking = asyncio.create_task(self._ask())

    async def _ask(self) -> None:
        """Ask it every `RETRY_S` seconds, until it would take requests."""
        while True:
            await asyncio.sleep(RETRY_S)
            try:
                standing = Standing.parse(await self._clients[-1].hand_over())
            except (ClientError, ValueError):
                continue
            if takes_requests(standing, self.target.served.model):
                log.info("%s takes requests over again", self.id)
                self._asking = None
                return

    async def _read(self, spec: RequestSpec, hop: int, outputs: tuple[int, ...], answer: "asyncio.Future[str]") -> None:
        """Send a request, and read its events to their end."""
        model = self.target.served.model
        precedence = spec.precedence
        request = HandedRequest(
            spec.id,
            spec.label,
            spec.body,
            precedence.service_class,
            precedence.arrived_s,
            hop,
            outputs,
            model,
        )
        error: MigrationError | None = None
        try:
            async with self._clients[-1].post_bytes(
                HAND_OVER_REQUESTS, encode_request(request), {PROTOCOL_HEADER: str(PROTOCOL)}
            ) as response:
                if not response.is_success:
                    raise await _refusal(response)
                await self._read_events(spec.id, response, answer)
        except MigrationError as failure:
            error = failure
        except (httpx.HTTPError, msgspec.DecodeError) as failure:
            error = PeerLost(f"{self.id}: {failure or type(failure).__name__}")
        except Exception as failure:
            log.exception("request %s: its events from %s could not be read", spec.id, self.id)
            error = PeerLost(f"{self.id}: {type(failure).__name__}")
        finally:
            if not answer.done():
                answer.set_exception(error or PeerLost(f"{self.id} ended its answer"))
            elif not answer.cancelled() and answer.exception() is None:
                if error is not None:
                    self._fail(error)
                # A request that is over has no reader any more.
                self._streams.lose(spec.id, self.id, hop, str(error or f"{self.id} ended its answer"))

    async def _read_events(self, request: RequestId, response: httpx.Response, answer: "asyncio.Future[str]") -> None:
        """Pass events on. Raises PeerLost if they break off, and msgspec.DecodeError for anything but frames."""
        decoder = FrameDecoder()
        async for data in response.aiter_raw():
            for frame in decoder.feed(data):
                for item in frame:
                    if not isinstance(item, CallAnswer):
                        if (handed := self._handed.get(request)) is not None:
                            handed.began = True
                        self._streams.take(item, self.id)
                    elif answer.done():
                        raise PeerLost(f"{self.id} has answered twice")
                    elif item.failure is not None:
                        answer.set_exception(item.failure.refusal())
                    else:
                        answer.set_result(msgspec.msgpack.decode(item.result, type=str))
        if not decoder.ended:
            raise PeerLost(f"{self.id} ended its answer")


async def _refusal(response: httpx.Response) -> MigrationError:
    """The refusal in an error answer: the request was not taken."""
    body = await response.aread()
    text = None
    with contextlib.suppress(ValueError):
        text = message_in(msgspec.json.decode(body))
    why = f"HTTP {response.status_code}, {text or response.reason_phrase}"
    if response.status_code == httpx.codes.REQUEST_ENTITY_TOO_LARGE:
        return Refused(why, Cause.TOO_LONG)
    return Stopping(why)
