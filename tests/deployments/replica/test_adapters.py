"""A replica takes a request with an adapter once its engine has loaded the adapter."""

import asyncio
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deployments.api.calls import Submission
from deployments.replica.deployment import EngineReplica
from deployments.replica.ingress_channels import submit_all
from deployments.replica.peers import PeerCalls
from migration.protocol.continuing import to_spec
from migration.protocol.core_messages import Adapter, CoreRequest, encode_request
from migration.protocol.errors import Refused, Stopping
from migration.protocol.request import IngressId
from policies.causes import Cause
from policies.model import ReplicaId, RequestId

pytestmark = pytest.mark.virtual_time

GOOD, BAD, SLOW = Adapter("good", 1, "/a"), Adapter("bad", 2, "/b"), Adapter("slow", 3, "/c")


class AdapterEngine:
    """Loads good adapters at once, slow ones in a minute, and no bad ones."""

    def __init__(self) -> None:
        self.loaded: list[str] = []
        self.fingerprint = SimpleNamespace(model="m")

    async def load_adapter(self, adapter: Adapter) -> None:
        if adapter == BAD:
            raise Refused("bad files", Cause.ADAPTER)
        await asyncio.sleep(60 if adapter == SLOW else 0)
        self.loaded.append(adapter.lora_name)


class Taking:
    """In the place of `Moves`: notes what it takes, and what the engine had loaded by then."""

    def __init__(self, engine: AdapterEngine) -> None:
        self.engine = engine
        self.taken: list[tuple[str, list[str]]] = []

    def submit(self, spec: Any, hop: int, outputs: tuple[int, ...], then: Any = None) -> None:
        self.taken.append((spec.id, list(self.engine.loaded)))

    def prepare(self, message: Any) -> None:
        self.taken.append((message.spec.id, list(self.engine.loaded)))


class Replica:
    """The parts of an engine replica that take requests."""

    _submit, _lacks = EngineReplica._submit, EngineReplica._lacks

    def __init__(self) -> None:
        self._engine = AdapterEngine()
        self._moves = self.moves = Taking(self._engine)

    async def submit(self, **adapters: Adapter | None) -> list[Any]:
        requests = tuple(Submission(spec(name, adapter), 0, ()) for name, adapter in adapters.items())
        own = cast(Any, self)
        return [
            each if isinstance(each, str) else each.refusal()
            for each in await submit_all(requests, own._submit, own._lacks)
        ]

    async def prepare(self, adapter: Adapter | None) -> Any:
        message = cast(Any, SimpleNamespace(migration="m", spec=spec("r", adapter), copies=True))
        own, unused = cast(Any, self), cast(Any, None)
        return await PeerCalls(ReplicaId("here"), own._moves, unused, own._lacks, unused, 1.0, unused).prepare(message)


def spec(name: str, adapter: Adapter | None) -> Any:
    request = CoreRequest(name, [5], sampling_params={"max_tokens": 3}, lora_request=adapter)
    made = to_spec(request, encode_request(request), RequestId(name), "", IngressId("i"))
    assert made.adapter == adapter
    return made


async def test_requests_wait_for_their_adapters() -> None:
    replica = Replica()
    assert await replica.submit(r=GOOD, s=None) == ["m", "m"]
    assert replica.moves.taken == [("s", []), ("r", ["good"])], "a request waits for no adapter but its own"


async def test_a_request_whose_adapter_cannot_be_loaded_is_refused_alone() -> None:
    replica = Replica()
    first, refused, last = await replica.submit(r=GOOD, s=BAD, t=None)
    assert (first, last) == ("m", "m") and type(refused) is Refused and refused.cause is Cause.ADAPTER
    assert sorted(name for name, _ in replica.moves.taken) == ["r", "t"]


async def test_a_request_whose_adapter_takes_long_may_come_again() -> None:
    replica = Replica()
    (refused,) = await replica.submit(r=SLOW)
    assert isinstance(refused, Stopping), "its reader tries another replica, and later this one again"
    assert "still being loaded" in str(refused) and replica.moves.taken == []


async def test_a_migration_enters_with_its_adapter_only() -> None:
    replica = Replica()
    await replica.prepare(None)
    await replica.prepare(GOOD)
    assert replica.moves.taken == [("r", []), ("r", ["good"])]
    for adapter in (BAD, SLOW):
        with pytest.raises(Refused) as refused:
            await replica.prepare(adapter)
        assert refused.value.cause is Cause.ADAPTER
    assert len(replica.moves.taken) == 2
