"""The API of an ingress: Mell's own, or that of vLLM's server application."""

import asyncio
import os
import time
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Protocol

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import BaseRoute, Mount, Route

from app.frontend.guard.layers import guarded, vllm_environment
from app.ingress.config import IngressConfig
from app.ingress.http.routes import Backend, Routes
from app.ingress.openai.answers.tool_parser import ToolParser
from app.ingress.openai.core_requests import CoreRequests, VllmRequests
from app.ingress.openai.model import Model
from app.ingress.openai.requests.template import ChatTemplate
from app.ingress.telemetry.vllm_requests import NO_STATISTICS, RequestStatistics, VllmRequestMetrics

if TYPE_CHECKING:
    from app.frontend.app import VllmFrontend

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
}
"""The environment in which vLLM makes its configuration: without a device, even if there is one."""


class Frontend(Protocol):
    """An API, from its requests to the streams of an ingress and back."""

    statistics: RequestStatistics

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        ...

    async def routes(self, backend: Backend) -> Sequence[BaseRoute]:
        """The API's routes over a backend, made once."""
        ...

    def check_health(self) -> None:
        """Raises RuntimeError if the API can answer no more requests."""
        ...

    async def close(self) -> None:
        """End what is left once the server has ended."""
        ...


def make_frontend(config: IngressConfig) -> Frontend:
    """The API that the settings name."""
    os.environ.update(ENVIRONMENT | vllm_environment(config))
    return VllmApi(config) if config.frontend == "vllm" else MellApi(config)


class MellApi:
    """Mell's own API."""

    def __init__(self, config: IngressConfig) -> None:
        from vllm.envs import enable_envs_cache

        from deployments.engine.arguments import frontend_config

        kwargs = {"served_model_name": config.model_id, **config.engine_kwargs}
        vllm_config = frontend_config(config.model_source, kwargs)
        # As in the engine's processes: vLLM's statistics would otherwise read the environment for every token.
        enable_envs_cache()
        self._model = _load_model(config, VllmRequests(vllm_config))
        self.statistics: RequestStatistics = VllmRequestMetrics(vllm_config)

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Frontend.decode`."""
        return self._model.decode(tokens)

    async def routes(self, backend: Backend) -> Sequence[BaseRoute]:
        """See `Frontend.routes`."""
        return Routes(backend, self._model).routes()

    def check_health(self) -> None:
        """See `Frontend.check_health`."""

    async def close(self) -> None:
        """See `Frontend.close`."""


def _load_model(config: IngressConfig, requests: CoreRequests) -> Model:
    from transformers import AutoConfig, AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(config.model_source)
    model = AutoConfig.from_pretrained(config.model_source)
    return Model(
        id=config.model_id,
        tokenizer=tokenizer.backend_tokenizer,
        vocab_size=model.vocab_size,
        max_context=config.max_context or model.max_position_embeddings,
        created=int(time.time()),
        requests=requests,
        chat=ChatTemplate.of(tokenizer, config.chat_template),
        parser=ToolParser.load(config.tool_call_parser, tokenizer) if config.tool_call_parser is not None else None,
    )


class VllmApi:
    """vLLM's server application; it counts its requests itself."""

    def __init__(self, config: IngressConfig) -> None:
        self.statistics: RequestStatistics = NO_STATISTICS
        self._config = config
        self._frontend: VllmFrontend | None = None

    def decode(self, tokens: Sequence[int]) -> str:
        """See `Frontend.decode`."""
        return self._frontend.decode(tokens) if self._frontend is not None else ""

    async def routes(self, backend: Backend) -> Sequence[BaseRoute]:
        """See `Frontend.routes`."""
        from vllm.envs import enable_envs_cache

        from app.frontend.app import VllmFrontend

        self._frontend = await VllmFrontend.start(self._config, backend.streams, backend.id)
        # As in the engine's processes: vLLM's statistics would otherwise read the environment for every token.
        enable_envs_cache()
        frontend = self._frontend
        application = guarded(frontend.app, backend.gate, backend.telemetry, backend.settings, frontend.max_context)
        return [Route("/openapi.json", _described(frontend), methods=["GET"]), Mount("", application)]

    def check_health(self) -> None:
        """See `Frontend.check_health`."""
        if self._frontend is not None:
            self._frontend.check_health()

    async def close(self) -> None:
        """See `Frontend.close`."""
        if self._frontend is not None:
            await self._frontend.close()


def _described(frontend: "VllmFrontend") -> Callable[[Request], Awaitable[Response]]:
    async def document(http: Request) -> Response:
        """GET /openapi.json."""
        return Response(await asyncio.to_thread(frontend.document), media_type="application/json")

    return document
