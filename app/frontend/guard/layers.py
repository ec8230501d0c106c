"""The layers around vLLM's applications, one of each model, outermost first:

    OpenRoutes        other paths and methods are refused
    DialectErrors     errors of the layers below are answered as the route's clients expect
    AdmissionLayer    log line and metrics, API key and its limits, time limit (`app.ingress.access.admission`)
    BodyGuard         the body is read within its limits, checked, and charged to the key; the call gets its model and
                      its class
    CallLayer         the call is known to the core below vLLM's application; at its end, its use of tokens is settled
    ApplicationErrors errors of vLLM's application are answered as the route's clients expect; a stream has no head
                      before a replica has taken its request

Chunks of answers pass through unread, but for the first bytes of those of `/v1/messages`.
"""

import asyncio
import re
import uuid
from collections.abc import Awaitable, Callable, Iterable, Mapping
from functools import partial
from typing import Any

from starlette.datastructures import Headers, QueryParams
from starlette.requests import Request
from starlette.responses import JSONResponse
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from app.frontend.calls import CURRENT, ApiCall
from app.frontend.guard.bodies import MAX_STOPS, BodyLimits, check_members, decode_body
from app.frontend.guard.dialects import ApplicationErrors, Dialect, DialectErrors
from app.frontend.guard.media import MAX_FETCHED_MIB, NO_DOMAIN, MediaGate
from app.frontend.guard.models import GuardedModel, GuardedModels, list_models
from app.frontend.guard.routes import MODELS, OPEN_ROUTES, OpenRoute, dialect_of, why_closed
from app.ingress.access.admission import AdmissionLayer, AdmittedCall, Gate, admitted, may_use
from app.ingress.access.classes import HEADER
from app.ingress.asgi import TrackedSend, read_body, read_label
from app.ingress.config import Tenancy
from app.ingress.errors import ApiError
from app.ingress.telemetry.requests import RequestTelemetry
from app.settings import IngressSettings
from migration.protocol.core_messages import decode_request
from migration.protocol.request import RequestSpec, Trait

_PRIORITY = re.compile(rb"-?[0-9]{1,18}")


def guarded(models: GuardedModels[Any], gate: Gate, telemetry: RequestTelemetry, settings: IngressSettings) -> ASGIApp:
    """vLLM's applications of the models as clients may reach them."""
    media = MediaGate(settings.max_media)

    def layered(route: OpenRoute) -> ASGIApp:
        if route.endpoint is None:
            return DialectErrors(KeyLayer(models, gate, route.dialect), route.dialect)
        begin, dialect = partial(telemetry.begin, route.endpoint), route.dialect
        guard = BodyGuard(CallLayer(dialect), models, route, settings.max_body_bytes, media)
        admission = AdmissionLayer(guard, gate, settings.request_timeout_s, begin, dialect.key, dialect.ending)
        return DialectErrors(admission, dialect)

    return OpenRoutes({path: (route.method, layered(route)) for path, route in OPEN_ROUTES.items()})


def body_limits(settings: IngressSettings, max_context: int) -> BodyLimits:
    """The limits of calls of a model with this context, in tokens."""
    return BodyLimits(
        settings.max_choices,
        settings.max_prompt_tokens or max_context,
        settings.max_media,
        frozenset(settings.allowed_media_domains),
    )


def vllm_environment(settings: IngressSettings) -> dict[str, str]:
    """Environment variables that vLLM has to find when it is imported: its limits are not below the guard's."""
    return {
        "VLLM_MAX_STOP_STRINGS": str(MAX_STOPS),
        "VLLM_MAX_COMPLETION_PROMPTS": str(settings.max_choices),
        "VLLM_MAX_N_SEQUENCES": str(settings.max_choices),
        "VLLM_MEDIA_URL_ALLOW_REDIRECTS": "0",
        "VLLM_MAX_IMAGE_PIXELS": str(settings.max_image_pixels),
        "VLLM_MAX_MEDIA_DOWNLOAD_SIZE_MB": str(MAX_FETCHED_MIB),
    }


def vllm_media_domains(settings: IngressSettings) -> list[str]:
    """vLLM's own list of allowed domains for the settings."""
    return list(settings.allowed_media_domains) or [NO_DOMAIN]


class OpenRoutes:
    """Passes a call on to its path's application; other paths and methods are refused, and websockets closed.

    `routes` are methods and applications by path.
    """

    def __init__(self, routes: Mapping[str, tuple[str, ASGIApp]]) -> None:
        self._routes = routes

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on, or refuse it."""
        if scope["type"] == "websocket":
            await send({"type": "websocket.close", "code": 1000})
        elif scope["type"] == "http":
            method, app = self._routes.get(scope["path"], ("", _closed))
            if method not in ("", scope["method"]):
                app = _other_method
            await app(scope, receive, send)


async def _closed(scope: Scope, receive: Receive, send: Send) -> None:
    path = scope["path"]
    body = dialect_of(path).body(ApiError(404, why_closed(path) or "Not Found"))
    await JSONResponse(body, 404)(scope, receive, send)


async def _other_method(scope: Scope, receive: Receive, send: Send) -> None:
    route = OPEN_ROUTES[scope["path"]]
    body = route.dialect.body(ApiError(405, f"{route.path} has the method {route.method} only"))
    await JSONResponse(body, 405, {"Allow": route.method})(scope, receive, send)


class KeyLayer:
    """Passes on calls with a valid API key, without a body."""

    def __init__(self, models: GuardedModels[Any], gate: Gate, dialect: Dialect) -> None:
        self._models = models
        self._gate = gate
        self._dialect = dialect

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass the call on. Raises ApiError 401, and as `GuardedModels.called`."""
        key = self._gate.authenticate(self._dialect.key(Headers(scope=scope)))
        allowed = key.models if key is not None else ()
        if scope["path"] == MODELS and len(self._models.all) > 1:
            shown = [model for model in self._models.all if may_use(allowed, model.id)]
            await JSONResponse(await list_models(shown, _to_vllm(scope)))(scope, receive, send)
            return
        model = self._models.called(QueryParams(scope["query_string"]).get("model"), allowed)
        await model.app(_to_vllm(scope), _replayed(b"", receive), send)


class BodyGuard:
    """Reads and checks the body, which the application gets in one piece, once there is room for its media."""

    def __init__(
        self, app: "CallLayer", models: GuardedModels[Any], route: OpenRoute, max_bytes: int, media: MediaGate
    ) -> None:
        self._app = app
        self._models = models
        self._route = route
        self._max_bytes = max_bytes
        self._media = media

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Pass an admitted call on to the application of its model.

        Raises:
            ApiError: the body is refused, or the call's key may not use it.
        """
        content = await read_body(Request(scope, receive), self._max_bytes)
        members = decode_body(content)
        through = admitted(scope)
        model = self._models.called(members.get("model"), through.admission.models)
        through.name_model(model.id)
        body = check_members(members, content, self._route, model.limits)
        through.assign(Headers(scope=scope).get(HEADER), body.service_tier, model.deadlines)
        through.admission.charge(body.max_tokens)
        held = await self._media.enter(body.media)
        # Of several conversations, vLLM makes one request after the other.
        prepared = held.release if self._route.inputs != "messages" else lambda: None
        try:
            session = read_session(Headers(scope=scope).get("x-session-id"), body.session)
            await self._app(model, scope, _replayed(body.content, receive), send, prepared, session)
        finally:
            held.release()


class CallLayer:
    """Makes a call known to the core below, and settles its use of tokens."""

    def __init__(self, dialect: Dialect) -> None:
        self._dialect = dialect

    async def __call__(
        self,
        model: GuardedModel,
        scope: Scope,
        receive: Receive,
        send: Send,
        prepared: Callable[[], None],
        session: str = "",
    ) -> None:
        """Pass an admitted call of a model on. The core calls `prepared` once it has the request."""
        through = admitted(scope)
        label = read_label(Headers(scope=scope).get("x-request-id")) or ""
        admission = through.admission
        call = ApiCall(
            label,
            through.observer.timer,
            prepared,
            service_class=admission.service_class,
            tenant=_tenant(model.tenancy, admission.key),
            session=session,
        )
        through.sent.usage = lambda: (call.prompt_tokens, call.completion_tokens)
        client = _WatchedClient(receive, send, through.sent)
        token = CURRENT.set(call)
        app = ApplicationErrors(model.app, self._dialect)
        answering = asyncio.ensure_future(app(_to_vllm(scope, call.label), client.receive, client.send))
        CURRENT.reset(token)
        try:
            await asyncio.shield(answering)
        except asyncio.CancelledError:
            await _end(answering, client)
            raise
        finally:
            client.close()
            _settle(call, through, client.disconnected)


def _tenant(tenancy: Tenancy, key: str | None) -> str:
    match tenancy:
        case Tenancy.ALL:
            return ""
        case Tenancy.KEY:
            return key or ""
        case Tenancy.CALL:
            return uuid.uuid4().hex


def read_session(header: str | None, member: Any) -> str:
    """The session that a client names by the header `X-Session-Id`, or by `prompt_cache_key`; empty for none."""
    named = header or (member if isinstance(member, str) else "")
    return named if len(named) <= MAX_SESSION else ""


MAX_SESSION = 256
"""The longest name of a session, in characters; longer ones are ignored."""

_END_S = 1.0
"""Time for vLLM's application to end a call."""


async def _end(answering: asyncio.Future[None], client: "_WatchedClient") -> None:
    """End a call that is late, and its requests.

    vLLM's handlers run in tasks of their own, which end their requests if the client leaves, and otherwise go on.
    """
    client.leave()
    await asyncio.wait({answering}, timeout=_END_S)
    answering.cancel()
    await asyncio.gather(answering, return_exceptions=True)


class _WatchedClient:
    """Passes messages on, and notices a disconnect before the answer's end. `leave` makes it look like one.

    `receive` has the whole body as its first message.
    """

    def __init__(self, receive: Receive, send: Send, sent: TrackedSend) -> None:
        self._receive = receive
        self._send = send
        self._sent = sent
        self._left = False
        self._gone = asyncio.Event()
        self._watching: asyncio.Task[None] | None = None
        self._has_body = False
        self.disconnected = False

    async def receive(self) -> Message:
        """The body; then a disconnect, once the client has left or is to leave. Several tasks may wait for that."""
        if not self._has_body:
            self._has_body = True
            return await self._receive()
        if self._watching is None:
            self._watching = asyncio.create_task(self._watch())
        await self._gone.wait()
        return {"type": "http.disconnect"}

    async def _watch(self) -> None:
        try:
            while (await self._receive())["type"] != "http.disconnect":
                pass
            self.disconnected = not self._sent.complete
        finally:
            self._gone.set()

    def send(self, message: Message) -> Awaitable[None]:
        """Send a message, unless the client is to leave. No coroutine: each chunk of an answer passes here."""
        return _unsent() if self._left else self._send(message)

    def leave(self) -> None:
        """Have the application believe that the client has left."""
        self._left = True
        self._gone.set()

    def close(self) -> None:
        """Watch no more."""
        if self._watching is not None:
            self._watching.cancel()


async def _unsent() -> None:
    pass


def _settle(call: ApiCall, through: AdmittedCall, disconnected: bool) -> None:
    """Settle the charge and report the outcome of a call. A later exception or time-out replaces the outcome."""
    requests, observer, status = call.requests, through.observer, through.sent.status
    prompt_tokens, tokens = call.prompt_tokens, call.completion_tokens
    through.admission.used = prompt_tokens + tokens
    if requests:
        first = requests[0].spec
        observer.accepted(first.id, call.label or first.label, prompt_tokens, lambda: _prompts(call.prompts.values()))
    for request in requests:
        observer.choice(request)
    answered = status is not None and through.sent.complete and not disconnected
    # At a stop string vLLM aborts the request: the engine has not ended it.
    finishes = [request.finish or "stop" for request in requests] if answered else [None]
    observer.answered(tokens, finishes)
    if status is not None and answered:
        if call.failure is not None:
            observer.failed(call.failure)
        elif status >= 400:
            observer.failed(ApiError(status, ""))
        elif all(Trait.POOLED in request.spec.traits for request in requests):
            observer.served()


def _prompts(specs: Iterable[RequestSpec]) -> list[list[int]]:
    return [decode_request(spec.body).prompt_token_ids or [] for spec in specs]


def _to_vllm(scope: Scope, label: str = "") -> Scope:
    """The scope for vLLM: of the client's headers it has the label and the priority.

    Without an origin, vLLM does not allow web pages of other origins to read the answer. The other headers that vLLM
    reads choose an engine, or name a session.
    """
    headers = [(b"content-type", b"application/json")]
    if label:
        headers.append((b"x-request-id", label.encode()))
    for name, value in scope["headers"]:
        if name == b"x-vllm-priority" and _PRIORITY.fullmatch(value):
            headers.append((name, value))
    # Before version 2.4, applications watch for a disconnect: Starlette would wait for `send` to raise OSError, which
    # uvicorn's does not.
    return {**scope, "asgi": {"version": "3.0", "spec_version": "2.3"}, "headers": headers, "query_string": b""}


def _replayed(content: bytes, receive: Receive) -> Receive:
    """Receives `content` as the whole body, and what comes after it from `receive`."""
    body: list[Message] = [{"type": "http.request", "body": content, "more_body": False}]

    async def replay() -> Message:
        return body.pop() if body else await receive()

    return replay
