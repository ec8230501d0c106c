"""One request's output so far, from which the routes make an answer."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from app.ingress.errors import ApiError, saturated
from app.ingress.telemetry.vllm_requests import NO_RECORD, RequestRecord
from migration.concurrency import gather
from migration.protocol.ports import Loss, LossKind
from migration.protocol.reading import Output, Reader
from migration.protocol.request import RequestSpec
from policies.model import RequestId


@dataclass(slots=True)
class Conversation:
    """Implements `Listener`: keeps the delivered output until it is read.

    `tokens` are all output tokens so far, `finish` is the finish reason, None while there is none. `extras` are those
    that have not been taken.
    """

    spec: RequestSpec
    reader: Reader
    record: RequestRecord = NO_RECORD
    tokens: list[int] = field(default_factory=list)
    extras: list[tuple[int, bytes]] = field(default_factory=list)
    finish: str | None = None
    _steps: list[tuple[int, ...]] = field(default_factory=list)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _loss: Loss | None = None

    @property
    def id(self) -> RequestId:
        """The request's internal id."""
        return self.spec.id

    @property
    def moves(self) -> int:
        """Migrations so far."""
        return self.reader.moves

    @property
    def resubmissions(self) -> int:
        """Submissions to another replica after a loss so far."""
        return self.reader.resubmissions

    def deliver(self, output: Output) -> None:
        """See `Listener.deliver`."""
        self.record.took(output)
        self.tokens.extend(output.tokens)
        self.extras.extend(output.extras)
        self.finish = output.finish
        if output.tokens:
            self._steps.append(output.tokens)
        self._ready.set()

    def stopped(self) -> None:
        """A stop string was found in the text so far, which ends the answer before its end here."""
        if self.finish is None:
            self.record.stopped()

    def lost(self, loss: Loss) -> None:
        """See `Listener.lost`."""
        self._loss = loss
        self._ready.set()

    async def steps(self) -> AsyncIterator[tuple[int, ...]]:
        """The tokens of each delivery, in order, until the output has its finish reason, `finish`.

        Raises:
            ApiError: it cannot be completed.
        """
        while True:
            steps, self._steps = self._steps, []
            for tokens in steps:
                yield tokens
            if self._steps:
                continue
            if self._loss is not None:
                raise to_error(self._loss)
            if self.finish is not None:
                return
            self._ready.clear()
            await self._ready.wait()


def to_error(loss: Loss) -> ApiError:
    """The answer to a request that is not served."""
    match loss.kind:
        case LossKind.INVALID:
            return ApiError(400, loss.text, code="invalid_value")
        case LossKind.UNAVAILABLE:
            return saturated(loss.text)
        case LossKind.INTERNAL:
            return ApiError(500, loss.text)


@dataclass(frozen=True, slots=True)
class Opened:
    """A conversation under way. `close` ends it wherever it is; more than once is once."""

    conversation: Conversation
    close: Callable[[], Awaitable[None]]


@asynccontextmanager
async def opened(
    open: Callable[[RequestSpec], AbstractAsyncContextManager[Conversation]], specs: Sequence[RequestSpec]
) -> AsyncIterator[list[Opened]]:
    """Have the choices of one answer served, all at once; on leaving, those that are still open are closed.

    Raises:
        ApiError: no replica took one of them. The others are closed.
    """
    async with AsyncExitStack() as all_of_them:

        async def enter(spec: RequestSpec) -> Opened:
            one = await all_of_them.enter_async_context(AsyncExitStack())
            return Opened(await one.enter_async_context(open(spec)), one.aclose)

        yield await gather([enter(spec) for spec in specs])
