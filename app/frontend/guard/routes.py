"""The open routes of vLLM's application, and how the clients of each present keys and read errors.

vLLM serves more: operators' routes (`/sleep`, `/collective_rpc`, `/scale_elastic_ep`, LoRA adapters by path), tokens
past all checks (`/inference/v1/generate`, `/invocations`), websockets, and what one process keeps for a later call
(stored responses). A route that is not listed here does not exist for clients.
"""

import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from starlette.datastructures import Headers

from app.ingress.access.keys import bearer
from app.ingress.asgi import last_event
from app.ingress.errors import ApiError


class RouteTask(StrEnum):
    """The task of a route's requests, on which their bounds depend."""

    GENERATE = "generate"
    """Runs a request for every choice, for as long as it generates."""
    POOL = "pool"
    """Runs a request of a single step for every input."""
    COUNT = "count"
    """Stays in the frontend."""


@dataclass(frozen=True, slots=True)
class Dialect:
    """An API's errors, as JSON bodies and as ends of event streams, and the API key in its headers."""

    body: Callable[[ApiError], Mapping[str, Any]]
    ending: Callable[[ApiError], bytes]
    key: Callable[[Headers], str | None]


def _bearer(headers: Headers) -> str | None:
    return bearer(headers.get("authorization"))


def _anthropic_key(headers: Headers) -> str | None:
    return headers.get("x-api-key") or _bearer(headers)


_ANTHROPIC_TYPES = {413: "request_too_large", 503: "overloaded_error"}
"""Anthropic's error types where they differ from OpenAI's."""


def _anthropic_body(error: ApiError) -> dict[str, Any]:
    kind = error.body()["error"]["type"]
    kind = _ANTHROPIC_TYPES.get(error.status, "api_error" if kind == "server_error" else kind)
    return {"type": "error", "error": {"type": kind, "message": error.message}}


def _event(body: Mapping[str, Any]) -> bytes:
    return f"event: error\ndata: {json.dumps(body)}\n\n".encode()


OPENAI = Dialect(ApiError.body, last_event, _bearer)
RESPONSES = Dialect(ApiError.body, lambda error: _event({"type": "error", **error.body()}), _bearer)
ANTHROPIC = Dialect(_anthropic_body, lambda error: _event(_anthropic_body(error)), _anthropic_key)


@dataclass(frozen=True, slots=True)
class OpenRoute:
    """A route that clients may call. `endpoint` is its name in metrics and logs; calls without one are not admitted."""

    path: str
    endpoint: str | None
    task: RouteTask = RouteTask.COUNT
    dialect: Dialect = OPENAI

    @property
    def method(self) -> str:
        """Its only method."""
        return "POST" if self.endpoint is not None else "GET"


OPEN_ROUTES = {
    route.path: route
    for route in (
        OpenRoute("/v1/models", None),
        OpenRoute("/v1/completions", "completions", RouteTask.GENERATE),
        OpenRoute("/v1/chat/completions", "chat", RouteTask.GENERATE),
        OpenRoute("/v1/responses", "responses", RouteTask.GENERATE, RESPONSES),
        OpenRoute("/v1/messages", "messages", RouteTask.GENERATE, ANTHROPIC),
        OpenRoute("/v1/messages/count_tokens", "count_tokens", RouteTask.COUNT, ANTHROPIC),
        OpenRoute("/tokenize", "tokenize"),
        OpenRoute("/detokenize", "detokenize"),
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
"""By path."""


def described(document: Mapping[str, Any]) -> dict[str, Any]:
    """vLLM's OpenAPI document with the open routes only."""
    paths = {
        path: {method: operation for method, operation in methods.items() if method == OPEN_ROUTES[path].method.lower()}
        for path, methods in document["paths"].items()
        if path in OPEN_ROUTES
    }
    return {**document, "paths": paths}
