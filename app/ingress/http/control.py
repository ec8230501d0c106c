"""The routes of operation: health, metrics, the live page, and the calls of operators."""

import hmac
import ipaddress
from typing import Any, Protocol

from starlette.applications import Starlette
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import Route
from starlette.types import ASGIApp

from app.ingress.access.admission import Gate
from app.ingress.asgi import read_body
from app.ingress.engine_orders import EngineOrders, Failures
from app.ingress.errors import ApiError
from app.ingress.http.cross_origin import CrossOrigin
from app.ingress.http.orders import (
    BoundsOrder,
    CopyPrompt,
    DropOrder,
    LoadAdapter,
    MatchOrder,
    ModeRequest,
    MoveRequest,
    Order,
    PinOrder,
    PromptOrder,
    RoleOrder,
    StartProfile,
    UnloadAdapter,
    parse_order,
)
from app.ingress.page.routes import PageRoutes
from app.ingress.telemetry.requests import CLIENT_CLOSED_STATUS, RequestTelemetry
from app.ingress.telemetry.scrape import CONTENT_TYPE
from app.settings import IngressSettings
from deployments.api.calls import MoveAccepted, MoveAnswer
from deployments.engine.port import ProfileSession
from migration.protocol.messages import PathRequest
from migration.protocol.request import RequestSpec
from policies.decision.limits import Mode
from policies.model import Role


class ControlBackend(Protocol):
    """The port of these routes to the ingress replica."""

    gate: Gate
    orders: EngineOrders
    telemetry: RequestTelemetry
    settings: IngressSettings

    def health(self) -> str | None:
        """The reason why no request can be served now, None if requests can be served."""
        ...

    def version(self) -> dict[str, str]:
        """Versions of Mell, vLLM, Ray and torch."""
        ...

    async def metrics(self) -> bytes:
        """The body of `/metrics`."""
        ...

    async def state(self) -> dict[str, Any]:
        """The body of `/mell/state`."""
        ...

    async def migrations(self) -> dict[str, Any]:
        """The body of `/mell/migrations`."""
        ...

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """`/mell/state` and `/mell/migrations` as of the scheduler's last epoch, without a call to any replica."""
        ...

    async def migrate(self, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        """Move a request to `target`, or to a replica of the scheduler's choice. `reference` is its id or label."""
        ...

    async def drain(self, replica: str) -> MoveAnswer:
        """Drain a replica, then stop it."""
        ...

    async def set_role(self, replica: str, role: Role | None) -> MoveAnswer:
        """Set a replica's role; with None, the scheduler assigns it again."""
        ...

    async def set_mode(self, mode: Mode) -> MoveAnswer:
        """Set the scheduler's mode, until the application is deployed again."""
        ...

    async def set_bounds(self, least: int, most: int) -> MoveAnswer:
        """Set the bounds on the number of replicas."""
        ...

    async def match(self, order: MatchOrder) -> dict[str, Any]:
        """The body of `/mell/cache/match`. Raises ApiError."""
        ...

    async def names(self, order: PromptOrder) -> tuple[int, ...] | None:
        """The names of the blocks of an order; None: all blocks. Raises ApiError."""
        ...

    async def prefix(self, order: CopyPrompt) -> RequestSpec:
        """A request with the prompt of an order. Raises ApiError."""
        ...

    async def load_adapter(self, order: LoadAdapter) -> str:
        """Load a LoRA adapter. Returns the answer's text. Raises ApiError."""
        ...

    async def unload_adapter(self, name: str) -> str:
        """Unload a LoRA adapter. Returns the answer's text. Raises ApiError."""
        ...


class ControlRoutes:
    """The handlers of these routes over a backend."""

    def __init__(self, backend: ControlBackend) -> None:
        self._backend = backend
        self._page = PageRoutes(backend, self._check_admin)

    def close(self) -> None:
        """End the streams of open pages, for which a stopping server would otherwise wait."""
        self._page.feed.close()

    def app(self, api: ASGIApp) -> Starlette:
        """These routes, and `api` for all other paths, as an ASGI application."""
        routes = [
            Route("/health", self.health, methods=["GET"]),
            Route("/ping", self.health, methods=["GET", "POST"]),
            Route("/load", self.load, methods=["GET"]),
            Route("/live", self.live, methods=["GET"]),
            Route("/version", self.version, methods=["GET"]),
            Route("/metrics", self.metrics, methods=["GET"]),
            Route("/mell/state", self.state, methods=["GET"]),
            Route("/mell/migrations", self.migrations, methods=["GET"]),
            Route("/mell/migrations", self.migrate, methods=["POST"]),
            Route("/mell/replicas/{replica}/drain", self.drain, methods=["POST"]),
            Route("/mell/replicas/{replica}/role", self.set_role, methods=["POST"]),
            Route("/mell/mode", self.mode, methods=["GET"]),
            Route("/mell/mode", self.set_mode, methods=["POST"]),
            Route("/mell/bounds", self.set_bounds, methods=["POST"]),
            Route("/mell/cache/match", self.match, methods=["POST"]),
            Route("/mell/cache/copy", self.copy, methods=["POST"]),
            Route("/mell/cache/pin", self.pin, methods=["POST"]),
            Route("/mell/cache", self.drop, methods=["DELETE"]),
            Route("/mell/reset_prefix_cache", self.reset_prefix_cache, methods=["POST"]),
            Route("/mell/start_profile", self.start_profile, methods=["POST"]),
            Route("/mell/stop_profile", self.stop_profile, methods=["POST"]),
            Route("/v1/load_lora_adapter", self.load_adapter, methods=["POST"]),
            Route("/v1/unload_lora_adapter", self.unload_adapter, methods=["POST"]),
            *self._page.routes(),
        ]
        handlers = {
            ApiError: _api_error,
            HTTPException: _http_error,
            ClientDisconnect: _client_disconnected,
            Exception: _internal_error,
        }
        settings = self._backend.settings
        layers = [Middleware(CrossOrigin, settings)] if settings.allowed_origins else []
        app = Starlette(routes=routes, middleware=layers, exception_handlers=handlers)  # type: ignore[arg-type]
        app.router.default = api
        return app

    async def health(self, http: Request) -> Response:
        """GET /health, GET and POST /ping: 200 if requests can be served."""
        if reason := self._backend.health():
            raise ApiError(503, reason, code="unavailable")
        return PlainTextResponse("OK")

    async def load(self, http: Request) -> Response:
        """GET /load: the number of calls that this ingress process answers now."""
        return JSONResponse({"server_load": self._backend.gate.running})

    async def live(self, http: Request) -> Response:
        """GET /live: 200 as long as the ingress runs."""
        return PlainTextResponse("OK")

    async def version(self, http: Request) -> Response:
        """GET /version."""
        return JSONResponse(self._backend.version())

    async def metrics(self, http: Request) -> Response:
        """GET /metrics: open to every client, since it reveals nothing about any single request."""
        return Response(await self._backend.metrics(), media_type=CONTENT_TYPE)

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
        order = await self._read(MoveRequest, http)
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

    async def set_role(self, http: Request) -> Response:
        """POST /mell/replicas/{id}/role."""
        self._check_admin(http)
        order = await self._read(RoleOrder, http)
        answer = await self._backend.set_role(http.path_params["replica"], order.role)
        if isinstance(answer, MoveAccepted):
            return JSONResponse({"id": answer.id, "role": order.role}, 202)
        raise ApiError(answer.status, answer.message, details=answer.details)

    async def mode(self, http: Request) -> Response:
        """GET /mell/mode."""
        self._check_admin(http)
        state, _ = await self._backend.snapshot()
        if not state["as_of"]:
            raise ApiError(503, "the scheduler is unavailable; try again", code="unavailable")
        return JSONResponse({name: state[name] for name in ("mode", "configured_mode")})

    async def set_mode(self, http: Request) -> Response:
        """POST /mell/mode."""
        self._check_admin(http)
        order = await self._read(ModeRequest, http)
        answer = await self._backend.set_mode(order.mode)
        if isinstance(answer, MoveAccepted):
            return JSONResponse({"mode": order.mode})
        raise ApiError(answer.status, answer.message, details=answer.details)

    async def set_bounds(self, http: Request) -> Response:
        """POST /mell/bounds."""
        self._check_admin(http)
        order = await self._read(BoundsOrder, http)
        answer = await self._backend.set_bounds(order.min_replicas, order.max_replicas)
        if isinstance(answer, MoveAccepted):
            return JSONResponse(order.model_dump())
        raise ApiError(answer.status, answer.message, details=answer.details)

    async def match(self, http: Request) -> Response:
        """POST /mell/cache/match."""
        self._check_admin(http)
        return JSONResponse(await self._backend.match(await self._read(MatchOrder, http)))

    async def copy(self, http: Request) -> Response:
        """POST /mell/cache/copy."""
        self._check_admin(http)
        order = await self._read(CopyPrompt, http)
        record = await self._backend.orders.copy(await self._backend.prefix(order), order.source, order.target)
        return JSONResponse(record.to_json())

    async def pin(self, http: Request) -> Response:
        """POST /mell/cache/pin."""
        self._check_admin(http)
        order = await self._read(PinOrder, http)
        names = await self._backend.names(order)
        blocks, failed = await self._backend.orders.pin_blocks(names or (), order.ttl_s, order.replica)
        return JSONResponse({"success": not failed, "blocks": blocks, "failed": failed, "ttl_s": order.ttl_s})

    async def drop(self, http: Request) -> Response:
        """DELETE /mell/cache."""
        self._check_admin(http)
        order = await self._read(DropOrder, http, empty=b"{}")
        blocks, failed = await self._backend.orders.delete_blocks(await self._backend.names(order), order.replica)
        return JSONResponse({"success": not failed, "blocks": blocks, "failed": failed})

    async def reset_prefix_cache(self, http: Request) -> Response:
        """POST /mell/reset_prefix_cache."""
        self._check_admin(http)
        return _carried_out(await self._backend.orders.reset_prefix_cache())

    async def start_profile(self, http: Request) -> Response:
        """POST /mell/start_profile."""
        self._check_admin(http)
        order = await self._read(StartProfile, http, empty=b"{}")
        session = ProfileSession(order.profile_prefix or "", order.delay_iterations, order.max_iterations)
        return _carried_out(await self._backend.orders.start_profile(session))

    async def stop_profile(self, http: Request) -> Response:
        """POST /mell/stop_profile."""
        self._check_admin(http)
        return _carried_out(await self._backend.orders.stop_profile())

    async def load_adapter(self, http: Request) -> Response:
        """POST /v1/load_lora_adapter."""
        self._check_updating(http)
        return PlainTextResponse(await self._backend.load_adapter(await self._read(LoadAdapter, http)))

    async def unload_adapter(self, http: Request) -> Response:
        """POST /v1/unload_lora_adapter."""
        self._check_updating(http)
        order = await self._read(UnloadAdapter, http)
        return PlainTextResponse(await self._backend.unload_adapter(order.lora_name))

    def _check_updating(self, http: Request) -> None:
        """Raise ApiError unless the caller may load and unload adapters."""
        if not self._backend.settings.allow_runtime_lora_updating:
            raise ApiError(404, "adapters are fixed: ingress.allow_runtime_lora_updating opens this route")
        self._check_admin(http)

    async def _read(self, kind: type[Order], http: Request, empty: bytes = b"") -> Order:
        """The order in a call's body; `empty` stands for a body without content."""
        return parse_order(kind, await read_body(http, self._backend.settings.max_body_bytes) or empty)

    def _check_admin(self, http: Request) -> None:
        """Raise ApiError unless the caller has the admin key or, without one, calls from loopback."""
        key = self._backend.settings.admin_key
        if key is None:
            if not _is_loopback(http):
                raise ApiError(403, "without an admin key, /mell is open on loopback only: set ingress.admin_key")
            return
        given = http.headers.get("authorization", "")
        if not hmac.compare_digest(given.encode(), f"Bearer {key}".encode()):
            raise ApiError(401, "this call requires Authorization: Bearer <admin key>", code="invalid_api_key")


def _carried_out(failed: Failures) -> Response:
    """The answer to an order to all replicas."""
    return JSONResponse({"success": not failed, "failed": failed})


def _is_loopback(http: Request) -> bool:
    try:
        return http.client is not None and ipaddress.ip_address(http.client.host).is_loopback
    except ValueError:
        return False


def _api_error(http: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


def _http_error(http: Request, error: HTTPException) -> Response:
    return JSONResponse(ApiError(error.status_code, str(error.detail)).body(), error.status_code, error.headers)


def _client_disconnected(http: Request, error: ClientDisconnect) -> Response:
    """The status is for the log only: the client is gone."""
    return Response(status_code=CLIENT_CLOSED_STATUS)


def _internal_error(http: Request, error: Exception) -> Response:
    """Starlette logs the exception; the response reveals no internals."""
    return JSONResponse(ApiError(500, "internal error").body(), 500)
