"""GET /metrics: one scrape of any ingress returns the metrics of the whole application.

Every process of Mell keeps its metrics in prometheus_client's registries, as vLLM does. A scraped ingress collects
them from all processes. Ray's application metrics would spare that, but they are late (Ray's agents get them every
ten seconds), their histogram sums are guesses (an agent counts every observation as the middle of its bucket), and an
observation costs five times as much.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass
from enum import StrEnum

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Gauge

from deployments.api.protocols import MetricsApi, RemoteReplicas, SchedulerClient
from deployments.metrics.exposition import Family, expose, merge
from deployments.serve.membership import Membership
from policies.model import ReplicaId

log = logging.getLogger("ray.serve")

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
TIMEOUT_S = 2.0
"""Longest wait for one process's metrics: well below Prometheus's default scrape timeout of ten seconds."""


class MetricsScope(StrEnum):
    """The processes in one answer.

    Of `SHARE`, the answers of all ingresses have every process once: each has its ingress, and the one of the ingress
    with the lowest id has the scheduler and the replicas, too.
    """

    ALL = "all"
    SHARE = "share"
    PROCESS = "process"


@dataclass(frozen=True, slots=True)
class ScrapeTarget:
    """A process with metrics; `fetch` raises if the process is unreachable."""

    deployment: str
    name: str
    fetch: Callable[[], Awaitable[Sequence[Family]]]

    @property
    def key(self) -> tuple[str, str]:
        """Deployment and name."""
        return self.deployment, self.name


async def scrape(
    targets: Sequence[ScrapeTarget],
    replica: str,
    timeout_s: float = TIMEOUT_S,
    reported: set[tuple[str, str]] | None = None,
) -> bytes:
    """The metrics of all targets that answer within `timeout_s`, in Prometheus's text format.

    `mell_metrics_unreachable` counts the processes of each deployment that did not answer; its label `replica` is the
    scraping ingress. `reported` are the targets whose silence is in the log; scrapes with the same set log it once.
    """
    reported = set() if reported is None else reported
    reported &= {target.key for target in targets}
    answers = await asyncio.gather(*(_fetch(target, timeout_s, reported) for target in targets))
    unreachable = Counter({target.deployment: 0 for target in targets})
    unreachable.update(target.deployment for target, answer in zip(targets, answers, strict=True) if answer is None)
    return merge([*(answer for answer in answers if answer is not None), _unreachable(unreachable, replica)])


async def _fetch(target: ScrapeTarget, timeout_s: float, reported: set[tuple[str, str]]) -> Sequence[Family] | None:
    try:
        async with asyncio.timeout(timeout_s):
            answer = await target.fetch()
    except Exception as error:
        if target.key not in reported:
            log.warning("no metrics from %s %s: %r", target.deployment, target.name, error)
        reported.add(target.key)
        return None
    reported.discard(target.key)
    return answer


def _unreachable(unreachable: Counter[str], replica: str) -> Sequence[Family]:
    registry = CollectorRegistry()
    gauge = Gauge(
        "mell_metrics_unreachable",
        "Processes whose metrics are missing from this scrape.",
        ["deployment"],
        registry=registry,
    )
    for deployment, count in unreachable.items():
        gauge.labels(deployment).set(count)
    return expose(registry, {"replica": replica})


class MetricsCollector:
    """Collects the metrics of the application's processes from one of its ingresses."""

    def __init__(
        self,
        own: tuple[ReplicaId, Callable[[], Awaitable[Sequence[Family]]]],
        scheduler: SchedulerClient[MetricsApi],
        engines: Sequence[tuple[str, RemoteReplicas[MetricsApi], Membership]],
        ingresses: tuple[RemoteReplicas[MetricsApi], Membership],
    ) -> None:
        """`own` is this ingress and its metrics; `engines` are the pools by name."""
        self._id, self._own = own
        self._scheduler = scheduler
        self._engines = engines
        self._ingresses, self._members = ingresses
        self._reported: set[tuple[str, str]] = set()

    async def scrape(self, scope: MetricsScope = MetricsScope.ALL) -> bytes:
        """The metrics of all processes of the scope that answer, in Prometheus's text format."""
        return await scrape(list(self._targets(scope)), self._id, reported=self._reported)

    def _targets(self, scope: MetricsScope) -> Iterator[ScrapeTarget]:
        yield ScrapeTarget("Ingress", self._id, self._own)
        others = [replica for replica in self._members.running if replica != self._id]
        if scope is MetricsScope.ALL:
            yield from (ScrapeTarget("Ingress", r, self._ingresses.at(r).metrics) for r in others)
        if scope is MetricsScope.PROCESS or (scope is MetricsScope.SHARE and any(r < self._id for r in others)):
            return
        yield ScrapeTarget("Scheduler", "", self._scheduler.within(TIMEOUT_S).metrics)
        for pool, replicas, membership in self._engines:
            yield from (ScrapeTarget(pool, r, replicas.at(r).metrics) for r in membership.running)
