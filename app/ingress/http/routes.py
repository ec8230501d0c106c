"""The routes of Mell's own API, on plain Starlette."""

import uuid
from collections.abc import Awaitable, Callable
from contextlib import suppress
from functools import partial
from typing import Protocol, TypeVar

from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp, Receive, Scope, Send

from app.ingress.access.admission import Admission, AdmissionLayer, Gate, admitted
from app.ingress.access.keys import bearer
from app.ingress.asgi import EventStream, read_body, read_label, unless_disconnected
from app.ingress.errors import ApiError
from app.ingress.openai.answer import Answer
from app.ingress.openai.answers.choice import Shape
from app.ingress.openai.chat import CHAT
from app.ingress.openai.completions import COMPLETIONS
from app.ingress.openai.description.openapi import document
from app.ingress.openai.generation import Endpoint, Plan, to_plan
from app.ingress.openai.model import Model
from app.ingress.openai.requests.schema import Generation, parse_detokenize, parse_tokenize
from app.ingress.openai.tokens import detokenize, tokenize
from app.ingress.streams.conversation import opened
from app.ingress.streams.streams import Streams
from app.ingress.telemetry.requests import RequestObserver, RequestTelemetry
from app.settings import IngressSettings
from migration.protocol.request import IngressId
from policies.model import RequestId

DEFAULT_CHARGE_TOKENS = 256
"""Provisional charge for an answer without `max_tokens`: about the length of a usual answer."""

ClientHandler = Callable[[Request, Admission, RequestObserver], Awaitable[ASGIApp]]
Body = TypeVar("Body")
RequestBody = TypeVar("RequestBody", bound=Generation)


class Backend(Protocol):
    """The routes' port to the ingress replica."""

    id: IngressId
    streams: Streams
    gate: Gate
    telemetry: RequestTelemetry
    settings: IngressSettings


class CompletionResponse:
    """The ASGI response to a completion: opens its conversations, and ends them if the client disconnects."""

    def __init__(
        self,
        request: Generation,
        plan: Plan,
        backend: Backend,
        model: Model,
        shape: Shape,
        admission: Admission,
        observer: RequestObserver,
    ) -> None:
        self._request = request
        self._plan = plan
        self._backend = backend
        self._model = model
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
            answer = Answer(self._request, self._plan, conversations, self._model, self._shape, self._observer)
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

    def __init__(self, backend: Backend, model: Model) -> None:
        self._backend = backend
        self._model = model

    def routes(self) -> list[Route]:
        """All routes."""
        backend = self._backend

        def limited(name: str, answer: ClientHandler) -> ASGIApp:
            begin = partial(backend.telemetry.begin, name)
            return AdmissionLayer(_endpoint(answer), backend.gate, backend.settings.request_timeout_s, begin)

        return [
            Route("/v1/completions", limited("completions", self.completions), methods=["POST"]),
            Route("/v1/chat/completions", limited("chat", self.chat), methods=["POST"]),
            Route("/v1/models", self.models, methods=["GET"]),
            Route("/v1/models/{model:path}", self.model, methods=["GET"]),
            Route("/tokenize", limited("tokenize", self.tokenize), methods=["POST"]),
            Route("/detokenize", limited("detokenize", self.detokenize), methods=["POST"]),
            Route("/openapi.json", self.openapi, methods=["GET"]),
        ]

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
        plan = to_plan(endpoint, request, self._model, request_id, label, backend.id)
        self._check_prompt(request, max(len(prompt.tokens) for prompt in plan.prompts))
        admission.charge(max_usage_tokens(request, plan))
        observer.accepted(request_id, label, plan.prompt_tokens, lambda: [prompt.tokens for prompt in plan.prompts])
        return CompletionResponse(request, plan, backend, self._model, endpoint.shape, admission, observer)

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
        answer = tokenize(await self._read(http, parse_tokenize), self._model)
        observer.served()
        return JSONResponse(answer)

    async def detokenize(self, http: Request, admission: Admission, observer: RequestObserver) -> Response:
        """POST /detokenize."""
        answer = detokenize(await self._read(http, parse_detokenize), self._model)
        observer.served()
        return JSONResponse(answer)

    async def models(self, http: Request) -> Response:
        """GET /v1/models."""
        self._check_client(http)
        return JSONResponse({"object": "list", "data": [self._model.entry()]})

    async def model(self, http: Request) -> Response:
        """GET /v1/models/{id}."""
        self._check_client(http)
        self._model.check_name(http.path_params["model"])
        return JSONResponse(self._model.entry())

    async def openapi(self, http: Request) -> Response:
        """GET /openapi.json."""
        return JSONResponse(document())

    def _check_client(self, http: Request) -> None:
        """Raise ApiError unless the caller has a valid API key or no keys are configured."""
        self._backend.gate.authenticate(bearer(http.headers.get("authorization")))


def _endpoint(answer: ClientHandler) -> ASGIApp:
    """A handler of admitted calls as an application."""

    async def app(scope: Scope, receive: Receive, send: Send) -> None:
        http, call = Request(scope, receive), admitted(scope)
        response = await answer(http, call.admission, call.observer)
        await response(scope, receive, send)

    return app


def max_usage_tokens(request: Generation, plan: Plan) -> int:
    """The request's maximum token usage; answers without `max_tokens` count as DEFAULT_CHARGE_TOKENS."""
    lengths = [spec.max_tokens for spec in plan.specs]
    if request.longest[1] is None:
        lengths = [min(tokens, DEFAULT_CHARGE_TOKENS) for tokens in lengths]
    return plan.prompt_tokens + sum(lengths)
