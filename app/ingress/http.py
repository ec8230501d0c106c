"""The HTTP routes, on plain Starlette."""

import hmac
import ipaddress
import re
import uuid
from collections.abc import Callable
from contextlib import suppress
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import Receive, Scope, Send

from app.ingress.answer import Answer, Shape
from app.ingress.asgi import EventStream, read_body, unless_left
from app.ingress.chat import CHAT
from app.ingress.completions import COMPLETIONS
from app.ingress.errors import ApiError
from app.ingress.generation import Endpoint, to_spec
from app.ingress.model import Model
from app.ingress.schema import Generation, parse_detokenize, parse_move, parse_tokenize
from app.ingress.streams import Streams
from app.ingress.tokens import detokenize, tokenize
from deployments.control import MoveAccepted, MoveAnswer
from migration.messages import PathRequest
from migration.request import IngressId, RequestSpec
from policies.model import RequestId

MAX_LABEL = 128
_NOT_IN_LABEL = re.compile(r"[^A-Za-z0-9._:/@+=-]")
CLIENT_CLOSED = 499
Body = TypeVar("Body")
Asked = TypeVar("Asked", bound=Generation)


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


class Completion:
    """The ASGI response to a completion: opens the conversation, and ends it when the client leaves."""

    def __init__(self, request: Generation, spec: RequestSpec, backend: Backend, shape: Shape) -> None:
        self._request = request
        self._spec = spec
        self._backend = backend
        self._shape = shape

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError if nothing was sent yet."""
        with suppress(ClientDisconnect):
            await unless_left(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # One task opens, answers and closes: there is no moment at which a cancellation would leave it open.
        async with self._backend.streams.open(self._spec) as conversation:
            answer = Answer(self._request, conversation, self._backend.model, self._shape)
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
            Route("/v1/chat/completions", self.chat, methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/tokenize", self.tokenize, methods=["POST"]),
            Route("/detokenize", self.detokenize, methods=["POST"]),
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
        return await self._generate(http, COMPLETIONS)

    async def chat(self, http: Request) -> Completion:
        """POST /v1/chat/completions."""
        return await self._generate(http, CHAT)

    async def _generate(self, http: Request, endpoint: Endpoint[Asked]) -> Completion:
        backend = self._backend
        request_id = RequestId(f"{endpoint.id_prefix}-{uuid.uuid4().hex}")
        # Serve's proxy sees to it that every request and its response carry an X-Request-Id.
        label = read_label(http.headers.get("x-request-id")) or request_id
        request = await self._read(http, endpoint.parse)
        spec = to_spec(endpoint, request, backend.model, request_id, label, backend.id)
        return Completion(request, spec, backend, endpoint.shape)

    async def _read(self, http: Request, parse: Callable[[bytes], Body]) -> Body:
        return parse(await read_body(http, self._backend.max_body_bytes))

    async def tokenize(self, http: Request) -> Response:
        """POST /tokenize."""
        return JSONResponse(tokenize(await self._read(http, parse_tokenize), self._backend.model))

    async def detokenize(self, http: Request) -> Response:
        """POST /detokenize."""
        return JSONResponse(detokenize(await self._read(http, parse_detokenize), self._backend.model))

    async def models(self, http: Request) -> Response:
        """GET /v1/models."""
        return JSONResponse({"object": "list", "data": [self._backend.model.entry()]})

    async def model(self, http: Request) -> Response:
        """GET /v1/models/{id}."""
        self._backend.model.check_name(http.path_params["model"])
        return JSONResponse(self._backend.model.entry())

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
        order = await self._read(http, parse_move)
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
