"""The replica's answers to the scheduler's `report(fence, version)`."""

from collections.abc import Iterable

from deployments.api.report import Gauges, ReplicaReport
from migration.protocol.record import MigrationRecord
from policies.decision.reports import Reporter
from policies.model import ReplicaLoad
from policies.paths.beliefs import Profile


class ReplicaReporter:
    """Answers with the changes since the scheduler's version. Keeps the state of the last answer, received or not.

    Versions rise from `first`; a replica that restarts under its old id must begin above its old versions.
    """

    def __init__(self, profile: Profile | None = None, first: int = 0) -> None:
        self._reporter = Reporter(profile, first)
        self._ended: dict[str, MigrationRecord] = {}

    def report(
        self, load: ReplicaLoad, gauges: Gauges, records: Iterable[MigrationRecord], version: int | None, at: float
    ) -> ReplicaReport:
        """Report the replica's present state. `records` are all migrations that it leads or remembers, newest first.

        Migrations under way are part of every answer, since the scheduler forgets a move without news. `at` is the
        replica's clock in seconds.
        """
        report = self._reporter.report(load, version, at)
        reported = {} if report.since is None else self._ended
        records = tuple(records)
        fresh = tuple(r for r in records if r.outcome is None or _differ(reported.get(r.id), r))
        self._ended = {r.id: r for r in records if r.outcome is not None}
        return ReplicaReport(report, gauges, fresh)


def _differ(one: MigrationRecord | None, other: MigrationRecord) -> bool:
    """True if the records differ; mostly they are one object, so that is compared first."""
    return one is not other and one != other
