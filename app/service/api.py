"""The API of one model of an ingress: vLLM's server application, and what operators ask about prompts."""

import asyncio
import json
import logging
import os
import time
import uuid
from collections.abc import Callable, Iterable, Sequence
from typing import TYPE_CHECKING

import msgspec
from fastapi.routing import APIRoute
from starlette.types import Receive, Scope, Send

from app.frontend.guard.bodies import BodyLimits, check_body
from app.frontend.guard.layers import body_limits, read_session, vllm_environment
from app.frontend.guard.routes import OPEN_ROUTES
from app.ingress.config import IngressConfig, ModelConfig
from app.ingress.errors import RETRY_S, ApiError
from app.ingress.http.openapi import document
from app.ingress.http.orders import CopyPrompt, MatchOrder, PromptOrder
from app.ingress.streams.placing import NO_CONTENT, PromptContent
from app.ingress.streams.streams import Streams
from deployments.metrics.exposition import Family
from migration.protocol.continuing import to_spec
from migration.protocol.core_messages import Adapter, CoreRequest, decode_request, encode_request
from migration.protocol.request import IngressId, RequestSpec
from policies.cluster.changes import Arrival
from policies.model import AdapterId, RequestId, Tokens
from policies.precedence import DEFAULT_CLASS, Precedence

if TYPE_CHECKING:
    from app.frontend.app import VllmFrontend

log = logging.getLogger("ray.serve")

ENVIRONMENT = {
    # vLLM would close all existing handlers, among them that of Serve's log.
    "VLLM_CONFIGURE_LOGGING": "0",
    "VLLM_TARGET_DEVICE": "cpu",
    # Engines refuse a context that their model does not have; paced ones have no model.
    "VLLM_ALLOW_LONG_MAX_MODEL_LEN": "1",
    "VLLM_NO_USAGE_STATS": "1",
    # Mell checks the keys of clients, and vLLM's application gets none.
    "VLLM_API_KEY": "",
    # Routes and stored answers that are no part of the API.
    "VLLM_SERVER_DEV_MODE": "0",
    "VLLM_ENABLE_RESPONSES_API_STORE": "0",
    # `app.frontend.media`
    "VLLM_MEDIA_CONNECTOR": "mell",
    # vLLM's resolvers would make a path of any model's name in a request.
    "VLLM_ALLOW_RUNTIME_LORA_UPDATING": "0",
}
"""The environment in which vLLM makes its configuration: without a device, even if there is one."""


_ANY_CONTEXT = 1 << 31
"""The context of a model whose application has not started, which then judges prompts itself."""


class VllmApi:
    """The API of a model, of an ingress process. `start` makes vLLM's application, on the running event loop."""

    def __init__(self, config: IngressConfig, model: ModelConfig) -> None:
        # Before vLLM is imported.
        os.environ.update(ENVIRONMENT | vllm_environment(config))
        self._config = config
        self._model = model
        self._frontend: VllmFrontend | None = None
        self._starting: asyncio.Task[None] | None = None
        """The start of an application that waits for a replica."""
        self._adapters: tuple[Adapter, ...] = model.adapters

    @property
    def names(self) -> frozenset[str]:
        """The names of the model in calls, those of its adapters included."""
        return self._model.names.union(adapter.lora_name for adapter in self._adapters)

    @property
    def limits(self) -> BodyLimits:
        """The limits of the model's calls."""
        context = self._frontend.max_context if self._frontend is not None else _ANY_CONTEXT
        return body_limits(self._config, context)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """vLLM's application, as an ASGI application. While it starts, requests wait up to `no_replica_timeout_s`.

        Raises:
            ApiError: 503, it has not started.
        """
        if self._frontend is None and self._starting is not None and scope["method"] == "POST":
            await asyncio.wait({self._starting}, timeout=self._config.no_replica_timeout_s)
        await self._started().app(scope, receive, send)

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included; empty before the start."""
        return self._frontend.decode(tokens) if self._frontend is not None else ""

    async def begin(self, streams: Streams, ingress: IngressId) -> None:
        """As `start`, but an application that needs a replica is made once one runs, and nobody waits for it."""
        waits: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        starting = asyncio.create_task(self.start(streams, ingress, lambda: waits.set_result(None)))
        await asyncio.wait({starting, waits}, return_when=asyncio.FIRST_COMPLETED)
        if starting.done():
            await starting
        else:
            self._starting = starting
            starting.add_done_callback(self._log_failure)

    def _log_failure(self, starting: asyncio.Task[None]) -> None:
        if not starting.cancelled() and (error := starting.exception()) is not None:
            log.error("the application of the model %s could not start", self._model.model_id, exc_info=error)

    async def start(self, streams: Streams, ingress: IngressId, waiting: Callable[[], None] = lambda: None) -> None:
        """Make the application over the ingress's streams, once. `waiting` is called if it waits for a replica."""
        from vllm.envs import enable_envs_cache

        from app.frontend.app import VllmFrontend

        frontend = self._frontend = await VllmFrontend.start(self._config, self._model, streams, ingress, waiting)
        if self._adapters:
            frontend.serve_adapters(self._adapters)
        # As in the engine's processes: vLLM's statistics would otherwise read the environment for every token.
        enable_envs_cache()

    def serve_adapters(self, adapters: Iterable[Adapter]) -> None:
        """Serve the model with these adapters, and with no others, once the API has started."""
        self._adapters = tuple(adapters)
        if self._frontend is not None:
            self._frontend.serve_adapters(self._adapters)

    async def arrival(self, order: MatchOrder) -> Arrival:
        """The arrival that a request with the order's prompt would be, of the default class and without a tenant.

        Raises:
            ApiError: there is no such model, or the prompt is refused.
        """
        frontend = self._started()
        request = await self._request(order, frontend)
        adapter, tokens = request.lora_request, request.prompt_token_ids or ()
        return Arrival(
            RequestId(uuid.uuid4().hex),
            Tokens(len(tokens)),
            frontend.names(request),
            read_session(None, order.prompt_cache_key),
            Precedence(DEFAULT_CLASS, time.time()),
            None if adapter is None else AdapterId(adapter.lora_int_id),
        )

    async def block_names(self, order: PromptOrder) -> tuple[int, ...]:
        """The names of the full blocks of the order's prompt, at least one.

        Raises:
            ApiError: there is no such model, the prompt is refused, or its blocks have no names.
        """
        frontend = self._started()
        request = await self._request(order, frontend)
        names = frontend.names(request)
        if not names:
            raise ApiError(422, frontend.why_unnamed(request), code="no_names")
        return names

    def content(self, spec: RequestSpec) -> PromptContent:
        """The names of the blocks of a request's prompt, if it has only text."""
        if self._frontend is None or len(spec.body) > 1:
            return NO_CONTENT
        return PromptContent(self._frontend.names(decode_request(spec.body)))

    async def prefix(self, order: CopyPrompt, ingress: IngressId) -> RequestSpec:
        """A request of one token with the order's prompt.

        Raises:
            ApiError: there is no such model, or the prompt is refused.
        """
        request = await self._request(order, self._started())
        asked = msgspec.structs.replace(request, sampling_params={"max_tokens": 1})
        return to_spec(asked, encode_request(asked), RequestId(uuid.uuid4().hex), "", ingress)

    def _started(self) -> "VllmFrontend":
        """The frontend. Raises ApiError 503 before the start."""
        if self._frontend is None:
            if self._starting is None:
                reason = "the ingress is starting"
            elif self._starting.done():
                reason = "the model's application could not start, see the log of the ingress"
            else:
                reason = "no replica of the model has run yet"
            raise ApiError(503, reason, code="unavailable", retry_after_s=RETRY_S)
        return self._frontend

    async def _request(self, order: PromptOrder, frontend: "VllmFrontend") -> CoreRequest:
        """The order's prompt as a request. Raises ApiError."""
        adapter = self._adapter(order.model)
        limit = self._config.max_prompt_tokens or frontend.max_context
        tokens = await self._tokens(order, frontend, limit)
        if not tokens:
            raise ApiError(400, "the prompt is empty", param="prompt", code="invalid_value")
        if len(tokens) > limit:
            reason = f"the prompt has {len(tokens)} tokens, and the limit is {limit}"
            raise ApiError(400, reason, param="prompt", code="context_length_exceeded")
        return CoreRequest("", list(tokens), lora_request=adapter, cache_salt=order.cache_salt)

    def _adapter(self, model: str | None) -> Adapter | None:
        """The adapter of that name, None for the model's own. Raises ApiError 404."""
        if model is None or model in self._model.names:
            return None
        for adapter in self._adapters:
            if adapter.lora_name == model:
                return adapter
        raise ApiError(404, f"the model {model!r} does not exist", param="model")

    async def _tokens(self, order: PromptOrder, frontend: "VllmFrontend", limit: int) -> Sequence[int]:
        """The prompt's tokens. Text passes the same checks as in a request. Raises ApiError."""
        path = "/v1/completions" if order.messages is None else "/v1/chat/completions"
        content = order.model_dump_json(include={"prompt", "messages", "cache_salt"}, exclude_none=True).encode()
        body = check_body(content, OPEN_ROUTES[path], BodyLimits(1, limit))
        if body.media:
            raise ApiError(400, "messages: only text is looked up", param="messages", code="invalid_value")
        return order.prompt if isinstance(order.prompt, list) else await frontend.tokens(body.content)

    @property
    def routes(self) -> Sequence[APIRoute]:
        """The application's open routes; none before the start."""
        return () if self._frontend is None else self._frontend.routes

    async def metrics(self, replica: str) -> Sequence[Family]:
        """vLLM's metrics of whole requests, labelled with `replica`; none before the start."""
        return () if self._frontend is None else await self._frontend.metrics(replica)

    def check_health(self) -> None:
        """Raises RuntimeError if the API can answer no more requests."""
        if self._frontend is not None:
            self._frontend.check_health()

    async def close(self) -> None:
        """End what is left once the server has ended."""
        if self._starting is not None:
            self._starting.cancel()
        if self._frontend is not None:
            await self._frontend.close()


async def describe_routes(apis: Iterable[VllmApi]) -> bytes:
    """The body of `/openapi.json`, whose making takes a second or two; empty before the start of all APIs."""
    routes = {route.path: route for api in apis for route in api.routes}
    return json.dumps(await asyncio.to_thread(document, routes.values())).encode() if routes else b""
