"""The replica's answers to the scheduler's `report(fence, version)`."""

from collections.abc import Iterable

from deployments.api.report import Gauges, ReplicaReport
from migration.protocol.record import MigrationRecord
from policies.decision.reports import CacheSource, Reporter, no_cache
from policies.model import ReplicaLoad
from policies.paths.prices import Profile


class ReplicaReporter:
    """Answers with the changes since the scheduler's version. Keeps the state of the last answer, received or not.

    Versions rise from `first`, which must be above the versions of an earlier replica with the same id. Every snapshot
    contains `profile`.
    """

    def __init__(self, profile: Profile | None = None, first: int = 0) -> None:
        self._reporter = Reporter(profile, first)
        self._ended: dict[str, MigrationRecord] = {}

    def report(
        self,
        load: ReplicaLoad,
        gauges: Gauges,
        records: Iterable[MigrationRecord],
        version: int | None,
        at: float,
        cache: CacheSource = no_cache,
    ) -> ReplicaReport:
        """Report the replica's present state. `records` are all migrations under way and in memory, newest first.

        Every answer contains the migrations under way, since the scheduler drops a move without new reports. `at` is
        the time by the replica's clock, in seconds.
        """
        report = self._reporter.report(load, version, at, cache)
        reported = {} if report.since is None else self._ended
        records = tuple(records)
        fresh = tuple(r for r in records if r.outcome is None or _differ(reported.get(r.id), r))
        self._ended = {r.id: r for r in records if r.outcome is not None}
        return ReplicaReport(report, gauges, fresh)


def _differ(one: MigrationRecord | None, other: MigrationRecord) -> bool:
    """True if the records differ. Compares identities first, since mostly both are the same object."""
    return one is not other and one != other
