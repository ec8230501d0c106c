"""The HTTP routes, on plain Starlette."""

import hmac
import ipaddress
import re
import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Any, Protocol, TypeVar

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.ingress.access.admission import Admission, ClientCall, Gate
from app.ingress.asgi import EventStream, read_body, unless_disconnected
from app.ingress.errors import ApiError
from app.ingress.openai.answer import Answer
from app.ingress.openai.answers.choice import Shape
from app.ingress.openai.chat import CHAT
from app.ingress.openai.completions import COMPLETIONS
from app.ingress.openai.description.openapi import document
from app.ingress.openai.generation import Endpoint, Plan, to_plan
from app.ingress.openai.model import Model
from app.ingress.openai.requests.schema import Generation, parse_detokenize, parse_move, parse_tokenize
from app.ingress.openai.tokens import detokenize, tokenize
from app.ingress.page.routes import PageRoutes
from app.ingress.streams.conversation import opened
from app.ingress.streams.streams import Streams
from app.ingress.telemetry.requests import CLIENT_CLOSED_STATUS, RequestObserver, RequestTelemetry
from app.ingress.telemetry.scrape import CONTENT_TYPE
from app.settings import IngressSettings
from deployments.api.calls import MoveAccepted, MoveAnswer
from migration.protocol.messages import PathRequest
from migration.protocol.request import IngressId
from policies.model import RequestId

MAX_LABEL = 128
_NOT_IN_LABEL = re.compile(r"[^A-Za-z0-9._:/@+=-]")
DEFAULT_CHARGE_TOKENS = 256
"""Provisional charge for an answer without `max_tokens`: about the length of a usual answer."""

Body = TypeVar("Body")
RequestBody = TypeVar("RequestBody", bound=Generation)


class Backend(Protocol):
    """The routes' port to the ingress replica."""

    id: IngressId
    model: Model
    streams: Streams
    gate: Gate
    telemetry: RequestTelemetry
    settings: IngressSettings

    def health(self) -> str | None:
        """The reason why no request can be served now, None if requests can be served."""
        ...

    def version(self) -> dict[str, str]:
        """Versions of Mell, vLLM, Ray and torch."""
        ...

    async def metrics(self) -> bytes:
        """The body of `/metrics`."""
        ...

    async def state(self) -> dict[str, Any]:
        """The body of `/mell/state`."""
        ...

    async def migrations(self) -> dict[str, Any]:
        """The body of `/mell/migrations`."""
        ...

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`/mell/state` and `/mell/migrations` as of the scheduler's last epoch, without a call to any replica."""
        ...

    async def migrate(self, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        """Move a request to `target`, or to a replica of the scheduler's choice. `reference` is its id or label."""
        ...

    async def drain(self, replica: str) -> MoveAnswer:
        """Drain a replica, then stop it."""
        ...


class CompletionResponse:
    """The ASGI response to a completion: opens its conversations, and ends them if the client disconnects."""

    def __init__(
        self,
        request: Generation,
        plan: Plan,
        backend: Backend,
        shape: Shape,
        admission: Admission,
        observer: RequestObserver,
    ) -> None:
        self._request = request
        self._plan = plan
        self._backend = backend
        self._shape = shape
        self._admission = admission
        self._observer = observer

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the answer. Raises ApiError if nothing was sent yet."""
        with suppress(ClientDisconnect):
            await unless_disconnected(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # One task opens, answers and closes, so that no cancellation leaves a conversation open.
        async with opened(self._backend.streams.open, self._plan.specs) as conversations:
            answer = Answer(self._request, self._plan, conversations, self._backend.model, self._shape, self._observer)
            response: Response
            try:
                if self._request.stream:
                    options = self._request.stream_options
                    response = EventStream(answer.events(include_usage=bool(options and options.include_usage)))
                else:
                    response = JSONResponse(await answer.whole())
                await response(scope, receive, send)
            finally:
                self._admission.used = answer.close()


class Routes:
    """The route handlers over a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._page = PageRoutes(backend, self._check_admin)

    def close(self) -> None:
        """End the streams of open pages, for which a stopping server would otherwise wait."""
        self._page.feed.close()

    def app(self) -> Starlette:
        """The ASGI application."""
        backend = self._backend

        def limited(
            name: str, answer: Callable[[Request, Admission, RequestObserver], Awaitable[ASGIApp]]
        ) -> ClientCall:
            return ClientCall(
                backend.gate, backend.settings.request_timeout_s, partial(backend.telemetry.begin, name), answer
            )

        routes = [
            Route("/v1/completions", limited("completions", self.completions), methods=["POST"]),
            Route("/v1/chat/completions", limited("chat", self.chat), methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/tokenize", limited("tokenize", self.tokenize), methods=["POST"]),
            Route("/detokenize", limited("detokenize", self.detokenize), methods=["POST"]),
            Route("/health", self.health, methods=["GET"]),
            Route("/live", self.live, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
            Route("/mell/state", self.state, methods=["GET"]),
            Route("/mell/migrations", self.migrations, methods=["GET"]),
            Route("/mell/migrations", self.migrate, methods=["POST"]),
            Route("/mell/replicas/{replica}/drain", self.drain, methods=["POST"]),
            *self._page.routes(),
        ]
        handlers = {
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_disconnected,
            Exception: _internal_error,
        }
        return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]

    async def completions(self, http: Request, admission: Admission, observer: RequestObserver) -> CompletionResponse:
        """POST /v1/completions."""
        return await self._generate(http, admission, observer, COMPLETIONS)

    async def chat(self, http: Request, admission: Admission, observer: RequestObserver) -> CompletionResponse:
        """POST /v1/chat/completions."""
        return await self._generate(http, admission, observer, CHAT)

    async def _generate(
        self, http: Request, admission: Admission, observer: RequestObserver, endpoint: Endpoint[RequestBody]
    ) -> CompletionResponse:
        backend = self._backend
        request_id = RequestId(f"{endpoint.id_prefix}-{uuid.uuid4().hex}")
        # Serve's proxy adds an X-Request-Id to every request and response.
        label = read_label(http.headers.get("x-request-id")) or request_id
        request = await self._read(http, endpoint.parse)
        plan = to_plan(endpoint, request, backend.model, request_id, label, backend.id)
        self._check_prompt(request, max(len(prompt.tokens) for prompt in plan.prompts))
        admission.charge(max_usage_tokens(request, plan))
        observer.accepted(request_id, label, [prompt.tokens for prompt in plan.prompts])
        return CompletionResponse(request, plan, backend, endpoint.shape, admission, observer)

    def _check_prompt(self, request: Generation, tokens: int) -> None:
        limit = self._backend.settings.max_prompt_tokens
        if limit is not None and tokens > limit:
            field = request.prompt_field
            message = f"{field}: the prompt has {tokens} tokens, and the limit is {limit}"
            raise ApiError(400, message, param=field, code="context_length_exceeded")

    async def _read(self, http: Request, parse: Callable[[bytes], Body]) -> Body:
        return parse(await read_body(http, self._backend.settings.max_body_bytes))

    async def tokenize(self, http: Request, admission: Admission, observer: RequestObserver) -> Response:
        """POST /tokenize."""
        answer = tokenize(await self._read(http, parse_tokenize), self._backend.model)
        observer.served()
        return JSONResponse(answer)

    async def detokenize(self, http: Request, admission: Admission, observer: RequestObserver) -> Response:
        """POST /detokenize."""
        answer = detokenize(await self._read(http, parse_detokenize), self._backend.model)
        observer.served()
        return JSONResponse(answer)

    async def models(self, http: Request) -> Response:
        """GET /v1/models."""
        self._check_client(http)
        return JSONResponse({"object": "list", "data": [self._backend.model.entry()]})

    async def model(self, http: Request) -> Response:
        """GET /v1/models/{id}."""
        self._check_client(http)
        self._backend.model.check_name(http.path_params["model"])
        return JSONResponse(self._backend.model.entry())

    async def health(self, http: Request) -> Response:
        """GET /health: 200 if requests can be served."""
        if reason := self._backend.health():
            raise ApiError(503, reason, code="unavailable")
        return PlainTextResponse("OK")

    async def live(self, http: Request) -> Response:
        """GET /live: 200 as long as the ingress runs."""
        return PlainTextResponse("OK")

    async def version(self, http: Request) -> Response:
        """GET /version."""
        return JSONResponse(self._backend.version())

    async def metrics(self, http: Request) -> Response:
        """GET /metrics: open to every client, since it reveals nothing about any single request."""
        return Response(await self._backend.metrics(), media_type=CONTENT_TYPE)

    async def openapi(self, http: Request) -> Response:
        """GET /openapi.json."""
        return JSONResponse(document())

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

    def _check_client(self, http: Request) -> None:
        """Raise ApiError unless the caller has a valid API key or no keys are configured."""
        self._backend.gate.authenticate(http.headers.get("authorization"))

    def _check_admin(self, http: Request) -> None:
        """Raise ApiError unless the caller has the admin key or, without one, calls from loopback."""
        key = self._backend.settings.admin_key
        if key is None:
            if not _is_loopback(http):
                raise ApiError(403, "without an admin key, /mell is open on loopback only: set ingress.admin_key")
            return
        given = http.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ApiError(401, "this call requires Authorization: Bearer <admin key>", code="invalid_api_key")


def max_usage_tokens(request: Generation, plan: Plan) -> int:
    """The request's maximum token usage; answers without `max_tokens` count as DEFAULT_CHARGE_TOKENS."""
    lengths = [spec.max_tokens for spec in plan.specs]
    if request.longest[1] is None:
        lengths = [min(tokens, DEFAULT_CHARGE_TOKENS) for tokens in lengths]
    return plan.prompt_tokens + sum(lengths)


def read_label(header: str | None) -> str | None:
    """The client's X-Request-Id, reduced to at most 128 allowed characters; None if none is left."""
    return _NOT_IN_LABEL.sub("", header or "")[:MAX_LABEL] or None


def _is_loopback(http: Request) -> bool:
    try:
        return http.client is not None and ipaddress.ip_address(http.client.host).is_loopback
    except ValueError:
        return False


def _api_error(http: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


def _http_error(http: Request, error: HTTPException) -> Response:
    return JSONResponse(ApiError(error.status_code, str(error.detail)).body(), error.status_code, error.headers)


def _client_disconnected(http: Request, error: ClientDisconnect) -> Response:
    """The status is for the log only: the client is gone."""
    return Response(status_code=CLIENT_CLOSED_STATUS)


def _internal_error(http: Request, error: Exception) -> Response:
    """Starlette logs the exception; the response reveals no internals."""
    return JSONResponse(ApiError(500, "internal error").body(), 500)
