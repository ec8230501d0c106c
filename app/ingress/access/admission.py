"""Who may come in: keys, their limits, and how many requests this ingress answers at a time."""

import logging
import time
from collections.abc import Awaitable, Callable, Iterable
from types import TracebackType
from typing import Self

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from app.ingress.access.keys import ApiKey, KeyFile, KeyListError, bearer, find
from app.ingress.access.limits import Exceeded, Meter
from app.ingress.errors import ApiError
from app.ingress.http.asgi import within
from app.ingress.observed import Watch

log = logging.getLogger("ray.serve")

_SOON_S = 1.0
"""When to try again where nobody can know: somebody else's request has to end first."""


class Gate:
    """Lets requests in. Without keys everybody may come in; `max_requests` None: any number at a time.

    What keys have used is counted here, so every ingress process has its own count.
    """

    def __init__(
        self, keys: Iterable[ApiKey] = (), max_requests: int | None = None, clock: Callable[[], float] = time.monotonic
    ) -> None:
        self._clock = clock
        self._max_requests = max_requests
        self._keys: tuple[ApiKey, ...] = ()
        self._meters: dict[str, Meter] = {}
        self._running = 0
        self.change(keys)

    def change(self, keys: Iterable[ApiKey]) -> None:
        """These keys are valid from now on. One whose name was known goes on with what it has used."""
        self._keys = tuple(keys)
        self._meters = {key.name: self._meters.get(key.name, Meter()) for key in self._keys}
        for key in self._keys:
            self._meters[key.name].limit(key.limits, self._clock())

    def heed(self, file: KeyFile) -> None:
        """Take over what a file of keys has become. A bad one is logged, and changes nothing."""
        try:
            keys = file.changed()
        except KeyListError as error:
            log.error("the API keys stay as they were: %s", error)
            return
        if keys is not None:
            self.change(keys)
            log.info("%d API keys are valid now", len(keys))

    def authenticate(self, authorization: str | None) -> ApiKey | None:
        """Whose key it is, None where keys are not asked for. Raises ApiError 401."""
        if not self._keys:
            return None
        given = bearer(authorization)
        if given is None:
            raise ApiError(401, "this call wants Authorization: Bearer <API key>", code="invalid_api_key")
        if (key := find(self._keys, given)) is None:
            raise ApiError(401, "the API key is not valid", code="invalid_api_key")
        return key

    def enter(self, authorization: str | None) -> "Visit":
        """Let a request in, which must be left again.

        Raises:
            ApiError: 401 without a valid key, 503 when this ingress has enough to do, 429 when the key's limits are
                reached. Then nothing was counted.
        """
        key = self.authenticate(authorization)
        if self._max_requests is not None and self._running >= self._max_requests:
            message = f"{self._running} requests are being answered; try again"
            raise ApiError(503, message, code="saturated", retry_after_s=_SOON_S)
        meter = self._meters[key.name] if key is not None else Meter()
        if exceeded := meter.begin(self._clock()):
            raise _too_many(exceeded)
        self._running += 1
        return Visit(meter, self._leave, self._clock, key.name if key is not None else None)

    def _leave(self) -> None:
        self._running -= 1


class Visit:
    """A request that was let in, until the block ends that is entered with it."""

    def __init__(self, meter: Meter, leave: Callable[[], None], clock: Callable[[], float], key: str | None) -> None:
        self.key = key
        """The name of the client's key."""
        self._meter = meter
        self._leave = leave
        self._clock = clock
        self._charged = 0
        self.used = 0
        """Tokens that the request has used: what its key is charged in the end."""

    def charge(self, tokens: int) -> None:
        """Charge the key what the request may use, once, until it is known. Raises ApiError 429."""
        if exceeded := self._meter.charge(tokens, self._clock()):
            raise _too_many(exceeded)
        self._charged = tokens

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, at: TracebackType | None) -> None:
        self._meter.correct(self._charged, self.used, self._clock())
        self._meter.end()
        self._leave()


class ClientCall:
    """The ASGI endpoint of a call that is watched, let in by the gate, and may take `timeout_s` in all."""

    def __init__(
        self,
        gate: Gate,
        timeout_s: float | None,
        begin: Callable[[], Watch],
        answer: Callable[[Request, Visit, Watch], Awaitable[ASGIApp]],
    ) -> None:
        self._gate = gate
        self._timeout_s = timeout_s
        self._begin = begin
        self._answer = answer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Let the request in, and answer it. Raises ApiError if nothing was sent yet."""
        http = Request(scope, receive)
        with self._begin() as watch, self._gate.enter(http.headers.get("authorization")) as visit:
            watch.key = visit.key

            async def call(scope: Scope, receive: Receive, send: Send) -> None:
                response = await self._answer(http, visit, watch)
                await response(scope, receive, send)

            if late := await within(self._timeout_s, call, scope, receive, send):
                watch.failed(late)


def _too_many(exceeded: Exceeded) -> ApiError:
    wait_s = _SOON_S if exceeded.wait_s is None else exceeded.wait_s
    message = f"this API key may have {exceeded.limit}"
    return ApiError(429, message, code="rate_limit_exceeded", retry_after_s=wait_s)
