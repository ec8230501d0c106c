"""One scrape returns the metrics of every process that answers, and counts the others."""

import asyncio
import logging
from collections.abc import Awaitable, Callable, Sequence

import pytest
from prometheus_client import CollectorRegistry, Counter

from app.ingress.telemetry.scrape import MetricsCollector, MetricsScope, ScrapeTarget, scrape
from deployments.api.protocols import MetricsApi
from deployments.metrics.exposition import Family, expose
from migration.protocol.errors import PeerLost
from policies.model import ReplicaId
from tests.deployments.metrics.test_exposition import parsed
from tests.deployments.scheduler.fakes import FakeMembership


def counted(replica: str) -> tuple[Family, ...]:
    registry = CollectorRegistry()
    Counter("mell_things", "Things.", registry=registry).inc()
    return expose(registry, {"replica": replica})


def answering(replica: str) -> Callable[[], Awaitable[Sequence[Family]]]:
    async def fetch() -> Sequence[Family]:
        return counted(replica)

    return fetch


async def refusing() -> Sequence[Family]:
    raise PeerLost("the replica died")


async def unreachable() -> Sequence[Family]:
    await asyncio.Event().wait()
    return ()


async def test_all_processes_answer() -> None:
    targets = [ScrapeTarget("Engine", name, answering(name)) for name in "ab"]
    seen = parsed(await scrape(targets, "i"))
    assert seen["mell_things_total"] == {("a",): 1, ("b",): 1}
    assert seen["mell_metrics_unreachable"] == {("Engine", "i"): 0}


@pytest.mark.parametrize("broken", [refusing, unreachable], ids=["fails", "is unreachable"])
async def test_a_process_that_does_not_answer_costs_only_its_own_metrics(
    broken: Callable[[], Awaitable[Sequence[Family]]],
) -> None:
    targets = [
        ScrapeTarget("Engine", "a", broken),
        ScrapeTarget("Engine", "b", answering("b")),
        ScrapeTarget("Scheduler", "", broken),
    ]
    async with asyncio.timeout(5):
        seen = parsed(await scrape(targets, "i", timeout_s=0.05))
    assert seen["mell_things_total"] == {("b",): 1}
    assert seen["mell_metrics_unreachable"] == {("Engine", "i"): 1, ("Scheduler", "i"): 1}


async def test_the_silence_of_a_process_is_logged_once_until_it_answers(caplog: pytest.LogCaptureFixture) -> None:
    reported: set[tuple[str, str]] = set()
    caplog.set_level(logging.WARNING, "ray.serve")
    for fetch in (refusing, refusing, answering("a"), refusing):
        await scrape([ScrapeTarget("Engine", "a", fetch)], "i", reported=reported)
    assert [record.getMessage() for record in caplog.records] == [
        "no metrics from Engine a: PeerLost('the replica died')"
    ] * 2
    await scrape([], "i", reported=reported)
    assert reported == set()


async def test_all_processes_are_queried_concurrently() -> None:
    meeting = asyncio.Barrier(2)

    async def fetch() -> Sequence[Family]:
        await meeting.wait()
        return ()

    seen = parsed(await scrape([ScrapeTarget("Engine", name, fetch) for name in "ab"], "i", timeout_s=5))
    assert seen["mell_metrics_unreachable"] == {("Engine", "i"): 0}


async def test_cancelling_a_scrape_cancels_its_queries() -> None:
    cancelled = asyncio.Event()

    async def fetch() -> Sequence[Family]:
        try:
            return await unreachable()
        except asyncio.CancelledError:
            cancelled.set()
            raise

    scraping = asyncio.create_task(scrape([ScrapeTarget("Engine", "a", fetch)], "i", timeout_s=5))
    await asyncio.sleep(0)
    await asyncio.sleep(0)
    scraping.cancel()
    await asyncio.wait({scraping})
    assert scraping.cancelled() and cancelled.is_set()


class Answering:
    """Implements `RemoteReplicas[MetricsApi]` and `SchedulerClient[MetricsApi]`; notes which process was asked."""

    def __init__(self) -> None:
        self.asked: list[str] = []

    def at(self, replica: ReplicaId, routed: bool = True) -> "CountingProcess":
        return CountingProcess(self.asked, replica)

    def forget(self, replica: ReplicaId) -> None:
        pass

    def within(self, timeout_s: float) -> "CountingProcess":
        return CountingProcess(self.asked, "scheduler")

    def notify(self, message: Callable[[MetricsApi], Awaitable[None]]) -> None:
        pass


class CountingProcess:
    """Implements `MetricsApi` for the process of that name."""

    def __init__(self, asked: list[str], name: str) -> None:
        self._asked = asked
        self._name = name

    async def metrics(self) -> Sequence[Family]:
        self._asked.append(self._name)
        return counted(self._name)


ALL = {("scheduler",), ("e1",), ("e2",), ("i1",), ("i2",)}


class Scraped:
    """A scrape of one of two ingresses: the processes that it asked."""

    def __init__(self, own: str) -> None:
        self.scheduler, self.engines, self.ingresses = Answering(), Answering(), Answering()
        self.collector = MetricsCollector(
            (ReplicaId(own), answering(own)),
            self.scheduler,
            [("Engine", self.engines, FakeMembership("e1", "e2"))],
            (self.ingresses, FakeMembership("i1", "i2")),
        )

    async def processes(self, scope: MetricsScope) -> set[tuple[str, ...]]:
        return set(parsed(await self.collector.scrape(scope))["mell_things_total"])


async def test_an_ingress_queries_every_other_process() -> None:
    made = Scraped("i1")
    seen = parsed(await made.collector.scrape())
    assert (made.scheduler.asked, made.engines.asked, made.ingresses.asked) == (["scheduler"], ["e1", "e2"], ["i2"])
    assert set(seen["mell_things_total"]) == ALL
    assert seen["mell_metrics_unreachable"] == {("Ingress", "i1"): 0, ("Scheduler", "i1"): 0, ("Engine", "i1"): 0}


async def test_the_shares_of_all_ingresses_have_every_process_once() -> None:
    first, second = [await Scraped(own).processes(MetricsScope.SHARE) for own in ("i1", "i2")]
    assert second == {("i2",)} and not first & second and first | second == ALL


async def test_a_process_alone_asks_no_other() -> None:
    made = Scraped("i1")
    assert await made.processes(MetricsScope.PROCESS) == {("i1",)}
    assert not made.scheduler.asked and not made.engines.asked and not made.ingresses.asked
