"""Mell's own routes, as FastAPI's path operations: health, metrics, the calls of operators, and the live page.

A handler's docstring describes its route in the OpenAPI document and in docs/api.md.
"""

from typing import Annotated, Any, Literal

from fastapi import APIRouter, Depends, FastAPI, Path, Query
from fastapi.exceptions import RequestValidationError
from fastapi.routing import APIRoute
from starlette.exceptions import HTTPException
from starlette.middleware import Middleware
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, PlainTextResponse, Response
from starlette.routing import BaseRoute, WebSocketRoute
from starlette.types import ASGIApp
from starlette.websockets import WebSocket

from app.client.api import HAND_OVER_REQUESTS
from app.ingress.engine_orders import Failures
from app.ingress.errors import ApiError
from app.ingress.hand_over.orders import HandOverOrders
from app.ingress.hand_over.rules import PROTOCOL, PROTOCOL_HEADER
from app.ingress.hand_over.taking import longest_message
from app.ingress.hand_over.wire import LONGEST_HEADER
from app.ingress.http.answers import (
    BoundsSet,
    CarriedOut,
    Copied,
    DrainStarted,
    Dropped,
    HandOverState,
    IngressDrain,
    LevelSet,
    Match,
    MemorySet,
    Migrations,
    Modes,
    ModeSet,
    MoveStarted,
    NodeDrain,
    PairBegun,
    PinnedPrefix,
    RoleSet,
    ServerLoad,
    SleepSet,
    State,
    Versions,
)
from app.ingress.http.backend import ControlBackend
from app.ingress.http.cross_origin import CrossOrigin
from app.ingress.http.operation import (
    ANY_ERROR,
    READING,
    AdapterOperation,
    Operation,
    OperatorOperation,
    Responses,
    refusals,
    text,
)
from app.ingress.http.orders import (
    BoundsOrder,
    CopyPrompt,
    DrainOrder,
    DropOrder,
    HandOverOrder,
    LevelOrder,
    LoadAdapter,
    MatchOrder,
    MemoryRequest,
    ModeRequest,
    MoveRequest,
    NodeDrainOrder,
    PairRequest,
    PinOrder,
    RoleOrder,
    StartProfile,
    UnloadAdapter,
)
from app.ingress.page.routes import PageRoutes
from app.ingress.telemetry.requests import CLIENT_CLOSED_STATUS
from app.ingress.telemetry.scrape import CONTENT_TYPE, MetricsScope
from deployments.api.calls import MoveAccepted, MoveAnswer
from deployments.engine.port import ProfileSession

SERVICE, CONTROL = "Service", "Control"
"""The tags of routes."""


async def _backend(http: Request) -> ControlBackend:
    backend: ControlBackend = http.app.state.backend
    return backend


Backend = Annotated[ControlBackend, Depends(_backend)]
Replica = Annotated[str, Path(description="An id from `/mell/state`.")]
ModelName = Annotated[str, Path(description="A name of the model.")]
Scope = Annotated[
    MetricsScope,
    Query(
        description="`all`: all processes; `share`: each process in the answer of one ingress only, for scrapes of "
        "every ingress; `process`: the ingress that answers."
    ),
]
NodeName = Annotated[str, Path(description="An id in Ray, as `node` in `/mell/state`, or an address or a host name.")]

# --- for every client -----------------------------------------------------------------------------------

service = APIRouter(route_class=Operation, tags=[SERVICE], responses=ANY_ERROR)

_HEALTH: dict[str, Any] = {"response_class": Response, "responses": {**text(), **refusals(503)}}


@service.get(
    "/health",
    **_HEALTH,
    response_description="They can: the initial replicas have run, and at least one does.",
)
async def health(backend: Backend) -> PlainTextResponse:
    """Check that requests can be served."""
    if reason := backend.health():
        raise ApiError(503, reason, code="unavailable")
    return PlainTextResponse("OK")


@service.get("/ping", **_HEALTH, response_description="As `GET /health`.")
@service.post("/ping", **_HEALTH, response_description="As `GET /health`.", operation_id="pingByPost")
async def ping(backend: Backend) -> PlainTextResponse:
    """Check that requests can be served, by SageMaker's name."""
    return await health(backend)


@service.get("/load", response_description="Their number in the ingress process that answers.")
async def load(backend: Backend) -> ServerLoad:
    """Count the calls that run."""
    return ServerLoad(server_load=backend.gate.running)


@service.get("/live", response_class=Response, responses=text(), response_description="It does.")
async def live() -> PlainTextResponse:
    """Check that the ingress runs."""
    return PlainTextResponse("OK")


_UNREADY: Responses = {503: {"description": "The reason, as text.", **text()[200]}}


@service.get(
    "/-/healthz",
    response_class=Response,
    response_description="`success`: as `GET /health`.",
    responses={**text(), **_UNREADY},
)
async def healthz(backend: Backend) -> PlainTextResponse:
    """Check that requests can be served, by the name and with the texts of Ray Serve's proxy.

    KubeRay's probes ask it.
    """
    reason = backend.health()
    return PlainTextResponse(reason or "success", 503 if reason else 200)


@service.get(
    "/-/routes",
    response_model=dict[str, str],
    response_description="The path below which the ingress answers, with the name of the application.",
    responses=_UNREADY,
)
async def routes(backend: Backend) -> Response:
    """List the application, by the name and in the form of Ray Serve's proxy."""
    if reason := backend.health():
        return PlainTextResponse(reason, 503)
    return JSONResponse({backend.settings.root_path or "/": backend.application})


@service.get("/version", response_description="Versions.")
async def version(backend: Backend) -> Versions:
    """Show versions."""
    return Versions(**backend.version())


@service.get(
    "/metrics",
    response_class=Response,
    responses={**text(CONTENT_TYPE), **refusals(400)},
    response_description="Prometheus's text format; docs/metrics.md explains each metric.",
)
async def metrics(backend: Backend, scope: Scope = MetricsScope.ALL) -> Response:
    """Collect the metrics of the whole application, or of a part of its processes."""
    # Open to every client, since it reveals nothing about any single request.
    return Response(await backend.metrics(scope), media_type=CONTENT_TYPE)


@service.get(
    "/openapi.json",
    response_model=dict[str, Any],
    response_description="A document of OpenAPI 3.1; its making takes a second or two.",
)
async def openapi(backend: Backend) -> Response:
    """Describe all calls."""
    return Response(await backend.document(), media_type="application/json")


# --- for operators --------------------------------------------------------------------------------------

operators = APIRouter(
    route_class=OperatorOperation,
    tags=[CONTROL],
    responses={**refusals(401, 403), **ANY_ERROR},
    strict_content_type=False,
)


@operators.get(
    "/mell/state",
    response_model=State,
    response_description="The state as of `as_of`: the last known one while the scheduler is away.",
)
async def get_state(backend: Backend) -> JSONResponse:
    """Show replicas and the requests on them."""
    return JSONResponse(await backend.state())


@operators.get(
    "/mell/migrations",
    response_model=Migrations,
    response_description="Up to 1,000, newest first; the last ones known while the scheduler is away.",
)
async def list_migrations(backend: Backend) -> JSONResponse:
    """Show migrations."""
    return JSONResponse(await backend.migrations())


@operators.post(
    "/mell/migrations",
    status_code=202,
    response_description="The migration has begun.",
    responses=refusals(*READING, 404, 409, 422, 503),
)
async def migrate(backend: Backend, order: MoveRequest) -> MoveStarted:
    """Move a running request.

    Refused:

    - No running request has the id or label (404), or several have the label (409, with `candidates`).
    - The request cannot be moved (422), see docs/api.md; no other replica runs, or `target` does not (422).
    - The scheduler or the source's replica is away (503).
    """
    return MoveStarted(id=_accepted(await backend.migrate(order.request_id, order.target, order.path)))


@operators.post(
    "/mell/replicas/{replica}/drain",
    status_code=202,
    response_description="Its requests move to others while they run; then it stops.",
    responses=refusals(404, 422, 503),
)
async def drain(backend: Backend, replica: Replica) -> DrainStarted:
    """Empty a replica and stop it.

    Refused:

    - No such replica runs (404, with `replicas`).
    - No other replica may run (422).
    - The scheduler or the replica is away (503).
    """
    return DrainStarted(id=_accepted(await backend.drain(replica)), state="DRAINING")


_UNTIL_EMPTY = NodeDrainOrder()


@operators.post(
    "/mell/nodes/{node}/drain",
    status_code=202,
    response_description="Their replicas are replaced elsewhere, and the requests on them move while they run.",
    responses=refusals(*READING, 404, 422, 503),
)
async def drain_node(backend: Backend, node: NodeName, order: NodeDrainOrder = _UNTIL_EMPTY) -> NodeDrain:
    """Drain a node that goes away.

    Ray starts nothing more there, and ends the node once it is empty; this cannot be undone. The order may be repeated,
    also for a node that has ended. The body may be empty.

    Refused:

    - No node has the id, address or host name (404, with `nodes`).
    - It is Ray's head node, or the only node (422).
    - Ray does not answer (503).
    """
    draining = await backend.nodes.drain(node, order.within_s)
    return NodeDrain(nodes=draining.nodes, replicas=draining.replicas)


_PATIENT = DrainOrder()


@operators.post(
    "/mell/ingress/drain",
    response_description="It drains. Once no call runs it may be ended; `running_calls` still run after `wait_s`.",
    responses=refusals(*READING, 422),
)
async def drain_ingress(backend: Backend, order: DrainOrder = _PATIENT) -> IngressDrain:
    """Drain the ingress process that answers, before it is ended.

    From now on `/health` and `/-/healthz` answer 503, and every answer closes its connection. Calls are still taken: a
    balancer sends some until it has seen that. The order is answered once no call runs, or after `wait_s`. It may be
    repeated. The body may be empty.

    Refused:

    - `ingress.port` is `null`, so clients connect to Serve's proxy (422).
    """
    if backend.settings.port is None:
        raise ApiError(422, "clients connect to Serve's proxy, not to this ingress: ingress.port is null")
    running = await backend.draining.drain(order.wait_s)
    return _ingress_drain(backend, running)


@operators.delete("/mell/ingress/drain", response_description="It is as before.")
async def undo_drain_of_ingress(backend: Backend) -> IngressDrain:
    """Undo the drain of the ingress process that answers."""
    return _ingress_drain(backend, backend.draining.undo())


@operators.get(
    "/mell/hand-over", response_model=HandOverState, response_description="The hand-over.", responses=refusals(422)
)
async def get_hand_over(backend: Backend) -> JSONResponse:
    """Show a hand-over to another Mell.

    Refused:

    - This Mell serves several models (422).
    """
    return JSONResponse(await _hand_over(backend).document())


@operators.post(
    "/mell/hand-over",
    response_model=HandOverState,
    response_description="It has begun: `here` falls as requests are handed over.",
    responses=refusals(*READING, 403, 422),
)
async def hand_over(backend: Backend, order: HandOverOrder) -> JSONResponse:
    """Hand all requests over to another Mell.

    Running requests continue there after their tokens so far, and new ones begin there. Clients keep their connections
    to this Mell, which passes the tokens on. The order may be repeated.

    Refused:

    - Nothing answers at `to`, or no Mell; its admin key is another one (422).
    - `to` is this Mell, hands over itself, or has another version of hand-overs (422).
    - It does not serve exactly the same model with the same vLLM, or no replica answers (422).
    - This Mell hands over to another one, or serves several models (422).
    - This Mell has no admin key: prompts would go to any URL that a program of this machine names (403).
    """
    if not backend.operators.has_key:
        raise ApiError(403, "a hand-over sends prompts to another machine: set ingress.admin_key first")
    return JSONResponse(await _hand_over(backend).begin(order.to, order.admin_key))


@operators.delete(
    "/mell/hand-over",
    response_model=HandOverState,
    response_description="New requests begin here.",
    responses=refusals(422),
)
async def undo_hand_over(backend: Backend) -> JSONResponse:
    """Hand no more requests over.

    Those that have been handed over go on there.

    Refused:

    - This Mell serves several models (422).
    """
    return JSONResponse(await _hand_over(backend).undo())


@operators.post(
    "/mell/replicas/{replica}/role",
    status_code=202,
    response_description="It has the role from the next epoch on, as policies.md describes.",
    responses=refusals(*READING, 404, 422, 503),
)
async def set_role(backend: Backend, replica: Replica, order: RoleOrder) -> RoleSet:
    """Set a replica's role in prefill and decoding.

    The role holds until `null` takes it back, or the replica ends.

    Refused:

    - No such replica runs (404, with `replicas`).
    - `scheduler.mode` is not `act`, so nothing moves requests on (422).
    - The scheduler is away (503).
    """
    return RoleSet(id=_accepted(await backend.set_role(replica, order.role)), role=order.role)


@operators.post(
    "/mell/replicas/{replica}/memory",
    status_code=202,
    response_description="The pool begins to change its size; `memory` of the replica in `/mell/state` shows it.",
    responses=refusals(*READING, 404, 422, 503),
)
async def set_memory(backend: Backend, replica: Replica, order: MemoryRequest) -> MemorySet:
    """Set the size of a replica's KV pool under its running requests.

    The replica keeps it until `null` gives it back to the division by demand. memory.md describes what happens to
    requests that do not fit. The order may be repeated.

    Refused:

    - No such replica runs (404, with `replicas`).
    - `memory.budget_mib` is not set (422).
    - The size does not hold one request of `max_model_len`, or is more than the replica has declared (422).
    - It is more than what is free in the budget of its node (422).
    - The scheduler or the replica is away (503).
    """
    return MemorySet(id=_accepted(await backend.set_memory(replica, order.blocks)), blocks=order.blocks)


@operators.post(
    "/mell/models/{model:path}/sleep",
    status_code=202,
    response_description="Requests leave; then parameters and KV pool are dropped.",
    responses=refusals(404, 409, 422, 503),
)
async def sleep_model(backend: Backend, model: ModelName) -> SleepSet:
    """Have all replicas of a model fall asleep.

    memory.md describes what it keeps. A request wakes the model again.

    Refused:

    - No model has that name (404).
    - None of them is awake (409).
    - `memory.budget_mib` is not set, or the engine cannot sleep (422).
    - `min_replicas` is not 0, or the mode is not `act` (422).
    - The scheduler or the replica is away (503).
    """
    return SleepSet(id=_accepted(await backend.set_model_asleep(model, asleep=True)), asleep=True)


@operators.post(
    "/mell/models/{model:path}/wake",
    status_code=202,
    response_description="It loads its parameters; `state` of the replica in `/mell/state` shows it.",
    responses=refusals(404, 409, 422, 503),
)
async def wake_model(backend: Backend, model: ModelName) -> SleepSet:
    """Wake a sleeping replica of a model.

    memory.md describes what it keeps. Requests wake a model without this call, too.

    Refused:

    - No model has that name (404).
    - None of them sleeps, or another one is waking (409).
    - `memory.budget_mib` is not set, or the engine cannot sleep (422).
    - As many as `max_replicas` are awake, or the budget has no room (422).
    - The scheduler or the replica is away (503).
    """
    return SleepSet(id=_accepted(await backend.set_model_asleep(model, asleep=False)), asleep=False)


@operators.post(
    "/mell/replicas/{replica}/sleep",
    status_code=202,
    response_description="Requests leave; then parameters and KV pool are dropped.",
    responses=refusals(404, 409, 422, 503),
)
async def sleep_replica(backend: Backend, replica: Replica) -> SleepSet:
    """Have a replica fall asleep.

    memory.md describes what it keeps. Its requests move to other replicas.

    Refused:

    - No such replica runs (404).
    - It is asleep (409).
    - `memory.budget_mib` is not set, or the engine cannot sleep (422).
    - As few as `min_replicas` are awake, or the mode is not `act` (422).
    - The scheduler or the replica is away (503).
    """
    return SleepSet(id=_accepted(await backend.set_asleep(replica, asleep=True)), asleep=True)


@operators.post(
    "/mell/replicas/{replica}/wake",
    status_code=202,
    response_description="It loads its parameters; `state` of the replica in `/mell/state` shows it.",
    responses=refusals(404, 409, 422, 503),
)
async def wake_replica(backend: Backend, replica: Replica) -> SleepSet:
    """Wake a sleeping replica.

    memory.md describes what it keeps. It takes requests once it has loaded.

    Refused:

    - No such replica runs (404).
    - It is awake, or another one is waking (409).
    - `memory.budget_mib` is not set, or the engine cannot sleep (422).
    - As many as `max_replicas` are awake, or the budget has no room (422).
    - The scheduler or the replica is away (503).
    """
    return SleepSet(id=_accepted(await backend.set_asleep(replica, asleep=False)), asleep=False)


@operators.post(
    "/mell/pairs",
    status_code=202,
    response_description="The pair begins to form; `memory.pair` of both replicas in `/mell/state` shows it.",
    responses=refusals(*READING, 404, 409, 422, 503),
)
async def pair(backend: Backend, order: PairRequest) -> PairBegun:
    """Have two replicas give each other layers, and use the memory of their parameters for KV.

    Their requests run on, each through both replicas, as memory.md describes. The order may be repeated.

    Refused:

    - No such replica runs (404, with `replicas`).
    - One of them is in another pair, or is not running (409).
    - `memory.budget_mib` is not set, the replicas are of two models, or the engine cannot be paired: the message has
      the reason (422).
    - The scheduler or a replica is away (503).
    """
    return PairBegun(id=_accepted(await backend.pair(order.lower, order.upper)))


@operators.delete(
    "/mell/pairs/{replica}",
    status_code=202,
    response_description="Both replicas load all layers again; `memory.pair` in `/mell/state` shows it.",
    responses=refusals(404, 409, 503),
)
async def unpair(backend: Backend, replica: Replica) -> PairBegun:
    """Undo the pair of a replica.

    Requests that do not fit into whole replicas move away first.

    Refused:

    - No such replica runs (404, with `replicas`).
    - It is in no pair (409).
    - The scheduler or the replica is away (503).
    """
    return PairBegun(id=_accepted(await backend.unpair(replica)))


@operators.get(
    "/mell/mode",
    response_description="The mode, and the one in the settings.",
    responses=refusals(503),
)
async def mode(backend: Backend) -> Modes:
    """Get the scheduler's mode.

    Refused:

    - The scheduler has not reported yet (503).
    """
    state, _ = await backend.snapshot()
    if not state["as_of"]:
        raise ApiError(503, "the scheduler is unavailable; try again", code="unavailable")
    return Modes.model_validate(state)


@operators.post(
    "/mell/mode",
    response_description="The scheduler has the mode: no later epoch acts in another one.",
    responses=refusals(*READING, 422, 503),
)
async def set_mode(backend: Backend, order: ModeRequest) -> ModeSet:
    """Stop the scheduler's moves, or let it move again.

    The mode holds until another order or until the application is deployed again, a restart of the scheduler included.
    Moves that have been ordered go on to their ends. The requests of stopping replicas move in every mode, and so do
    those that an operator moves.

    Refused:

    - The mode is `act`, and `autoscaling_config.target_ongoing_requests` has Serve decide on the number of replicas
      (422).
    - The scheduler is away (503).
    """
    _accepted(await backend.set_mode(order.mode))
    return ModeSet(mode=order.mode)


@operators.post(
    "/mell/bounds",
    response_description="They count at once.",
    responses=refusals(*READING, 422, 503),
)
async def set_bounds(backend: Backend, order: BoundsOrder) -> BoundsSet:
    """Set the bounds on the number of replicas.

    They count until Serve ends, or a configuration with other bounds is applied. Replicas beyond the maximum are
    stopped, and their requests move to others.

    Refused:

    - `scheduler.mode` is not `act`, or the minimum is not above the number of replicas for prefills (422).
    - The scheduler is away (503).
    """
    _accepted(await backend.set_bounds(order.model, order.min_replicas, order.max_replicas))
    return BoundsSet(min_replicas=order.min_replicas, max_replicas=order.max_replicas)


@operators.post(
    "/mell/level",
    response_description="The next epoch keeps the level.",
    responses=refusals(*READING, 422, 503),
)
async def set_level(backend: Backend, order: LevelOrder) -> LevelSet:
    """Set the service level of a class.

    It counts until Serve ends, or a configuration with other levels is applied.

    Refused:

    - No level is configured for the class (422).
    - The scheduler is away (503).
    """
    itl_s = None if order.itl_p99_ms is None else order.itl_p99_ms / 1e3
    _accepted(await backend.set_level(order.model, order.service_class, order.ttft_p99_s, itl_s))
    return LevelSet.model_validate(order.model_dump(by_alias=True))


@operators.post(
    "/mell/cache/match",
    response_model=Match,
    response_description="The tokens that each replica has, and the placement that a request would get now.",
    responses=refusals(*READING, 404, 503),
)
async def match_prompt(backend: Backend, order: MatchOrder) -> JSONResponse:
    """Look a prompt up in all prefix caches.

    Nothing is placed or promised. A request would be of the class `default`. caching.md explains the answer.

    Refused:

    - Both `prompt` and `messages`, or neither (400).
    - The prompt is empty, or longer than `ingress.max_prompt_tokens` or the model's context (400).
    - `messages` with images, audio or video (400).
    - There is no such model or adapter (404).
    - The scheduler is away (503).
    """
    return JSONResponse(await backend.match(order))


@operators.post(
    "/mell/cache/copy",
    response_model=Copied,
    response_description="The target has the blocks.",
    responses=refusals(*READING, 404, 409, 503),
)
async def copy_prompt(backend: Backend, order: CopyPrompt) -> JSONResponse:
    """Copy the cached blocks of a prompt from one replica to another.

    Only blocks that the target lacks are sent, and requests go on meanwhile.

    Refused:

    - Both `prompt` and `messages`, or neither; `from` and `to` are the same replica (400).
    - The prompt is empty, or longer than `ingress.max_prompt_tokens` or the model's context (400).
    - `messages` with images, audio or video (400).
    - There is no such model or adapter, or no such replica runs (404, with `replicas`).
    - Nothing was copied: the donor has no block of it, the target has no room, or the caches differ (409).
    - The ingress is starting, or the donor is away (503).
    """
    prefix = await backend.prefix(order)
    record = await backend.orders_for(order).copy(prefix, order.source, order.target)
    return JSONResponse(record.to_json())


@operators.post(
    "/mell/cache/pin",
    response_description="They are not evicted from there.",
    responses=refusals(*READING, 404, 409, 422, 503),
)
async def pin_blocks(backend: Backend, order: PinOrder) -> PinnedPrefix:
    """Keep the blocks of a prompt in host memory for a time.

    On the replicas that have the prompt's first block in their host memory. A later call for the same prompt replaces
    its pin; `ttl_s: 0` ends it.

    Refused:

    - Both `prompt` and `messages`, or neither; `ttl_s` is negative or above a day (400).
    - The prompt is empty, or longer than `ingress.max_prompt_tokens` or the model's context (400).
    - `messages` with images, audio or video (400).
    - There is no such model or adapter, or no such replica runs (404, with `replicas`).
    - No replica has the prompt in host memory, or its pin has expired (404).
    - There is no tier of host memory, or `cache.pin_share` is exceeded (409).
    - The prompt has no full block, or its blocks have no names (422).
    - The ingress is starting, or no replica answers (503).
    """
    names = await backend.names(order)
    blocks, failed = await backend.orders_for(order).pin_blocks(names or (), order.ttl_s, order.replica)
    return PinnedPrefix(success=not failed, failed=failed, blocks=blocks, ttl_s=order.ttl_s)


_ALL = DropOrder()


@operators.delete(
    "/mell/cache",
    response_description="No later request finds the blocks.",
    responses=refusals(*READING, 404, 422, 503),
)
async def drop_blocks(backend: Backend, order: DropOrder = _ALL) -> Dropped:
    """Delete the blocks of a prompt, or all blocks, from prefix caches.

    Running requests keep the blocks that they use, and go on. Without `prompt` and `messages`, all blocks are deleted;
    the body may be empty.

    Refused:

    - Both `prompt` and `messages`; `model` or `cache_salt` with neither (400).
    - The prompt is empty, or longer than `ingress.max_prompt_tokens` or the model's context (400).
    - `messages` with images, audio or video (400).
    - There is no such model or adapter, or no such replica runs (404, with `replicas`).
    - The prompt has no full block, or its blocks have no names (422).
    - The ingress is starting (503).
    """
    names = await backend.names(order)
    blocks, failed = await backend.orders_for(order).delete_blocks(names, order.replica)
    return Dropped(success=not failed, failed=failed, blocks=blocks)


@operators.post("/mell/reset_prefix_cache", response_description="As vLLM's `/reset_prefix_cache`.")
async def reset_prefix_cache(backend: Backend) -> CarriedOut:
    """Drop the cached KV blocks of ended requests, on all running replicas.

    As in vLLM, a replica on which requests run keeps its cache: try again.
    """
    return _carried_out(await backend.orders.reset_prefix_cache())


_WHOLE = StartProfile()


@operators.post(
    "/mell/start_profile",
    response_description="As vLLM's `/start_profile`.",
    responses=refusals(*READING),
)
async def start_profile(backend: Backend, order: StartProfile = _WHOLE) -> CarriedOut:
    """Start the profilers of all running replicas.

    Engines have a profiler with `engine_kwargs.profiler_config`. The body may be empty.
    """
    session = ProfileSession(order.profile_prefix or "", order.delay_iterations, order.max_iterations)
    return _carried_out(await backend.orders.start_profile(session))


@operators.post("/mell/stop_profile", response_description="As vLLM's `/stop_profile`.")
async def stop_profile(backend: Backend) -> CarriedOut:
    """Stop the profilers of all running replicas, and write their files.

    Until then, a silent engine is not replaced (`deployment_config.engine_silence_s`): writing takes minutes.
    """
    return _carried_out(await backend.orders.stop_profile())


adapters = APIRouter(
    route_class=AdapterOperation,
    tags=[CONTROL],
    responses={**text(), **refusals(401, 403, 404, *READING), **ANY_ERROR},
    default_response_class=Response,
    strict_content_type=False,
)


@adapters.post(
    "/v1/load_lora_adapter",
    response_description="All running replicas have loaded it, and the ingress processes serve it.",
    responses=refusals(503),
)
async def load_adapter(backend: Backend, order: LoadAdapter) -> PlainTextResponse:
    """Load a LoRA adapter.

    As in vLLM. Without `ingress.allow_runtime_lora_updating` the answer is 404.

    Refused:

    - The name is that of the model, of a loaded adapter (without `load_inplace`), or of one in `lora_modules` (400).
    - A replica cannot load it; the message has the replica and the reason (400).
    - No replica runs (503).
    """
    return PlainTextResponse(await backend.load_adapter(order))


@adapters.post(
    "/v1/unload_lora_adapter",
    response_description="No new request can name it; requests that run with it continue.",
)
async def unload_adapter(backend: Backend, order: UnloadAdapter) -> PlainTextResponse:
    """Unload a LoRA adapter.

    As in vLLM. Without `ingress.allow_runtime_lora_updating` the answer is 404.

    Refused:

    - No such adapter is loaded (404), or it is in `lora_modules` (400).
    """
    return PlainTextResponse(await backend.unload_adapter(order.lora_name))


def _hand_over(backend: ControlBackend) -> HandOverOrders:
    """The hand-over. Raises ApiError 422 if there is none."""
    if backend.hand_over is None:
        raise ApiError(422, _SEVERAL)
    return backend.hand_over


_SEVERAL = "this Mell serves several models, and a hand-over is of one"


def _ingress_drain(backend: ControlBackend, running: int) -> IngressDrain:
    state: Literal["DRAINING", "RUNNING"] = "DRAINING" if backend.draining.active else "RUNNING"
    return IngressDrain(id=backend.id, state=state, running_calls=running)


def _accepted(answer: MoveAnswer) -> str:
    """The id of an accepted order. Raises ApiError if the order is refused."""
    if isinstance(answer, MoveAccepted):
        return answer.id
    raise ApiError(answer.status, answer.message, details=answer.details)


def _carried_out(failed: Failures) -> CarriedOut:
    """The answer to an order to all replicas."""
    return CarriedOut(success=not failed, failed=failed)


# --- for other Mells ----------------------------------------------------------------------------------


async def take_requests(connection: WebSocket) -> None:
    """Take requests of another Mell, which hands them over; `app/ingress/hand_over/wire.py` has the messages."""
    backend: ControlBackend = connection.app.state.backend
    try:
        backend.operators.check(connection)
        hand_over, taken = _hand_over(backend), backend.taken
        if (version := connection.headers.get(PROTOCOL_HEADER)) != str(PROTOCOL):
            raise ApiError(422, f"this Mell has version {PROTOCOL} of hand-overs, and the caller {version}")
    except ApiError as error:
        await connection.send_denial_response(JSONResponse(error.body(), error.status, error.headers))
        return
    longest = str(longest_message(backend.settings)).encode()
    await connection.accept(headers=[(LONGEST_HEADER.lower().encode(), longest)])
    assert taken is not None
    await taken.serve(connection, lambda: hand_over.closed)


# --- the application ------------------------------------------------------------------------------------

ROUTES = [r for router in (service, operators, adapters) for r in router.routes if isinstance(r, APIRoute)]
"""All described routes: all but the page's."""


class ControlRoutes:
    """These routes and the page's over a backend."""

    def __init__(self, backend: ControlBackend) -> None:
        self._backend = backend
        self._page = PageRoutes(backend, lambda http: backend.operators.check(http))

    def close(self) -> None:
        """End the streams of open pages, for which a stopping server would otherwise wait."""
        self._page.feed.close()

    def app(self, api: ASGIApp) -> FastAPI:
        """These routes, and `api` for all other paths, as an ASGI application."""
        handlers: dict[Any, Any] = {
            ApiError: _api_error,
            HTTPException: _http_error,
            RequestValidationError: _invalid_parameter,
            ClientDisconnect: _client_disconnected,
            Exception: _internal_error,
        }
        settings = self._backend.settings
        layers = [Middleware(CrossOrigin, settings)] if settings.allowed_origins else []
        routes: list[BaseRoute] = [*ROUTES, WebSocketRoute(HAND_OVER_REQUESTS, take_requests), *self._page.routes()]
        # The backend has the document, of vLLM's routes, too.
        app = FastAPI(routes=routes, middleware=layers, exception_handlers=handlers, openapi_url=None)
        app.state.backend = self._backend
        app.router.default = api
        return app


def _api_error(http: Request, error: ApiError) -> Response:
    return JSONResponse(error.body(), error.status, error.headers)


def _http_error(http: Request, error: HTTPException) -> Response:
    return JSONResponse(ApiError(error.status_code, str(error.detail)).body(), error.status_code, error.headers)


def _invalid_parameter(http: Request, error: RequestValidationError) -> Response:
    """Bodies have been read before: FastAPI refuses only parameters of a query, and of a path that is no UTF-8."""
    first = error.errors()[0]
    place, name = first["loc"][:2]
    if place != "query":
        return JSONResponse(ApiError(404, "Not Found").body(), 404)
    refused = ApiError(400, f"{name}: {first['msg']}", param=str(name), code="invalid_value")
    return JSONResponse(refused.body(), refused.status)


def _client_disconnected(http: Request, error: ClientDisconnect) -> Response:
    """The status is for the log only: the client is gone."""
    return Response(status_code=CLIENT_CLOSED_STATUS)


def _internal_error(http: Request, error: Exception) -> Response:
    """Starlette logs the exception; the response reveals no internals."""
    return JSONResponse(ApiError(500, "internal error").body(), 500)
