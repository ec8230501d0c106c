"""The ASGI application over the Rust frontend's process, which it keeps running."""

import asyncio
import logging
import time
import uuid
from collections.abc import Iterable, Sequence
from contextlib import suppress
from dataclasses import dataclass
from http import HTTPStatus
from typing import Any, Self

from starlette.types import Message, Receive, Scope, Send
from vllm.entrypoints.launchers.app import build_app
from vllm.tokenizers import cached_tokenizer_from_config

from app.frontend.app import frontend_kwargs, serve_args
from app.frontend.calls import CURRENT
from app.frontend.core import AddCall
from app.frontend.guard.dialects import openai_ending
from app.frontend.guard.routes import OPEN_ROUTES, RouteTask, described
from app.frontend.rust.core import RustCore
from app.frontend.rust.exchange import AnswerHead, ExchangeBroken, HttpExchange
from app.frontend.rust.process import FrontendProcess, Listeners, find_binary
from app.ingress.asgi import unless_disconnected
from app.ingress.config import IngressConfig
from app.ingress.errors import ApiError
from app.ingress.streams.streams import Streams
from deployments.engine.arguments import is_pooling, of_frontends
from deployments.metrics.exposition import Family
from deployments.metrics.vllm import expose_text
from migration.protocol.core_messages import Adapter, CoreRequest, encode_request
from migration.protocol.ports import Loss, LossKind
from migration.protocol.request import IngressId
from migration.run.reader import NotServed

log = logging.getLogger("ray.serve")

SERVED = frozenset({"/v1/models", "/v1/completions", "/v1/chat/completions", "/tokenize", "/detokenize"})
"""The open routes that the Rust frontend of the pinned vLLM has. A test asks it for the others."""

_OF_MELL = frozenset(
    {
        "disable_sliding_window",
        "dtype",
        "enable_auto_tool_choice",
        "enable_prefix_caching",
        "max_model_len",
        "model_class_overrides",
        "model_impl",
        "prefix_caching_hash_algo",
        "served_model_name",
    }
)
"""Arguments that reach the process otherwise, or have no effect there."""

_PASSED_ON = (b"content-type", b"content-length", b"cache-control")
"""Headers of answers for clients."""

_ERROR = b'data: {"error"'
"""The beginning of the event by which the process ends a stream whose request is lost, without the reason."""

_RESTART_S = 1.0
_DOWN_S = 8.0
"""Time without a process after which the ingress is unhealthy."""


@dataclass(frozen=True, slots=True)
class _Life:
    """A process that serves, and the core that it is connected to."""

    process: FrontendProcess
    core: RustCore
    listeners: Listeners

    async def end(self) -> None:
        await self.process.end()
        await self.core.close()
        self.listeners.forget()


class RustFrontend:
    """vLLM's Rust frontend over the ingress's streams; `app` serves it."""

    def __init__(self, config: IngressConfig, streams: Streams, ingress: IngressId) -> None:
        """Raises ValueError, TypeError: there is no binary, or an argument of vLLM has an invalid value."""
        self._binary = config.rust_binary or find_binary()
        self._args, self._vllm = serve_args(config)
        if is_pooling(self._vllm):
            raise ValueError("ingress.frontend: vLLM's Rust frontend has no endpoints for pooling models: write vllm")
        self._config = config
        self._streams = streams
        self._ingress = ingress
        self._life: _Life | None = None
        self._down_since = 0.0
        self._keeping: asyncio.Task[None] | None = None

    @classmethod
    async def start(cls, config: IngressConfig, streams: Streams, ingress: IngressId) -> Self:
        """Start the process.

        Raises:
            ValueError, TypeError: there is no binary, or an argument of vLLM has an invalid value.
        """
        frontend = cls(config, streams, ingress)
        life = frontend._life = await frontend._begin()
        frontend._keeping = asyncio.create_task(frontend._keep(life))
        return frontend

    async def _begin(self) -> _Life:
        listeners, limit = Listeners(), self._config.max_prompt_tokens
        classes = self._config.service_classes
        core = RustCore(self._streams, self._ingress, listeners, self._vllm, limit, classes)
        core.serve()
        try:
            process = await FrontendProcess.start(self._binary, arguments(self._config), listeners)
        except BaseException:
            await core.close()
            listeners.forget()
            raise
        listeners.unlink()
        return _Life(process, core, listeners)

    async def _keep(self, life: _Life) -> None:
        """Replace the process whenever it ends. Its answers under way have ended with it, and so do their requests."""
        while True:
            status = await asyncio.shield(life.process.ended)
            self._life, self._down_since = None, time.monotonic()
            log.error("vllm-rs ended with status %d; starting another: %s", status, life.process.last_lines)
            await life.end()
            life = self._life = await self._begin_again()

    async def _begin_again(self) -> _Life:
        while True:
            try:
                return await self._begin()
            except (ValueError, OSError) as error:
                log.error("vllm-rs cannot be started: %s", error)
            await asyncio.sleep(_RESTART_S)

    # --- calls ----------------------------------------------------------------------------------------

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application. While no replica is running, a request waits for one, up to `no_replica_timeout_s`.

        Raises:
            ApiError: before the answer has begun.
        """
        route = OPEN_ROUTES[scope["path"]]
        if route.path not in SERVED:
            raise ApiError(404, f"vLLM's Rust frontend has no {route.path}: ingress.frontend: vllm has it")
        body = (await receive())["body"]
        if route.task is RouteTask.GENERATE and not self._streams.serving:
            await self._streams.wait_until_serving(self._config.no_replica_timeout_s)
            if not self._streams.serving:
                raise ApiError.of(Loss(LossKind.UNAVAILABLE, "no replica accepts requests"))
        life = self._serving()
        await unless_disconnected(receive, self._answer(life, scope, route.task is RouteTask.GENERATE, body, send))

    def _serving(self) -> _Life:
        """The process that serves. Raises ApiError 503 while it restarts."""
        if self._life is None:
            raise ApiError(503, "the frontend restarts; try again", code="unavailable", retry_after_s=_RESTART_S)
        return self._life

    async def _answer(self, life: _Life, scope: Scope, adds: bool, body: bytes, send: Send) -> None:
        api_call = CURRENT.get()
        label = api_call.label if api_call is not None else ""
        # Clients choose the label, and may give the same one to several calls.
        name = f"{label}-{uuid.uuid4().hex[:8]}" if label else uuid.uuid4().hex
        headers = [(b"x-request-id", name.encode()), *(h for h in scope["headers"] if h[0] != b"x-request-id")]
        call = life.core.expect(1, api_call, name) if adds else None
        exchange: HttpExchange | None = None
        try:
            exchange = await HttpExchange.begin(life.listeners.address, scope["method"], scope["path"], headers, body)
            await _relay(exchange, await _head(exchange, call), send)
        except NotServed as error:
            raise ApiError.of(error.loss) from error
        except ExchangeBroken as error:
            raise ApiError.of(Loss(LossKind.UNAVAILABLE, "the frontend has ended; try again")) from error
        finally:
            if exchange is not None:
                exchange.close()
            if call is not None:
                life.core.forget(call)

    # --- the ingress's other questions ----------------------------------------------------------------

    @property
    def max_context(self) -> int:
        """The model's context in tokens."""
        context: int = self._vllm.model_config.max_model_len
        return context

    def document(self) -> dict[str, Any]:
        """The OpenAPI document: of vLLM's Python server, the routes that the Rust one has."""
        document = described(build_app(self._args, ("generate",), self._vllm.model_config).openapi())
        return {**document, "paths": {path: item for path, item in document["paths"].items() if path in SERVED}}

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        tokenizer = cached_tokenizer_from_config(self._vllm.model_config)
        text: str = tokenizer.decode(list(tokens), skip_special_tokens=False)
        return text

    async def tokens(self, body: bytes) -> Sequence[int]:
        """Refuses text, which becomes tokens in the process that serves. Raises ApiError."""
        reason = "with `ingress.frontend: rust`, give the prompt as token ids: POST /tokenize has them"
        raise ApiError(400, reason, param="prompt", code="invalid_value")

    def names(self, request: CoreRequest) -> tuple[int, ...]:
        """The names of the full KV blocks of a request's prompt, of text only; none if they are not known."""
        return self._serving().core.names(request, encode_request(request))

    def why_unnamed(self, request: CoreRequest) -> str:
        """The one reason why `names` gives none for a request."""
        return self._serving().core.why_unnamed(request)

    def serve_adapters(self, adapters: Iterable[Adapter]) -> None:
        """Raises ValueError: the settings refuse adapters with this frontend."""
        raise ValueError("the Rust frontend serves no adapters")

    def check_health(self) -> None:
        """Raises RuntimeError if the process cannot be kept running, or its core has failed."""
        if self._life is None and time.monotonic() - self._down_since > _DOWN_S:
            raise RuntimeError("vllm-rs cannot be started")
        if self._life is not None and not self._life.core.reading:
            raise RuntimeError("the engine core for vllm-rs has failed")

    async def metrics(self, replica: str) -> Sequence[Family]:
        """The process's own metrics of requests, labelled with `replica`; none while it restarts."""
        if (life := self._life) is None:
            return ()
        with suppress(ExchangeBroken):
            exchange = await HttpExchange.begin(life.listeners.address, "GET", "/metrics", (), b"")
            try:
                return expose_text((await exchange.content()).decode(), replica)
            finally:
                exchange.close()
        return ()

    async def close(self) -> None:
        """End the process and all requests."""
        if self._keeping is not None:
            self._keeping.cancel()
            await asyncio.wait({self._keeping})
        if self._life is not None:
            await self._life.end()


def arguments(config: IngressConfig) -> dict[str, Any]:
    """The arguments of the process: those of `vllm serve` that the settings stand for. It refuses what it lacks."""
    given = of_frontends(config.engine_kwargs) | frontend_kwargs(config)
    return {
        **{name: value for name, value in given.items() if name not in _OF_MELL},
        "model_tag": config.model_source,
        "served_model_name": [config.model_id],
        # It has no list of domains that media may be fetched from.
        "language_model_only": True,
    }


async def _head(exchange: HttpExchange, call: AddCall | None) -> AnswerHead:
    """The head of the answer, of a stream once a replica has taken its request.

    Raises:
        NotServed: no replica takes it.
        ExchangeBroken: the process has ended.
    """
    if call is None:
        return await exchange.head()
    heading, placing = asyncio.ensure_future(exchange.head()), asyncio.ensure_future(call.placed())
    try:
        await asyncio.wait({heading, placing}, return_when=asyncio.FIRST_COMPLETED)
        if not heading.done():
            await placing
        head = await heading
        if head.status == HTTPStatus.OK:
            await placing
        return head
    finally:
        for waiting in (heading, placing):
            waiting.cancel()
        await asyncio.wait({heading, placing})


async def _relay(exchange: HttpExchange, head: AnswerHead, send: Send) -> None:
    """Pass an answer on. Raises ApiError for an error that has no JSON body, or that comes from replicas."""
    kind, call = head.header(b"content-type"), CURRENT.get()
    if head.status == HTTPStatus.INTERNAL_SERVER_ERROR and call is not None and call.failure is not None:
        raise call.failure
    if head.status >= HTTPStatus.BAD_REQUEST and kind != b"application/json":
        text = (await exchange.content()).decode(errors="replace")
        raise ApiError(head.status, text or HTTPStatus(head.status).phrase)
    headers = [pair for pair in head.headers if pair[0] in _PASSED_ON]
    start: Message = {"type": "http.response.start", "status": head.status, "headers": headers}
    if not kind.startswith(b"text/event-stream"):
        content = await exchange.content()
        await send(start)
        await send({"type": "http.response.body", "body": content, "more_body": False})
        return
    await send(start)
    try:
        async for chunk in exchange.chunks():
            if call is not None and call.failure is not None and _ERROR in chunk:
                end = chunk.partition(_ERROR)[0] + openai_ending(call.failure)
                break
            await send({"type": "http.response.body", "body": chunk, "more_body": True})
        else:
            end = b""
    except ExchangeBroken:
        error = ApiError(500, "the frontend has ended")
        if call is not None:
            call.failure = error
        end = openai_ending(error)
    await send({"type": "http.response.body", "body": end, "more_body": False})
