"""The replica's ends of the channels to ingresses: events out of an outbox, and calls about requests."""

import asyncio
import contextlib
import logging
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from dataclasses import dataclass, field

from deployments.api.calls import Submission
from deployments.api.protocols import CHANNEL_METHODS, ChannelApi
from deployments.channels import listening
from deployments.channels.listening import ChannelListener, answer_calls
from deployments.channels.wire import END, ChannelOffer, Failure, encode_batch
from deployments.replica.outbox import Outboxes
from migration.protocol.core_messages import Adapter
from migration.protocol.errors import Refused
from migration.protocol.request import IngressId, RequestSpec
from policies.causes import Cause

log = logging.getLogger("ray.serve")

Submit = Callable[[Submission], Refused | str]
"""Runs a request. Returns the refusal, or the model that runs it."""

Lacks = Callable[[Adapter], Awaitable[Refused | None]]
"""Has an adapter loaded before a request with it is run. Returns the refusal if the engine does not have it."""


async def require_adapter(spec: RequestSpec, lacks: Lacks) -> None:
    """Have a request's adapter loaded. Its files may be gone by now, and then its request would end the engine.

    Raises:
        Refused: the engine does not have it.
    """
    if spec.adapter is not None and (refused := await lacks(spec.adapter)):
        raise refused


@dataclass(eq=False, slots=True)
class IngressChannel:
    """One ingress's stream of Ray (until `closing`), and its connection (from `connected` until `ended`)."""

    ingress: IngressId
    outboxes: Outboxes
    requests: ChannelApi
    connected: asyncio.Event = field(default_factory=asyncio.Event)
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    closing: asyncio.Event = field(default_factory=asyncio.Event)

    async def over(self) -> None:
        """Wait for the end of the connection. None comes if the ingress has died meanwhile."""
        with contextlib.suppress(TimeoutError):
            async with asyncio.timeout(listening.ADMISSION_S):
                await self.connected.wait()
        if self.connected.is_set():
            await self.ended.wait()

    async def exchange(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Send events and take calls until one of both ends, or the ingress is given up."""
        self.connected.set()
        given_up = self.outboxes.given_up(self.ingress)
        tasks: list[asyncio.Task[object]] = [
            asyncio.create_task(self._send(writer)),
            asyncio.create_task(self._answer(reader, writer)),
            asyncio.create_task(self.closing.wait()),
            asyncio.create_task(given_up.wait()),
        ]
        try:
            await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED)
        finally:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)
            if given_up.is_set():
                writer.transport.abort()  # A close would wait until the ingress has read what was written.
            self.ended.set()
        for task in tasks:
            if not task.cancelled() and (error := task.exception()) is not None:
                log.error("the channel to ingress %s has failed", self.ingress, exc_info=error)

    async def _answer(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        """Execute the ingress's calls. Nobody waits for those that it has left behind."""
        for call in await answer_calls(self.requests, CHANNEL_METHODS, reader, writer, self._acknowledged):
            call.cancel()

    def _acknowledged(self) -> None:
        self.outboxes.acknowledged(self.ingress)

    async def _send(self, writer: asyncio.StreamWriter) -> None:
        """Send the events of the ingress, as fast as it reads them."""
        with contextlib.suppress(ConnectionError):
            async with contextlib.aclosing(self.outboxes.read(self.ingress)) as batches:
                async for batch in batches:
                    writer.write(encode_batch(batch))
                    await writer.drain()
            writer.write(END)


@contextlib.asynccontextmanager
async def offered(listener: ChannelListener, channel: IngressChannel) -> AsyncIterator[ChannelOffer]:
    """The offer of a channel to an ingress. The channel ends with the context."""
    offer = listener.offer(channel.exchange)
    try:
        yield offer
    finally:
        listener.withdraw(offer)
        channel.closing.set()


async def submit_all(requests: Sequence[Submission], submit: Submit, lacks: Lacks) -> tuple[str | Failure, ...]:
    """Run requests, each with an adapter once that is loaded. Returns for each the model that runs it, or the refusal.

    Without adapters, nothing is awaited. A request waits for no adapter but its own.
    """
    adapters = {adapter for each in requests if (adapter := each.spec.adapter) is not None}
    loads = {adapter: asyncio.ensure_future(lacks(adapter)) for adapter in adapters}

    def begin(request: Submission, refusal: Refused | None = None) -> str | Failure:
        try:
            answer = refusal or submit(request)
        except Exception:
            return failed(request)
        return answer if isinstance(answer, str) else Failure.of(answer)

    async def begin_loaded(request: Submission) -> str | Failure:
        try:
            refusal = None if request.spec.adapter is None else await loads[request.spec.adapter]
        except Exception:
            return failed(request)
        return begin(request, refusal)

    def failed(request: Submission) -> Failure:
        log.exception("request %s could not be submitted", request.spec.id)
        return Failure.of(Refused("internal error", Cause.UNEXPECTED))

    if not loads:
        return tuple(map(begin, requests))
    return tuple(await asyncio.gather(*map(begin_loaded, requests)))
