"""The replica that a call goes to, and the translation of Ray's errors about it. Serve's router base is left out."""

import asyncio
import pickle
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, cast

import pytest
from ray.exceptions import ActorUnavailableError, RayActorError, RaySystemError, RayTaskError, WorkerCrashedError
from ray.serve._private.common import DeploymentID
from ray.serve._private.common import ReplicaID as FullReplicaId
from ray.serve.exceptions import BackPressureError, ReplicaUnavailableError
from ray.serve.request_router import RequestRouter

from deployments.serve.routing import AWAY_S, ReplicaHandles, TargetRouter, Unrouted, _peer_errors, own_pool
from migration.protocol.errors import PeerLost, Refused
from policies.causes import Cause
from policies.model import ReplicaId


@dataclass(eq=False)
class Pending:
    """A request that waits for a replica."""

    target: str = ""
    future: "asyncio.Future[Any]" = field(default_factory=lambda: asyncio.get_running_loop().create_future())
    routing_context: Any = field(default_factory=SimpleNamespace)

    @property
    def metadata(self) -> Any:
        return SimpleNamespace(session_id=self.target)


class Router(TargetRouter):
    """The router without what Serve's base class connects to."""

    def __init__(self, lengths: dict[str, int]) -> None:
        self.lengths = {replica(name).replica_id: length for name, length in lengths.items()}
        self.removed: list[Pending] = []
        self.initialize_state()

    @property
    def replica_queue_len_cache(self) -> Any:
        return self.lengths

    def _record_queue_wait_time(self, pending: Any) -> None:
        pass

    def _remove_pending_request_from_indices(self, pending: Any) -> None:
        self.removed.append(pending)


@dataclass(frozen=True)
class Id:
    unique_id: str


def replica(name: str) -> Any:
    return SimpleNamespace(replica_id=Id(name))


async def choice(target: str, names: str = "abc", **lengths: int) -> str:
    """The replica that a request is settled on."""
    router, pending = Router(lengths), Pending(target)
    await router.choose_replicas([replica(name) for name in names], pending)
    assert router.removed == [pending]
    return str((await pending.future).replica_id.unique_id)


@pytest.mark.parametrize("target", ["a", "b", "c"])
async def test_a_request_goes_to_the_replica_it_names(target: str) -> None:
    assert await choice(target, a=0, b=5, c=100) == target


@pytest.mark.parametrize("target", ["d", "A", "ab"])
async def test_a_request_to_a_replica_that_is_not_listed_fails_at_once(target: str) -> None:
    with pytest.raises(ReplicaUnavailableError):
        await choice(target)


async def test_a_replica_that_was_found_unreachable_is_tried_again_after_a_while(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Serve's own router tries at once, and for as long as it lists the replica."""
    monkeypatch.setattr(RequestRouter, "on_replica_actor_unavailable", lambda self, replica_id: None)
    now = [0.0]
    router, replicas = Router({}), [replica("a"), replica("b")]
    router.initialize_state(lambda: now[0])

    async def settled(target: str) -> Pending:
        pending = Pending(target)
        await router.choose_replicas(replicas, pending)
        return pending

    router.on_replica_actor_unavailable(replicas[0].replica_id)
    for _ in range(2):
        with pytest.raises(ReplicaUnavailableError):
            await (await settled("a")).future
        assert (await (await settled("b")).future) is replicas[1]
        now[0] += AWAY_S / 3
    now[0] = AWAY_S
    assert (await (await settled("a")).future) is replicas[0]


async def test_a_request_that_names_none_goes_to_the_less_busy_of_two() -> None:
    assert {await choice("", "ab", a=5, b=1) for _ in range(20)} == {"b"}


async def test_of_many_replicas_the_busiest_is_never_chosen() -> None:
    assert {await choice("", "abc", a=9, b=1, c=1) for _ in range(100)} == {"b", "c"}


async def test_a_replica_of_unknown_length_counts_as_free() -> None:
    assert {await choice("", "ab", a=1) for _ in range(20)} == {"b"}


async def test_one_replica_serves_a_call_without_a_target() -> None:
    assert await choice("", "a") == "a"


async def test_a_request_that_was_cancelled_meanwhile_stays_so() -> None:
    router, pending = Router({}), Pending("a")
    pending.future.cancel()
    await router.choose_replicas([replica("a")], pending)
    assert pending.future.cancelled() and router.removed == []


async def test_without_replicas_a_request_goes_on_waiting() -> None:
    router, pending = Router({}), Pending("a")
    assert await router.choose_replicas([], pending) == []
    assert not pending.future.done()


async def test_without_a_request_nothing_is_chosen() -> None:
    assert await Router({}).choose_replicas([replica("a")], None) == []


@pytest.mark.parametrize(
    ("raised", "translated"),
    [
        (ReplicaUnavailableError("a"), Unrouted),
        (RayActorError(), PeerLost),
        (ActorUnavailableError("away", None), PeerLost),
        (WorkerCrashedError(), PeerLost),
        (RaySystemError("gone"), PeerLost),
        (BackPressureError(1, 1), PeerLost),
        (Refused("no", Cause.NO_ROOM), Refused),
        (ValueError("ours"), ValueError),
    ],
    ids=["not routable", "dead", "unavailable", "crashed", "Ray's own", "full", "refused", "another error"],
)
def test_errors_about_a_replica_become_our_own(raised: Exception, translated: type[Exception]) -> None:
    with pytest.raises(translated) as caught, _peer_errors(ReplicaId("a")):
        raise raised
    assert type(caught.value) is translated


def test_exceptions_of_a_method_are_raised_unchanged() -> None:
    """Ray's own object of both classes has a traceback for its text, and another `cause`."""
    refused = Refused("no room", Cause.NO_ROOM)
    wrapped = RayTaskError("method", "Traceback ...", refused, "proc", 1, "127.0.0.1").as_instanceof_cause()
    assert isinstance(wrapped, Refused)
    with pytest.raises(Refused) as caught, _peer_errors(ReplicaId("a")):
        raise wrapped
    assert caught.value is refused


# --- calls --------------------------------------------------------------------------------------------


class Handle:
    """A deployment's handle: `answer` is what a method returns, raises, or yields."""

    def __init__(self, answer: Any) -> None:
        self.answer = answer
        self.method = SimpleNamespace(remote=self._remote)

    def options(self, **_: Any) -> "Handle":
        return self

    def _remote(self, *_: Any) -> Any:
        return self._stream() if isinstance(self.answer, list) else self._one()

    async def _one(self) -> Any:
        if isinstance(self.answer, Exception):
            raise self.answer
        return self.answer

    def _stream(self) -> "Items":
        self.stream = Items(self.answer)
        return self.stream


class Items:
    """A streamed answer; after its last item it is silent, unless that item is None: then it ends."""

    def __init__(self, items: list[Any]) -> None:
        self.items = iter(items)
        self.cancelled = False

    def __aiter__(self) -> "Items":
        return self

    async def __anext__(self) -> Any:
        item = next(self.items, "silence")
        if item is None:
            raise StopAsyncIteration
        if item == "silence":
            await asyncio.Event().wait()
        return item

    def cancel(self) -> None:
        self.cancelled = True


def replicas(answer: Any, routed: bool = True) -> ReplicaHandles:
    made = ReplicaHandles.__new__(ReplicaHandles)
    made._routed = routed
    made._handle = Handle(answer)
    made._deployment = DeploymentID("Engine", "mell")
    made._one, made._actors, made._streams = {}, {}, {}
    return made


class Actor:
    """A replica's actor, as Serve's own processes call it."""

    def __init__(self) -> None:
        self.calls: list[tuple[str, tuple[Any, ...]]] = []
        self.handle_request = SimpleNamespace(remote=self._remote)

    async def _remote(self, metadata: bytes, *args: Any) -> str:
        self.calls.append((pickle.loads(metadata).call_method, args))
        return "from the actor"


async def test_a_replica_that_left_the_routers_list_is_reached_by_its_actor(monkeypatch: pytest.MonkeyPatch) -> None:
    actor = Actor()
    actors = {("SERVE_REPLICA::mell#Engine#x", "serve"): actor}
    monkeypatch.setattr("ray.get_actor", lambda name, namespace: actors[name, namespace])
    assert await replicas(ReplicaUnavailableError("x")).call(ReplicaId("x"), "method", 1, 2) == "from the actor"
    assert actor.calls == [("method", (1, 2))]
    assert await replicas("from anyone", routed=False).call(ReplicaId("x"), "method") == "from the actor"


async def test_an_actor_is_looked_up_once_until_its_replica_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[str] = []

    def look(name: str, namespace: str) -> Actor:
        looked.append(name)
        return Actor()

    monkeypatch.setattr("ray.get_actor", look)
    made = replicas("from anyone", routed=False)
    for _ in range(2):
        await made.call(ReplicaId("x"), "method")
    assert len(looked) == 1
    made.forget(ReplicaId("x"))
    await made.call(ReplicaId("x"), "method")
    assert len(looked) == 2


async def test_one_without_an_actor_is_unrouted(monkeypatch: pytest.MonkeyPatch) -> None:
    def none(name: str, namespace: str) -> Any:
        raise ValueError("no such actor")

    monkeypatch.setattr("ray.get_actor", none)
    with pytest.raises(Unrouted):
        await replicas(ReplicaUnavailableError("x")).call(ReplicaId("x"), "method")


async def test_a_stream_is_read_to_its_end() -> None:
    made = replicas([1, 2, None])
    assert [item async for item in made.stream(ReplicaId("x"), "method")] == [1, 2]
    assert not cast(Any, made._streams[ReplicaId("x")]).stream.cancelled


@pytest.mark.parametrize("waiting", [False, True], ids=["between items", "while it waits"])
async def test_a_stream_that_its_reader_leaves_is_cancelled(waiting: bool) -> None:
    made = replicas([1])
    stream = made.stream(ReplicaId("x"), "method")
    assert await anext(stream) == 1
    if waiting:
        with pytest.raises(TimeoutError):
            await asyncio.wait_for(anext(stream), 0.01)
    await stream.aclose()
    assert cast(Any, made._streams[ReplicaId("x")]).stream.cancelled


def test_a_replicas_pool_is_the_deployment_that_serve_has_started_it_for(monkeypatch: pytest.MonkeyPatch) -> None:
    context = SimpleNamespace(replica_id=FullReplicaId("a", DeploymentID("Other", "mell")))
    monkeypatch.setattr("ray.serve.get_replica_context", lambda: context)
    assert own_pool() == "Other"
