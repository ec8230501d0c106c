"""An order reaches all ingress processes of an application: the newest one counts, whoever has got it."""

import asyncio
from collections.abc import AsyncIterator
from typing import Any, cast

import pytest

from app.client.api import ApiClient
from app.ingress.hand_over import orders
from app.ingress.hand_over.orders import HandOverOrders
from app.ingress.hand_over.rules import PROTOCOL, Standing
from app.ingress.streams.streams import Streams
from deployments.api.calls import HandOverCounts, OrderedHandOver
from deployments.api.protocols import HandOverApi
from migration.protocol.request import IngressId, ModelIdentity
from policies.model import ReplicaId
from tests.app.ingress.fakes import eventually
from tests.deployments.scheduler.fakes import FakeMembership

X, Y = "http://x:8000", "http://y:8000"


class NoStreams:
    """The part of `Streams` that orders need, with `here` requests."""

    def __init__(self) -> None:
        self.to: str | None = None
        self.here: list[Any] = []

    def succeed(self, successor: Any) -> None:
        self.to = None if successor is None else successor.id

    def hand_over(self, at_once: int) -> None:
        pass

    def by_place(self) -> tuple[list[Any], int]:
        return self.here, 0

    async def served(self) -> ModelIdentity:
        return ModelIdentity("model", frozenset())


class Asked:
    """The client of another Mell, which takes requests."""

    async def hand_over(self) -> dict[str, Any]:
        return Standing(PROTOCOL, "other", "model", (), None).document()

    async def aclose(self) -> None:
        pass


class Process:
    """An ingress process as the others see it; one that is `silent` never answers."""

    def __init__(self, name: str, application: "Processes") -> None:
        self.streams, self.silent = NoStreams(), False
        self.orders = HandOverOrders(
            "mell",
            IngressId(name),
            cast(Streams, self.streams),
            (application, application.members),
            connect=lambda url, key: cast(ApiClient, Asked()),
        )

    async def succeed(self, order: OrderedHandOver) -> None:
        if self.silent:
            await asyncio.Event().wait()
        self.orders.succeed(order)

    async def hand_over_counts(self) -> HandOverCounts:
        if self.silent:
            await asyncio.Event().wait()
        return self.orders.counts()


class Processes:
    """Implements `RemoteReplicas[HandOverApi]`: the processes p0, p1 and p2."""

    def __init__(self) -> None:
        self.members = FakeMembership()
        self.named: dict[str, Process] = {}
        for name in ("p0", "p1", "p2"):
            self.start(name)

    def start(self, name: str) -> None:
        self.named[name] = Process(name, self)
        self.members.running = (*self.members.running, ReplicaId(name))

    def at(self, replica: ReplicaId, routed: bool = True) -> HandOverApi:
        return self.named[replica]

    def forget(self, replica: ReplicaId) -> None:
        pass

    def follow(self, url: str | None) -> bool:
        """True if all hand over to the Mell at that URL."""
        return {process.streams.to for process in self.named.values()} == {url}


@pytest.fixture
async def processes(monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Processes]:
    monkeypatch.setattr(orders, "_PEER_S", 0.05)
    made = Processes()
    yield made
    for process in made.named.values():
        await process.orders.close()


async def test_all_processes_follow_also_those_that_start_later(processes: Processes) -> None:
    await processes.named["p0"].orders.begin(X, None)
    assert processes.follow(X)
    processes.start("p3")
    await eventually(lambda: processes.follow(X))
    await processes.named["p2"].orders.undo()
    assert processes.follow(None)


async def test_the_newest_order_counts_whichever_process_has_got_it(processes: Processes) -> None:
    first = processes.named["p0"]
    await first.orders.begin(X, None)
    first.silent = True
    await processes.named["p1"].orders.undo()
    await processes.named["p1"].orders.begin(Y, None)
    processes.start("p3")
    await eventually(lambda: processes.named["p3"].streams.to == Y)
    await processes.named["p3"].succeed(first.orders._newest)
    assert [processes.named[name].streams.to for name in ("p0", "p1", "p2", "p3")] == [X, Y, Y, Y]
    first.silent = False
    await eventually(lambda: processes.follow(Y))


async def test_a_silent_process_gets_the_order_later_and_is_named(processes: Processes) -> None:
    silent = processes.named["p2"]
    silent.silent, silent.streams.here = True, [None]
    await processes.named["p0"].orders.begin(X, None)
    document = await processes.named["p0"].orders.undo()
    assert document["silent"] == ["p2"] and document["here"] == 0
    await processes.named["p1"].orders.begin(X, None)
    assert not processes.follow(X)
    silent.silent, silent.streams.here = False, []
    await eventually(lambda: processes.follow(X))
    assert (await processes.named["p1"].orders.document())["silent"] == []
