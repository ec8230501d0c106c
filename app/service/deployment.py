"""The `Ingress` deployment: HTTP towards clients, token streams towards replicas."""

import asyncio
import contextlib
import importlib
import inspect
import logging
import time
import uuid
from collections.abc import Awaitable, Callable, Iterator, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from ray import serve
from ray.serve.handle import DeploymentHandle
from starlette.applications import Starlette
from starlette.middleware.base import BaseHTTPMiddleware
from starlette.types import ASGIApp

from app.frontend.guard.layers import guarded
from app.frontend.guard.models import GuardedModels
from app.ingress.access.admission import FirstTokenDeadlines, Gate
from app.ingress.access.classes import ClassChooser
from app.ingress.access.keys import KeyFile
from app.ingress.access.operators import OperatorAccess
from app.ingress.adapters import AdapterOrders, taken_elsewhere
from app.ingress.config import IngressConfig, ModelConfig
from app.ingress.engine_orders import EngineOrders
from app.ingress.errors import ApiError
from app.ingress.hand_over.orders import HandOverOrders
from app.ingress.hand_over.taking import TakenRequests
from app.ingress.http.control import ControlRoutes
from app.ingress.http.draining import CloseConnections, Draining
from app.ingress.http.orders import CopyPrompt, LoadAdapter, MatchOrder, PromptOrder
from app.ingress.http.server import HttpServer
from app.ingress.node_orders import NodeOrders
from app.ingress.streams.placing import Placer
from app.ingress.streams.streams import Streams
from app.ingress.telemetry.requests import RequestTelemetry
from app.ingress.telemetry.scrape import MetricsCollector, MetricsScope
from app.ingress.telemetry.tracing import NO_TRACER, KeepHttpScope, Tracer
from app.service.api import VllmApi, describe_routes
from app.service.merging import merge_migrations, merge_states, of_several
from app.service.models import IngressModel, of_one_pool, order_where_found
from app.service.starting import StartProgress, serve_own_port
from app.settings import IngressSettings
from app.versions import VERSION, installed_version
from deployments.api.calls import HandOverCounts, MoveAnswer, MoveRejected, OrderedHandOver
from deployments.api.protocols import IngressApi
from deployments.api.stubs import SchedulerStub, engines, ingresses, scheduler_client
from deployments.config import Topology
from deployments.metrics.exposition import Family, join_families
from deployments.metrics.vllm import expose_requests
from deployments.processes.guard import start_guard
from deployments.processes.heap import freeze_heap
from deployments.processes.niceness import take_niceness_of_parent
from deployments.serve.adapters import AdapterStore
from deployments.serve.environment import check_environment
from deployments.serve.membership import Membership, ServeMembership
from deployments.serve.nodes import RayNodes
from deployments.serve.retirement import generation
from deployments.serve.routing import own_app, own_id
from migration.protocol.messages import PathRequest
from migration.protocol.request import IngressId, RequestSpec
from policies.decision.limits import Mode
from policies.model import PoolId, ReplicaId, Role

log = logging.getLogger("ray.serve")

_CONTROL_TIMEOUT_S = 3.0
_CONTROL_PATIENCE_S = 12.0
"""Longest time for which a call is retried while the scheduler is slow or restarting."""
_CONTROL_RETRY_S = 0.3
_STATE_TIMEOUT_S = 1.0


PoolOrder = Callable[[SchedulerStub, PoolId], Awaitable[MoveAnswer]]


class IngressBackend:
    """Implements `Backend` over the deployments."""

    def __init__(self, config: IngressConfig, topology: Topology) -> None:
        self.id = IngressId(own_id())
        self.application = app = own_app()
        self.settings: IngressSettings = config
        self._config = config
        self._key_file = KeyFile(config.api_keys_file) if config.api_keys_file is not None else None
        keys = self._key_file.read() if self._key_file is not None else config.api_keys
        self.operators = OperatorAccess(config.admin_key, config.admin_key_file)
        self.tracer = _make_tracer(config, self.id)
        self.telemetry = _make_telemetry(config, self._decode, self.tracer)
        self.progress = StartProgress.of(config)
        self._scheduler = scheduler_client(app)
        self._peers: frozenset[ReplicaId] = frozenset()
        self._processes = processes = ingresses(app)
        self._ingresses = ServeMembership("Ingress", app, f"ingresses-{self.id}", self._peers_changed)
        self.models = tuple(self._serve_model(model, topology.pools) for model in config.models)
        self.guarded = GuardedModels(self.models)
        pools = [(model.pool, model.replicas, model.membership) for model in self.models]
        self._metrics = MetricsCollector(
            (ReplicaId(self.id), self.own_metrics),
            self._scheduler,
            pools,
            (processes, self._ingresses),
        )
        self.orders = EngineOrders([(replicas, membership) for _, replicas, membership in pools])
        self.nodes = NodeOrders(RayNodes(), self.state)
        chooser = ClassChooser(config.service_classes, config.service_tiers)
        ids = [model.id for model in self.models]
        self.gate = Gate(keys, config.max_requests, chooser=chooser, models=ids)
        model, taken = self.models[0], self._taken
        self.draining = Draining(lambda: self.gate.running + taken())
        self.taken: TakenRequests | None = None
        self.hand_over: HandOverOrders | None = None
        if len(self.models) == 1:
            self.taken = TakenRequests(model.streams, self.id, model.api.content, config.service_classes)
            service, peers = f"{app}.{generation()}", (processes, self._ingresses)
            self.hand_over = HandOverOrders(service, self.id, model.streams, peers, taken=taken)
        self._state: dict[str, Any] = {"as_of": 0.0, "mode": "off", "replicas": []}
        self._migrations: dict[str, Any] = {"migrations": []}
        self._scheduler_down = False
        self._document = b""
        self._refresher = asyncio.create_task(repeat(self._refresh, config.refresh_s))

    def _taken(self) -> int:
        """The number of requests of another Mell."""
        return 0 if self.taken is None else self.taken.count

    def _serve_model(self, model: ModelConfig, pools: Mapping[str, PoolId]) -> IngressModel:
        """A model, on the replicas of its pool. `pools` are those of all models, by id."""
        config, app, api, pool = self._config, self.application, VllmApi(self._config, model), pools[model.model_id]
        membership = ServeMembership(pool, app, f"ingress-{pool}-{self.id}", lambda found: self._changed(model, found))
        replicas = engines(app, pool, config.replica_silence_s)
        placer = Placer(self._scheduler, pool, membership, config.place_timeout_s)
        streams = Streams(
            self.id,
            replicas,
            placer,
            self._scheduler,
            config.no_replica_timeout_s,
            config.max_engine_losses,
            lost=partial(self.telemetry.lost.inc, 1.0, model.model_id),
            tracer=self.tracer,
        )
        others = [each for each in config.models if each is not model]
        adapters = AdapterOrders(
            AdapterStore(app, pool),
            model.names,
            model.adapters,
            (replicas, membership),
            (self._processes, self._ingresses),
            api.serve_adapters,
            frozenset[str]().union(*(each.all_names for each in others)),
            [AdapterStore(app, pools[each.model_id]) for each in others],
        )
        deadlines = FirstTokenDeadlines(config.refuse_late, lambda: placer.ttft_s, placer.soonest_s)
        orders = EngineOrders([(replicas, membership)])
        return IngressModel(model, pool, api, replicas, membership, placer, streams, orders, adapters, deadlines)

    def _decode(self, model: str, tokens: Sequence[int]) -> str:
        """The text of tokens of the model with that id."""
        return next(served.api.decode(tokens) for served in self.models if served.id == model)

    def _changed(self, model: ModelConfig, membership: Membership) -> None:
        served = next(each for each in self.models if each.config is model)
        served.streams.watch(membership)
        self.progress.count([len(each.membership.running) for each in self.models])

    def _peers_changed(self, membership: Membership) -> None:
        running = frozenset(membership.running)
        for gone in self._peers - running:
            self._processes.forget(gone)
        self._peers = running

    async def start(self) -> ASGIApp:
        """Make the applications of all models; they are served behind one guard."""
        for model in self.models:
            start = model.api.start if len(self.models) == 1 else model.api.begin
            await start(model.streams, self.id)
        return guarded(self.guarded, self.gate, self.telemetry, self.settings)

    async def _refresh(self) -> None:
        """Refresh the view of the cluster, report latencies to the scheduler, and reload changed key files."""
        self.operators.reload()
        if self._key_file is not None:
            self.gate.reload(self._key_file)
        await asyncio.gather(*(model.placer.refresh() for model in self.models))
        for model in self.models if self.telemetry.keeps_times else ():
            self._report_latencies(model)
        await self.refresh_adapters()
        if not self.progress.ended:
            await self._lower_initial()

    def _report_latencies(self, model: IngressModel) -> None:
        counts = self.telemetry.class_counts(model.id)
        self._scheduler.notify(lambda scheduler: scheduler.latencies(model.pool, self.id, counts))

    async def refresh_adapters(self) -> None:
        """Follow the adapters that are loaded at run time, if that is allowed."""
        if not self.settings.allow_runtime_lora_updating:
            return
        try:
            for model in self.models:
                await model.adapters.refresh()
        except Exception:
            log.exception("the list of adapters could not be read")

    async def _lower_initial(self) -> None:
        """Lower the expected number of replicas: the scheduler may have stopped one before this ingress saw it."""
        with contextlib.suppress(Exception):
            scheduler = self._scheduler.within(_STATE_TIMEOUT_S)
            wanted = [await scheduler.wanted(model.pool) for model in self.models]
            if (known := [number for number in wanted if number is not None]) == wanted:
                self.progress.lower_initial(known)

    def health(self) -> str | None:
        """See `Backend.health`."""
        if self.draining.active:
            return self.draining.reason
        if not self.progress.ended:
            return f"starting: {self.progress.running} of {self.progress.initial} replicas run"
        return None if any(model.streams.serving for model in self.models) else "no replica accepts requests"

    def version(self) -> dict[str, str]:
        """See `Backend.version`."""
        return {"version": VERSION, **{name: installed_version(name) for name in ("vllm", "ray", "torch")}}

    async def own_metrics(self) -> Sequence[Family]:
        """The metrics of this ingress."""
        own = [await model.api.metrics(self.id) for model in self.models]
        if len(self.models) == 1:  # vLLM counts the calls of tool parsers, of all its applications, as one model's.
            own.append(expose_requests(self.id))
        return (*self.telemetry.expose(self.id), *join_families(own))

    async def metrics(self, scope: MetricsScope) -> bytes:
        """See `Backend.metrics`."""
        return await self._metrics.scrape(scope)

    async def document(self) -> bytes:
        """See `Backend.document`."""
        if self._document:
            return self._document
        is_complete = all(model.api.routes for model in self.models)
        found = await describe_routes([model.api for model in self.models])
        if is_complete:
            self._document = found
        return found

    async def state(self) -> dict[str, Any]:
        """See `Backend.state`; while the scheduler is unavailable, its last answer, with its time in `as_of`."""
        with self._ignore_scheduler_outage():
            scheduler = self._scheduler.within(_STATE_TIMEOUT_S)
            self._state = self._merged(await asyncio.gather(*(scheduler.state(model.pool) for model in self.models)))
        return self._state

    async def migrations(self) -> dict[str, Any]:
        """See `Backend.migrations`; while the scheduler is unavailable, its last answer."""
        with self._ignore_scheduler_outage():
            scheduler = self._scheduler.within(_STATE_TIMEOUT_S)
            found = await asyncio.gather(*(scheduler.migrations(model.pool) for model in self.models))
            self._migrations = merge_migrations(found)
        return self._migrations

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        """See `Backend.snapshot`; while the scheduler is unavailable, its last answer."""
        with self._ignore_scheduler_outage():
            scheduler = self._scheduler.within(_STATE_TIMEOUT_S)
            found = await asyncio.gather(*(scheduler.snapshot(model.pool) for model in self.models))
            self._state = self._merged([state for state, _ in found])
            self._migrations = merge_migrations([migrations for _, migrations in found])
        return self._state, self._migrations

    def _merged(self, states: Sequence[dict[str, Any]]) -> dict[str, Any]:
        """The state of the application, from those of the models, in their order."""
        found = {model.id: state for model, state in zip(self.models, states, strict=True)}
        return merge_states(found, {model.id: model.config.names for model in self.models})

    @contextlib.contextmanager
    def _ignore_scheduler_outage(self) -> Iterator[None]:
        """Continue without an answer of the scheduler; log one line per outage, since open pages poll continuously."""
        try:
            yield
            self._scheduler_down = False
        except Exception as error:
            if not self._scheduler_down:
                log.warning("no answer from the scheduler: %r", error)
            self._scheduler_down = True

    async def migrate(self, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        """See `Backend.migrate`."""
        if len(self.models) > 1 and (several := of_several((await self.snapshot())[0], reference)):
            message = f"{len(several)} requests have the id or label {reference!r}"
            return MoveRejected(409, message, {"candidates": several})
        id = uuid.uuid4().hex[:16]
        return await self._find(lambda scheduler, pool: scheduler.migrate(pool, id, reference, target, path))

    async def drain(self, replica: str) -> MoveAnswer:
        """See `Backend.drain`."""
        return await self._find(lambda scheduler, pool: scheduler.drain(pool, replica))

    async def set_role(self, replica: str, role: Role | None) -> MoveAnswer:
        """See `Backend.set_role`."""
        return await self._find(lambda scheduler, pool: scheduler.set_role(pool, replica, role))

    async def set_memory(self, replica: str, blocks: int | None) -> MoveAnswer:
        """See `Backend.set_memory`."""
        return await self._find(lambda scheduler, pool: scheduler.set_memory(pool, replica, blocks))

    async def set_asleep(self, replica: str, asleep: bool) -> MoveAnswer:
        """See `Backend.set_asleep`."""
        return await self._find(lambda scheduler, pool: scheduler.set_asleep(pool, replica, asleep))

    async def set_model_asleep(self, model: str, asleep: bool) -> MoveAnswer:
        """See `Backend.set_model_asleep`."""
        pool = self.guarded.named(model).pool
        return await self._order(lambda scheduler: scheduler.set_asleep(pool, None, asleep))

    async def pair(self, lower: str, upper: str) -> MoveAnswer:
        """See `Backend.pair`."""
        answer = await self._find(lambda scheduler, pool: scheduler.pair(pool, lower, upper))
        return of_one_pool(answer, (lower, upper))

    async def unpair(self, replica: str) -> MoveAnswer:
        """See `Backend.unpair`."""
        return await self._find(lambda scheduler, pool: scheduler.unpair(pool, replica))

    async def set_mode(self, mode: Mode) -> MoveAnswer:
        """See `Backend.set_mode`."""
        return await self._order(lambda scheduler: scheduler.set_mode(mode))

    async def set_level(
        self, model: str | None, service_class: str, ttft_p99_s: float | None, itl_p99_s: float | None
    ) -> MoveAnswer:
        """See `Backend.set_level`."""
        pool = self.guarded.named(model).pool
        return await self._order(lambda scheduler: scheduler.set_level(pool, service_class, ttft_p99_s, itl_p99_s))

    async def set_bounds(self, model: str | None, least: int, most: int) -> MoveAnswer:
        """See `Backend.set_bounds`."""
        pool = self.guarded.named(model).pool
        return await self._order(lambda scheduler: scheduler.set_bounds(pool, least, most))

    async def match(self, order: MatchOrder) -> dict[str, Any]:
        """See `Backend.match`."""
        model = self.guarded.called(order.model)
        arrival = await model.api.arrival(order)
        try:
            return await self._scheduler.within(_CONTROL_TIMEOUT_S).match(model.pool, arrival)
        except Exception as error:
            log.warning("no answer from the scheduler about a prompt: %r", error)
            raise ApiError(503, "the scheduler is unavailable; try again", code="unavailable") from error

    async def names(self, order: PromptOrder) -> tuple[int, ...] | None:
        """See `Backend.names`."""
        return await self.guarded.called(order.model).api.block_names(order) if order.of_prompt else None

    def orders_for(self, order: PromptOrder) -> EngineOrders:
        """See `Backend.orders_for`."""
        return self.guarded.called(order.model).orders if order.of_prompt else self.orders

    async def prefix(self, order: CopyPrompt) -> RequestSpec:
        """See `Backend.prefix`."""
        return await self.guarded.called(order.model).api.prefix(order, self.id)

    async def load_adapter(self, order: LoadAdapter) -> str:
        """See `Backend.load_adapter`."""
        model = self.guarded.named(order.base_model_name, "base_model_name")
        await self._see_adapters()
        if any(order.lora_name in other.names for other in self.models if other is not model):
            raise taken_elsewhere(order.lora_name)
        return await model.adapters.load(order)

    async def unload_adapter(self, name: str) -> str:
        """See `Backend.unload_adapter`."""
        await self._see_adapters()
        serving = [model for model in self.models if name in model.names]
        return await (serving or self.models)[0].adapters.unload(name)

    async def _see_adapters(self) -> None:
        """See the models of adapters that other ingress processes have loaded."""
        if len(self.models) > 1:
            await self.refresh_adapters()

    async def _find(self, order: PoolOrder) -> MoveAnswer:
        """Give an order about a request or a replica to the pool that has it."""
        return await order_where_found(
            [model.pool for model in self.models], lambda pool: self._order(lambda scheduler: order(scheduler, pool))
        )

    async def _order(self, order: Callable[[SchedulerStub], Awaitable[MoveAnswer]]) -> MoveAnswer:
        """Call the scheduler until it answers, since it may be slow or restarting; the call must be idempotent."""
        deadline = time.monotonic() + _CONTROL_PATIENCE_S
        failing = False
        while True:
            try:
                return await order(self._scheduler.within(_CONTROL_TIMEOUT_S))
            except Exception as error:
                if not failing:
                    log.warning("no answer from the scheduler to an order: %r", error)
                failing = True
                if time.monotonic() > deadline:
                    return MoveRejected(503, "the scheduler is unavailable; try again")
            await asyncio.sleep(_CONTROL_RETRY_S)

    async def close(self, within_s: float) -> None:
        """Stop the background tasks and flush the traces within `within_s` seconds."""
        self._refresher.cancel()
        if self.hand_over is not None:
            await self.hand_over.close()
        for model in self.models:
            model.membership.stop()
        self._ingresses.stop()
        await self.tracer.close(within_s)


async def repeat(refresh: Callable[[], Awaitable[None]], every_s: float) -> None:
    """Call `refresh` for ever, with pauses of `every_s` seconds. Of failures in a row, the first is logged."""
    failing = False
    while True:
        try:
            await refresh()
            failing = False
        except Exception:
            if not failing:
                log.exception("the view of the cluster, or the keys, could not be refreshed")
            failing = True
        await asyncio.sleep(every_s)


def add_middleware(app: Starlette, path: str) -> None:
    """Put a middleware around an application, as vLLM's server does.

    Raises:
        ImportError, AttributeError: there is none of that import path.
    """
    module, _, name = path.rpartition(".")
    found: Any = getattr(importlib.import_module(module), name)
    if inspect.iscoroutinefunction(found):
        app.add_middleware(BaseHTTPMiddleware, dispatch=found)
    else:
        app.add_middleware(found)


def _make_telemetry(
    config: IngressConfig, decode: Callable[[str, Sequence[int]], str], tracer: Tracer
) -> RequestTelemetry:
    return RequestTelemetry(
        *(model.model_id for model in config.models),
        decode=decode if config.log_text else None,
        tracer=tracer,
        classes=config.service_classes.names,
        keeps_times=any(model.has_level for model in config.models),
    )


def _make_tracer(config: IngressConfig, instance: str) -> Tracer:
    if config.otlp_traces_endpoint is None:
        return NO_TRACER
    from app.ingress.telemetry.spans import OpenTelemetryTracer, batched

    return OpenTelemetryTracer(batched(config.otlp_traces_endpoint), instance)


@serve.ingress()
class IngressReplica:
    """Serves the routes on its own port and, if it runs, behind Serve's HTTP proxy."""

    async def __init__(  # type: ignore[misc]  # Serve awaits it
        self,
        config: IngressConfig,
        topology: Topology,
        *deployments: DeploymentHandle,
    ) -> None:
        """The handles make Serve deploy the other deployments; calls address them by name."""
        check_environment()
        start_guard()
        take_niceness_of_parent()
        self._backend = IngressBackend(config, topology)
        self._control = ControlRoutes(self._backend)
        self._app = self._control.app(await self._backend.start())
        await self._backend.refresh_adapters()
        for path in config.middleware:
            add_middleware(self._app, path)
        if self._backend.tracer is not NO_TRACER:
            self._app.add_middleware(KeepHttpScope)
        self._grace_s = config.grace_s
        self._server: HttpServer | None = None
        freeze_heap()
        if config.port is not None:
            service = f"{own_app()}.{generation()}"
            self._server = await serve_own_port(
                CloseConnections(self._app, self._backend.draining), config, service, self._backend.progress
            )

    async def __serve_build_asgi_app__(self) -> Starlette:
        """Called by Serve once this replica is constructed."""
        return self._app

    async def check_health(self) -> None:
        """Raises RuntimeError if the API can answer no more requests: Serve then replaces this replica."""
        for model in self._backend.models:
            model.api.check_health()

    async def metrics(self) -> Sequence[Family]:
        """The metrics of this ingress, for the scraped ingress."""
        return await self._backend.own_metrics()

    async def refresh_adapters(self) -> None:
        """See `AdapterListApi.refresh_adapters`."""
        await self._backend.refresh_adapters()

    async def succeed(self, order: OrderedHandOver) -> None:
        """See `HandOverApi.succeed`."""
        assert self._backend.hand_over is not None, "with several models there is no hand-over"
        self._backend.hand_over.succeed(order)

    async def hand_over_counts(self) -> HandOverCounts:
        """See `HandOverApi.hand_over_counts`."""
        assert self._backend.hand_over is not None, "with several models there is no hand-over"
        return self._backend.hand_over.counts()

    async def __del__(self) -> None:
        self._control.close()
        # Serve kills the process at the end of the grace period, so finish before.
        if self._server is not None:
            await self._server.close(self._grace_s * 0.9)
        for model in self._backend.models:
            await model.api.close()
        await self._backend.close(self._grace_s * 0.05)


if TYPE_CHECKING:
    _offers: type[IngressApi] = IngressReplica
