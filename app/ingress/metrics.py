"""GET /metrics: one scrape of any ingress shows the whole application.

Every process of Mell keeps its own metrics, in prometheus_client's registries, and vLLM's are in one already. An
ingress asks them all when it is scraped. Ray's application metrics would be there without asking, but late (Ray's
agents are told every ten seconds), with sums of histograms that are guesses (an agent takes every observation for the
middle of its bucket), and at five times the cost of an observation.
"""

import asyncio
import logging
from collections import Counter
from collections.abc import Awaitable, Callable, Iterator, Sequence
from dataclasses import dataclass

from prometheus_client import CONTENT_TYPE_PLAIN_0_0_4, CollectorRegistry, Gauge

from deployments.exposition import Family, expose, merge
from deployments.membership import Membership
from deployments.routing import Replicas
from deployments.scheduler_client import SchedulerClient
from policies.model import ReplicaId

log = logging.getLogger("ray.serve")

CONTENT_TYPE = CONTENT_TYPE_PLAIN_0_0_4
TIMEOUT_S = 2.0
"""How long a process may take to tell its metrics: well below the ten seconds that Prometheus gives a scrape."""


@dataclass(frozen=True, slots=True)
class Source:
    """A process that has metrics; `ask` raises when it cannot be reached."""

    deployment: str
    name: str
    ask: Callable[[], Awaitable[Sequence[Family]]]


async def scrape(sources: Sequence[Source], replica: str, timeout_s: float = TIMEOUT_S) -> bytes:
    """The metrics of all sources that answer in time, in Prometheus's text format.

    `mell_metrics_unreachable` says of each deployment how many of its processes did not answer; `replica` is whose
    word that is.
    """
    answers = await asyncio.gather(*(_ask(source, timeout_s) for source in sources))
    silent = Counter({source.deployment: 0 for source in sources})
    silent.update(source.deployment for source, answer in zip(sources, answers, strict=True) if answer is None)
    return merge([*(answer for answer in answers if answer is not None), _unreachable(silent, replica)])


async def _ask(source: Source, timeout_s: float) -> Sequence[Family] | None:
    try:
        async with asyncio.timeout(timeout_s):
            return await source.ask()
    except Exception as error:
        log.warning("%s %s did not tell its metrics: %r", source.deployment, source.name, error)
        return None


def _unreachable(silent: Counter[str], replica: str) -> Sequence[Family]:
    registry = CollectorRegistry()
    gauge = Gauge(
        "mell_metrics_unreachable",
        "Processes whose metrics are missing from this scrape.",
        ["deployment"],
        registry=registry,
    )
    for deployment, count in silent.items():
        gauge.labels(deployment).set(count)
    return expose(registry, {"replica": replica})


class Metrics:
    """The metrics of the whole application, as one of its ingresses collects them."""

    def __init__(
        self,
        own: tuple[ReplicaId, Callable[[], Sequence[Family]]],
        scheduler: SchedulerClient,
        others: Sequence[tuple[str, Replicas, Membership]],
    ) -> None:
        """`own` is this ingress and its metrics; `others` are deployments, each replica of which has a `metrics`."""
        self._id, self._own = own
        self._scheduler = scheduler
        self._others = others

    async def scrape(self) -> bytes:
        """Prometheus's text, with whatever could be reached."""
        return await scrape(list(self._sources()), self._id)

    def _sources(self) -> Iterator[Source]:
        yield Source("Ingress", self._id, self._ask_own)
        yield Source("Scheduler", "", lambda: self._scheduler.call("metrics", timeout_s=TIMEOUT_S))
        for deployment, replicas, membership in self._others:
            for replica in membership.running:
                if replica != self._id:
                    yield Source(deployment, replica, _asking(replicas, replica))

    async def _ask_own(self) -> Sequence[Family]:
        return self._own()


def _asking(replicas: Replicas, replica: ReplicaId) -> Callable[[], Awaitable[Sequence[Family]]]:
    return lambda: replicas.call(replica, "metrics")
