"""The HTTP routes, on plain Starlette: bodies are read with a limit, streams are written without layers."""

import hmac
import ipaddress
import json
import re
import uuid
from collections.abc import AsyncIterator
from contextlib import aclosing
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.ingress.completions import Answer, Model, to_spec
from app.ingress.errors import ApiError
from app.ingress.schema import parse_completion
from app.ingress.streams import Streams
from deployments.control import MoveAccepted, MoveAnswer
from migration.messages import PathRequest
from migration.request import IngressId
from policies.model import RequestId

MAX_LABEL = 128
_NOT_IN_LABEL = re.compile(r"[^A-Za-z0-9._:/@+=-]")
CLIENT_CLOSED = 499


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


class EventStream(Response):
    """Server-sent events. `events` is closed when the client leaves, whatever it is doing then."""

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
        ]
        handlers = {ApiError: _api_error, HTTPException: _http_error, Exception: _internal_error}
        return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]

    async def completions(self, http: Request) -> Response:
        """POST /v1/completions."""
        backend = self._backend
        request_id = RequestId(f"cmpl-{uuid.uuid4().hex}")
        # Serve's proxy sees to it that every request and its response carry an X-Request-Id.
        label = read_label(http.headers.get("x-request-id")) or request_id
        request = parse_completion(await read_body(http, backend.max_body_bytes))
        spec = to_spec(request, backend.model, request_id, label, backend.id)
        opened = backend.streams.open(spec)
        conversation = await opened.__aenter__()
        answer = Answer(request, conversation, backend.model)
        if request.stream:
            options = request.stream_options
            events = answer.events(include_usage=bool(options and options.include_usage))
            return EventStream(_then_close(events, opened))
        try:
            return JSONResponse(await answer.whole())
        finally:
            await opened.__aexit__(None, None, None)

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
        reference, target, path = _read_move(await read_body(http, self._backend.max_body_bytes))
        answer = await self._backend.migrate(reference, target, path)
        if isinstance(answer, MoveAccepted):
            return JSONResponse({"id": answer.id}, 202)
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


async def _then_close(events: AsyncIterator[bytes], opened: Any) -> AsyncIterator[bytes]:
    """The events; the conversation is over with the last of them, or with the client."""
    try:
        async for event in events:
            yield event
    finally:
        await opened.__aexit__(None, None, None)


async def read_body(http: Request, limit: int) -> bytes:
    """The body. Raises ApiError 413 as soon as it is known to be too large."""
    too_large = ApiError(413, f"the body is larger than {limit} bytes", code="request_too_large")
    declared = http.headers.get("content-length", "")
    if declared.isdigit() and int(declared) > limit:
        raise too_large
    body = bytearray()
    try:
        async for chunk in http.stream():
            body += chunk
            if len(body) > limit:
                raise too_large
    except ClientDisconnect:
        raise ApiError(CLIENT_CLOSED, "the client left") from None
    return bytes(body)


def read_label(header: str | None) -> str | None:
    """The client's X-Request-Id, cut to 128 harmless characters; None if nothing is left of it."""
    return _NOT_IN_LABEL.sub("", header or "")[:MAX_LABEL] or None


def _read_move(body: bytes) -> tuple[str, str | None, PathRequest]:
    """The members of POST /mell/migrations. Raises ApiError 400."""
    try:
        data = json.loads(body)
    except ValueError:
        raise ApiError(400, "the body is not valid JSON", code="invalid_json") from None
    if not isinstance(data, dict):
        raise ApiError(400, "the body must be a JSON object", code="invalid_body")
    if unknown := sorted(set(data) - {"request_id", "target", "path"}):
        raise ApiError(400, f"unknown parameter {unknown[0]!r}", param=unknown[0], code="unknown_parameter")
    reference, target = data.get("request_id"), data.get("target")
    if not isinstance(reference, str) or not reference:
        raise ApiError(400, "request_id must be a string", param="request_id", code="invalid_value")
    if target is not None and not isinstance(target, str):
        raise ApiError(400, "target must be a string", param="target", code="invalid_value")
    try:
        return reference, target, PathRequest(data.get("path", "auto"))
    except ValueError:
        raise ApiError(400, "path must be auto, kv or tokens", param="path", code="invalid_value") from None


def _is_loopback(http: Request) -> bool:
    try:
        return http.client is not None and ipaddress.ip_address(http.client.host).is_loopback
    except ValueError:
        return False


def _api_error(http: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status)


def _http_error(http: Request, error: HTTPException) -> Response:
    return JSONResponse(ApiError(error.status_code, str(error.detail)).body(), error.status_code)


def _internal_error(http: Request, error: Exception) -> Response:
    """Starlette logs the exception; the client learns nothing of our insides."""
    return JSONResponse(ApiError(500, "internal error").body(), 500)
