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

from app.ingress.access.admission import ClientCall, Gate, Visit
from app.ingress.conversation import opened
from app.ingress.errors import ApiError
from app.ingress.http.asgi import EventStream, read_body, unless_left
from app.ingress.metrics import CONTENT_TYPE
from app.ingress.observed import CLIENT_CLOSED_STATUS, Observed, Watch
from app.ingress.openai.answer import Answer
from app.ingress.openai.answers.choice import Shape
from app.ingress.openai.chat import CHAT
from app.ingress.openai.completions import COMPLETIONS
from app.ingress.openai.description.openapi import document
from app.ingress.openai.generation import Endpoint, Plan, to_plan
from app.ingress.openai.model import Model
from app.ingress.openai.requests.schema import Generation, parse_detokenize, parse_move, parse_tokenize
from app.ingress.openai.tokens import detokenize, tokenize
from app.ingress.page import Page
from app.ingress.streams import Streams
from deployments.control import MoveAccepted, MoveAnswer
from migration.messages import PathRequest
from migration.request import IngressId
from policies.model import RequestId

MAX_LABEL = 128
_NOT_IN_LABEL = re.compile(r"[^A-Za-z0-9._:/@+=-]")
UNSAID_TOKENS = 256
"""What a key is charged until an answer is over for which the client has not set a length: about a usual answer."""

Body = TypeVar("Body")
Asked = TypeVar("Asked", bound=Generation)


class Backend(Protocol):
    """What the routes need from the ingress replica."""

    id: IngressId
    model: Model
    streams: Streams
    gate: Gate
    observed: Observed
    max_body_bytes: int
    max_prompt_tokens: int | None
    request_timeout_s: float | None
    admin_key: str | None

    def health(self) -> str | None:
        """Why no request can be served now, None if it can."""
        ...

    def version(self) -> dict[str, str]:
        """Versions of Mell and of what it runs on."""
        ...

    async def metrics(self) -> bytes:
        """`/metrics`."""
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
    """The ASGI response to a completion: opens its conversations, and ends them when the client leaves."""

    def __init__(
        self, request: Generation, plan: Plan, backend: Backend, shape: Shape, visit: Visit, watch: Watch
    ) -> None:
        self._request = request
        self._plan = plan
        self._backend = backend
        self._shape = shape
        self._visit = visit
        self._watch = watch

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Answer. Raises ApiError if nothing was sent yet."""
        with suppress(ClientDisconnect):
            await unless_left(receive, self._answer(scope, receive, send))

    async def _answer(self, scope: Scope, receive: Receive, send: Send) -> None:
        # One task opens, answers and closes: there is no moment at which a cancellation would leave it open.
        async with opened(self._backend.streams.open, self._plan.specs) as conversations:
            answer = Answer(self._request, self._plan, conversations, self._backend.model, self._shape, self._watch)
            response: Response
            try:
                if self._request.stream:
                    options = self._request.stream_options
                    response = EventStream(answer.events(include_usage=bool(options and options.include_usage)))
                else:
                    response = JSONResponse(await answer.whole())
                await response(scope, receive, send)
            finally:
                self._visit.used = answer.close()


class Routes:
    """The handlers, over a backend."""

    def __init__(self, backend: Backend) -> None:
        self._backend = backend
        self._page = Page(backend, self._check_admin)

    def close(self) -> None:
        """End the streams of open pages, which would hold a server up that waits for its connections."""
        self._page.feed.close()

    def app(self) -> Starlette:
        """The ASGI application."""
        backend = self._backend

        def limited(name: str, answer: Callable[[Request, Visit, Watch], Awaitable[ASGIApp]]) -> ClientCall:
            return ClientCall(backend.gate, backend.request_timeout_s, partial(backend.observed.begin, name), answer)

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
            ClientDisconnect: _nobody_left,
            Exception: _internal_error,
        }
        return Starlette(routes=routes, exception_handlers=handlers)  # type: ignore[arg-type]

    async def completions(self, http: Request, visit: Visit, watch: Watch) -> Completion:
        """POST /v1/completions."""
        return await self._generate(http, visit, watch, COMPLETIONS)

    async def chat(self, http: Request, visit: Visit, watch: Watch) -> Completion:
        """POST /v1/chat/completions."""
        return await self._generate(http, visit, watch, CHAT)

    async def _generate(self, http: Request, visit: Visit, watch: Watch, endpoint: Endpoint[Asked]) -> Completion:
        backend = self._backend
        request_id = RequestId(f"{endpoint.id_prefix}-{uuid.uuid4().hex}")
        # Serve's proxy sees to it that every request and its response carry an X-Request-Id.
        label = read_label(http.headers.get("x-request-id")) or request_id
        request = await self._read(http, endpoint.parse)
        plan = to_plan(endpoint, request, backend.model, request_id, label, backend.id)
        self._check_prompt(request, max(len(prompt.tokens) for prompt in plan.prompts))
        visit.charge(most_tokens(request, plan))
        watch.accepted(request_id, label, [prompt.tokens for prompt in plan.prompts])
        return Completion(request, plan, backend, endpoint.shape, visit, watch)

    def _check_prompt(self, request: Generation, tokens: int) -> None:
        most = self._backend.max_prompt_tokens
        if most is not None and tokens > most:
            field = request.prompt_field
            message = f"{field}: the prompt has {tokens} tokens, and at most {most} are taken here"
            raise ApiError(400, message, param=field, code="context_length_exceeded")

    async def _read(self, http: Request, parse: Callable[[bytes], Body]) -> Body:
        return parse(await read_body(http, self._backend.max_body_bytes))

    async def tokenize(self, http: Request, visit: Visit, watch: Watch) -> Response:
        """POST /tokenize."""
        answer = tokenize(await self._read(http, parse_tokenize), self._backend.model)
        watch.served()
        return JSONResponse(answer)

    async def detokenize(self, http: Request, visit: Visit, watch: Watch) -> Response:
        """POST /detokenize."""
        answer = detokenize(await self._read(http, parse_detokenize), self._backend.model)
        watch.served()
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

    async def metrics(self, http: Request) -> Response:
        """GET /metrics: names and numbers, nothing of any one request."""
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
        """Raise ApiError unless the caller has an API key, where they are asked for."""
        self._backend.gate.authenticate(http.headers.get("authorization"))

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


def most_tokens(request: Generation, plan: Plan) -> int:
    """Prompts and answers, at most; where the client has not said how long an answer may be, usual answers."""
    longest = [spec.sampling.max_tokens for spec in plan.specs]
    if request.longest[1] is None:
        longest = [min(tokens, UNSAID_TOKENS) for tokens in longest]
    return plan.prompt_tokens + sum(longest)


def read_label(header: str | None) -> str | None:
    """The client's X-Request-Id, cut to 128 harmless characters; None if nothing is left of it."""
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


def _nobody_left(http: Request, error: ClientDisconnect) -> Response:
    """For the log only."""
    return Response(status_code=CLIENT_CLOSED_STATUS)


def _internal_error(http: Request, error: Exception) -> Response:
    """Starlette logs the exception; the client learns nothing of our insides."""
    return JSONResponse(ApiError(500, "internal error").body(), 500)
