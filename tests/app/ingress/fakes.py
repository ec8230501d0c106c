"""A whole service in one process: real streams, hosts and migrations over paced engines; wires and scheduler are fakes.

Knobs are plain attributes: a replica is killed, a wire is cut, a call is made to fail, the scheduler is silenced.
"""

import asyncio
import contextlib
import json
import time
import uuid
from collections.abc import AsyncIterator, Awaitable, Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import httpx
from msgspec import structs
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import JSONResponse, Response
from starlette.types import ASGIApp, Receive, Scope, Send

from app.frontend.calls import CURRENT, EngineRequest
from app.frontend.guard.layers import body_limits, guarded
from app.frontend.guard.models import GuardedModels
from app.ingress.access.admission import NO_DEADLINES, FirstTokenDeadlines, Gate
from app.ingress.access.operators import OperatorAccess
from app.ingress.asgi import EventStream, unless_disconnected
from app.ingress.config import Tenancy
from app.ingress.engine_orders import EngineOrders
from app.ingress.errors import ApiError
from app.ingress.hand_over.orders import HandOverOrders
from app.ingress.hand_over.taking import TakenRequests
from app.ingress.http.control import ControlRoutes
from app.ingress.http.draining import Draining
from app.ingress.http.orders import CopyPrompt, LoadAdapter, MatchOrder, PromptOrder
from app.ingress.node_orders import NodeOrders
from app.ingress.streams.placing import NO_CONTENT, Placer
from app.ingress.streams.streams import Streams
from app.ingress.telemetry.requests import RequestTelemetry, StepTimer
from app.ingress.telemetry.scrape import MetricsScope
from app.settings import IngressSettings
from deployments.api.calls import MoveAccepted, MoveAnswer, MoveRejected, PinAnswer, PinRefusal, PlaceCall, Submission
from deployments.api.protocols import HandOverApi
from deployments.channels.wire import Batch
from deployments.engine.port import ProfileSession, Tie
from deployments.replica.moves import Moves
from deployments.serve.nodes import Node
from deployments.serve.routing import Unrouted
from migration.protocol.continuing import plain_spec
from migration.protocol.core_messages import decode_request
from migration.protocol.errors import PeerLost, Refused, TransferFailed
from migration.protocol.messages import PathRequest, Tail
from migration.protocol.ports import Generated, Loss, OutputSink
from migration.protocol.reading import Output, Reader
from migration.protocol.record import CopyOutcome, CopyRecord, MigrationRecord
from migration.protocol.request import IngressId, ModelIdentity, RequestSpec, Trait
from migration.protocol.rounds import CopyLimits
from migration.run.donor import CopyOrder
from migration.run.reader import NotServed, ReaderRun
from migration.run.source import Order
from migration.run.world import MigrationLimits
from migration.transport.shared import SharedSlots
from policies.causes import Cause
from policies.cost.latencies import ClassCounts
from policies.cost.service import ReplicaSpeed
from policies.decision.limits import Mode
from policies.decision.placement import Decision, NoReplica, Place, PlacingView, ReplicaView
from policies.model import Blocks, PoolId, ReplicaId, RequestId, Role
from policies.plan import Reason
from tests.app.client.sample import MATCHED
from tests.deployments.engine.quick_engine import QuickEngine, prompt_of, tie
from tests.deployments.scheduler.fakes import FakeMembership
from tests.migration import world
from tests.migration.world import INGRESS, POOL, spec
from tests.virtual_time import now

LIMITS = MigrationLimits(prepare_s=0.3, copy_s=0.3, final_s=0.3, adopt_s=0.3, copy=CopyLimits())
PATIENT = MigrationLimits(prepare_s=30.0, copy_s=30.0, final_s=30.0, adopt_s=30.0, copy=CopyLimits())
"""For tests in real time: no move fails because the machine is slow."""
MAX_CONTEXT = 1024
LOOPBACK = ("127.0.0.1", 4711)


def pooled(tokens: Sequence[int]) -> list[float]:
    """The vector of a pooled prompt."""
    return [float(len(tokens)), float(sum(tokens)), tokens[0] / 8, -tokens[-1] / 8]


def encode_pooled(vector: Sequence[float]) -> bytes:
    """The rest of a step with this vector, as vLLM's core sends it."""
    import torch
    from vllm.v1.engine import EngineCoreOutput, FinishReason

    from deployments.engine.core import RestEncoder

    output = EngineCoreOutput("", [], pooling_output=torch.tensor(vector), finish_reason=FinishReason.STOP)
    rest = RestEncoder().encode(output, 0.0)
    assert rest is not None
    return rest


class StoppingEngine(QuickEngine):
    """An engine that observes `stop_token_ids`, from `min_tokens` on; a `script` replaces its tokens.

    A pooled prompt takes one step.
    """

    script: tuple[int, ...] | None = None

    def add(
        self, key: str, spec: RequestSpec, outputs: tuple[int, ...], sink: OutputSink, tail: Tail | None = None
    ) -> None:
        """See `Engine.add`."""
        if Trait.POOLED in spec.traits:
            spec = replace(spec, max_tokens=1, traits=frozenset())
            super().add(key, spec, outputs, PoolingSink(sink, prompt_of(spec)), tail)
        else:
            sampling = decode_request(spec.body).sampling
            stops, least = sampling.get("stop_token_ids", ()), sampling.get("min_tokens", 0)
            super().add(key, spec, outputs, StoppingSink(self, key, stops, least, len(outputs), sink), tail)

    def replace_last(self, key: str, token: int) -> None:
        """Have the newest token of a run be another one, in its KV blocks, too."""
        if (output := self._outputs.get(key)) is not None:
            output.sequence.context[-1] = token


@dataclass
class PoolingSink:
    """Implements `OutputSink`: makes the step of a prompt that of a pooled one."""

    sink: OutputSink
    prompt: tuple[int, ...]

    def take(self, step: Generated) -> None:
        self.sink.take(Generated((), "stop", encode_pooled(pooled(self.prompt))))

    def fail(self, error: Exception) -> None:
        self.sink.fail(error)


@dataclass
class StoppingSink:
    """Implements `OutputSink`: ends a run of `count` tokens so far with its stop, and follows the engine's script."""

    engine: StoppingEngine
    key: str
    stops: Sequence[int]
    least: int
    count: int
    sink: OutputSink

    def take(self, step: Generated) -> None:
        self.count += 1
        script = self.engine.script
        if script is not None:
            token = script[self.count - 1]
            self.engine.replace_last(self.key, token)
            step = structs.replace(step, tokens=(token,))
        stopped = step.tokens[-1] in self.stops and self.count >= self.least
        if stopped or (script is not None and self.count == len(script)):
            self.engine.abort(self.key)
            step = structs.replace(step, finish="stop")
        self.sink.take(step)

    def fail(self, error: Exception) -> None:
        self.sink.fail(error)


class Replica(world.Replica):
    """A replica that can die: then it neither answers nor sends."""

    engine: StoppingEngine

    def __init__(
        self, name: str, cluster: "dict[ReplicaId, Replica]", step_s: float, lease_s: float, limits: MigrationLimits
    ) -> None:
        super().__init__(name, {}, StoppingEngine(step_s), SharedSlots(), lease_s, limits)
        self.moves = Moves(self.moves._world, self.host, lambda to: Peer(cluster[to], self), lease_s)
        self.calls = world.calls_of(self.id, self.moves, self.engine, limits.adopt_s)
        self.dead = False
        self.model = self.engine.fingerprint.model


class Peer(world.LocalPeer):
    """The wire between two replicas, either of which may be dead."""

    def __init__(self, target: Replica, source: Replica) -> None:
        super().__init__(target)
        self._target, self._source = target, source

    async def _pass(self, call: str) -> Moves:
        if self._source.dead:
            await asyncio.Event().wait()
        if self._target.dead:
            raise PeerLost(f"replica {self.id} died")
        return await super()._pass(call)


Hook = Callable[[], Awaitable[object]]
Answer = TypeVar("Answer")


class Wires:
    """Implements `RemoteReplicas[ServingApi]`: calls and streams to the replicas of a service.

    `lose` is asked of every batch on its way; a batch that is lost breaks its stream. `before` and `after` are
    awaited around a call of that (replica, method), and may raise. Nothing passes to or from the replicas in `hushed`.
    """

    def __init__(self, replicas: dict[ReplicaId, Replica]) -> None:
        self.hushed: set[ReplicaId] = set()
        self.replicas = replicas
        self.calls: list[tuple[str, str]] = []
        self.before: dict[tuple[str, str], Hook] = {}
        self.after: dict[tuple[str, str], Hook] = {}
        self.lose: Callable[[Batch], bool] = lambda batch: False
        self.streams = 0
        self._cuts: dict[ReplicaId, asyncio.Future[Exception]] = {}

    def cut(self, name: str, error: Exception) -> None:
        """Break the stream from a replica."""
        cut = self._cuts.get(ReplicaId(name))
        if cut is not None and not cut.done():
            cut.set_result(error)

    def at(self, replica: ReplicaId, routed: bool = True) -> "ReplicaWire":
        return ReplicaWire(self, replica)

    async def call(self, replica: ReplicaId, method: str, act: Callable[[Replica], Answer]) -> Answer:
        """Have a replica act, unless it is dead, or dies meanwhile."""
        self.calls.append((replica, method))
        await asyncio.sleep(0)
        await self._while_hushed(replica)
        await self._run(self.before, replica, method)
        answer = act(self._alive(replica))
        await self._run(self.after, replica, method)
        self._alive(replica)
        return answer

    @staticmethod
    async def _run(hooks: dict[tuple[str, str], Hook], replica: ReplicaId, method: str) -> None:
        if hook := hooks.get((replica, method)):
            await hook()

    async def _while_hushed(self, replica: ReplicaId) -> None:
        while replica in self.hushed:
            await asyncio.sleep(0.001)

    async def events(self, replica: ReplicaId, ingress: IngressId) -> AsyncIterator[Batch]:
        """The events of a replica, until the wire is cut."""
        await self._while_hushed(replica)
        batches = self._alive(replica).outboxes.read(ingress)
        cut = self._cuts[replica] = asyncio.get_running_loop().create_future()
        self.streams += 1
        pull: asyncio.Future[Batch | None] | None = None
        try:
            while True:
                while replica in self.hushed and not cut.done():
                    await asyncio.sleep(0.001)
                pull = asyncio.ensure_future(anext(batches, None))
                await asyncio.wait({pull, cut}, return_when=asyncio.FIRST_COMPLETED)
                if cut.done():
                    raise cut.result()
                batch = pull.result()
                if batch is None:
                    return
                if self.lose(batch):
                    raise ConnectionError("the stream broke")
                yield batch
        finally:
            self.streams -= 1
            if pull is not None and not pull.done():
                pull.cancel()
                await asyncio.wait({pull})
            await batches.aclose()

    def forget(self, replica: ReplicaId) -> None:
        pass

    def _alive(self, replica: ReplicaId) -> Replica:
        if replica not in self.replicas:
            raise Unrouted(f"replica {replica} is not routable")
        if self.replicas[replica].dead:
            raise PeerLost(f"replica {replica} died")
        return self.replicas[replica]


class ReplicaWire:
    """Implements `ServingApi` for one replica."""

    def __init__(self, wires: Wires, replica: ReplicaId) -> None:
        self._wires = wires
        self._replica = replica

    def events(self, ingress: IngressId) -> AsyncIterator[Batch]:
        return self._wires.events(self._replica, ingress)

    async def tasks(self) -> tuple[str, ...]:
        return await self._call("tasks", lambda replica: replica.engine.tasks)

    async def served(self) -> ModelIdentity:
        return await self._call("served", lambda replica: ModelIdentity(replica.model, replica.host.tied))

    async def submit(self, requests: tuple[Submission, ...]) -> Sequence[Refused | str]:
        return await self._call("submit", lambda replica: [_submit(replica, request) for request in requests])

    async def attach(self, request: RequestId, hop: int, index: int) -> bool:
        return await self._call("attach", lambda replica: replica.moves.attach(request, hop, index))

    async def keep(self, request: RequestId, hop: int, next_hop: int) -> None:
        await self._call("keep", lambda replica: replica.moves.keep(request, hop, next_hop))

    async def release(self, request: RequestId, hop: int | None) -> None:
        await self._call("release", lambda replica: replica.moves.release(request, hop))

    async def _call(self, method: str, act: Callable[[Replica], Answer]) -> Answer:
        return await self._wires.call(self._replica, method, act)


def _submit(replica: Replica, request: Submission) -> Refused | str:
    if request.model not in (None, replica.model):
        return Refused("another version of the model runs here", Cause.FINGERPRINT)
    try:
        replica.moves.submit(request.spec, request.hop, request.outputs, request.then)
    except Refused as error:
        return error
    return replica.model


WAKE_S = 7.0
"""The predicted time of a wake, in seconds."""


class Scheduler:
    """Implements `SchedulerClient`: `fault` is raised by every call, or "silent" makes it last for ever.

    It places on the first of `order` that runs and is not excluded; `records` are those that it has received.
    """

    def __init__(self, order: str, members: Callable[[], tuple[ReplicaId, ...]]) -> None:
        self.order = order
        self.fault: Exception | str | None = None
        self.asleep: frozenset[ReplicaId] = frozenset()
        self.seen: dict[ReplicaId, ReplicaView] = {}
        self.speed: ReplicaSpeed | None = None
        self.records: list[MigrationRecord] = []
        self._members = members

    def within(self, timeout_s: float) -> "AnsweringScheduler":
        return AnsweringScheduler(self, timeout_s)

    def notify(self, message: Callable[["AnsweringScheduler"], Awaitable[None]]) -> None:
        next(message(self.within(0.0)).__await__(), None)

    async def answer(self, timeout_s: float) -> None:
        """Answer in time, or not."""
        async with asyncio.timeout(timeout_s):
            await asyncio.sleep(0)
            if isinstance(self.fault, Exception):
                raise self.fault
            if self.fault == "silent":
                await asyncio.Event().wait()

    def decide(self, call: PlaceCall) -> Decision:
        """Where a request goes."""
        free = [r for r in map(ReplicaId, self.order) if r in self._members() and r not in call.exclude]
        free = [r for r in free if r not in self.asleep]
        return Place(free[0]) if free else NoReplica(WAKE_S if self.asleep else None)


class AnsweringScheduler:
    """Implements `PlacingApi` and `NoticeApi`."""

    def __init__(self, scheduler: Scheduler, timeout_s: float) -> None:
        self._scheduler = scheduler
        self._timeout_s = timeout_s

    async def view(self, pool: PoolId) -> PlacingView:
        await self._scheduler.answer(self._timeout_s)
        return PlacingView(self._scheduler.seen, self._scheduler.speed, asleep=self._scheduler.asleep)

    async def place(self, calls: tuple[PlaceCall, ...]) -> list[Decision]:
        await self._scheduler.answer(self._timeout_s)
        return [self._scheduler.decide(call) for call in calls]

    async def record(self, pool: PoolId, record: MigrationRecord) -> None:
        assert pool == POOL
        self._scheduler.records.append(record)

    async def copied(self, pool: PoolId, record: CopyRecord) -> None:
        raise AssertionError("replicas report copies")

    async def latencies(self, pool: PoolId, ingress: IngressId, counts: ClassCounts) -> None:
        pass

    async def hurry(self) -> None:
        pass


@dataclass
class Conversation:
    """Implements `Listener`: keeps the output of a request until it is read."""

    spec: RequestSpec
    reader: Reader = field(default_factory=Reader)
    finish: str | None = None
    _steps: list[tuple[int, ...]] = field(default_factory=list)
    _ready: asyncio.Event = field(default_factory=asyncio.Event)
    _loss: Loss | None = None

    def deliver(self, output: Output) -> None:
        self.finish = output.finish
        if output.tokens:
            self._steps.append(output.tokens)
        self._ready.set()

    def lost(self, loss: Loss) -> None:
        self._loss = loss
        self._ready.set()

    @property
    def tokens(self) -> Sequence[int]:
        """Output tokens so far."""
        return self.reader.cursor.tokens

    @property
    def ended(self) -> str | None:
        """The finish reason, once all steps have been read."""
        return None if self._steps else self.finish

    async def steps(self) -> AsyncIterator[tuple[int, ...]]:
        """The tokens of each delivery, in order, to the end. Raises NotServed if the output cannot be completed."""
        while True:
            steps, self._steps = self._steps, []
            for tokens in steps:
                yield tokens
            if self._steps:
                continue
            if self._loss is not None:
                raise NotServed(self._loss)
            if self.finish is not None:
                return
            self._ready.clear()
            await self._ready.wait()


@dataclass
class Service:
    """Replicas named by single letters, and the streams of one ingress over them."""

    replicas: dict[ReplicaId, Replica]
    wires: Wires
    scheduler: Scheduler
    placer: Placer
    streams: Streams
    members: FakeMembership = field(init=False)

    def replica(self, name: str) -> Replica:
        return self.replicas[ReplicaId(name)]

    def say(self, tokens: Sequence[int]) -> None:
        """Make these tokens every answer; the last one ends it."""
        for replica in self.replicas.values():
            replica.engine.script = tuple(tokens)

    def kill(self, name: str, noticed: bool = True) -> None:
        """Kill a replica's process; `noticed`: Serve's controller also notices."""
        replica = self.replica(name)
        replica.dead = True
        replica.engine.shutdown()
        self.wires.cut(name, PeerLost(f"replica {name} died"))
        if noticed:
            self.members.become(*(r for r in self.members.running if r != name))

    def tie(self, why: Tie = Tie.SEEDED) -> None:
        """Make every request immovable."""
        for replica in self.replicas.values():
            tie(replica.engine, why)

    def move(self, request: RequestId, to: str, path: PathRequest = PathRequest.KV) -> MigrationRecord:
        """Begin to move a request from its current replica."""
        source = next(r for r in self.replicas.values() if not r.dead and request in r.host._runs)
        return source.moves.start(Order(f"m-{to}-{time.monotonic_ns()}", request, path, Reason.MANUAL), ReplicaId(to))

    @contextlib.asynccontextmanager
    async def open(self, spec: RequestSpec) -> AsyncIterator[Conversation]:
        """Have a request served; on leaving, it is ended wherever it is. Raises NotServed if no replica takes it."""
        conversation = Conversation(spec)
        async with self.streams.run(spec, conversation.reader, conversation):
            yield conversation

    async def reading(self, conversation: Conversation | ReaderRun, tokens: int) -> None:
        """Wait until `tokens` tokens have arrived."""
        await eventually(lambda: conversation.reader.cursor.next_index >= tokens)

    async def idle(self) -> None:
        """Wait until no replica runs or holds a request."""
        await eventually(lambda: not self.streams.count and all(r.idle for r in self.replicas.values() if not r.dead))

    def hosts(self, request: RequestId) -> str:
        """The living replicas on which the request runs."""
        return "".join(r.id for r in self.replicas.values() if not r.dead and request in r.host._runs)


async def eventually(holds: Callable[[], bool], within_s: float = 5.0) -> None:
    """Wait until `holds` returns True."""
    async with asyncio.timeout(within_s):
        while not holds():
            await asyncio.sleep(0.001)


async def output(conversation: Conversation, within_s: float = 5.0) -> tuple[int, ...]:
    """All tokens of an answer, read to its end."""
    async with asyncio.timeout(within_s):
        return tuple([token async for step in conversation.steps() for token in step])


def make_service(
    names: str = "ab",
    *,
    order: str | None = None,
    step_s: float = 0.001,
    lease_s: float = 0.3,
    place_timeout_s: float = 0.05,
    no_replica_timeout_s: float = 0.3,
    max_engine_losses: int = 2,
    limits: MigrationLimits = LIMITS,
) -> Service:
    """A service whose replicas all run; requests go to the first of `order` (the names, if not given)."""
    replicas: dict[ReplicaId, Replica] = {}
    for name in names:
        replicas[ReplicaId(name)] = Replica(name, replicas, step_s, lease_s, limits)
    wires = Wires(replicas)
    members = FakeMembership(on_change=lambda membership: service.streams.watch(membership))
    scheduler = Scheduler(order or names, lambda: members.running)
    placer = Placer(scheduler, POOL, members, place_timeout_s)
    streams = Streams(INGRESS, wires, placer, scheduler, no_replica_timeout_s, max_engine_losses, clock=now)
    service = Service(replicas, wires, scheduler, placer, streams)
    service.members = members
    members.become(*names)
    return service


class Utilities:
    """Implements `RemoteReplicas[OrderedReplica]`: notes orders, with the answers of `answers`, by replica."""

    def __init__(self) -> None:
        self.orders: list[tuple[ReplicaId, str, Any]] = []
        self.answers: dict[str, str | Exception] = {}

    def at(self, replica: ReplicaId, routed: bool = True) -> "Utility":
        return Utility(self, replica)

    def forget(self, replica: ReplicaId) -> None:
        pass


class Utility:
    """Implements `CacheApi`, `CopyApi` and `UtilityApi`."""

    def __init__(self, utilities: Utilities, replica: ReplicaId) -> None:
        self._utilities = utilities
        self._replica = replica

    async def delete_blocks(self, names: tuple[int, ...] | None) -> Blocks:
        answer = await self._take("delete_blocks", names)
        if isinstance(answer, str):
            raise TransferFailed(answer)
        return Blocks(3)

    async def pin_blocks(self, names: tuple[int, ...], ttl_s: float) -> PinAnswer:
        answer = await self._take("pin_blocks", (names, ttl_s))
        if answer is None:
            return PinAnswer(Blocks(2))
        return PinAnswer(refusal=PinRefusal(answer), why=f"refused: {answer}")

    async def copy_prefix(self, order: CopyOrder, to: ReplicaId) -> CopyRecord:
        answer = await self._take("copy_prefix", (order, to))
        outcome = CopyOutcome.ABORTED if isinstance(answer, str) else CopyOutcome.DONE
        return CopyRecord(
            order.id, self._replica, to, order.reason, "", outcome, error=answer, held=Blocks(3), blocks=Blocks(3)
        )

    async def reset_prefix_cache(self) -> str | None:
        return await self._take("reset_prefix_cache")

    async def start_profile(self, session: ProfileSession) -> str | None:
        return await self._take("start_profile", session)

    async def stop_profile(self) -> str | None:
        return await self._take("stop_profile")

    async def _take(self, order: str, about: Any = None) -> str | None:
        self._utilities.orders.append((self._replica, order, about))
        answer = self._utilities.answers.get(self._replica)
        if answer == "silent":
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


# --- HTTP ---------------------------------------------------------------------------------------------


HEAD_NODE, NODE_A, NODE_B = (
    Node("h" * 8, "10.0.0.1", "head", is_head=True),
    Node("a" * 8, "10.0.0.2", "gpu-a"),
    Node("b" * 8, "10.0.0.3", "gpu-b"),
)


class FakeNodes:
    """Implements `ClusterNodes`; `failure` is raised instead of an answer."""

    def __init__(self) -> None:
        self.listed = [HEAD_NODE, NODE_A, NODE_B]
        self.drained: list[tuple[str, float | None]] = []
        self.failure: Exception | None = None

    async def all_nodes(self) -> Iterable[Node]:
        return self.listed

    async def drain_node(self, id: str, within_s: float | None) -> None:
        if self.failure is not None:
            raise self.failure
        self.drained.append((id, within_s))


class Ingresses:
    """Implements `RemoteReplicas[HandOverApi]` without any other ingress."""

    def at(self, replica: ReplicaId, routed: bool = True) -> HandOverApi:
        raise AssertionError(replica)

    def forget(self, replica: ReplicaId) -> None:
        pass


class Backend:
    """Implements `ControlBackend` and `Backend` over a service; `answer` replaces the answers to orders."""

    def __init__(
        self,
        service: Service,
        model: str = "tiny",
        max_body_bytes: int = 1 << 20,
        gate: Gate | None = None,
        max_prompt_tokens: int | None = None,
        request_timeout_s: float | None = None,
        admin_key: str | None = None,
        deadlines: FirstTokenDeadlines = NO_DEADLINES,
    ) -> None:
        self.id: IngressId = INGRESS
        self.deadlines = deadlines
        self.application = "mell"
        self.model = model
        self.streams = service.streams
        self.service = service
        self.gate = gate or Gate()
        self.operators = OperatorAccess(admin_key)
        self.taken = TakenRequests(service.streams, INGRESS, lambda spec: NO_CONTENT)
        self.hand_over = HandOverOrders(
            f"mell.{id(self)}", INGRESS, service.streams, (Ingresses(), FakeMembership()), lambda: self.taken.count
        )
        self.draining = Draining(lambda: self.gate.running + self.taken.count)
        self.telemetry = RequestTelemetry(model)
        self.settings = IngressSettings.model_construct(
            max_body_bytes=max_body_bytes,
            max_prompt_tokens=max_prompt_tokens,
            request_timeout_s=request_timeout_s,
            root_path="",
            port=8000,
            allow_runtime_lora_updating=True,
        )
        self.utilities = Utilities()
        self.orders = EngineOrders([(self.utilities, service.members)])
        self.ray_nodes = FakeNodes()
        self.nodes = NodeOrders(self.ray_nodes, self.state)
        self.unhealthy: str | None = None
        self.answer: MoveAnswer | None = None
        self.asked: list[tuple[Any, ...]] = []
        self.mode = {"as_of": 1.0, "mode": "act", "configured_mode": "act"}
        self.adapter_orders: list[LoadAdapter | str] = []
        self.matched: list[MatchOrder] = []

    def require(self, admin_key: str | None) -> None:
        self.operators = OperatorAccess(admin_key)

    def health(self) -> str | None:
        return self.draining.reason or self.unhealthy

    def version(self) -> dict[str, str]:
        return {"version": "1", "vllm": "2", "ray": "3", "torch": "4"}

    async def metrics(self, scope: MetricsScope) -> bytes:
        return f"# {scope}\n".encode()

    async def document(self) -> bytes:
        return b"{}"

    async def state(self) -> dict[str, Any]:
        loads = [(r.id, load) for r in self.service.replicas.values() for load in r.host.loads()]
        return self.mode | {
            "replicas": [{"id": r, "node": NODE_A.id, "requests": [{"id": x.id, "label": x.label}]} for r, x in loads]
        }

    async def migrations(self) -> dict[str, Any]:
        return {"migrations": []}

    async def snapshot(self) -> tuple[dict[str, Any], dict[str, Any]]:
        return await self.state(), await self.migrations()

    async def migrate(self, reference: str, target: str | None, path: PathRequest) -> MoveAnswer:
        self.asked.append((reference, target, path))
        if self.answer is not None:
            return self.answer
        loads = [load for r in self.service.replicas.values() for load in r.host.loads()]
        found = [load.id for load in loads if reference in (load.id, load.label)]
        if not found:
            return MoveRejected(404, "no such request")
        return MoveAccepted(self.service.move(found[0], target or "b", path).id)

    async def drain(self, replica: str) -> MoveAnswer:
        if replica not in self.service.replicas:
            return MoveRejected(404, f"no replica {replica!r} is running")
        return self.answer or MoveAccepted(replica)

    async def set_role(self, replica: str, role: Role | None) -> MoveAnswer:
        if replica not in self.service.replicas:
            return MoveRejected(404, f"no replica {replica!r} is running")
        self.asked.append((replica, role))
        return self.answer or MoveAccepted(replica)

    async def set_memory(self, replica: str, blocks: int | None) -> MoveAnswer:
        if replica not in self.service.replicas:
            return MoveRejected(404, f"no replica {replica!r} is running")
        self.asked.append((replica, blocks))
        return self.answer or MoveAccepted(replica)

    async def set_asleep(self, replica: str, asleep: bool) -> MoveAnswer:
        if replica not in self.service.replicas:
            return MoveRejected(404, f"no replica {replica!r} is running")
        self.asked.append((replica, asleep))
        return self.answer or MoveAccepted(replica)

    async def set_model_asleep(self, model: str, asleep: bool) -> MoveAnswer:
        self.asked.append((model, asleep))
        return self.answer or MoveAccepted("Engine")

    async def pair(self, lower: str, upper: str) -> MoveAnswer:
        self.asked.append(("pair", lower, upper))
        return self.answer or MoveAccepted(lower)

    async def unpair(self, replica: str) -> MoveAnswer:
        self.asked.append(("unpair", replica))
        return self.answer or MoveAccepted(replica)

    async def set_mode(self, mode: Mode) -> MoveAnswer:
        self.asked.append((mode,))
        return self.answer or MoveAccepted(mode)

    async def set_level(
        self, model: str | None, service_class: str, ttft_p99_s: float | None, itl_p99_s: float | None
    ) -> MoveAnswer:
        self.asked.append((service_class, ttft_p99_s, itl_p99_s))
        return self.answer or MoveAccepted("Engine")

    async def set_bounds(self, model: str | None, least: int, most: int) -> MoveAnswer:
        self.asked.append((least, most))
        return self.answer or MoveAccepted("Engine")

    async def match(self, order: MatchOrder) -> dict[str, Any]:
        self.matched.append(order)
        return MATCHED

    async def names(self, order: PromptOrder) -> tuple[int, ...] | None:
        return (7, 8) if order.of_prompt else None

    def orders_for(self, order: PromptOrder) -> EngineOrders:
        return self.orders

    async def prefix(self, order: CopyPrompt) -> RequestSpec:
        return plain_spec("prefix", (1, 2, 3), 1)

    async def load_adapter(self, order: LoadAdapter) -> str:
        self.adapter_orders.append(order)
        return "loaded"

    async def unload_adapter(self, name: str) -> str:
        self.adapter_orders.append(name)
        return "unloaded"


@dataclass
class Api:
    """A client of the routes that calls from `address`."""

    backend: Backend
    app: Starlette
    address: tuple[str, int] = LOOPBACK

    async def send(self, method: str, path: str, **options: Any) -> httpx.Response:
        transport = httpx.ASGITransport(self.app, raise_app_exceptions=False, client=self.address)
        async with httpx.AsyncClient(transport=transport, base_url="http://mell") as client:
            return await client.request(method, path, **options)

    async def get(self, path: str, **options: Any) -> httpx.Response:
        return await self.send("GET", path, **options)

    async def post(self, path: str, **options: Any) -> httpx.Response:
        return await self.send("POST", path, **options)

    async def complete(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await self.post("/v1/completions", json={"prompt": PROMPT, **fields}, headers=headers)

    async def chat(self, headers: dict[str, str] | None = None, **fields: Any) -> httpx.Response:
        return await self.post("/v1/chat/completions", json={"messages": MESSAGES, **fields}, headers=headers)


PROMPT = list(prompt_of(spec()))
MESSAGES = [{"role": "system", "content": "Be brief."}, {"role": "user", "content": "Where do blocks move?"}]


class Completions:
    """In the place of vLLM's application: token ids in, and the text of their numbers out."""

    def __init__(self, service: Service, model: str) -> None:
        self._service = service
        self._model = model

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        http = Request(scope, receive)
        fields = json.loads(await http.body() or b"{}")
        if not scope["path"].endswith("completions"):
            await JSONResponse({})(scope, receive, send)
            return
        with contextlib.suppress(ClientDisconnect):
            await unless_disconnected(receive, self._answer(fields, scope, receive, send))

    async def _answer(self, fields: dict[str, Any], scope: Scope, receive: Receive, send: Send) -> None:
        response: Response
        try:
            async with contextlib.AsyncExitStack() as stack:
                choices = [await stack.enter_async_context(self._choice(fields, i)) for i in range(fields.get("n", 1))]
                if fields.get("stream"):
                    response = EventStream(self._events(choices[0]))
                else:
                    response = JSONResponse(self._chunk([(c, [t async for t in c.timed()]) for c in choices]))
                await response(scope, receive, send)
        except NotServed as error:
            failed = note_loss(error.loss)
            await JSONResponse(failed.body(), failed.status)(scope, receive, send)

    @contextlib.asynccontextmanager
    async def _choice(self, fields: dict[str, Any], index: int) -> AsyncIterator["TimedConversation"]:
        call = CURRENT.get()
        assert call is not None and call.timer is not None
        id = f"cmpl-{uuid.uuid4().hex}-{index}"
        prompt = fields["prompt"] if isinstance(fields.get("prompt"), list) else [3, 4, 5]
        request = plain_spec(id, tuple(prompt), fields.get("max_tokens") or 16, call.label or id, INGRESS)
        timer = call.timer()
        async with self._service.open(request) as conversation:
            call.add(EngineRequest("cmpl", request, conversation.reader))
            yield TimedConversation(conversation, timer)

    async def _events(self, choice: "TimedConversation") -> AsyncIterator[bytes]:
        try:
            async for tokens in choice.timed():
                yield f"data: {json.dumps(self._chunk([(choice, [tokens])]))}\n\n".encode()
        except NotServed as error:
            yield note_loss(error.loss).event()
        yield b"data: [DONE]\n\n"

    def _chunk(self, choices: "Sequence[tuple[TimedConversation, Sequence[Sequence[int]]]]") -> dict[str, Any]:
        first, tokens = choices[0][0].conversation, sum(len(c.conversation.tokens) for c, _ in choices)
        return {
            "id": first.spec.id,
            "model": self._model,
            "choices": [
                {"index": index, "text": "".join(map(text_of, steps)), "finish_reason": choice.conversation.ended}
                for index, (choice, steps) in enumerate(choices)
            ],
            "usage": {"prompt_tokens": first.spec.prompt_tokens, "completion_tokens": tokens},
        }


@dataclass
class TimedConversation:
    """A conversation whose steps are timed when they are read."""

    conversation: Conversation
    timer: StepTimer

    async def timed(self) -> AsyncIterator[tuple[int, ...]]:
        async for tokens in self.conversation.steps():
            self.timer.step()
            yield tokens


def note_loss(loss: Loss) -> ApiError:
    """The error of a loss, which the call has from now on, as from vLLM's client of engines."""
    call, error = CURRENT.get(), ApiError.of(loss)
    assert call is not None
    call.failure = error
    return error


def text_of(tokens: Iterable[int]) -> str:
    """The text that `Completions` has for tokens."""
    return "".join(f"{token} " for token in tokens)


def make_api(service: Service | None = None, **options: Any) -> Api:
    """The routes over a service."""
    backend = Backend(service or make_service(), **options)
    return Api(backend, make_app(backend))


def make_app(backend: Backend) -> Starlette:
    """All routes over a backend."""
    return ControlRoutes(backend).app(completions(backend))


def completions(backend: Backend) -> ASGIApp:
    """`Completions` behind the layers."""
    model = GuardedApp(Completions(backend.service, backend.model), backend.settings, backend.model)
    model.deadlines = backend.deadlines
    return guarded(GuardedModels([model]), backend.gate, backend.telemetry, backend.settings)


class GuardedApp:
    """Implements `GuardedModel` for an application."""

    def __init__(
        self,
        app: ASGIApp,
        settings: IngressSettings,
        id: str = "tiny",
        context: int = MAX_CONTEXT,
        tenancy: Tenancy = Tenancy.ALL,
    ) -> None:
        self.app = app
        self.id = id
        self.names = [id]
        self.limits = body_limits(settings, context)
        self.tenancy = tenancy
        self.deadlines = NO_DEADLINES


class Exchange:
    """One HTTP request, message by message. After a disconnect, sending continues without effect, as with uvicorn."""

    def __init__(
        self,
        api: Api,
        body: bytes,
        path: str = "/v1/completions",
        headers: dict[str, str] | None = None,
        spec_version: str = "2.4",
    ) -> None:
        self.sent: list[dict[str, Any]] = []
        self._incoming: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self._incoming.put_nowait({"type": "http.request", "body": body, "more_body": False})
        self.gate = asyncio.Event()
        self.gate.set()
        self.left = self.failing = False
        scope = {
            "type": "http",
            "asgi": {"version": "3.0", "spec_version": spec_version},
            "http_version": "1.1",
            "method": "POST",
            "scheme": "http",
            "path": path,
            "raw_path": path.encode(),
            "root_path": "",
            "query_string": b"",
            "headers": [(b"content-type", b"application/json")]
            + [(name.lower().encode(), value.encode()) for name, value in (headers or {}).items()],
            "client": LOOPBACK,
            "server": ("mell", 80),
        }
        self.task = asyncio.create_task(api.app(scope, self._incoming.get, self._send))

    async def _send(self, message: Any) -> None:
        await self.gate.wait()
        if self.left and self.failing:
            raise OSError("the client left")
        if not self.left:
            self.sent.append(message)

    async def chunks(self, count: int) -> None:
        """Wait for `count` chunks of the body."""
        await eventually(lambda: sum(m["type"] == "http.response.body" for m in self.sent) >= count)

    def disconnect(self) -> None:
        """Disconnect the client; receiving reports it."""
        self.left = True
        self._incoming.put_nowait({"type": "http.disconnect"})

    def fail(self) -> None:
        """Disconnect the client; sending raises OSError, as ASGI allows since 2.4."""
        self.left = self.failing = True

    async def ended(self) -> None:
        """Wait for any end of the exchange."""
        await asyncio.wait({self.task}, timeout=5)
        assert self.task.done()
        if not self.task.cancelled():
            self.task.exception()


def body(**fields: Any) -> bytes:
    """A completions body."""
    return json.dumps({"prompt": PROMPT, **fields}).encode()


def events(response: httpx.Response) -> list[Any]:
    """The server-sent events of a response: JSON, and "[DONE]"."""
    assert response.headers["content-type"].startswith("text/event-stream")
    blocks = response.text.split("\n\n")
    assert blocks.pop() == ""
    assert all(block.startswith("data: ") and "\n" not in block for block in blocks)
    return [text if (text := block[6:]) == "[DONE]" else json.loads(text) for block in blocks]
