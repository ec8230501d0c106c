"""vLLM's server application, made in the ingress's process and on its event loop, without an engine or a device."""

import dataclasses
from argparse import Namespace
from collections.abc import Callable, Iterable, Sequence
from typing import Any, Self

import msgspec
from fastapi import FastAPI
from fastapi.routing import APIRoute
from prometheus_client import CollectorRegistry
from starlette.types import Receive, Scope, Send
from vllm.config import VllmConfig
from vllm.entrypoints.launchers.api_server.app_state import init_app_state
from vllm.entrypoints.launchers.app import build_app
from vllm.entrypoints.openai.chat_completion.protocol import ChatCompletionRequest
from vllm.entrypoints.openai.completion.protocol import CompletionRequest
from vllm.entrypoints.serve.engine.protocol import ErrorResponse
from vllm.lora.request import LoRARequest
from vllm.reasoning import ReasoningParserManager
from vllm.renderers.inputs.preprocess import extract_prompt_components
from vllm.tool_parsers import ToolParserManager
from vllm.version import __version__

from app.frontend.core import GENERATION, ClusterCore
from app.frontend.engine_client import ClusterLLM, as_api_error
from app.frontend.guard.layers import vllm_media_domains
from app.frontend.guard.routes import OPEN_ROUTES
from app.frontend.media import bound_images
from app.frontend.names import PromptNamer
from app.ingress.config import IngressConfig, ModelConfig
from app.ingress.errors import ApiError
from app.ingress.streams.streams import Streams
from app.vllm_cli.arguments import FrontendArgs, validate_parsed_serve_args
from deployments.engine.arguments import USAGE, check_model, frontend_args, is_pooling
from deployments.engine.stat_logger import stat_logger
from deployments.engine.vllm_messages import EngineCoreReadyResponse
from deployments.metrics.exposition import Family
from deployments.metrics.vllm import expose_requests
from migration.protocol.core_messages import Adapter, CoreRequest, encode_request
from migration.protocol.request import IngressId


class VllmFrontend:
    """vLLM's application over the ingress's streams; `app` serves it."""

    def __init__(
        self, application: FastAPI, client: ClusterLLM, patience_s: float, registry: CollectorRegistry
    ) -> None:
        """`registry` has the metrics of vLLM's client."""
        self._application = application
        self._client = client
        self._patience_s = patience_s
        self._registry = registry

    @classmethod
    async def start(
        cls,
        config: IngressConfig,
        model: ModelConfig,
        streams: Streams,
        ingress: IngressId,
        waiting: Callable[[], None] = lambda: None,
    ) -> Self:
        """Make the application of a model. That of a pooling model waits for a replica, which knows the model's tasks;
        `waiting` is called before it does.

        Raises:
            ValueError, TypeError: an argument of vLLM has an invalid value.
        """
        args, vllm_config = serve_args(config, model)
        bound_images(config.max_image_pixels)
        # A pooling model's tasks are those of its layers, which only engines have.
        tasks: Sequence[str] = GENERATION
        if is_pooling(vllm_config):
            waiting()
            tasks = await streams.tasks()
        ready, classes = ready_response(vllm_config), config.service_classes
        namer = prompt_namer(vllm_config)
        media_bytes = config.max_media_bytes // len(config.models)
        core = ClusterCore(streams, ingress, ready, media_bytes, tasks=tasks, classes=classes, namer=namer)
        registry = CollectorRegistry()
        client = ClusterLLM.from_vllm_config(
            vllm_config, usage_context=USAGE, client_addresses=core.addresses, stat_loggers=[stat_logger(registry)]
        )
        client.core = core
        core.on_loss = client.lose
        client.max_prompt_tokens = config.max_prompt_tokens
        core.serve(client.engine_core.outputs_queue.put_nowait)
        client.engine_core._send_input_message = core.take
        tasks = await client.get_supported_tasks()
        core.unlink()
        application = build_app(args, tasks, client.model_config)
        # Origins and HTTP metrics are a matter of Mell's layers, and no engine is scaled elastically.
        application.user_middleware.clear()
        application.middleware_stack = None
        await init_app_state(client, application.state, args, tasks)
        # vLLM's handlers of errors would stop their own server here (`check_health` does so).
        application.state.server = Namespace(should_exit=False)
        return cls(application, client, config.no_replica_timeout_s, registry)

    async def app(self, scope: Scope, receive: Receive, send: Send) -> None:
        """The ASGI application. While no replica is running, a request waits for one, up to `no_replica_timeout_s`."""
        if not self._client.core.serving and scope["type"] == "http" and scope["method"] == "POST":
            await self._client.core.wait_until_serving(self._patience_s)
        await self._application(scope, receive, send)

    def serve_adapters(self, adapters: Iterable[Adapter]) -> None:
        """Serve the model with each of these adapters, under the adapter's name, and with no others.

        vLLM's application chooses an adapter by the model's name in a request, among these only. Requests that run
        with another one continue.
        """
        served = {adapter.lora_name: LoRARequest(*msgspec.structs.astuple(adapter)) for adapter in adapters}
        adapters_by_name = self._application.state.openai_serving_models.lora_requests
        adapters_by_name.clear()
        adapters_by_name.update(served)

    async def tokens(self, body: bytes) -> Sequence[int]:
        """The prompt's tokens of a request, by the code that serves requests. `body` is one of text only: with
        `messages` for `/v1/chat/completions`, else for `/v1/completions`.

        Raises:
            ApiError: vLLM refuses the prompt.
        """
        try:
            rendered = await self._rendered(msgspec.json.decode(body))
        except Exception as error:
            raise as_api_error(error) from error
        if isinstance(rendered, ErrorResponse):
            shown = rendered.error
            raise ApiError(shown.code, shown.message, shown.param)
        (prompt,) = rendered
        return extract_prompt_components(self._client.model_config, prompt).token_ids or ()

    async def _rendered(self, fields: dict[str, Any]) -> list[Any] | ErrorResponse:
        """The prompt as vLLM's input of an engine, in a list."""
        renderer = self._application.state.online_renderer
        if "messages" not in fields:
            return await renderer.render_completion(CompletionRequest(**fields, max_tokens=1))
        chat = await renderer.render_chat(ChatCompletionRequest(**fields))
        return chat if isinstance(chat, ErrorResponse) else chat[1]

    def names(self, request: CoreRequest) -> tuple[int, ...]:
        """The names of the full KV blocks of a request's prompt, of text only; none if they are not known."""
        return self._client.core.names(request, encode_request(request))

    def why_unnamed(self, request: CoreRequest) -> str:
        """The one reason why `names` gives none for a request."""
        return self._client.core.why_unnamed(request)

    @property
    def max_context(self) -> int:
        """The model's context in tokens."""
        context: int = self._client.model_config.max_model_len
        return context

    @property
    def routes(self) -> list[APIRoute]:
        """The application's open routes."""
        routes = [route for route in self._application.routes if isinstance(route, APIRoute)]
        return [
            route for route in routes if route.path in OPEN_ROUTES and OPEN_ROUTES[route.path].method in route.methods
        ]

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of tokens, special ones included."""
        text: str = self._client.get_tokenizer().decode(list(tokens), skip_special_tokens=False)
        return text

    async def metrics(self, replica: str) -> Sequence[Family]:
        """vLLM's metrics of the model's whole requests, labelled with `replica`."""
        return expose_requests(replica, self._registry)

    def check_health(self) -> None:
        """Raises RuntimeError once vLLM's application can answer no more requests."""
        if self._client.errored or not self._client.core.reading:
            raise RuntimeError("vLLM's application has failed")

    async def close(self) -> None:
        """End all requests."""
        await self._client.core.close()
        self._client.shutdown()


def prompt_namer(config: VllmConfig) -> PromptNamer:
    """The names of blocks by a configuration of vLLM."""
    return PromptNamer(config.cache_config.prefix_caching_hash_algo)


def serve_args(config: IngressConfig, model: ModelConfig) -> tuple[Namespace, VllmConfig]:
    """The arguments of `vllm serve` for a model, and vLLM's configuration, made without a device."""
    frontend = FrontendArgs(**frontend_kwargs(model))
    # The vectors of a query would stay in one engine, and its documents would have to go there.
    frontend.enable_flash_late_interaction = False
    engine = frontend_args(model.model_source, {"served_model_name": model.model_id, **model.engine_kwargs})
    engine.allowed_media_domains = vllm_media_domains(config)
    if frontend.tool_parser_plugin:
        ToolParserManager.import_tool_parser(frontend.tool_parser_plugin)
    if engine.reasoning_parser_plugin:
        ReasoningParserManager.import_reasoning_parser(engine.reasoning_parser_plugin)
    vllm_config = engine.create_engine_config(USAGE)
    if not is_pooling(vllm_config):
        check_model(vllm_config.model_config)
    args = Namespace(grpc=False, headless=False, **_members(engine) | _members(frontend))
    if isinstance(args.served_model_name, str):
        args.served_model_name = [args.served_model_name]
    validate_parsed_serve_args(args)
    return args, vllm_config


def frontend_kwargs(model: ModelConfig) -> dict[str, Any]:
    kwargs = {name: value for name, value in model.frontend_kwargs.items() if name != "lora_modules"}
    if model.chat_template is not None:
        kwargs["chat_template"] = model.chat_template
    if model.tool_call_parser is not None:
        kwargs |= {"tool_call_parser": model.tool_call_parser, "enable_auto_tool_choice": True}
    return kwargs


def _members(args: Any) -> dict[str, Any]:
    return {field.name: getattr(args, field.name) for field in dataclasses.fields(args)}


def ready_response(config: VllmConfig) -> EngineCoreReadyResponse:
    """The replicas' engines as one core describes itself. All have the ingress's own configuration of the model.

    The frontend needs of it the model's context; the number of KV blocks is only in metrics that engines expose.
    """
    cache = config.cache_config
    return EngineCoreReadyResponse(
        max_model_len=config.model_config.max_model_len,
        num_gpu_blocks=0,
        block_size=cache.block_size,
        dp_stats_address=None,
        dtype=str(config.model_config.dtype).removeprefix("torch."),
        vllm_version=__version__,
        world_size=1,
        data_parallel_size=1,
        tensor_parallel_size=1,
        pipeline_parallel_size=1,
        decode_context_parallel_size=1,
        data_parallel_rank=0,
        max_num_seqs=config.scheduler_config.max_num_seqs,
        max_num_batched_tokens=config.scheduler_config.max_num_batched_tokens,
        instance_id=config.instance_id,
        supports_lora=config.lora_config is not None,
        max_loras=config.lora_config.max_loras if config.lora_config is not None else 0,
    )
