"""What the deployments' parts are tested with, in place of Serve."""

import asyncio
from collections.abc import Collection
from typing import Any

from deployments.membership import Membership
from deployments.report import ReplicaReport
from deployments.routing import Replicas
from policies.model import Blocks, ReplicaId, ReplicaLoad, ReplicaState, RequestLoad, Tokens


def make_report(name: str, free: int = 10, requests: tuple[RequestLoad, ...] = ()) -> ReplicaReport:
    load = ReplicaLoad(
        ReplicaId(name), ReplicaState.RUNNING, "node", Tokens(1024), 4, Blocks(free), 64, requests=requests
    )
    return ReplicaReport(load, (1, 2, 3), 0, 0, 0, 1, ())


class Answers(Replicas):
    """What replicas say: a report, an error, or nothing ("silent")."""

    def __init__(self, **answers: Any) -> None:
        self.answers = answers
        self.asked: list[tuple[Any, ...]] = []

    async def call(self, replica: ReplicaId, method: str, *args: Any, routed: bool = True) -> Any:
        self.asked.append((replica, method, *args))
        await asyncio.sleep(0)
        answer = self.answers[replica]
        if answer == "silent":
            await asyncio.Event().wait()
        if isinstance(answer, Exception):
            raise answer
        return answer


class Running(Membership):
    """The replicas that run."""

    def __init__(self, names: str) -> None:
        self.running = tuple(ReplicaId(name) for name in names)
        self.known = asyncio.Event()
        self.known.set()


class FakeListing:
    """Implements `Listing`: replicas that run, and `starting` ones that nobody has a name for."""

    def __init__(self, running: Collection[str], starting: int = 0) -> None:
        self.running, self.starting = set(running), starting
        self.listed = True
        self.without_room: tuple[ReplicaLoad, ...] = ()

    async def refresh(self) -> None:
        pass

    @property
    def wanted_by_serve(self) -> int:
        return len(self.running) + self.starting

    def knows(self, replica: ReplicaId) -> bool:
        return replica in self.running

    def runs(self, replica: ReplicaId) -> bool:
        return replica in self.running

    def stopping(self) -> tuple[ReplicaId, ...]:
        return ()

    def as_listed(self, report: ReplicaReport) -> ReplicaReport:
        return report

    def others(self, reported: Collection[ReplicaId]) -> tuple[ReplicaLoad, ...]:
        return tuple(load for load in self.without_room if load.id not in reported)
