"""One request as its reader sees it: where it is, what of it has come, and how it ends."""

import asyncio
from collections.abc import AsyncIterator, Awaitable, Callable, Sequence
from contextlib import AbstractAsyncContextManager, AsyncExitStack, asynccontextmanager
from dataclasses import dataclass, field

from app.ingress.concurrency import gather
from app.ingress.errors import ApiError
from migration.cursor import Cursor
from migration.request import Moving, RequestSpec
from policies.model import ReplicaId, RequestId


@dataclass(slots=True)
class Conversation:
    """One request, as its reader sees it; `submitted` while its host has it, whose model is `model`.

    `ready` is set when there is something in `fresh`, or it is over.
    """

    spec: RequestSpec
    host: ReplicaId
    cursor: Cursor = field(default_factory=Cursor)
    top_hop: int = 0
    moving: Moving | None = None
    touched: set[ReplicaId] = field(default_factory=set)
    fresh: list[tuple[int, ...]] = field(default_factory=list)
    ready: asyncio.Event = field(default_factory=asyncio.Event)
    error: ApiError | None = None
    moves: int = 0
    resubmissions: int = 0
    recovering: asyncio.Task[None] | None = None
    submitted: bool = False
    closed: bool = False
    model: str | None = None

    @property
    def id(self) -> RequestId:
        """The request's internal id."""
        return self.spec.id

    def take(self, tokens: tuple[int, ...]) -> None:
        """New tokens for the client, as one step; none unless they are new or the answer is over."""
        if tokens:
            self.fresh.append(tokens)
        if tokens or self.cursor.finish:
            self.ready.set()

    def new_hop(self, stride: int) -> None:
        """What earlier hosts still say of the request is not listened to any more."""
        self.top_hop += stride
        self.take(self.cursor.advance(self.top_hop))

    def fail(self, error: ApiError) -> None:
        """The answer cannot be completed."""
        self.error = error
        self.ready.set()

    async def steps(self) -> AsyncIterator[tuple[int, ...]]:
        """The tokens of each step, in order, until the answer is over (`cursor.finish` says how).

        Raises:
            ApiError: it cannot be completed.
        """
        while True:
            steps, self.fresh = self.fresh, []
            for tokens in steps:
                yield tokens
            if self.fresh:
                continue
            if self.error is not None:
                raise self.error
            if self.cursor.finish is not None:
                return
            self.ready.clear()
            await self.ready.wait()


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
