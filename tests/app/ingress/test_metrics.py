"""One scrape shows every process that answers, and says how many did not."""

import asyncio
from collections.abc import Awaitable, Callable, Sequence
from typing import Any

import pytest
from prometheus_client import CollectorRegistry, Counter

from app.ingress.metrics import Metrics, Source, scrape
from deployments.exposition import Family, expose
from deployments.membership import Membership
from deployments.routing import Replicas
from deployments.scheduler_client import SchedulerClient
from migration.errors import PeerLost
from policies.model import ReplicaId
from tests.deployments.test_exposition import parsed


def counted(replica: str) -> tuple[Family, ...]:
    registry = CollectorRegistry()
    Counter("mell_things", "Things.", registry=registry).inc()
    return expose(registry, {"replica": replica})


def telling(replica: str) -> Callable[[], Awaitable[Sequence[Family]]]:
    async def ask() -> Sequence[Family]:
        return counted(replica)

    return ask


async def refusing() -> Sequence[Family]:
    raise PeerLost("the replica died")


async def silent() -> Sequence[Family]:
    await asyncio.Event().wait()
    return ()


async def test_all_answer() -> None:
    sources = [Source("Engine", name, telling(name)) for name in "ab"]
    seen = parsed(await scrape(sources, "i"))
    assert seen["mell_things_total"] == {("a",): 1, ("b",): 1}
    assert seen["mell_metrics_unreachable"] == {("Engine", "i"): 0}


@pytest.mark.parametrize("broken", [refusing, silent], ids=["fails", "is silent"])
async def test_one_that_does_not_answer_costs_only_its_own(broken: Callable[[], Awaitable[Sequence[Family]]]) -> None:
    sources = [Source("Engine", "a", broken), Source("Engine", "b", telling("b")), Source("Scheduler", "", broken)]
    async with asyncio.timeout(5):
        seen = parsed(await scrape(sources, "i", timeout_s=0.05))
    assert seen["mell_things_total"] == {("b",): 1}
    assert seen["mell_metrics_unreachable"] == {("Engine", "i"): 1, ("Scheduler", "i"): 1}


async def test_all_are_asked_at_once() -> None:
    meeting = asyncio.Barrier(2)

    async def ask() -> Sequence[Family]:
        await meeting.wait()
        return ()

    seen = parsed(await scrape([Source("Engine", name, ask) for name in "ab"], "i", timeout_s=5))
    assert seen["mell_metrics_unreachable"] == {("Engine", "i"): 0}


async def test_who_leaves_ends_the_questions() -> None:
    cancelled = asyncio.Event()

    async def ask() -> Sequence[Family]:
        try:
            return await silent()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    scraping = asyncio.create_task(scrape([Source("Engine", "a", ask)], "i", timeout_s=5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    scraping.cancel()
    await asyncio.wait({scraping})
    assert scraping.cancelled() and cancelled.is_set()


class Answering(Replicas, SchedulerClient):
    """Replicas, or the scheduler, that tell their metrics."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    async def call(self, *args: Any, timeout_s: float | None = None) -> Any:
        self.asked.append(args[0])
        assert args[-1] == "metrics"
        return counted(args[0])


class Listed(Membership):
    def __init__(self, *names: str) -> None:
        self.running = tuple(map(ReplicaId, names))


async def test_an_ingress_asks_everybody_but_itself() -> None:
    scheduler, engines, ingresses = Answering(), Answering(), Answering()
    others = [("Engine", engines, Listed("e1", "e2")), ("Ingress", ingresses, Listed("i1", "i2"))]
    metrics = Metrics((ReplicaId("i1"), lambda: counted("i1")), scheduler, others)
    seen = parsed(await metrics.scrape())
    assert (scheduler.asked, engines.asked, ingresses.asked) == (["metrics"], ["e1", "e2"], ["i2"])
    assert set(seen["mell_things_total"]) == {("metrics",), ("e1",), ("e2",), ("i1",), ("i2",)}
    assert seen["mell_metrics_unreachable"] == {("Ingress", "i1"): 0, ("Scheduler", "i1"): 0, ("Engine", "i1"): 0}
