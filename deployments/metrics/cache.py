"""The metrics of a replica's prefix cache."""

from collections.abc import Iterable, Mapping
from dataclasses import asdict

from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from deployments.cache.mirror import Resync
from deployments.cache.occupancy import CacheReport, Recomputed
from deployments.metrics.exposition import Family, expose
from migration.protocol.record import CopyCounts, CopyOutcome
from policies.model import PoolId
from policies.prefix.copies import CopyReason

CACHE_TOKENS = "Prompt tokens of requests, by stage: on replicas prompt and delivered, before them the others."
"""The help of a metric of which the scheduler and the replicas export different stages."""
COPIES = "Copies of cached prefixes to other replicas that ended, by reason and outcome."
COPY_BYTES = "KV bytes sent by copies of cached prefixes."
"""The helps of metrics that the scheduler exports for the copies of replicas that stop: their own end with them."""


def expose_cache(
    report: CacheReport, made: CopyCounts, recomputed: Mapping[Recomputed, int], pool: PoolId, replica: str
) -> tuple[Family, ...]:
    """The metrics of a replica's cache, of the copies that it has made, and of the contexts that it has `recomputed`.

    Their label `replica` is the replica's id, and `pool` its pool's.
    """
    return expose(_Cache(report, made, recomputed), {"replica": replica, "pool": pool})


class _Cache:
    """A registry of the numbers in a report, of copies and of recomputations."""

    def __init__(self, report: CacheReport, made: CopyCounts, recomputed: Mapping[Recomputed, int]) -> None:
        self._report = report
        self._made = made
        self._recomputed = recomputed

    def collect(self) -> Iterable[Metric]:
        report = self._report
        tokens = CounterMetricFamily("mell_cache_tokens", CACHE_TOKENS, labels=("stage",))
        tokens.add_metric(("prompt",), report.prompts.prompt)
        tokens.add_metric(("delivered",), report.prompts.cached)
        yield tokens
        delivered = CounterMetricFamily(
            "mell_cache_delivered_tokens", "Prompt tokens that were not computed, by source.", labels=("source",)
        )
        for tier, count in report.delivered.items():
            delivered.add_metric((tier,), count)
        yield delivered
        yield from self._copies()
        if not report.used:
            return
        blocks = GaugeMetricFamily("mell_cache_blocks", "KV blocks by tier and use.", labels=("tier", "state"))
        for tier, used in report.used.items():
            for state, count in asdict(used).items():
                blocks.add_metric((tier, state), count)
        yield blocks
        resyncs = CounterMetricFamily(
            "mell_cache_resyncs", "Replacements of the mirror of the cache, by reason.", labels=("reason",)
        )
        for reason in Resync:
            resyncs.add_metric((reason,), report.resyncs.get(reason, 0))
        yield resyncs
        recomputed = CounterMetricFamily(
            "mell_cache_recomputations", "Recomputations of cached contexts, by outcome.", labels=("outcome",)
        )
        for outcome in Recomputed:
            recomputed.add_metric((outcome,), self._recomputed.get(outcome, 0))
        yield recomputed

    def _copies(self) -> Iterable[Metric]:
        copies = CounterMetricFamily(
            "mell_cache_copies",
            COPIES,
            labels=("reason", "outcome"),
        )
        for reason in (reason for reason in CopyReason if reason is not CopyReason.EVACUATE):
            for outcome in CopyOutcome:
                copies.add_metric((reason, outcome), self._made.ended[reason, outcome])
        yield copies
        sent = CounterMetricFamily("mell_cache_copy_bytes", COPY_BYTES)
        sent.add_metric((), self._made.sent)
        yield sent
