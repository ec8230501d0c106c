"""Mell's own routes as FastAPI's path operations, and their documented refusals."""

import inspect
from collections.abc import Callable, Coroutine
from typing import Any, cast

from fastapi.routing import APIRoute
from pydantic import BaseModel
from pydantic.alias_generators import to_camel
from starlette.requests import Request
from starlette.responses import Response

from app.ingress.asgi import read_body
from app.ingress.errors import ApiError
from app.ingress.http.answers import Error
from app.ingress.http.orders import OrderBody, parse_order
from app.settings import IngressSettings

STATUSES = {
    400: "The body is not JSON, or a parameter in it is invalid, unknown or not supported.",
    401: "The key is missing or not valid.",
    403: "There is no admin key, and the order needs one, or the client is not on loopback, or a web page of another "
    "origin; or the API key does not allow it.",
    404: "The route, the request, the replica or the model does not exist.",
    405: "The path does not have this method; `Allow` lists its methods.",
    408: "The body arrived too slowly.",
    409: "Several running requests have this label.",
    413: "The body is larger than `ingress.max_body_bytes`.",
    415: "The body's content type is not JSON.",
    422: "The order cannot be carried out; the message has the reason.",
    429: "The API key's limits are reached.",
    500: "An error of the server.",
    503: "No replica can serve this now.",
    504: "The call took longer than `ingress.request_timeout_s`.",
}
"""The meanings of the statuses of errors, on every route."""

Responses = dict[int | str, dict[str, Any]]
"""Answers beside that of a route's return type, as FastAPI takes them."""

ANY_ERROR: Responses = {"default": {"model": Error, "description": "Any other error."}}
"""On all routes. Where a status or this is documented, FastAPI describes none of its own errors, which never occur."""

READING = (400, 408, 413, 415)
"""The refusals of routes with a body."""

_HEADERS = {
    401: ("WWW-Authenticate", {"description": "Bearer.", "schema": {"type": "string"}}),
    503: (
        "Retry-After",
        {"description": "Seconds after which to try again.", "schema": {"type": "integer", "minimum": 1}},
    ),
}


def refusals(*statuses: int) -> Responses:
    """Errors of these statuses, for a route's `responses`."""
    documented: Responses = {status: {"model": Error, "description": STATUSES[status]} for status in statuses}
    for status in documented.keys() & _HEADERS.keys():
        name, header = _HEADERS[int(status)]
        documented[status]["headers"] = {name: header}
    return documented


def text(media_type: str = "text/plain; charset=utf-8") -> Responses:
    """An answer of text, for a route's `responses`; its `response_class` is `Response`, or errors were text, too."""
    return {200: {"content": {media_type: {"schema": {"type": "string"}}}}}


class Operation(APIRoute):
    """A route whose endpoint describes it: the docstring is summary and description, the name makes the operation's id.

    As with Starlette's routes, HEAD is answered where GET is.
    """

    def __init__(self, path: str, endpoint: Callable[..., Any], **options: Any) -> None:
        super().__init__(path, endpoint, **options)
        summary, _, self.description = inspect.cleandoc(endpoint.__doc__ or "").partition("\n\n")
        self.summary = summary.removesuffix(".")
        self.operation_id = self.operation_id or to_camel(self.name)
        if "GET" in self.methods:
            self.methods.add("HEAD")


class OperatorOperation(Operation):
    """A route for operators.

    FastAPI reads a body first, whole, and from any client. So this class checks the caller, reads the body within the
    limits of `read_body` and parses it as JSON, and FastAPI's handler gets the order as it is.
    """

    def check(self, http: Request, settings: IngressSettings) -> None:
        """Raise ApiError unless the caller may call."""
        http.app.state.backend.operators.check(http)

    def get_route_handler(self) -> Callable[[Request], Coroutine[Any, Any, Response]]:
        """See `APIRoute`."""
        handle = super().get_route_handler()

        async def checked(http: Request) -> Response:
            settings: IngressSettings = http.app.state.backend.settings
            self.check(http, settings)
            if kind := order_of(self):
                body = await read_body(http, settings.max_body_bytes) or self._empty
                http = _WithOrder(http, parse_order(kind, body))
            return await handle(http)

        return checked

    @property
    def _empty(self) -> bytes:
        """The content that an empty body stands for, if the endpoint has a default."""
        return b"" if self.body_field is None or self.body_field.field_info.is_required() else b"{}"


class AdapterOperation(OperatorOperation):
    """A route for operators that may load and unload adapters."""

    def check(self, http: Request, settings: IngressSettings) -> None:
        """Raise ApiError unless the caller may call."""
        if not settings.allow_runtime_lora_updating:
            raise ApiError(404, "adapters are fixed: ingress.allow_runtime_lora_updating opens this route")
        super().check(http, settings)


def order_of(route: APIRoute) -> type[OrderBody] | None:
    """The order in the body of a route; None without a body."""
    return None if route.body_field is None else cast(type[OrderBody], route.body_field.field_info.annotation)


class _WithOrder(Request):
    """A request whose body has become an order. Without headers, FastAPI takes any body for JSON."""

    def __init__(self, http: Request, order: BaseModel) -> None:
        super().__init__({**http.scope, "headers": []}, http.receive)
        self._order = order

    async def body(self) -> bytes:
        return b"{}"

    async def json(self) -> BaseModel:
        return self._order
