"""The HTTP routes, on plain Starlette: bodies are read with a limit, streams are written without layers."""

import asyncio
import hmac
import ipaddress
import re
import uuid
from collections.abc import AsyncIterator, Coroutine
from contextlib import aclosing, suppress
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.ingress.completions import Answer, Model, to_spec
from app.ingress.errors import ApiError
from app.ingress.schema import CompletionRequest, parse_completion, parse_move
from app.ingress.streams import Streams
from deployments.control import MoveAccepted, MoveAnswer
from migration.messages import PathRequest
from migration.request import IngressId, RequestSpec
from policies.model import RequestId

MAX_LABEL = 128
_NOT_IN_LABEL = re.compile(r"[^A-Za-z0-9._:/@+=-]")
CLIENT_CLOSED = 499
Result = TypeVar("Result")


class Backend(Protocol):
    """What the routes need from the ingress replica."""

    id: IngressId
    model: Model
    streams: Streams
    max_body_bytes: int
    admin_key: str | None

    def health(self) -> str | None:
        """Why no request can be served now, None if it can."""
        ...

    def version(self) -> dict[str, str]:
        """Versions of Mell and of what it runs on."""
        ...

    async def state(self) -> dict[str, Any]:
        """`/mell/state`."""
        ...

    async def migrations(self) -> dict[str, Any]:
        """`/mell/migrations`."""
        ...

    async def migrate(self, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        """Move a request."""
        ...

    async def drain(self, replica: str) -> MoveAnswer:
        """Empty a replica and stop it."""
        ...


class EventStream(Response):
    """Server-sent events. `events` is closed when they are over, or the writing is cancelled."""

    media_type = "text/event-stream"

    def __init__(self, events: AsyncIterator[bytes]) -> None:
        self.status_code = 200
        self.background = None
        self.body = b""
        self._events = events
        self.init_headers({"Cache-Control": "no-cache", "X-Accel-Buffering": "no"})

    def init_headers(self, headers: Any = None) -> None:
        """As Starlette's, without a content length."""
        super().init_headers(headers)
        self.raw_headers = [pair for pair in self.raw_headers if pair[0] != b"content-length"]

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Write the stream."""
        await send({"type": "http.response.start", "status": 200, "headers": self.raw_headers})
        async with aclosing(self._events) as events:  # type: ignore[type-var]
            async for chunk in events:
                await send({"type": "http.response.body", "body": chunk, "more_body": True})
        await send({"type": "http.response.body", "body": b"", "more_body": False})


class Completion:
    """The ASGI response to a completion: opens the conversation, and ends it when the client leaves."""

    def __init__(self, request: CompletionRequest, spec: RequestSpec, backend: Backend) -> None:
        self._request = request
        self._spec = spec
        self._backend = backend

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError if nothing was sent yet."""
        with suppress(ClientDisconnect):
            await unless_left(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # One task opens, answers and closes: there is no moment at which a cancellation would leave it open.
        async with self._backend.streams.open(self._spec) as conversation:
            answer = Answer(self._request, conversation, self._backend.model)
            response: Response
            if self._request.stream:
                options = self._request.stream_options
                response = EventStream(answer.events(include_usage=bool(options and options.include_usage)))
            else:
                response = JSONResponse(await answer.whole())
            await response(scope, receive, send)


class Routes:
    """The handlers, over a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend

    def app(self) -> Starlette:
        """The ASGI application."""
        routes = [
            Route("/v1/completions", self.completions, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/live", self.live, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/mell/state", self.state, methods=["GET"]),
            Route("/mell/migrations", self.migrations, methods=["GET"]),
            Route("/mell/migrations", self.migrate, methods=["POST"]),
            Route("/mell/replicas/{replica}/drain", self.drain, methods=["POST"]),
        ]
        handlers = {
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _nobody_left,
            Exception: _internal_error,
        }
        return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]

    async def completions(self, http: Request) -> Completion:
        """POST /v1/completions."""
        backend = self._backend
        request_id = RequestId(f"cmpl-{uuid.uuid4().hex}")
        # Serve's proxy sees to it that every request and its response carry an X-Request-Id.
        label = read_label(http.headers.get("x-request-id")) or request_id
        request = parse_completion(await read_body(http, backend.max_body_bytes))
        spec = to_spec(request, backend.model, request_id, label, backend.id)
        return Completion(request, spec, backend)

    async def models(self, http: Request) -> Response:
        """GET /v1/models."""
        model = self._backend.model
        entry = {
            "id": model.id,
            "object": "model",
            "created": model.created,
            "owned_by": "mell",
            "max_model_len": model.max_context,
            "vocab_size": model.vocab_size,
        }
        return JSONResponse({"object": "list", "data": [entry]})

    async def health(self, http: Request) -> Response:
        """GET /health: 200 when requests can be served."""
        if reason := self._backend.health():
            raise ApiError(503, reason, code="unavailable")
        return PlainTextResponse("OK")

    async def live(self, http: Request) -> Response:
        """GET /live: 200 as long as the ingress runs."""
        return PlainTextResponse("OK")

    async def version(self, http: Request) -> Response:
        """GET /version."""
        return JSONResponse(self._backend.version())

    async def state(self, http: Request) -> Response:
        """GET /mell/state."""
        self._check_admin(http)
        return JSONResponse(await self._backend.state())

    async def migrations(self, http: Request) -> Response:
        """GET /mell/migrations."""
        self._check_admin(http)
        return JSONResponse(await self._backend.migrations())

    async def migrate(self, http: Request) -> Response:
        """POST /mell/migrations."""
        self._check_admin(http)
        order = parse_move(await read_body(http, self._backend.max_body_bytes))
        answer = await self._backend.migrate(order.request_id, order.target, order.path)
        if isinstance(answer, MoveAccepted):
            return JSONResponse({"id": answer.id}, 202)
        raise ApiError(answer.status, answer.message, details=answer.details)

    async def drain(self, http: Request) -> Response:
        """POST /mell/replicas/{id}/drain."""
        self._check_admin(http)
        answer = await self._backend.drain(http.path_params["replica"])
        if isinstance(answer, MoveAccepted):
            return JSONResponse({"id": answer.id, "state": "DRAINING"}, 202)
        raise ApiError(answer.status, answer.message, details=answer.details)

    def _check_admin(self, http: Request) -> None:
        """Raise ApiError unless the caller may see and move other clients' requests."""
        key = self._backend.admin_key
        if key is None:
            if not _is_loopback(http):
                raise ApiError(403, "without an admin key, /mell is open on loopback only: set ingress.admin_key")
            return
        given = http.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ApiError(401, "this call wants Authorization: Bearer <admin key>", code="invalid_api_key")


async def read_body(http: Request, limit: int) -> bytes:
    """The body.

    Raises:
        ApiError: 415 when it says that it is not JSON; 413 as soon as it is known to be too large.
        ClientDisconnect: the client left.
    """
    media_type = http.headers.get("content-type", "").partition(";")[0].strip().lower()
    # Not for order's sake: a web page may send other types to loopback, where /mell is open, without being asked.
    if media_type not in ("", "application/json"):
        raise ApiError(415, f"the body is {media_type}: send Content-Type: application/json")
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
    declared = http.headers.get("content-length", "")
    if declared.isdecimal() and int(declared) > limit:
        raise too_large
    body = bytearray()
    async for chunk in http.stream():
        body += chunk
        if len(body) > limit:
            raise too_large
    return bytes(body)


async def unless_left(receive: Receive, work: Coroutine[Any, Any, Result]) -> Result:
    """What `work` returns; it is cancelled when the client leaves. Raises ClientDisconnect.

    Only reading tells that a client left: uvicorn takes what is sent to nobody without a word. (Serve's proxy
    cancels the whole call instead.)
    """
    working = asyncio.create_task(work)
    leaving = asyncio.create_task(_left(receive))
    try:
        await asyncio.wait({working, leaving}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientDisconnect
    finally:
        working.cancel()
        leaving.cancel()
        await asyncio.wait({working, leaving})


async def _left(receive: Receive) -> None:
    while (await receive())["type"] != "http.disconnect":
        pass


def read_label(header: str | None) -> str | None:
    """The client's X-Request-Id, cut to 128 harmless characters; None if nothing is left of it."""
    return _NOT_IN_LABEL.sub("", header or "")[:MAX_LABEL] or None


def _is_loopback(http: Request) -> bool:
    try:
        return http.client is not None and ipaddress.ip_address(http.client.host).is_loopback
    except ValueError:
        return False


def _api_error(http: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status)


def _http_error(http: Request, error: HTTPException) -> Response:
    return JSONResponse(ApiError(error.status_code, str(error.detail)).body(), error.status_code, error.headers)


def _nobody_left(http: Request, error: ClientDisconnect) -> Response:
    """For the log only."""
    return Response(status_code=CLIENT_CLOSED)


def _internal_error(http: Request, error: Exception) -> Response:
    """Starlette logs the exception; the client learns nothing of our insides."""
    return JSONResponse(ApiError(500, "internal error").body(), 500)
