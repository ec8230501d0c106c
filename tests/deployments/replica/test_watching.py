"""What a replica checks by itself goes on whatever fails: each check has a loop of its own. Peers are forgotten."""

import asyncio
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any, cast

import pytest

from deployments.replica import deployment
from deployments.replica.deployment import EngineReplica
from deployments.replica.outbox import Outboxes
from migration.concurrency import repeat
from migration.protocol.request import IngressId
from tests.virtual_time import now

pytestmark = pytest.mark.virtual_time


class Replica:
    """The parts of an engine replica that watch, on parts that record what happens, or fail."""

    _watch_preemptions, _watch_tokens = EngineReplica._watch_preemptions, EngineReplica._watch_tokens
    _watch_ingresses, _watch_stop = EngineReplica._watch_ingresses, EngineReplica._watch_stop
    _give_up = EngineReplica._give_up

    def __init__(self) -> None:
        self.happened: list[str] = []
        self.fails = True
        self._silence_s, self._ingress_lease_s, self._pending = 5.0, 1.0, 0
        self._preemptions = 0
        self._engine = SimpleNamespace(profiling=False, shutdown=lambda: self.happen("shutdown"), stats=self._stats)
        self._outboxes = Outboxes(now)
        self._scheduler = SimpleNamespace(notify=lambda message: self.happen("hurry"))
        self._host = SimpleNamespace(
            silent_s=lambda: 9.0,
            excuse_silence=lambda: self.happen("excuse"),
            lose_all=self.lose,
            forget_ingress=self.forget_ingress,
            loads=lambda: (),
        )
        self._moves = SimpleNamespace(stop=lambda: self.happen("stop"))
        self._last_copies = SimpleNamespace(over=lambda empty: False)
        self._pairs = SimpleNamespace(pauses=False, undo=lambda cause: self.happen("undo"))

    def happen(self, what: str) -> None:
        if what not in self.happened:
            self.happened.append(what)

    def _stats(self) -> Any:
        return SimpleNamespace(preemptions=1)

    def lose(self, reason: str) -> None:
        self.happen("lose")
        if self.fails:
            raise RuntimeError("a request cannot be lost")

    def forget_ingress(self, ingress: IngressId) -> int:
        self.happen(f"end {ingress}")
        if self.fails:
            raise RuntimeError("a request cannot be ended")
        return 1


async def test_an_engine_that_loads_the_layers_of_a_pair_is_not_taken_for_one_that_hangs() -> None:
    replica = Replica()
    replica._pairs.pauses = True
    await cast(Any, replica)._watch_tokens()
    assert replica.happened == ["excuse"]


async def test_a_check_that_fails_is_made_again_and_ends_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    async def call(function: Callable[[], None]) -> None:
        function()

    monkeypatch.setattr(asyncio, "to_thread", call)  # Virtual time does not wait for threads.
    monkeypatch.setattr(deployment, "is_stopping", lambda: True)
    replica = Replica()
    for ingress in ("one", "two"):
        replica._outboxes.put(IngressId(ingress), cast(Any, None))
    own = cast(Any, replica)
    checks = (own._watch_preemptions, own._watch_tokens, own._watch_ingresses, own._watch_stop)
    tasks = [asyncio.create_task(repeat(check, 0.2)) for check in checks]
    await asyncio.sleep(5.0)
    assert set(replica.happened) == {"hurry", "lose", "end one", "end two", "stop", "undo"}
    replica.fails = False
    await asyncio.sleep(2.0)
    assert "shutdown" in replica.happened and not any(task.done() for task in tasks)
    for task in tasks:
        task.cancel()
    await asyncio.wait(tasks)


class Peers:
    """The parts of an engine replica that know others."""

    _forget, _leave, _disconnect = EngineReplica._forget, EngineReplica._leave, EngineReplica._disconnect

    def __init__(self, transport: Any) -> None:
        self.happened: list[tuple[float, str]] = []
        self._grace_s = 60.0
        self._links = SimpleNamespace(forget=lambda replica: self.happen(f"link {replica}"))
        self._replicas = SimpleNamespace(forget=lambda replica: None)
        self._membership = SimpleNamespace(running=())
        self._transport = transport(lambda replica: self.happen(f"group {replica}"))

    def happen(self, what: str) -> None:
        self.happened.append((round(now(), 3), what))


async def test_a_replica_is_left_once_it_cannot_send_any_more() -> None:
    peers = Peers(lambda leave: SimpleNamespace(leave=leave))
    cast(Any, peers)._forget("gone")
    cast(Any, peers)._forget("back")
    peers._membership.running = ("back",)
    await asyncio.sleep(100)
    assert peers.happened == [(0.0, "link gone"), (0.0, "link back"), (60.0, "link gone"), (60.0, "group gone")]


async def test_a_transport_without_groups_is_left_alone() -> None:
    peers = Peers(lambda leave: SimpleNamespace(close=leave))
    cast(Any, peers)._forget("gone")
    await asyncio.sleep(100)
    assert peers.happened == [(0.0, "link gone"), (60.0, "link gone")]
