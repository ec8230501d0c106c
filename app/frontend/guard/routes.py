"""The open routes of vLLM's application, and why the others are closed.

A route that is not open does not exist for clients. A test compares both lists with vLLM's own.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

from app.frontend.guard.dialects import ANTHROPIC, OPENAI, RESPONSES, Dialect


class RouteTask(StrEnum):
    """The task of a route's requests, on which their bounds depend."""

    GENERATE = "generate"
    """Runs a request for every choice, for as long as it generates."""
    POOL = "pool"
    """Runs a request of a single step for every input."""
    COUNT = "count"
    """Stays in the frontend."""


@dataclass(frozen=True, slots=True)
class OpenRoute:
    """A route that clients may call. `endpoint` is its name in metrics and logs; calls without one are not admitted.

    `inputs` is the member of its body that may hold several prompts, each of which is a request for an engine.
    """

    path: str
    endpoint: str | None
    task: RouteTask = RouteTask.COUNT
    dialect: Dialect = OPENAI
    inputs: str = "prompt"

    @property
    def method(self) -> str:
        """Its only method."""
        return "POST" if self.endpoint is not None else "GET"


MODELS = "/v1/models"

OPEN_ROUTES = {
    route.path: route
    for route in (
        OpenRoute(MODELS, None),
        OpenRoute("/v1/completions", "completions", RouteTask.GENERATE),
        OpenRoute("/v1/chat/completions", "chat", RouteTask.GENERATE),
        OpenRoute("/v1/chat/completions/batch", "chat", RouteTask.GENERATE, inputs="messages"),
        OpenRoute("/v1/responses", "responses", RouteTask.GENERATE, RESPONSES),
        OpenRoute("/v1/messages", "messages", RouteTask.GENERATE, ANTHROPIC),
        OpenRoute("/v1/messages/count_tokens", "count_tokens", RouteTask.COUNT, ANTHROPIC),
        OpenRoute("/generative_scoring", "generative_scoring", RouteTask.GENERATE, inputs="items"),
        OpenRoute("/tokenize", "tokenize"),
        OpenRoute("/detokenize", "detokenize"),
        OpenRoute("/tokenizer_info", None),
        OpenRoute("/v1/embeddings", "embeddings", RouteTask.POOL),
        OpenRoute("/v2/embed", "embeddings", RouteTask.POOL),
        OpenRoute("/pooling", "pooling", RouteTask.POOL),
        OpenRoute("/classify", "classify", RouteTask.POOL),
        OpenRoute("/score", "score", RouteTask.POOL),
        OpenRoute("/v1/score", "score", RouteTask.POOL),
        OpenRoute("/rerank", "rerank", RouteTask.POOL),
        OpenRoute("/v1/rerank", "rerank", RouteTask.POOL),
        OpenRoute("/v2/rerank", "rerank", RouteTask.POOL),
    )
}
"""By path. vLLM has `/tokenizer_info` only with its flag, and the last ones, from `/v1/embeddings` on, for pooling."""

NOT_STORED = "responses are not stored, since ingress processes share nothing: send the earlier items as `input`"
_OF_TOKENS = "calls between vLLM's servers are not served: send token ids as `prompt` to /v1/completions"
_WEIGHTS = "engines keep the weights that they started with"
_SLEEP = "Mell frees GPUs by closing replicas: POST /mell/replicas/{replica}/drain"
_PAUSE = "requests are not held back: `mell mode off` stops moves"
_ADAPTERS = "adapters are loaded at run time only with `ingress.allow_runtime_lora_updating`"
_SPEECH = "models of speech are not served"
_DESCRIPTION = "GET /openapi.json describes all calls"

CLOSED_ROUTES: Mapping[str, str] = {
    "/v1/responses/{response_id}": NOT_STORED,
    "/v1/responses/{response_id}/cancel": NOT_STORED,
    "/v1/completions/render": _OF_TOKENS,
    "/v1/completions/derender": _OF_TOKENS,
    "/v1/chat/completions/render": _OF_TOKENS,
    "/v1/chat/completions/derender": _OF_TOKENS,
    "/v1/messages/render": _OF_TOKENS,
    "/v1/responses/render": _OF_TOKENS,
    "/inference/v1/generate": _OF_TOKENS,
    "/inference/v1/abort_requests": "a request ends when its client disconnects",
    "/abort_requests": "a request ends when its client disconnects",
    "/invocations": "SageMaker's calls are not served: call the endpoint itself, such as /v1/chat/completions",
    "/v1/systemone": "structured decisions are not served: POST /generative_scoring gives probabilities of tokens",
    "/v1/load_lora_adapter": _ADAPTERS,
    "/v1/unload_lora_adapter": _ADAPTERS,
    "/v1/audio/transcriptions": _SPEECH,
    "/v1/audio/translations": _SPEECH,
    "/v1/realtime": _SPEECH,
    "/docs": _DESCRIPTION,
    "/docs/oauth2-redirect": _DESCRIPTION,
    "/redoc": _DESCRIPTION,
    "/kv_event_sources": "every replica reads the events of its own engine; GET /mell/state has the caches",
    "/scale_elastic_ep": "Mell opens and closes replicas itself, up to `max_replicas`",
    "/is_scaling_elastic_ep": "GET /mell/state has the replicas and their states",
    "/fault_tolerance/apply": "Mell continues the requests of a failed replica on others",
    "/fault_tolerance/status": "GET /mell/state has the replicas and their states",
    "/server_info": "GET /version and GET /mell/state have what operators need",
    "/start_profile": "for operators: POST /mell/start_profile",
    "/stop_profile": "for operators: POST /mell/stop_profile",
    "/reset_prefix_cache": "for operators: POST /mell/reset_prefix_cache",
    "/reset_mm_cache": "for operators: POST /mell/reset_prefix_cache",
    "/reset_encoder_cache": "for operators: POST /mell/reset_prefix_cache",
    "/collective_rpc": "workers take no calls of clients",
    "/sleep": _SLEEP,
    "/wake_up": _SLEEP,
    "/is_sleeping": _SLEEP,
    "/release_kv_cache_memory": _SLEEP,
    "/pause": _PAUSE,
    "/resume": _PAUSE,
    "/is_paused": _PAUSE,
    "/init_weight_transfer_engine": _WEIGHTS,
    "/shutdown_weight_transfer_engine": _WEIGHTS,
    "/start_weight_update": _WEIGHTS,
    "/start_draft_weight_update": _WEIGHTS,
    "/update_weights": _WEIGHTS,
    "/finish_weight_update": _WEIGHTS,
    "/update_weight_version": _WEIGHTS,
    "/weight_info": _WEIGHTS,
    "/weight_checker": _WEIGHTS,
    "/get_world_size": "GET /mell/state has the replicas and their states",
}
"""Reasons by path, for vLLM's other routes; those of its developer mode included."""

_RESPONSE = re.compile(r"/v1/responses/[^/]+(?P<rest>/cancel)?")


def why_closed(path: str) -> str | None:
    """The reason why a route of vLLM is closed, None for a path that vLLM does not have either."""
    if path not in CLOSED_ROUTES and (response := _RESPONSE.fullmatch(path)):
        path = "/v1/responses/{response_id}" + (response["rest"] or "")
    return CLOSED_ROUTES.get(path)


def dialect_of(path: str) -> Dialect:
    """The dialect of the clients that call a path, open or not."""
    if path in OPEN_ROUTES:
        return OPEN_ROUTES[path].dialect
    return ANTHROPIC if path.startswith("/v1/messages/") else OPENAI
